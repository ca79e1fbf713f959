"""Route by caller over a running cluster: every URL and every websocket, by all kinds of callers.

The rule of a route follows from its path alone, and what no rule names is for admins: a new route is covered
the day it is added. The routes come from Django's resolver and the raw table, not from a list here.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import httpx
import pytest
import websockets
from django.urls import URLPattern, URLResolver, get_resolver

from localai_cluster import edge
from localai_cluster.web import page
from tests.support.cluster import ADMIN_KEY, SCRAPER, TOKEN, Cluster, running_cluster

METHODS = ("GET", "POST")
INFERENCE = (
    "/embeddings",
    "/chat/completions",
    "/completions",
    "/tokenize",
    "/detokenize",
    "/rerank",
    "/audio/transcriptions",
    "/audio/speech",
    "/images/generations",
    "/tts",
    "/models",
    "/messages",
    "/messages/count_tokens",
    "/responses",
    "/responses/{response_id}",
    *(
        f"/api/{name}"
        for name in ("chat", "generate", "embed", "embeddings", "show", "tags", "ps", "version", "pull")
    ),
    "/v2/rerank",
)
"""Beside `/v1/`."""
MODELS_OF_OLLAMA = tuple(f"/api/{name}" for name in ("push", "blobs/{digest}"))
"""Refused for everybody, after the key is checked."""
ODD_METHODS = ("PUT", "PATCH", "DELETE", "HEAD", "OPTIONS")
SOCKETS = ("/ws/operations", "/ws/feed")
LOGS = "/ws/nodes/{node_id}/backend-logs/m"
NODE, OTHER = "5" * 64, "6" * 64

# Makes a user, an admin and one whose password was generated inside the cluster; prints their keys and the
# cookies of their sessions.
_ACCOUNTS = """
import json
from django.contrib.auth import get_user_model, BACKEND_SESSION_KEY, HASH_SESSION_KEY, SESSION_KEY
from django.contrib.sessions.backends.db import SessionStore
from localai_cluster.accounts import principals
from localai_cluster.accounts.models import InitialPassword
made = {}
for name, staff in (("ann", False), ("root", True), ("new", True)):
    user = get_user_model().objects.create_user(name, password="x", is_staff=staff, is_superuser=staff)
    session = SessionStore()
    session[SESSION_KEY], session[HASH_SESSION_KEY] = str(user.pk), user.get_session_auth_hash()
    session[BACKEND_SESSION_KEY] = "localai_cluster.accounts.passwords.SessionBackend"
    session.save()
    made[name] = [principals.create_api_key(user, "matrix")[1], session.session_key]
InitialPassword.objects.create(user=user)
print(json.dumps(made))
"""


@dataclass(frozen=True)
class Caller:
    """Somebody: who it is to the rules, and what it sends."""

    name: str
    kind: str
    headers: dict[str, str]


@dataclass(frozen=True)
class World:
    """A cluster with accounts and two nodes of type agent, which nothing is ever placed on."""

    url: str
    callers: list[Caller]
    node_id: str

    def path(self, template: str) -> str:
        """A concrete path: the node's own id, an id of nothing for everything else."""
        return re.sub(r"\{\w+\}", str(uuid4()), template.replace("{node_id}", self.node_id))


def _from(template: str) -> httpx.HTTPTransport:
    """A loopback address for each route: wrong tokens are counted for the address they come from."""
    net, host = divmod(all_routes().index(template), 250)
    return httpx.HTTPTransport(local_address=f"127.0.{1 + net}.{1 + host}", verify=False)


