"""What every answer tells a browser: what a page may load, what is kept, over which line cookies go."""

import re
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from asgiref.testing import ApplicationCommunicator
from django.conf import settings as django_settings
from django.contrib.auth import get_user_model
from django.test import Client

from localai_cluster.asgi import application
from tests.support import api, pages

pytestmark = pytest.mark.django_db

PASSWORD = "a long first sentence"
SITE = "https://cluster.example"


@pytest.fixture
def ann() -> Any:
    """A person who may enter the admin."""
    return get_user_model().objects.create_superuser("ann", password=PASSWORD)


def ask(method: str, path: str, **headers: str) -> tuple[int, dict[str, str], bytes]:
    """One request through the whole ASGI application."""
    untyped: Any = ApplicationCommunicator

    async def talk() -> tuple[int, dict[str, str], bytes]:
        sent = [(name.lower().replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
        scope = {"type": "http", "method": method, "path": path, "query_string": b"", "headers": sent}
        browser: Any = untyped(application, scope)
        await browser.send_input({"type": "http.request"})
        start, body, more = await browser.receive_output(10), b"", True
        while more:
            part = await browser.receive_output(10)
            body, more = body + part.get("body", b""), part.get("more_body", False)
        await browser.wait(60)
        return start["status"], {k.decode().lower(): v.decode() for k, v in start["headers"]}, body

    return async_to_sync(talk)()


# What a page may load


def directives(answer: Any) -> dict[str, str]:
    parts = answer["Content-Security-Policy"].split("; ")
    return {name: values for name, _, values in (part.partition(" ") for part in parts)}


@pytest.mark.parametrize("path", [pages.LIST, "/admin/", "/admin/auth/user/add/", "/api/docs"])
def test_every_page_has_a_policy(ann: Any, path: str) -> None:
    """No inline script, no other host, no frame; those of the admin and of the API's documents too."""
    answer = pages.signed_in(ann).get(path, headers={"Accept": "text/html"})
    found = directives(answer)
    assert found["default-src"] == found["base-uri"] == found["frame-ancestors"] == "'none'"
    assert found["connect-src"] == found["form-action"] == "'self'"
    assert re.fullmatch(r"'self'( 'nonce-[\w-]{20,}')?", found["script-src"])
    assert "unsafe" not in answer["Content-Security-Policy"]
    assert answer["X-Frame-Options"] == "DENY"


def test_a_form_without_its_token_is_refused_on_a_page_with_a_policy(ann: Any) -> None:
    """Also what Django writes by itself."""
    refused = pages.signed_in(ann).post("/admin/auth/user/add/")
    assert refused.status_code == 403
    assert directives(refused)["script-src"] == "'self'"


def test_the_documents_run_only_their_own_script(ann: Any) -> None:
    """Its library writes it into the page: each answer has a nonce of its own for it."""
    browser = pages.signed_in(ann)
    first, second = browser.get("/api/docs"), browser.get("/api/docs")
    nonces = []
    for answer in (first, second):
        (script,) = set(re.findall(r"<script nonce=\"([^\"]+)\">", answer.content.decode()))
        assert directives(answer)["script-src"] == f"'self' 'nonce-{script}'"
        nonces.append(script)
        assert not re.search(r"<(script|style)>", answer.content.decode())
        assert answer["Cross-Origin-Opener-Policy"] == "same-origin"
    assert nonces[0] != nonces[1]


# What is kept


@pytest.mark.parametrize("path", ["/api/nodes", "/api/auth/status", "/version", "/api/schema", "/api/docs"])
def test_what_is_for_one_person_is_kept_nowhere(ann: Any, path: str) -> None:
    """Neither on the way nor in the browser of somebody who has signed out; refusals neither."""
    assert pages.signed_in(ann).get(path)["Cache-Control"] == "private, no-store"
    assert api.Caller().get(path)["Cache-Control"] == "private, no-store"


# Files


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "TRACE"])
def test_files_are_only_read(method: str) -> None:
    """405 by the method, with nothing of the file."""
    status, headers, body = ask(method, "/static/favicon.svg")
    assert (status, headers["allow"], body) == (405, "GET, HEAD", b"")


