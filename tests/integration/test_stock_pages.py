"""The reference's pages on our server: their calls in their order, without our token (`http-api.md` §5)."""

import json
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from django.contrib.auth import get_user_model
from django.test import Client

from localai_cluster.accounts import principals
from localai_cluster.kit import clock
from localai_cluster.web import throttle
from tests.support import api
from tests.support.environment import API_KEY

pytestmark = pytest.mark.django_db

PASSWORD = "a long first sentence"
HERE = "http://testserver"
STATUS_KEYS = {"authEnabled", "staticApiKeyRequired", "providers", "hasUsers", "registrationMode", "user"}


@dataclass
class StockPage:
    """A tab with the reference's pages: cookies and the headers of its browser, no token of ours."""

    site: dict[str, str] = field(default_factory=lambda: {"Sec-Fetch-Site": "same-origin"})
    client: Client = field(
        default_factory=lambda: Client(
            raise_request_exception=False, enforce_csrf_checks=True, REMOTE_ADDR="192.0.2.9"
        )
    )

    def get(self, path: str) -> Any:
        """GET, with the content type that the reference's helper puts on every call."""
        return self.client.get(path, headers={"Content-Type": "application/json", **self.site})

    def send(self, method: str, path: str, body: Any = None) -> Any:
        """A change; what has no body is `{}`."""
        return self.client.generic(
            method, path, json.dumps(body or {}), content_type="application/json", headers=self.site
        )

    def post(self, path: str, body: Any = None) -> Any:
        """POST."""
        return self.send("POST", path, body)

    def user(self) -> Any:
        """Who is signed in."""
        return self.get("/api/auth/status").json()["user"]


@pytest.fixture
def ann() -> Any:
    """An administrator with a password of her own."""
    return get_user_model().objects.create_user("ann", email="a@b.c", password=PASSWORD, is_staff=True)


@pytest.fixture
def two_keys(settings: Any) -> tuple[str, str]:
    """Two static keys."""
    keys = API_KEY, "another-static-key-of-tests"
    settings.CLUSTER = replace(settings.CLUSTER, api_keys=keys)
    return keys


# Signing in


@pytest.mark.rule("http-5.3", "http-5.4", "http-0.3")
@pytest.mark.parametrize(
    "site", [{"Sec-Fetch-Site": "same-origin"}, {"Origin": HERE}], ids=["over TLS", "plain HTTP"]
)
def test_a_person_signs_in_works_and_signs_out(ann: Any, site: dict[str, str]) -> None:
    """D-SIGN-IN: branding and status first, then the password, a change, and the way out."""
    page = StockPage(site)
    assert page.get("/api/branding").status_code == 200
    status = page.get("/api/auth/status").json()
    assert set(status) == STATUS_KEYS
    assert (status["user"], status["authEnabled"], status["hasUsers"]) == (None, True, True)
    refused = page.post("/api/auth/login", {"email": "a@b.c", "password": "wrong"})
    assert (refused.status_code, set(refused.json())) == (401, {"error"})
    signed_in = page.post("/api/auth/login", {"email": "ann", "password": PASSWORD})
    assert (signed_in.status_code, signed_in.json()["user"]["role"]) == (200, "admin")
    node = api.make_node(approved=False)
    assert page.post(f"/api/nodes/{node.id}/approve").status_code == 200
    assert page.post("/api/auth/logout").status_code == 200
    assert page.user() is None
    assert page.get("/api/nodes").status_code == 401


@pytest.mark.rule("http-5.4", "http-0.2")
def test_a_static_key_signs_in_as_its_user(two_keys: tuple[str, str]) -> None:
    """§5.4: one token field; the user that the key maps to, an administrator, in the status too."""
    recorded = next(item for item in api.examples("shell") if item["name"].startswith("auth status"))["body"]
    for key in two_keys:
        page = StockPage()
        answer = page.post("/api/auth/token-login", {"token": key})
        user = answer.json()["user"]
        assert answer.status_code == 200
        for given in (user, page.user(), api.bearer(key).get("/api/auth/status").json()["user"]):
            assert given | {"permissions": {}} == recorded["user"] | {
                "permissions": {},
                "mustChangePassword": False,
            }
            assert set(given["permissions"]) == set(recorded["user"]["permissions"])
        assert page.get("/api/auth/status").json()["hasUsers"] is False
        cookie = page.client.cookies["sessionid"]
        assert (cookie["httponly"], cookie["samesite"]) == (True, "Lax")
        assert key not in str(dict(page.client.session))
        assert page.get("/api/nodes").status_code == 200
        node = api.make_node(f"w-{key[:4]}", approved=False)
        assert page.post(f"/api/nodes/{node.id}/approve").status_code == 200
        assert page.post("/api/auth/logout").status_code == 200
        assert page.get("/api/nodes").status_code == 401


def test_a_session_of_a_static_key_ends_with_the_key(two_keys: tuple[str, str], settings: Any) -> None:
    """What the operator removes or replaces opens nothing any more; the other key goes on."""
    pages = [StockPage() for _ in two_keys]
    for page, key in zip(pages, two_keys, strict=True):
        assert page.post("/api/auth/token-login", {"token": key}).status_code == 200
    settings.CLUSTER = replace(settings.CLUSTER, api_keys=(two_keys[0], "one-more-static-key-of-tests"))
    assert [page.get("/api/nodes").status_code for page in pages] == [200, 401]
    settings.CLUSTER = replace(settings.CLUSTER, api_keys=())
    assert [page.get("/api/nodes").status_code for page in pages] == [401, 401]


