"""Health, Django's admin, bootstrap and the API document."""

import io
import json
import re
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from django.apps import apps
from django.conf import settings
from django.contrib import admin
from django.contrib.auth import get_user_model
from django.core.management import CommandError, call_command
from django.test import Client
from django.urls import URLPattern, URLResolver, get_resolver
from django_q.models import Schedule

from localai_cluster import edge, health
from localai_cluster.accounts import principals
from localai_cluster.accounts.principals import hash_secret
from localai_cluster.embedded.bundled_servers import EmbeddedValkey
from localai_cluster.embedded.preparation import PASSWORD_CHANGED_LINE
from localai_cluster.kit import clock, conf, periodic
from localai_cluster.web.bodies import Utf8Only
from nodes.models import BackendNode
from operations.models import Operation
from tests.support import api

pytestmark = pytest.mark.django_db


@pytest.fixture
def root() -> Client:
    """A signed-in superuser."""
    client = Client()
    client.force_login(get_user_model().objects.create_superuser("root", password="x"))
    return client


def test_alive_is_anonymous() -> None:
    """/healthz says nothing but that the process answers."""
    assert api.Caller().get("/healthz").json() == {"status": "ok"}


@pytest.fixture
def nats() -> Iterator[int]:
    """Something that greets like a NATS server."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        stopped = threading.Event()
        thread = threading.Thread(target=_greet, args=(server, stopped))
        thread.start()
        yield server.getsockname()[1]
        stopped.set()
        socket.create_connection(server.getsockname()).close()
        thread.join()


def _greet(server: socket.socket, stopped: threading.Event) -> None:
    while not stopped.is_set():
        link, _ = server.accept()
        with link:
            link.sendall(b'INFO {"version":"2"}\r\n')


@pytest.mark.django_db(transaction=True)
def test_ready_names_each_dependency(
    valkey: EmbeddedValkey, nats: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """/readyz: 503 with the one that fails, and no secret; 200 when all are there."""
    answer = api.Caller().get("/readyz")
    assert (answer.status_code, answer["Retry-After"]) == (503, "2")
    checks = answer.json()["checks"]
    assert checks["database"] == checks["channel layer"] == "ok"
    assert "not reachable" in checks["nats"]
    assert "controller" in checks["controller"]
    assert conf.cluster().redis_url not in answer.content.decode()
    url = f"nats://user:secret@127.0.0.1:1,nats://127.0.0.1:{nats}"
    monkeypatch.setattr(settings, "CLUSTER", replace(settings.CLUSTER, nats_url=url))
    Schedule.objects.create(func="x", schedule_type=Schedule.CRON, cron="* * * * *", next_run=clock.now())
    assert api.Caller().get("/readyz").json()["status"] == "ready"
    Schedule.objects.update(next_run=clock.now() - 2 * periodic.MAX_TRIGGER_DELAY)
    assert "no controller" in api.Caller().get("/readyz").json()["checks"]["controller"]


def test_a_check_that_hangs_costs_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each check is bounded."""
    release = threading.Event()
    monkeypatch.setattr(health, "CHECK_BY_NAME", {"slow": lambda: release.wait(180), "fine": lambda: None})
    started = clock.monotonic()
    assert health.check_dependencies() == {"slow": "no answer within 1 s", "fine": "ok"}
    assert clock.monotonic() - started < 60
    release.set()


