"""How clients reach inference (review C7, C8, C10, C11): Basic, open networks, CORS, unknown routes."""

import base64
import dataclasses
from collections.abc import Mapping
from datetime import timedelta
from ipaddress import ip_network
from typing import Any

import pytest
from django.contrib.auth import get_user_model
from django.core.checks import run_checks
from pytest_django import Settings

from localai_cluster.accounts.principals import create_api_key
from localai_cluster.asgi import application
from localai_cluster.kit import clock, conf
from localai_cluster.web.throttle import DEFAULT_LIMIT, WINDOW, Failures
from nodes.live import notices
from tests.support import hot
from tests.support.answering import ASK, CHAT, definitions, play, reply
from tests.support.environment import API_KEY
from tests.support.scripted import Scripted, words

__all__ = ["definitions"]
pytestmark = pytest.mark.django_db(transaction=True)

ORIGIN = "https://app.example"


def basic(password: str, name: str = "me") -> dict[str, str]:
    """The header of Basic authentication."""
    return {"authorization": "Basic " + base64.b64encode(f"{name}:{password}".encode()).decode()}


def sent(
    headers: Mapping[str, str],
    *,
    path: str = CHAT,
    method: str = "POST",
    body: bytes = b"",
    key: str | None = None,
) -> hot.Reply:
    """The reply to one request with these headers; a chat if no body is given."""

    async def scenario(_: hot.Client, __: Any) -> hot.Reply:
        client = hot.Client(application, key=key)
        if method == "POST" and path == CHAT:
            return await reply(client.post(path, ASK, headers=headers))
        return await reply(client.request(method, path, body, headers=headers))

    answer: hot.Reply = play(scenario, Scripted(words("Hello yourself")))
    return answer


# Basic


@pytest.mark.rule("http-0.2")
def test_the_key_may_be_the_password_of_basic_authentication() -> None:
    """C7: clients that can send nothing else; the name does not matter."""
    key = create_api_key(get_user_model().objects.create_user("ann"), "k")[1]
    for password in (API_KEY, key):
        for name in ("me", "", "a@b.c"):
            assert sent(basic(password, name)).status == 200


@pytest.mark.rule("http-0.2")
@pytest.mark.parametrize(
    "headers",
    [
        basic("wrong"),
        basic(""),
        {"authorization": "Basic !!!"},
        {"authorization": "Basic " + base64.b64encode(b"\xff\xfe").decode()},
        {"authorization": "Basic"},
        {**basic(API_KEY), "origin": ORIGIN},
        {**basic(API_KEY), "cookie": "a=b"},
    ],
)
def test_no_page_uses_a_browsers_stored_password(headers: dict[str, str]) -> None:
    """C7: never with a cookie or an origin, and no challenge that would make a browser ask for one."""
    refused = sent(headers)
    assert refused.status == 401
    assert refused.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("path", ["/api/nodes", "/api/operations", "/metrics", "/version"])
def test_basic_opens_inference_only(path: str) -> None:
    assert sent(basic(API_KEY), path=path, method="GET").status == 401


def test_wrong_passwords_count_like_wrong_keys(failed_keys: Failures) -> None:
    """D-FAILED-TOKENS."""
    now = clock.now()
    for minute in (now, now + timedelta(seconds=WINDOW)):
        for _ in range(DEFAULT_LIMIT):
            failed_keys.note("192.0.2.7", minute)
    assert sent(basic("wrong")).status == 429


# Networks


@pytest.fixture
def keyless(settings: Settings) -> None:
    """The client's network needs no key."""
    networks = (ip_network("192.0.2.0/28"), ip_network("2001:db8::/64"))
    settings.CLUSTER = dataclasses.replace(settings.CLUSTER, keyless_networks=networks)


@pytest.mark.rule("http-0.2", "http-0.3")
def test_a_network_may_be_admitted_without_a_key(keyless: None) -> None:
    """C7: to inference as a user, to nothing else; a wrong key stays wrong."""
    assert sent({}).status == 200
    assert sent({"authorization": "Bearer wrong"}).status == 401
    assert sent({"cookie": "sessionid=x"}).status == 401
    assert sent({"origin": ORIGIN}).status == 401, "a page of another site asks"
    for path in ("/api/nodes", "/api/operations", "/api/features", "/metrics"):
        assert sent({}, path=path, method="GET").status == 401
    unload = sent({}, path="/api/generate", body=b'{"model": "m", "keep_alive": 0}')
    assert unload.status == 403


def test_no_other_address_is_admitted(settings: Settings) -> None:
    """Off by default; an IPv4 address in IPv6 is that address."""
    assert sent({}).status == 401
    for networks, status in (("192.0.2.0/29", 200), ("192.0.2.8/29", 401), ("::/0", 401)):
        named = (ip_network(networks),)
        settings.CLUSTER = dataclasses.replace(settings.CLUSTER, keyless_networks=named)
        assert sent({}).status == status, networks


def test_open_networks_are_shown_as_a_warning(keyless: None) -> None:
    """C7: by `manage.py check` and on the pages, with the setting."""
    found = [message for message in run_checks() if message.id == "cluster.W005"]
    assert "192.0.2.0/28" in found[0].msg
    (notice,) = notices._keyless_notices(conf.cluster())
    assert (notice["level"], "CLUSTER_KEYLESS_NETWORKS" in notice["hint"]) == ("warning", True)


