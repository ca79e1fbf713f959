"""What browsers may do with an answer: the content security policy of pages, and what is kept of anything.

A page that needs more than files of this host says so itself, with a nonce of its own answer; every other
answer gets the strict default here, also those that Django writes.
"""

from django.conf import settings
from django.contrib.sessions.middleware import SessionMiddleware
from django.http import HttpRequest, HttpResponse
from django.middleware.security import SecurityMiddleware

CSP = "Content-Security-Policy"
_SECURE = "secure"
"""In a session: it began on a page that came by https."""


def policy(*, scripts: str = "", styles: str = "") -> str:
    """Only what this host serves, and inline what carries these nonces."""
    return (
        f"default-src 'none'; script-src 'self'{_nonce(scripts)}; style-src 'self'{_nonce(styles)}; "
        "img-src 'self' data:; font-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'self'; "
        "frame-ancestors 'none'"
    )


def _nonce(value: str) -> str:
    return f" 'nonce-{value}'" if value else ""


class SafeAnswers(SecurityMiddleware):
    """Django's, and what an answer does not say itself: its policy, and that it is not kept."""

    def process_response(self, request: HttpRequest, response: HttpResponse) -> HttpResponse:
        """Add the headers that are missing."""
        answer = super().process_response(request, response)
        answer.headers.setdefault("Cache-Control", "private, no-store")
        if answer.headers.get("Content-Type", "").startswith("text/html"):
            answer.headers.setdefault(CSP, policy())
        return answer


class Sessions(SessionMiddleware):
    """Django's, with a cookie that is Secure if the page that signed in came by https (§5.4).

    TLS ends in front of this process, and what a proxy says of it anybody could say. A browser tells the
    origin of the page with every change; a client that lies about it harms only itself.
    """

    def process_response(self, request: HttpRequest, response: HttpResponse) -> HttpResponse:
        """Send the cookie if the session has changed."""
        session = request.session
        if session.modified and not session.is_empty() and _by_https(request):
            session[_SECURE] = True
        answer = super().process_response(request, response)
        cookie = answer.cookies.get(settings.SESSION_COOKIE_NAME)
        if cookie is not None and session.get(_SECURE):
            cookie["secure"] = True
        return answer


def _by_https(request: HttpRequest) -> bool:
    return request.headers.get("origin", "").startswith("https://")