def test_every_model_has_pages_and_facts_cannot_be_typed_in(root: Client) -> None:
    """The admin shows all models of both apps; nodes, replicas and operations are not added by hand."""
    node = api.make_node(approved=False)
    api.replica(node)
    row = Operation.objects.create(kind="k", key="k", element="e")
    for model in [
        *apps.get_app_config("nodes").get_models(),
        *apps.get_app_config("operations").get_models(),
    ]:
        assert admin.site.is_registered(model), model
        page = f"/admin/{model._meta.app_label}/{model._meta.model_name}/"
        assert root.get(page).status_code == 200, page
    for path in ("nodes/backendnode", "nodes/nodemodel", "operations/operation", "nodes/webprocess"):
        assert root.get(f"/admin/{path}/add/").status_code == 403
    page = root.get(f"/admin/nodes/backendnode/{node.id}/change/").content.decode()
    assert node.fingerprint in page, "anyone who approves compares it"
    assert not set(re.findall(r'<(?:input|select|textarea)[^>]* name="(\w+)"', page)) & {
        "status",
        "last_heartbeat",
        "available_vram",
        "fingerprint",
        "approved_at",
        "name",
    }
    assert root.get(f"/admin/operations/operation/{row.pk}/change/").status_code == 200
    assert root.get("/admin/django_q/schedule/").status_code == 200


def test_bootstrap_is_idempotent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The admin keeps a changed password; the enrolled worker is healthy at its first registration."""
    (tmp_path / "password").write_text("first-password\n")
    (tmp_path / "secret").write_text(api.SECRET + "\n")
    monkeypatch.setenv("CLUSTER_ADMIN_PASSWORD_FILE", str(tmp_path / "password"))
    monkeypatch.setenv("CLUSTER_ENROL_NODE", "local")
    monkeypatch.setenv("CLUSTER_ENROL_SECRET_FILE", str(tmp_path / "secret"))
    call_command("bootstrap", stdout=io.StringIO())
    user = get_user_model().objects.get(username="admin")
    assert user.check_password("first-password")
    user.set_password("mine now")
    user.save()
    said = io.StringIO()
    call_command("bootstrap", stdout=said)
    assert PASSWORD_CHANGED_LINE in said.getvalue().splitlines(), "`make run` announces the first one no more"
    user.refresh_from_db()
    assert user.check_password("mine now")
    assert api.register(api.registration("local"), api.SECRET).json()["status"] == "healthy"
    assert BackendNode.objects.get().fingerprint == hash_secret(api.SECRET)
    (tmp_path / "secret").write_text("short")
    with pytest.raises(CommandError, match="CLUSTER_ENROL_SECRET"):
        call_command("bootstrap", stdout=io.StringIO())


def django_routes(resolver: URLResolver, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every route of Django but the admin's and the static files'."""
    for entry in resolver.url_patterns:
        path = prefix + str(entry.pattern)
        if isinstance(entry, URLResolver):
            if not path.startswith("admin/"):
                yield from django_routes(entry, path)
        elif isinstance(entry, URLPattern):
            yield "/" + re.sub(r"<(?:\w+:)?(\w+)>", r"{\1}", path), entry.callback


PAGES = {"/", "/api/docs", "/app", "/app/{path}", "/browse", "/browse/{rest}", "/login", "/favicon.svg"}
PROBES = {"/healthz", "/readyz"}
GET_ONLY = {*PROBES, "/api/schema"}
PUBLIC = PROBES | {
    "/api/auth/status",
    "/api/auth/login",
    "/api/auth/token-login",
    "/api/auth/logout",
    "/api/branding",
}


def test_every_route_is_in_the_document(root: Client) -> None:
    """The whole route table, raw ASGI routes and websockets included, against the OpenAPI document."""
    document = root.get("/api/schema").json()
    listed = {
        (method.upper(), path)
        for path, methods in document["paths"].items()
        for method in methods
        if method in ("get", "head", "post", "put", "patch", "delete")
    }
    expected = {(route.method, route.path) for route in edge.ROUTES} | {
        ("GET", "/ws/operations"),
        ("GET", "/ws/feed"),
        ("GET", "/ws/nodes/{node_id}/backend-logs/{model}"),
    }
    for path, view in django_routes(get_resolver()):
        if path in PAGES:
            continue
        verbs = dir(view.cls) if path not in GET_ONLY else ["get"]
        methods = {"get", "post", "put", "patch", "delete"} & set(verbs)
        expected |= {(method.upper(), path) for method in methods}
    assert listed == expected
    for path, method in ((path, method) for method, path in listed):
        operation = document["paths"][path][method.lower()]
        assert operation.get("summary") or operation.get("description"), path
        assert bool(operation.get("security")) is (path not in PUBLIC), path
        assert any(status.startswith(("1", "2")) for status in operation["responses"]), path


