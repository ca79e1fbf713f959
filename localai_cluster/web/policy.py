"""Security headers of responses: the content security policy of pages, and cache control.

A page that needs more than files of this host sets its own policy, with a nonce per response; every other
response gets the strict default here, including those that Django writes.
"""

from django.conf import settings
from django.contrib.sessions.middleware import SessionMiddleware
from django.http import HttpRequest, HttpResponse
from django.middleware.security import SecurityMiddleware

CSP_HEADER = "Content-Security-Policy"
_SECURE_SESSION_KEY = "secure"
"""Session key that is True if the session began on a page that was loaded by https."""


def content_security_policy(*, scripts: str = "", styles: str = "") -> str:
    """Return a content security policy that allows files of this host and inline code with these nonces."""
    return (
        f"default-src 'none'; script-src 'self'{_nonce(scripts)}; style-src 'self'{_nonce(styles)}; "
        "img-src 'self' data:; font-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'self'; "
        "frame-ancestors 'none'"
    )


def _nonce(value: str) -> str:
    return f" 'nonce-{value}'" if value else ""


class SafeAnswers(SecurityMiddleware):
    """Django's security middleware, which also sets a default policy and `no-store`.

    A response that sets its own policy or cache control keeps it.
    """

    def process_response(self, request: HttpRequest, response: HttpResponse) -> HttpResponse:
        """Add the security headers that the response lacks."""
        result = super().process_response(request, response)
        result.headers.setdefault("Cache-Control", "private, no-store")
        if result.headers.get("Content-Type", "").startswith("text/html"):
            result.headers.setdefault(CSP_HEADER, content_security_policy())
        return result


class Sessions(SessionMiddleware):
    """Django's session middleware. Its cookie is Secure if the sign-in page was loaded by https (§5.4).

    TLS may end at a proxy, and any client could forge the proxy's headers. So the page's origin decides,
    which a browser sends with every state-changing request. A client that forges its origin harms only
    itself.
    """

    def process_response(self, request: HttpRequest, response: HttpResponse) -> HttpResponse:
        """Set the session cookie if the session has changed."""
        session = request.session
        origin = request.headers.get("origin", "")
        if session.modified and not session.is_empty() and origin.startswith("https://"):
            session[_SECURE_SESSION_KEY] = True
        result = super().process_response(request, response)
        cookie = result.cookies.get(settings.SESSION_COOKIE_NAME)
        if cookie is not None and session.get(_SECURE_SESSION_KEY):
            cookie["secure"] = True
        return result