@pytest.mark.parametrize("path", ["/static/favicon.svg", "/static/none.js"])
def test_files_are_what_they_are_called(path: str) -> None:
    """No browser guesses a type."""
    assert ask("GET", path)[1]["x-content-type-options"] == "nosniff"


@pytest.mark.rule("http-0.4")
@pytest.mark.parametrize("path", ["/api/", "/api", "/v1/", "/ws/", "/static"])
def test_the_root_of_an_api_is_no_page(path: str) -> None:
    """§0.4: API paths are never HTML, however they end."""
    status, headers, _ = ask("GET", path, Accept="text/html")
    assert (status, headers["content-type"]) == (404, "application/json")


@pytest.mark.parametrize("address", ["/?" + "a" * 17_000, "/admin/login/?" + "a=1&" * 1_100])
def test_no_one_fills_the_log_with_long_addresses(address: str, caplog: pytest.LogCaptureFixture) -> None:
    """400, and no traceback for each."""
    assert Client().get(address, headers={"Accept": "text/html"}).status_code == 400
    assert [line for line in caplog.records if line.exc_info] == []


# Cookies


@pytest.mark.rule("http-5.4")
@pytest.mark.parametrize(("origin", "secure"), [(SITE, True), ("http://testserver", False), ("", False)])
def test_the_session_goes_over_the_line_on_which_it_began(
    ann: Any, settings: Any, origin: str, secure: bool
) -> None:
    """§5.4: Secure on https, by the page's own origin: a proxy that ends TLS need not rewrite cookies."""
    settings.CSRF_TRUSTED_ORIGINS = [SITE]
    browser = Client(enforce_csrf_checks=True)
    browser.get("/api/auth/status")

    def post(path: str, body: dict[str, str]) -> Any:
        sent = {"X-CSRFToken": browser.cookies["csrftoken"].value} | ({"Origin": origin} if origin else {})
        return browser.post(path, body, "application/json", headers=sent)

    assert post("/api/auth/login", {"username": "ann", "password": PASSWORD}).status_code == 200
    assert bool(browser.cookies["sessionid"]["secure"]) is secure
    kept = browser.session
    kept["changed"] = True
    kept.save()
    changed = post("/api/auth/password", {"old": PASSWORD, "new": "another long sentence"})
    assert changed.status_code == 200
    assert bool(changed.cookies["sessionid"]["secure"]) is secure
    assert post("/api/auth/logout", {}).status_code == 200
    assert not browser.cookies["sessionid"].value


def test_no_one_has_a_session_for_looking(ann: Any) -> None:
    """Nor for trying in vain."""
    browser = Client(headers={"Origin": SITE})
    browser.get("/api/auth/status")
    browser.get("/app")
    browser.post("/api/auth/logout", {}, "application/json")
    assert "sessionid" not in browser.cookies
    assert django_settings.SESSION_COOKIE_HTTPONLY


# Guesses


def test_the_admin_takes_no_guesses_at_the_present_password(ann: Any) -> None:
    """Its form for it would count none; the page's own does (D-SIGN-IN)."""
    browser = pages.signed_in(ann)
    for path in ("/admin/password_change/", "/admin/password_change/?next=//evil.example"):
        sent = browser.get(path)
        assert (sent.status_code, sent["Location"]) == (302, "/app/password")
    token = browser.get("/admin/auth/user/add/").cookies["csrftoken"].value
    fields = {"old_password": PASSWORD, "new_password1": "another long one", "csrfmiddlewaretoken": token}
    tried = browser.post("/admin/password_change/", fields | {"new_password2": "another long one"})
    assert tried.status_code == 302
    ann.refresh_from_db()
    assert ann.check_password(PASSWORD)