def test_the_document_is_valid_and_without_warnings(tmp_path: Path) -> None:
    """`manage.py spectacular --validate --fail-on-warn`."""
    call_command("spectacular", "--validate", "--fail-on-warn", "--file", str(tmp_path / "schema.yml"))


def test_the_document_says_which_keys_may_be_absent(root: Client) -> None:
    """§0.5: what is left out when it is empty is not required, everything else is; so are a body's limits."""
    schemas = root.get("/api/schema").json()["components"]["schemas"]
    optional = {
        name: set(schemas[name]["properties"]) - set(schemas[name]["required"])
        for name in ("Node", "NodeDetail", "Replica", "Registration")
    }
    theirs = {"capability", "vram_budget", "vram_budget_bytes", "labels"}
    ours = {"weak_identity", "rejected", "revoked", "open_conflicts", "worker_version", "version_skew"}
    ours |= {"disk_quota", "disk_quota_bytes"}
    assert optional["Node"] == theirs | ours
    facts = {"joined", "approval", "revoked", "drain", "offline", "unhealthy", "file_port"}
    assert optional["NodeDetail"] == optional["Node"] - {"labels"} | facts
    assert "cleanup_error" in optional["Replica"]
    assert set(schemas["Registration"]["properties"]) - optional["Registration"] == {"name", "token"}
    assert schemas["Registration"]["properties"]["name"]["maxLength"] == 255


def test_the_document_says_how_each_refusal_looks(root: Client) -> None:
    """§0.4: a 401 names the scheme, a 503 when to come back; a registration has both envelopes."""
    paths = root.get("/api/schema").json()["paths"]
    for operation in (operation for methods in paths.values() for operation in methods.values()):
        for status, header in (("401", "WWW-Authenticate"), ("503", "Retry-After")):
            answer = operation["responses"].get(status)
            assert answer is None or answer["headers"][header]["required"], operation["operationId"]
    assert "401" in paths["/api/schema"]["get"]["responses"]
    assert "404" in paths["/ws/operations"]["get"]["responses"]
    refused = paths["/api/node/register"]["post"]["responses"]["401"]["content"]["application/json"]["schema"]
    assert refused == {"$ref": "#/components/schemas/RegistrationRefusal"}


def test_parameters_of_the_document_lead_nowhere(root: Client) -> None:
    """Its library would put `version` into a header and fail on a line break."""
    assert root.get("/api/schema?version=%0d%0aX-Evil:1&lang=..%2f").status_code == 200


def test_documents_are_for_signed_in_users(root: Client) -> None:
    """Users read them, a browser without a session is sent to sign in, no one else gets anything."""
    user = get_user_model().objects.create_user("ann", password="x")
    key = principals.create_api_key(user, "k")[1]
    for path in ("/api/schema", "/api/docs"):
        assert api.Caller().get(path).status_code == 401
        assert api.bearer(key).get(path).status_code == 200
        assert root.get(path).status_code == 200
    sent = api.Caller(Accept="text/html").get("/api/docs")
    assert (sent.status_code, sent["Location"]) == (302, "/login?next=%2Fapi%2Fdocs")
    assert json.loads(api.Caller().get("/api/docs").content)["error"]["code"] == 401


async def test_character_sets_do_not_reach_django() -> None:
    """§0.1: a content type may name any codec; everything is read as UTF-8."""
    seen: list[bytes] = []

    async def application(scope: Any, receive: Any, send: Any) -> None:
        seen.extend(value for name, value in scope["headers"] if name == b"content-type")

    for value in (b"application/json; charset=hex", b"multipart/form-data; charset=zlib; boundary=x"):
        await Utf8Only(application)({"type": "http", "headers": [(b"content-type", value)]}, None, None)
    assert seen == [b"application/json", b"multipart/form-data; boundary=x"]