def _bearer(credential: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {credential}"}


def _register(url: str, name: str, secret: str) -> str:
    answer = httpx.post(
        f"{url}/api/node/register",
        json={"name": name, "node_type": "agent", "token": TOKEN},
        headers={**_bearer(TOKEN), "X-LocalAI-Node-Secret": secret},
    )
    assert answer.status_code == 201, answer.text
    return str(answer.json()["id"])


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """Made once for all tests here, with one process of each kind that a route may speak to."""
    with running_cluster(LOCALAI_METRICS_TOKEN=SCRAPER) as cluster:
        web = cluster.web()
        cluster.controller()
        cluster.worker("one", web)
        yield _populated(cluster, web.url)


def _populated(cluster: Cluster, url: str) -> World:
    accounts = json.loads(cluster.manage("shell", "-v", "0", "-c", _ACCOUNTS).splitlines()[-1])
    csrf = "c" * 32
    cookie = {
        name: {"Cookie": f"sessionid={session}; csrftoken={csrf}", "X-CSRFToken": csrf}
        for name, (_, session) in accounts.items()
    }
    node_id = _register(url, "matrix-node", NODE)
    _register(url, "matrix-other", OTHER)
    return World(
        url,
        [
            Caller("anonymous", "nobody", {}),
            Caller("wrong token", "nobody", _bearer("wrong")),
            Caller("wrong API key", "nobody", {"x-api-key": "lac-" + "0" * 48}),
            Caller("empty bearer", "nobody", {"Authorization": "Bearer"}),
            Caller("other scheme", "nobody", {"Authorization": f"Basic {ADMIN_KEY}"}),
            Caller("stale session", "nobody", {"Cookie": "sessionid=nothing"}),
            Caller("registration token", "knocking", _bearer(TOKEN)),
            Caller("the node", "node", _bearer(NODE)),
            Caller("another node", "other node", _bearer(OTHER)),
            Caller("user's key", "user", _bearer(accounts["ann"][0])),
            Caller("user's session", "user session", cookie["ann"]),
            Caller("newcomer's session", "newcomer session", cookie["new"]),
            Caller("newcomer's key", "admin", _bearer(accounts["new"][0])),
            Caller("admin's key", "admin", {"x-api-key": accounts["root"][0]}),
            Caller("admin's session", "admin session", cookie["root"]),
            Caller("static key", "admin", _bearer(ADMIN_KEY)),
            Caller("scraper", "scraper", _bearer(SCRAPER)),
        ],
        node_id,
    )


def django_routes(resolver: URLResolver, prefix: str = "/") -> Iterator[str]:
    """Every path template that Django knows."""
    for entry in resolver.url_patterns:
        path = prefix + str(entry.pattern).lstrip("^").rstrip("$").replace("\\Z", "")
        if isinstance(entry, URLResolver):
            yield from django_routes(entry, path)
        elif isinstance(entry, URLPattern):
            yield re.sub(r"\(\?P<(\w+)>[^)]*\)|<(?:\w+:)?(\w+)>", r"{\1\2}", path)


def all_routes() -> list[str]:
    return sorted({route.path for route in edge.ROUTES} | set(django_routes(get_resolver())))


PAGES = ("/", "/app", "/app/{path}", "/browse", "/browse/{rest}", "/login", "/favicon.svg")


def _signs_in(path: str, kind: str) -> bool | int:
    if path.startswith("/api/auth/api-keys"):
        # Only people manage keys, in sessions of their own.
        return kind in ("user session", "admin session") or (403 if kind == "newcomer session" else 401)
    # Open to all; a change needs the CSRF token, which callers without a session do not send here.
    return kind.endswith("session") or 403


def allowed(path: str, kind: str) -> bool | int:
    """Whether `kind` may call `path` at all; a number is the refusal's status."""
    person, admin = kind.removesuffix(" session") in ("user", "admin"), kind.startswith("admin")
    if path in PAGES or path in ("/healthz", "/readyz", "/api/branding"):
        return True
    if path.startswith("/api/auth/"):
        return _signs_in(path, kind)
    if kind == "newcomer session":
        return 401 if path.startswith("/metrics") else 403
    if path in ("/version", "/api/features", "/api/models/capabilities") or path.endswith("/load-status"):
        return True if person else 401
    if path in ("/join", "/join/wheel"):
        return True if admin or kind == "knocking" else 403 if person else 401
    if path == "/api/node/register":
        return True if kind == "knocking" else 403 if person else 401
    if path.startswith("/api/node/"):
        return True if kind == "node" else 403 if person or kind == "other node" else 401
    if path.startswith("/metrics"):
        # Keys only: a scraper has no session.
        return True if kind in ("admin", "scraper") else 403 if kind == "user" else 401
    if path.startswith(("/v1/", "/api/schema", "/api/docs")) or path in INFERENCE:
        return True if person else 401
    return True if admin and path not in MODELS_OF_OLLAMA else 403 if person else 401


@pytest.mark.parametrize("template", [path for path in all_routes() if not path.startswith("/admin/")])
@pytest.mark.rule("O107")
def test_every_route_by_every_caller(world: World, template: str) -> None:
    """Refused callers get exactly 401 or 403 by every method; admitted ones never a 5xx."""
    with httpx.Client(base_url=world.url, transport=_from(template), verify=False, timeout=180) as client:
        for caller in world.callers:
            if template == "/api/auth/logout" and caller.kind.endswith("session"):
                continue  # it would end the session that the other routes are called with
            verdict = allowed(template, caller.kind)
            for method in METHODS + (ODD_METHODS if caller.name in ("anonymous", "static key") else ()):
                body = b"{}" if method in ("POST", "PUT", "PATCH") else None
                headers = {"Content-Type": "application/json", **caller.headers}
                path = world.path(_harmless(template, method) if verdict is True else template)
                answer = client.request(method, path, headers=headers, content=body)
                shown = f"{method} {template} by {caller.name}: {answer.status_code} {answer.text[:200]}"
                if template == "/api/auth/status" and method in ("GET", "HEAD"):
                    assert answer.status_code == 200, shown
                elif verdict is True and template in PAGES and not page.build_id():
                    assert answer.status_code in (200, 301, 405, 503), shown
                elif verdict is True:
                    # Honest ones: a server without the package for joining machines, a node without a worker.
                    honest = template == "/join/wheel" or "/backend-logs" in template
                    assert answer.status_code < 500 or honest, shown
                    assert answer.status_code != 403, shown
                    assert answer.status_code != 401 or template == "/api/node/register", shown
                else:
                    assert answer.status_code in (verdict, 405), shown
                    assert answer.status_code != 401 or answer.headers["WWW-Authenticate"] == "Bearer", shown
                assert NODE not in answer.text, shown


def _harmless(template: str, method: str) -> str:
    """What an admin may do to a node happens to an unknown one: the node is still needed."""
    changes = template.startswith("/api/nodes/") and method != "GET"
    return template.replace("{node_id}", "{unknown}") if changes else template


def test_the_admin_pages_send_everyone_else_to_sign_in(world: World) -> None:
    """No page of Django's admin answers anybody but staff, except the sign-in page."""
    pages = [path for path in all_routes() if path.startswith("/admin/")]
    assert len(pages) > 30
    strangers = {"anonymous", "user's session", "newcomer's session", "the node", "static key"}
    callers = [caller for caller in world.callers if caller.name in strangers]
    with httpx.Client(base_url=world.url, timeout=180) as client:
        for template in pages:
            path = re.sub(r"\{\w+\}", "1", template).replace(".*", "x")
            for caller in callers if template != "/admin/login/" else []:
                answer = client.get(path, headers=caller.headers)
                shown = f"{path} by {caller.name}: {answer.status_code}"
                assert answer.status_code in (302, 404, 405), shown
                assert answer.status_code != 302 or answer.headers["Location"].startswith("/admin/"), shown
        assert client.get("/admin/login/").headers["Location"] == "/login?next=%2Fadmin%2F"
        root = next(caller for caller in world.callers if caller.kind == "admin session")
        assert client.get("/admin/nodes/backendnode/", headers=root.headers).status_code == 200


@pytest.mark.parametrize("path", SOCKETS)
async def test_every_websocket_by_every_caller(world: World, path: str) -> None:
    """Admins only, decided in the handshake; a page of another origin has no caller."""
    url = world.url.replace("http", "ws") + path
    for caller in world.callers:
        assert await _opens(url, caller.headers) == caller.kind.startswith("admin"), caller.name
    root = next(caller for caller in world.callers if caller.kind == "admin session")
    assert not await _opens(url, {**root.headers, "Origin": "http://evil.example"})
    assert not await _opens(world.url.replace("http", "ws") + "/ws/nope", root.headers)


async def test_logs_by_every_caller(world: World) -> None:
    """The same for a log: the node of this test has no worker, which only an admin is told."""
    url = world.url.replace("http", "ws") + world.path(LOGS)
    for caller in world.callers:
        expected = 1011 if caller.kind.startswith("admin") else 403
        assert await _ends(url, caller.headers) == expected, caller.name


async def _ends(url: str, headers: dict[str, str]) -> int | None:
    """The code that an open socket is closed with, or the status that refuses it."""
    try:
        async with websockets.connect(url, additional_headers=headers, open_timeout=60) as socket:
            await socket.wait_closed()
            return socket.close_code
    except websockets.InvalidStatus as refusal:
        return refusal.response.status_code


async def _opens(url: str, headers: dict[str, str]) -> bool:
    try:
        async with websockets.connect(url, additional_headers=headers, open_timeout=60) as socket:
            return json.loads(await socket.recv())["type"] in ("snapshot", "hello")
    except websockets.InvalidStatus as refusal:
        if refusal.response.status_code != 403:
            raise
        return False


def test_unknown_and_odd_paths_are_never_a_5xx(world: World) -> None:
    """Any path, without a credential and as an admin."""
    odd: list[tuple[str, dict[str, Any]]] = [
        ("/api/nope", {}),
        ("/api/nodes/%00", {}),
        ("/api/nodes/%2e%2e/%2e%2e", {}),
        ("/api/nodes/%ff%fe", {}),
        ("/api/nodes?format=xml&x=%ff", {"Accept": "text/nonsense"}),
        ("/api/nodes?x=%41", {"Content-Type": "application/json; charset=hex"}),
        ("/admin/login/?x=%41", {"Content-Type": "application/x-www-form-urlencoded; charset=rot13"}),
        ("/api/node/nope/heartbeat", {}),
        ("/" + "a" * 5000, {}),
    ]
    with httpx.Client(base_url=world.url, timeout=180) as client:
        for path, headers in odd:
            for credential in ({}, _bearer(ADMIN_KEY), _bearer("lac-\u00ff")):
                sent = {name: value.encode("latin-1") for name, value in {**headers, **credential}.items()}
                for method in ("GET", "POST"):
                    answer = client.request(method, path, headers=sent, content=b"a=%41")
                    assert answer.status_code < 500, (method, path, answer.status_code)


def test_trailing_slashes_are_accepted_without_a_redirect(world: World) -> None:
    """§0.1: workers treat any redirect as an error."""
    with httpx.Client(base_url=world.url, timeout=180, headers=_bearer(ADMIN_KEY)) as client:
        for path in (
            "/api/nodes/",
            "/api/nodes/models/",
            "/api/operations/",
            "/v1/models/",
            "/models/jobs/",
            "/backends/galleries/",
            "/readyz/",
            "/metrics/",
            "/metrics/nodes/",
            "/api/docs/",
        ):
            assert client.get(path).status_code == 200, path
        beat = client.post(f"/api/node/{world.node_id}/heartbeat/", headers=_bearer(NODE))
        assert beat.status_code == 200
        assert client.post("/api/node/register/", headers=_bearer(TOKEN), json={}).status_code == 401