@pytest.mark.parametrize("ends", ["revoked", "inactive", "deleted"])
def test_a_session_of_a_persons_key_ends_with_the_key(ann: Any, ends: str) -> None:
    """It is that person, with the key's end."""
    row, key = principals.create_api_key(ann, "k")
    page = StockPage()
    signed_in = page.post("/api/auth/token-login", {"token": key})
    assert signed_in.json()["user"]["name"] == page.user()["name"] == "ann"
    assert page.get("/api/nodes").status_code == 200
    if ends == "revoked":
        row.revoked_at = clock.now()
        row.save()
    elif ends == "inactive":
        get_user_model().objects.update(is_active=False)
    else:
        row.delete()
    assert page.get("/api/nodes").status_code == 401
    assert page.user() is None


def test_a_key_that_is_no_administrators_opens_no_more_than_it_does(ann: Any) -> None:
    get_user_model().objects.update(is_staff=False)
    page = StockPage()
    page.post("/api/auth/token-login", {"token": principals.create_api_key(ann, "k")[1]})
    assert page.user()["role"] == "user"
    assert page.get("/api/nodes").status_code == 403


def test_a_session_of_a_key_changes_no_password_and_opens_no_admin(ann: Any) -> None:
    """A key that leaked must not become a password."""
    get_user_model().objects.update(is_superuser=True)
    for key in (API_KEY, principals.create_api_key(ann, "k")[1]):
        page = StockPage()
        page.post("/api/auth/token-login", {"token": key})
        changed = page.post("/api/auth/password", {"old": PASSWORD, "new": "another long sentence"})
        assert (changed.status_code, set(changed.json())) == (403, {"error"})
        assert page.get("/admin/auth/user/").status_code == 302
    ann.refresh_from_db()
    assert ann.check_password(PASSWORD)


@pytest.mark.rule("http-0.4", "http-5.4")
@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"token": "wrong"}, 401),
        ({"token": "lac-" + "0" * 48}, 401),
        ({"token": "\u00fc"}, 401),
        ({"token": f"{API_KEY},another-static-key-of-tests"}, 401),
        ({}, 400),
        ({"token": None}, 400),
        ({"token": ["x"]}, 400),
        ({"token": "x" * 5000}, 400),
    ],
)
def test_a_token_that_is_none(two_keys: tuple[str, str], body: Any, status: int) -> None:
    refused = StockPage().post("/api/auth/token-login", body)
    assert refused.status_code == status
    assert set(refused.json()) <= {"error", "field"}
    assert "sessionid" not in refused.cookies


@pytest.mark.rule("http-5.4")
def test_five_wrong_tokens_a_minute(
    failed_sign_ins: throttle.Failures, monkeypatch: pytest.MonkeyPatch
) -> None:
    """§5.4: then 429 for the right one too; passwords and tokens are counted together."""
    now = clock.now().replace(second=5)
    monkeypatch.setattr(clock, "now", lambda: now)
    page = StockPage()
    for _ in range(throttle.SIGN_INS):
        assert page.post("/api/auth/token-login", {"token": "wrong"}).status_code == 401
    assert page.post("/api/auth/token-login", {"token": API_KEY}).status_code == 429
    assert page.post("/api/auth/login", {"email": "ann", "password": PASSWORD}).status_code == 429


def test_the_status_is_no_way_to_try_keys(
    failed_keys: throttle.Failures, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D-FAILED-TOKENS: a wrong key is counted there as anywhere."""
    now = clock.now().replace(second=5)
    monkeypatch.setattr(clock, "now", lambda: now)
    caller = api.bearer("wrong")
    answers = [caller.get("/api/auth/status") for _ in range(throttle.LIMIT + 1)]
    assert {answer.json()["user"] for answer in answers[:-1]} == {None}
    assert answers[-1].status_code == 429


@pytest.mark.rule("http-0.1")
@pytest.mark.parametrize(
    "site",
    [
        {},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
        {"Sec-Fetch-Site": "none"},
        {"Sec-Fetch-Site": "same-origin, cross-site"},
        {"Sec-Fetch-Site": "", "Origin": HERE},
        {"Sec-Fetch-Site": "cross-site", "Origin": HERE},
        {"Origin": "http://elsewhere.test"},
        {"Origin": "https://testserver"},
        {"Origin": "http://testserver:8081"},
        {"Origin": "null"},
        {"Origin": f"{HERE}/"},
        {"Referer": f"{HERE}/app"},
    ],
)
def test_no_other_page_signs_in_or_changes_anything(ann: Any, site: dict[str, str]) -> None:
    """403 without a token of ours, and nothing has happened; a session that is there stays as it is."""
    page = StockPage()
    page.post("/api/auth/login", {"email": "ann", "password": PASSWORD})
    node = api.make_node(approved=False)
    page.site = site
    calls: tuple[tuple[str, Any], ...]
    calls = ("logout", {}), ("token-login", {"token": API_KEY}), ("login", {"email": "b", "password": "x"})
    for route, body in calls:
        assert page.post(f"/api/auth/{route}", body).status_code == 403
    assert page.post(f"/api/nodes/{node.id}/approve").status_code == 403
    assert api.node(node.id).status == "pending"
    assert page.user()["name"] == "ann"


def test_a_key_in_a_list_is_a_key_and_the_list_is_none(two_keys: tuple[str, str]) -> None:
    """Several keys in `LOCALAI_API_KEY`: each is the administrator's."""
    assert [api.bearer(key).get("/api/nodes").status_code for key in two_keys] == [200, 200]
    assert api.bearer(",".join(two_keys)).get("/api/nodes").status_code == 401
    assert api.bearer(two_keys[0][:-1]).get("/api/nodes").status_code == 401
