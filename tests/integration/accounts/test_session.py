"""Signing in, signing out, changing a password: `/api/auth/…`, and what a generated password is good for."""

import io
import logging
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.contrib.auth import authenticate, get_user_model
from django.contrib.auth.hashers import get_hasher
from django.core.management import CommandError, call_command
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext

from localai_cluster.accounts import passwords, principals
from localai_cluster.accounts.models import InitialPassword
from localai_cluster.accounts.sessions import principal_of_socket
from localai_cluster.kit import clock
from localai_cluster.web import throttle
from tests.support import api

pytestmark = pytest.mark.django_db

PASSWORD, NEXT = "a long first sentence", "another long sentence"
HERE = "192.0.2.9"


@dataclass
class Browser:
    """What a page does: keeps cookies, and sends the CSRF token it was given with every change."""

    client: Client = field(
        default_factory=lambda: Client(
            raise_request_exception=False, enforce_csrf_checks=True, REMOTE_ADDR=HERE
        )
    )

    def get(self, path: str, **headers: str) -> Any:
        """GET."""
        return self.client.get(path, headers=headers)

    def post(self, path: str, body: Any = None) -> Any:
        """POST of JSON with the token of the cookie."""
        cookie = self.client.cookies.get("csrftoken")
        headers = {"X-CSRFToken": cookie.value} if cookie else {}
        return self.client.post(path, {} if body is None else body, "application/json", headers=headers)

    def sign_in(self, name: str = "ann", password: str = PASSWORD, key: str = "username") -> Any:
        """Asks who is there, as every page does first, then signs in."""
        self.get("/api/auth/status")
        return self.post("/api/auth/login", {key: name, "password": password})


@pytest.fixture
def ann() -> Any:
    """A person who is an admin and has chosen her password."""
    return get_user_model().objects.create_user("ann", email="a@b.c", password=PASSWORD, is_staff=True)


@pytest.fixture
def newcomer(ann: Any) -> Any:
    """The same with a generated password."""
    InitialPassword.objects.create(user=ann)
    return ann


# Who is there


@pytest.mark.rule("http-5.4")
def test_no_one_is_signed_in(ann: Any) -> None:
    """§5.4: `user` is null; the answer brings the CSRF cookie. People sign in, not the static key."""
    browser = Browser()
    assert browser.get("/api/auth/status").json() == {
        "authEnabled": True,
        "staticApiKeyRequired": False,
        "providers": ["local"],
        "hasUsers": True,
        "registrationMode": "invite",
        "user": None,
    }
    assert browser.client.cookies["csrftoken"].value


@pytest.mark.rule("http-5.4", "UI-0.4")
def test_an_installation_without_people_says_so() -> None:
    """The page can say what to run; nothing else is open."""
    browser = Browser()
    status = browser.get("/api/auth/status").json()
    assert (status["hasUsers"], status["authEnabled"], status["user"]) == (False, True, None)
    assert browser.get("/api/nodes").status_code == 401


@pytest.mark.rule("http-5.4")
@pytest.mark.parametrize("key", ["username", "email"])
def test_signing_in_by_an_e_mail_address(ann: Any, key: str) -> None:
    """D-SIGN-IN: in any case; a name counts more, and two people with one address have to use theirs."""
    assert Browser().sign_in("A@B.c", key=key).json()["user"]["name"] == "ann"
    users = get_user_model().objects
    gone = users.create_user("gone", email="a@b.c", password=PASSWORD, is_active=False)
    assert Browser().sign_in("a@b.c", key=key).json()["user"]["name"] == "ann"
    assert Browser().sign_in("gone", key=key).status_code == 401
    gone.is_active = True
    gone.save()
    assert Browser().sign_in("a@b.c", key=key).status_code == 401
    users.create_user("a@b.c", password=NEXT)
    assert Browser().sign_in("a@b.c", NEXT, key=key).json()["user"]["name"] == "a@b.c"
    assert Browser().sign_in("a@b.c", key=key).status_code == 401