@pytest.mark.parametrize(
    ("text", "setting"),
    [
        ("10.0.0.1/24", "CLUSTER_KEYLESS_NETWORKS"),
        ("everywhere", "CLUSTER_KEYLESS_NETWORKS"),
        ("https://app.example/path", "CLUSTER_CORS_ORIGINS"),
        ("app.example", "CLUSTER_CORS_ORIGINS"),
        ("null", "CLUSTER_CORS_ORIGINS"),
    ],
)
def test_settings_that_are_none(text: str, setting: str) -> None:
    """Named, and nothing is opened."""
    cluster, environment = conf.load({setting: text})
    assert setting in [problem.setting for problem in environment.problems]
    assert (cluster.keyless_networks, cluster.cors_origins) == ((), ())


# CORS


PREFLIGHT = {
    "origin": ORIGIN,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization, content-type, x-stainless-os",
}


@pytest.fixture
def cors(settings: Settings) -> None:
    """Pages of one other origin may use inference."""
    settings.CLUSTER = dataclasses.replace(settings.CLUSTER, cors_origins=(ORIGIN,))


@pytest.mark.rule("http-0.1")
def test_a_page_of_a_named_origin_uses_inference_with_a_key(cors: None) -> None:
    """C8: the preflight is answered without a key; no cookie is ever allowed."""
    preflight = sent(PREFLIGHT, method="OPTIONS")
    assert (preflight.status, preflight.headers["access-control-allow-origin"]) == (200, ORIGIN)
    assert preflight.headers["access-control-allow-methods"] == "POST"
    assert preflight.headers["access-control-allow-headers"] == PREFLIGHT["access-control-request-headers"]
    assert preflight.headers["vary"] == "Origin"
    for key, status in ((API_KEY, 200), (None, 401)):
        answer = sent({"origin": ORIGIN}, key=key)
        assert (answer.status, answer.headers["access-control-allow-origin"]) == (status, ORIGIN)
        assert "access-control-allow-credentials" not in answer.headers


@pytest.mark.rule("http-0.1")
@pytest.mark.parametrize(
    ("origin", "path"),
    [
        ("https://evil.example", CHAT),
        ("https://app.example.evil.example", CHAT),
        ("http://app.example", CHAT),
        ("null", CHAT),
        (ORIGIN, "/api/nodes"),
        (ORIGIN, "/api/auth/login"),
        (ORIGIN, "/metrics"),
    ],
)
def test_nothing_else_is_opened(cors: None, origin: str, path: str) -> None:
    refused = sent(PREFLIGHT | {"origin": origin}, method="OPTIONS", path=path)
    assert refused.status >= 400
    assert "access-control-allow-origin" not in refused.headers
    assert "access-control-allow-origin" not in sent({"origin": origin}, path=path, key=API_KEY).headers


def test_no_origin_is_allowed_unless_it_is_set(settings: Settings) -> None:
    assert sent(PREFLIGHT, method="OPTIONS").status == 401
    assert "access-control-allow-origin" not in sent({"origin": ORIGIN}, key=API_KEY).headers
    settings.CLUSTER = dataclasses.replace(settings.CLUSTER, cors_origins=("*",))
    assert sent({"origin": "https://any.example"}, key=API_KEY).headers["access-control-allow-origin"]


@pytest.mark.parametrize("names", ["a\r\nset-cookie: x", "a" * 5000, "a,,b", ""])
def test_a_preflight_repeats_no_nonsense(cors: None, names: str) -> None:
    answer = sent(PREFLIGHT | {"access-control-request-headers": names}, method="OPTIONS")
    assert "access-control-allow-headers" not in answer.headers


# Routes and dialects


@pytest.mark.rule("http-0.4", "http-6a")
@pytest.mark.parametrize("path", ["/v1/nope", "/v1/chat", "/v1/responses/resp_1/input_items"])
def test_an_unknown_route_is_told_in_the_clients_dialect(path: str) -> None:
    """C10, C11: OpenAI's code, or Anthropic's envelope."""
    error = sent({}, path=path, method="GET", key=API_KEY).body["error"]
    assert (error["code"], error["type"], error["param"]) == ("unknown_url", "invalid_request_error", None)
    answer = sent({"anthropic-version": "2023-06-01"}, path=path, method="GET")
    assert (answer.status, answer.body["type"], answer.body["error"]["type"]) == (
        404,
        "error",
        "not_found_error",
    )


@pytest.mark.rule("http-0.4", "http-6a")
def test_models_are_listed_as_anthropics_clients_expect() -> None:
    """C10: by the header; errors too."""
    header = {"anthropic-version": "2023-06-01"}
    listed = sent(header, path="/v1/models", method="GET", key=API_KEY).body
    (model,) = listed["data"]
    assert (model["type"], model["id"], model["display_name"]) == ("model", "m", "m")
    assert model["created_at"].endswith("Z")
    assert (listed["has_more"], listed["first_id"], listed["last_id"]) == (False, "m", "m")
    assert sent(header, path="/v1/models/m", method="GET", key=API_KEY).body == model
    unknown = sent(header, path="/v1/models/nope", method="GET", key=API_KEY)
    assert (unknown.status, unknown.body["error"]["type"]) == (404, "not_found_error")
    wrong = sent(header, path="/v1/models", method="GET", key="wrong")
    assert (wrong.status, wrong.body["error"]["type"]) == (401, "authentication_error")
    assert sent({}, path="/v1/models", method="GET", key="wrong").body["error"]["code"] == "invalid_api_key"