def test_a_refusal_takes_as_long_whoever_was_meant(ann: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One hash and the same queries for a wrong password as for a name or an address that nobody has."""
    get_user_model().objects.create_user("bob", email="two@b.c", password=PASSWORD)
    get_user_model().objects.create_user("eve", email="two@b.c", password=PASSWORD)
    hasher, hashes = get_hasher(), list[str]()
    encode = type(hasher).encode

    def counted(self: Any, password: str, *more: Any, **kept: Any) -> Any:
        hashes.append(password)
        return encode(self, password, *more, **kept)

    monkeypatch.setattr(type(hasher), "encode", counted)
    costs = set()
    for name in ("ann", "a@b.c", "two@b.c", "nobody", "nobody@b.c"):
        hashes.clear()
        with CaptureQueriesContext(
            connection,
        ) as captured:
            assert authenticate(username=name, password="wrong") is None
        costs.add((len(hashes), len(captured)))
    assert costs == {(1, 2)}


@pytest.mark.rule("http-5.4")
@pytest.mark.parametrize("key", ["username", "email"])
def test_signing_in(ann: Any, key: str) -> None:
    """§5.4: the name in either field; the answer and the status tell who it is, the admin API is open."""
    browser = Browser()
    signed_in = browser.sign_in(key=key)
    assert signed_in.status_code == 200
    person = {
        "id": str(ann.pk),
        "email": "a@b.c",
        "name": "ann",
        "avatarUrl": "",
        "role": "admin",
        "provider": "local",
        "mustChangePassword": False,
    }
    user = signed_in.json()["user"]
    built = {feature for feature, is_there in user.pop("permissions").items() if is_there}
    assert {"chat", "embeddings", "images"} <= built
    assert not {"agents", "mcp", "fine_tuning"} & built
    assert user == person
    assert browser.get("/api/auth/status").json()["user"].keys() == {*person, "permissions"}
    assert browser.get("/api/nodes").status_code == 200


@pytest.mark.rule("http-5.4")
def test_the_session_cookie(ann: Any) -> None:
    """§5.4, D-SIGN-IN: not for scripts, Lax, for 30 days."""
    browser = Browser()
    browser.sign_in()
    cookie = browser.client.cookies["sessionid"]
    assert cookie["httponly"]
    assert (cookie["samesite"], cookie["path"], cookie["max-age"]) == ("Lax", "/", 30 * 24 * 3600)


@pytest.mark.rule("http-5.4")
def test_a_person_who_is_no_admin(ann: Any) -> None:
    """§5.4: `role` says so, and the admin API stays closed."""
    get_user_model().objects.update(is_staff=False)
    browser = Browser()
    assert browser.sign_in().json()["user"]["role"] == "user"
    assert browser.get("/api/nodes").status_code == 403


def test_signing_in_changes_session_and_token(ann: Any) -> None:
    """What somebody has planted in the browser before is worth nothing afterwards."""
    browser = Browser()
    planted = browser.client.session
    planted["theirs"] = True
    planted.save()
    browser.get("/api/auth/status")
    token = browser.client.cookies["csrftoken"].value
    assert browser.sign_in().status_code == 200
    assert browser.client.cookies["sessionid"].value != planted.session_key
    assert not planted.exists(planted.session_key or "")
    assert browser.client.cookies["csrftoken"].value != token


@pytest.mark.rule("http-0.4", "http-5.4")
@pytest.mark.parametrize(("name", "password"), [("ann", "wrong"), ("nobody", PASSWORD), ("ann", "")])
def test_a_wrong_name_looks_like_a_wrong_password(ann: Any, name: str, password: str) -> None:
    """§0.4, §5.4: 401 flat, the same for both."""
    refused = Browser().sign_in(name, password)
    assert (refused.status_code, refused.json()) == (401, {"error": "incorrect username or password"})


@pytest.mark.rule("http-5.4")
def test_an_inactive_person_is_anonymous(ann: Any) -> None:
    """D-SIGN-IN: 401 like a wrong password; a session that was open ends."""
    browser = Browser()
    browser.sign_in()
    get_user_model().objects.update(is_active=False)
    assert browser.get("/api/auth/status").json()["user"] is None
    assert browser.get("/api/nodes").status_code == 401
    assert Browser().sign_in().status_code == 401


def test_an_agent_is_no_person(ann: Any) -> None:
    """Its user has no password that could be right."""
    agent = get_user_model().objects.create_user("agent-worker:a")
    assert not agent.has_usable_password()
    assert Browser().sign_in("agent-worker:a", "").status_code == 401


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"password": "x"}, "username"),
        ({"username": "", "email": None, "password": "x"}, "username"),
        ({"username": "ann"}, "password"),
        ({"username": 7, "password": "x"}, "username"),
        ({"username": "a\0b", "password": "x"}, "username"),
        ({"username": "ann", "password": ["x"]}, "password"),
        ({"username": "ann", "password": "x" * 5000}, "password"),
        ({"username": "a" * 300, "password": "x"}, "username"),
    ],
)
def test_a_body_that_is_none(ann: Any, body: Any, named: str) -> None:
    """§0.4: 400 flat that names the field; it is no failed sign-in."""
    browser = Browser()
    browser.get("/api/auth/status")
    for _ in range(throttle.SIGN_IN_FAILURE_LIMIT + 1):
        refused = browser.post("/api/auth/login", body)
        assert (refused.status_code, refused.json()["field"]) == (400, named)
    assert browser.sign_in().status_code == 200


NO_BODY = "invalid request body"
DEEP = "the request body is nested more than 64 levels deep"


@pytest.mark.parametrize(
    ("raw", "said"),
    [(b"[]", NO_BODY), (b"{", NO_BODY), (b'"x"', NO_BODY), (b"\xff", NO_BODY), (b"[" * 100_000, DEEP)],
)
def test_a_body_that_is_no_object(raw: bytes, said: str) -> None:
    """400, never a 500."""
    browser = Browser()
    browser.get("/api/auth/status")
    token = browser.client.cookies["csrftoken"].value
    refused = browser.client.post("/api/auth/login", raw, "application/json", headers={"X-CSRFToken": token})
    assert (refused.status_code, refused.json()) == (400, {"error": said})


@pytest.mark.rule("http-0.4")
@pytest.mark.parametrize("route", ["login", "logout", "password"])
def test_every_change_needs_the_token(ann: Any, route: str) -> None:
    """403 flat, of an anonymous caller too: no other site signs a browser in or out."""
    browser = Browser()
    browser.sign_in()
    for client in (browser.client, Client(enforce_csrf_checks=True)):
        refused = client.post(
            f"/api/auth/{route}", {"username": "ann", "password": PASSWORD}, "application/json"
        )
        assert refused.status_code == 403
        assert refused.json()["error"].startswith("CSRF Failed")
    assert browser.get("/api/auth/status").json()["user"]["name"] == "ann"


@pytest.mark.rule("http-0.4")
@pytest.mark.parametrize("route", ["status", "login", "logout", "password"])
@pytest.mark.parametrize("method", ["PUT", "DELETE", "QUERY", "OPTIONS"])
def test_a_method_that_is_not_there(ann: Any, route: str, method: str) -> None:
    """405 flat, and not the refusal of a missing token."""
    refused = Client(enforce_csrf_checks=True).generic(method, f"/api/auth/{route}")
    assert (refused.status_code, set(refused.json())) == (405, {"error"})


@pytest.mark.rule("http-5.4")
def test_signing_out(ann: Any) -> None:
    """The session ends on the server too; without one there is nothing to end."""
    browser = Browser()
    browser.sign_in()
    old = browser.client.cookies["sessionid"].value
    assert browser.post("/api/auth/logout").status_code == 200
    assert browser.get("/api/auth/status").json()["user"] is None
    browser.client.cookies["sessionid"] = old
    assert browser.get("/api/auth/status").json()["user"] is None
    assert browser.post("/api/auth/logout").status_code == 200


# Failures


@pytest.mark.rule("http-5.4", "http-0.4")
def test_five_failures_a_minute(
    ann: Any, minute: None, failed_sign_ins: throttle.Failures, caplog: pytest.LogCaptureFixture
) -> None:
    """§5.4, D-SIGN-IN: then 429 flat with Retry-After, for the right password too, from there alone."""
    browser = Browser()
    with caplog.at_level(logging.WARNING):
        assert [browser.sign_in(password="wrong").status_code for _ in range(6)] == [401] * 5 + [429]
    refused = browser.sign_in()
    assert refused.status_code == 429
    assert refused.json() == {"error": "too many failed sign-ins from this address; try again later"}
    assert 1 <= int(refused["Retry-After"]) <= throttle.WINDOW
    elsewhere = Client(enforce_csrf_checks=True, REMOTE_ADDR="192.0.2.10")
    assert Browser(elsewhere).sign_in().status_code == 200
    failed_sign_ins.check(HERE, clock.now() + timedelta(seconds=throttle.WINDOW))
    lines = [line.getMessage() for line in caplog.records if line.levelno >= logging.WARNING]
    assert lines == ["failed sign-ins from 192.0.2.9 within two minutes: 1"]


def test_tries_at_the_same_time_are_counted_before_they_are_looked_at(
    ann: Any, minute: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many at once are no more than as many one after the other."""
    looked: list[int] = []

    def check(self: Any, raw: str) -> bool:
        if len(looked) < 2 * throttle.SIGN_IN_FAILURE_LIMIT:
            looked.append(len(looked))
            Browser().sign_in(password="wrong")
        return False

    monkeypatch.setattr(get_user_model(), "check_password", check)
    Browser().sign_in(password="wrong")
    assert len(looked) == throttle.SIGN_IN_FAILURE_LIMIT


def test_right_passwords_are_never_too_many(ann: Any, minute: None) -> None:
    """They are taken back from the count."""
    browser = Browser()
    assert [browser.sign_in().status_code for _ in range(7)] == [200] * 7
    assert [browser.sign_in(password="wrong").status_code for _ in range(5)] == [401] * 5


def test_failed_tokens_and_failed_sign_ins_are_counted_apart(
    ann: Any, failed_tokens: throttle.Failures
) -> None:
    """A worker with a wrong token locks no one out of the pages."""
    for at in (clock.now(), clock.now() + timedelta(seconds=throttle.WINDOW)):
        for _ in range(throttle.DEFAULT_LIMIT):
            failed_tokens.note(HERE, at)
    assert Browser().sign_in().status_code == 200


# Another password


def test_another_password_keeps_this_session_and_ends_the_others(ann: Any) -> None:
    """The old one is good for nothing; sessions elsewhere end."""
    here, elsewhere = Browser(), Browser()
    here.sign_in()
    elsewhere.sign_in()
    session = here.client.cookies["sessionid"].value
    changed = here.post("/api/auth/password", {"old": PASSWORD, "new": NEXT})
    assert (changed.status_code, changed.json()["user"]["name"]) == (200, "ann")
    assert here.client.cookies["sessionid"].value != session
    assert here.get("/api/nodes").status_code == 200
    assert elsewhere.get("/api/nodes").status_code == 401
    assert Browser().sign_in().status_code == 401
    assert Browser().sign_in(password=NEXT).status_code == 200


@pytest.mark.rule("http-0.4")
@pytest.mark.parametrize(
    ("old", "new", "named", "said"),
    [
        ("wrong", NEXT, "old", "Current password is incorrect."),
        (PASSWORD, "short1!", "new", "at least 8 characters"),
        (PASSWORD, "password", "new", "too common"),
        (PASSWORD, "8273645190", "new", "not a digit"),
        (PASSWORD, PASSWORD, "new", "The new password must differ from the current one."),
        (PASSWORD, "", "new", "at least 8 characters"),
        (PASSWORD, None, "new", "null"),
        (None, NEXT, "old", "null"),
        (PASSWORD, "a\0" + NEXT, "new", "Null characters"),
        (PASSWORD, 12345678, "new", "must be a string"),
    ],
)
def test_a_password_that_is_refused(newcomer: Any, old: Any, new: Any, named: str, said: str) -> None:
    """400 flat that names the field and says why; nothing has changed."""
    browser = Browser()
    browser.sign_in()
    refused = browser.post("/api/auth/password", {"old": old, "new": new})
    assert (refused.status_code, refused.json()["field"]) == (400, named)
    assert said in refused.json()["error"]
    newcomer.refresh_from_db()
    assert newcomer.check_password(PASSWORD)
    assert InitialPassword.objects.exists()


def test_a_refusal_names_every_broken_rule_at_once(ann: Any) -> None:
    """One sentence per rule, by field: a person corrects all of it before the next try."""
    browser = Browser()
    browser.sign_in()
    refused = browser.post("/api/auth/password", {"old": "wrong", "new": "1234567"}).json()
    assert refused["fields"] == {
        "old": ["Current password is incorrect."],
        "new": [
            "Use at least 8 characters.",
            "This password is too common.",
            "Use at least one character that is not a digit.",
        ],
    }
    assert refused["field"] == "old"


def test_guessing_the_present_password_is_guessing(ann: Any, minute: None) -> None:
    """Anyone who finds an open browser gets five tries a minute, too; refused new ones are no guesses."""
    browser = Browser()
    browser.sign_in()
    for _ in range(throttle.SIGN_IN_FAILURE_LIMIT + 1):
        assert browser.post("/api/auth/password", {"old": PASSWORD, "new": "x"}).status_code == 400
    body = {"old": "wrong", "new": NEXT}
    codes = [browser.post("/api/auth/password", body).status_code for _ in range(6)]
    assert codes == [400] * 5 + [429]


def test_only_a_session_changes_a_password(ann: Any) -> None:
    """A key is not its owner: 401 flat, with the token."""
    browser = Browser()
    browser.get("/api/auth/status")
    refused = browser.post("/api/auth/password", {"old": PASSWORD, "new": NEXT})
    assert (refused.status_code, refused.json()) == (401, {"error": "sign-in required"})
    key = principals.create_api_key(ann, "k")[1]
    assert api.bearer(key).post("/api/auth/password", {"old": PASSWORD, "new": NEXT}).status_code == 403


# A generated password


def bootstrapped(monkeypatch: pytest.MonkeyPatch, **environment: str) -> Any:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    call_command("bootstrap", stdout=io.StringIO())
    return get_user_model().objects.get(username="admin")


@pytest.mark.parametrize(("generated", "must"), [("true", True), ("false", False), ("", False)])
def test_bootstrap_knows_which_password_was_generated(
    generated: str, must: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A password that the operator has chosen stays; a later run changes nothing."""
    settings = {"CLUSTER_ADMIN_PASSWORD": PASSWORD, "CLUSTER_ADMIN_PASSWORD_GENERATED": generated}
    assert passwords.must_change(bootstrapped(monkeypatch, **settings)) is must
    browser = Browser()
    assert browser.sign_in("admin").json()["user"]["mustChangePassword"] is must
    InitialPassword.objects.all().delete()
    assert not passwords.must_change(bootstrapped(monkeypatch, **settings))


def test_bootstrap_makes_no_user_while_a_setting_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the password must be changed is never guessed."""
    with pytest.raises(CommandError, match="CLUSTER_ADMIN_PASSWORD_GENERATED"):
        bootstrapped(monkeypatch, CLUSTER_ADMIN_PASSWORD=PASSWORD, CLUSTER_ADMIN_PASSWORD_GENERATED="perhaps")
    assert not get_user_model().objects.exists()


def test_a_generated_password_is_good_for_changing_it_and_nothing_else(newcomer: Any) -> None:
    """REST says 403 with a code of its own; status, password, sign-in and sign-out work."""
    browser = Browser()
    browser.sign_in()
    assert browser.get("/api/auth/status").json()["user"]["mustChangePassword"] is True
    for path in ("/api/nodes", "/api/operations", "/api/features", "/version", "/api/schema", "/api/docs"):
        refused = browser.get(path)
        assert refused.status_code == 403, path
        assert refused.json()["error"]["code"] == "password_change_required", path
    node = api.make_node(approved=False)
    assert browser.post(f"/api/nodes/{node.id}/approve").status_code == 403
    assert api.node(node.id).status == "pending"
    changed = browser.post("/api/auth/password", {"old": PASSWORD, "new": NEXT})
    assert changed.json()["user"]["mustChangePassword"] is False
    assert not InitialPassword.objects.exists()
    assert browser.get("/api/nodes").status_code == 200
    assert browser.post(f"/api/nodes/{node.id}/approve").status_code == 200


def test_pages_lead_to_the_change_first(newcomer: Any) -> None:
    """The admin and the API's pages are pages too."""
    newcomer.is_superuser = True
    newcomer.save()
    browser = Browser()
    browser.sign_in()
    sent = browser.get(browser.get("/admin/nodes/backendnode/?status=pending")["Location"])
    assert sent["Location"] == "/app/password?next=%2Fadmin%2Fnodes%2Fbackendnode%2F%3Fstatus%3Dpending"
    docs = browser.get("/api/docs", Accept="text/html")
    assert (docs.status_code, docs["Location"]) == (302, "/app/password?next=%2Fapi%2Fdocs")
    browser.post("/api/auth/password", {"old": PASSWORD, "new": NEXT})
    assert browser.get("/admin/nodes/backendnode/").status_code == 200


def test_keys_are_not_affected(newcomer: Any) -> None:
    """They were made on purpose, and prove nothing about the password."""
    key = principals.create_api_key(newcomer, "k")[1]
    assert api.bearer(key).get("/api/nodes").status_code == 200


@pytest.mark.django_db(transaction=True)
def test_sockets_know_a_newcomer_and_open_nothing(newcomer: Any) -> None:
    """Refused like a user without the right (4403), not like a stranger: signing in again does not help."""
    browser = Browser()
    browser.sign_in()

    def scope() -> dict[str, Any]:
        session = browser.client.session
        return {"type": "websocket", "headers": [], "session": session}

    who = async_to_sync(principal_of_socket)(scope())
    assert (who.kind, who.is_authenticated, who.is_admin, who.is_user) == ("newcomer", True, False, False)
    browser.post("/api/auth/password", {"old": PASSWORD, "new": NEXT})
    assert async_to_sync(principal_of_socket)(scope()).is_admin


def test_a_password_set_elsewhere_is_none_that_was_generated(
    newcomer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is set by hand was chosen."""
    monkeypatch.setattr("getpass.getpass", lambda prompt="": NEXT)
    call_command("changepassword", "ann", stdout=io.StringIO())
    assert Browser().sign_in(password=NEXT).json()["user"]["mustChangePassword"] is False


def test_the_state_costs_no_query(ann: Any) -> None:
    """It is read with the session's user."""
    browser = Browser()
    browser.sign_in()
    with CaptureQueriesContext(connection) as queries:
        assert browser.get("/api/features").status_code == 200
    tables = [query["sql"].split(" FROM ")[1].split()[0].strip('"') for query in queries]
    assert tables == ["django_session", "auth_user"]


# The admin's own door


def test_the_admin_is_entered_through_the_page(ann: Any) -> None:
    """One sign-in, whose failures are counted; it leads back to where one wanted to go."""
    browser = Browser()
    assert browser.get("/admin/")["Location"] == "/admin/login/?next=/admin/"
    assert browser.get("/admin/login/?next=/admin/")["Location"] == "/login?next=%2Fadmin%2F"
    lax = Client()
    lax.post("/admin/login/", {"username": "ann", "password": PASSWORD})
    assert "sessionid" not in lax.cookies
    browser.sign_in()
    assert browser.get("/admin/login/?next=/admin/nodes/")["Location"] == "/admin/nodes/"
    page = browser.get("/admin/").content.decode()
    assert 'href="/app"' in page


@pytest.mark.parametrize(
    "evil", ["//evil.example", "https://evil.example/", "/\\evil.example", "javascript:x"]
)
def test_no_one_is_sent_to_another_host(ann: Any, evil: str) -> None:
    """`next` is a path of this host or nothing."""
    browser = Browser()
    assert browser.client.get("/admin/login/", {"next": evil})["Location"] == "/login?next=%2Fadmin%2F"
    browser.sign_in()
    assert browser.client.get("/admin/login/", {"next": evil})["Location"] == "/admin/"


def test_who_is_no_admin_is_sent_to_the_page(ann: Any) -> None:
    """Not back and forth between the admin and the sign-in."""
    get_user_model().objects.update(is_staff=False)
    browser = Browser()
    browser.sign_in()
    assert browser.get("/admin/login/?next=/admin/")["Location"] == "/app"


# What the page asks for beside


@pytest.mark.rule("http-5.4", "http-5.1", "http-0.3", "UI-0.26")
def test_features_branding_version(ann: Any) -> None:
    """§5.4: the cluster is on and nothing else; branding for everyone, the other two for users."""
    assert api.admin().get("/api/features").json() == {
        "agents": False,
        "mcp": False,
        "fine_tuning": False,
        "quantization": False,
        "distributed": True,
        "localai_assistant": False,
    }
    names = {"instance_name", "instance_tagline", "logo_url", "logo_horizontal_url", "favicon_url"}
    assert api.Caller().get("/api/branding").json() == dict.fromkeys(names, "")
    assert api.admin().get("/version").json()["version"]
    for path in ("/api/features", "/version"):
        assert api.Caller().get(path).status_code == 401
    get_user_model().objects.update(is_staff=False)
    browser = Browser()
    browser.sign_in()
    assert browser.get("/api/features").status_code == browser.get("/version").status_code == 200
