"""The token that a worker makes for its engines: who is sent it, who is not, and that no one is shown it."""

import asyncio
import dataclasses
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from io import StringIO
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from django.apps import apps
from django.core.management import call_command
from pytest_django import Settings

from localai_cluster.accounts import actors
from localai_cluster.asgi import application
from localai_cluster.kit.clock import now
from localai_cluster.rpc.client import BackendClient
from localai_cluster.rpc.messages import ModelOptions
from nodes.gateway.request import Replica
from nodes.live import rows
from nodes.models import BackendNode, NodeConflict
from nodes.registry import claims, dial_targets, lifecycle, registration
from tests.support import api, backends, hot, pages
from tests.support.environment import REGISTRATION_TOKEN
from tests.support.ports import free_port

pytestmark = pytest.mark.django_db(transaction=True)

PATH = "/v1/embeddings"
BODY = {"model": "echo", "input": "a"}
MINE, LATER = "5" * 64, "6" * 64
ADMIN = actors.Actor(actors.ActorKind.USER, "anna")


@pytest.fixture(autouse=True)
def definitions(tmp_path: Path, settings: Settings) -> None:
    """A models folder with `echo`."""
    (tmp_path / "echo.yaml").write_text("name: echo\nbackend: echo\nparameters: {model: echo}\n")
    settings.CLUSTER = dataclasses.replace(settings.CLUSTER, models_path=tmp_path, model_load_wait=2.0)


class Listener(grpc.GenericRpcHandler):
    """An engine that writes down what proves each call, and refuses all of them."""

    def __init__(self) -> None:
        self.heard: list[list[str]] = []

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        """Every method is one to listen to."""
        offered = [str(value) for name, value in details.invocation_metadata if name == "authorization"]

        async def refuse(request: bytes, context: Any) -> bytes:
            self.heard.append(offered)
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "no")
            return b""

        return grpc.unary_unary_rpc_method_handler(refuse)


@asynccontextmanager
async def listening() -> AsyncIterator[tuple[Listener, str]]:
    """A listener and its address."""
    server, listener = grpc.aio.server(), Listener()
    server.add_generic_rpc_handlers((listener,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield listener, f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


@pytest.mark.rule("R2.66")
@pytest.mark.parametrize(
    ("node", "offers"),
    [
        ({"engine_token": MINE}, [f"Bearer {MINE}"]),
        ({"engine_token": "", "weak_identity": True}, [f"Bearer {REGISTRATION_TOKEN}"]),
        ({"engine_token": ""}, []),
    ],
    ids=["ours", "stock", "an earlier release of ours"],
)
def test_an_engine_is_sent_its_own_nodes_token(node: dict[str, Any], offers: list[str]) -> None:
    """With the registration token anyone can register: only stock workers' engines are sent it."""

    async def scenario() -> list[list[str]]:
        async with listening() as (listener, address), hot.serving():
            await hot.in_thread(lambda: hot.replica(hot.node(**node), address=address))
            answered = await hot.Client(application).post(PATH, BODY)
            assert answered is not None
            assert (answered.status, answered.body["error"]["code"]) == (503, "backend_unauthenticated")
            return listener.heard

    assert asyncio.run(scenario()) == [offers]


def test_a_new_token_counts_at_the_next_request_and_costs_no_statement() -> None:
    """It comes with the pick: nothing is to be told to the web processes."""

    async def scenario() -> tuple[list[list[str]], list[int]]:
        async with listening() as (listener, address), hot.serving() as picker:
            await hot.in_thread(lambda: hot.replica(hot.node(engine_token=MINE), address=address))
            client, counted = hot.Client(application), []
            for token in (MINE, LATER):
                await hot.in_thread(lambda token=token: BackendNode.objects.update(engine_token=token))
                before = picker.connection.executed
                await client.post(PATH, BODY)
                await picker.settle()
                counted.append(picker.connection.executed - before)
            return listener.heard, counted

    heard, counted = asyncio.run(scenario())
    assert heard == [[f"Bearer {MINE}"], [f"Bearer {LATER}"]]
    assert counted[0] == counted[1] <= 2


@pytest.mark.rule("R2.66")
@pytest.mark.parametrize(("token", "status"), [(REGISTRATION_TOKEN, 200), (backends.TOKEN, 503)])
def test_engines_tell_the_two_tokens_apart(token: str, status: int, tmp_path: Path) -> None:
    """A stock worker's engine accepts the registration token; one of ours refuses it."""

    async def scenario() -> int:
        engine = backends.start("echo", free_port(), tmp_path / "log", token=token)
        try:
            await backends.ready(engine, token=token)
            client = BackendClient(engine.address, token)
            await client.load_model(ModelOptions(Model="echo", Embeddings=True), 30.0)
            await client.close()
            async with hot.serving():
                stock = await hot.in_thread(lambda: hot.node(engine_token="", weak_identity=True))
                await hot.in_thread(lambda: hot.replica(stock, address=engine.address))
                answered = await hot.Client(application).post(PATH, BODY)
                assert answered is not None
                return answered.status
        finally:
            engine.kill()

    assert asyncio.run(scenario()) == status


@pytest.mark.parametrize(
    ("engine_token", "weak", "offers"),
    [(MINE, False, MINE), (MINE, True, MINE), ("", True, REGISTRATION_TOKEN), ("", False, "")],
)
def test_a_load_offers_the_same(engine_token: str, weak: bool, offers: str) -> None:
    node = hot.node(engine_token=engine_token, weak_identity=weak)
    assert dial_targets.accept_replied_address(node.id, "127.0.0.1:7001", now=now()).token == offers


def test_each_registration_says_what_holds() -> None:
    """A restarted worker has another token; a stock worker in its place has none."""
    node = api.make_node(engine_token=MINE)
    assert api.node(node.id).engine_token == MINE
    api.make_node(engine_token=LATER)
    assert api.node(node.id).engine_token == LATER
    api.make_node()
    assert api.node(node.id).engine_token == ""


def test_a_revoked_or_replaced_worker_has_none() -> None:
    revoked, replaced = api.make_node("w1", engine_token=MINE), api.make_node("w2", engine_token=LATER)
    claims.revoke(revoked.id, actor=ADMIN, now=now())
    assert api.register(api.registration("w2"), api.OTHER_SECRET).status_code == 409
    claims.accept_conflict(NodeConflict.objects.get().pk, actor=ADMIN, now=now())
    for node in (revoked, replaced):
        assert api.node(node.id).engine_token == ""


@pytest.mark.parametrize("wrong", ["5" * 63, "5" * 65, "G" * 64, "A" * 64, f"{'5' * 64}\n", "\u0665" * 64])
def test_a_token_of_another_form_is_refused_and_not_repeated(wrong: str) -> None:
    answer = api.register(api.registration(engine_token=wrong))
    assert (answer.status_code, answer.json()["error"]["field"]) == (400, "engine_token")
    assert wrong.strip() not in answer.content.decode()
    assert not BackendNode.objects.exists()


def test_no_one_is_shown_it(caplog: pytest.LogCaptureFixture) -> None:
    """Every surface: REST, feed, pages of the admin, command line, logs, `repr`, and every other column."""
    caplog.set_level(logging.DEBUG)
    answer = api.register(api.registration(engine_token=MINE))
    told = registration.Registration(name="w1", engine_token=MINE)
    node = api.node(answer.json()["id"])
    lifecycle.approve(node.id, actor=ADMIN, now=now())
    lifecycle.drain(node.id, actor=ADMIN, now=now())
    api.register(api.registration(engine_token=LATER), api.OTHER_SECRET)
    surfaces = [answer.content.decode()]
    for path in ("", f"/{node.id}", f"/{node.id}/events", f"/{node.id}/backends", f"/{node.id}/models"):
        found = api.admin().get(f"/api/nodes{path}")
        assert found.status_code == 200, path
        surfaces.append(found.content.decode())
    surfaces += [api.admin().get(path).content.decode() for path in ("/api/nodes/conflicts", "/api/schema")]
    browser = pages.superuser()
    for path in ("backendnode/", f"backendnode/{node.pk}/change/", f"backendnode/{node.pk}/history/"):
        found = browser.get(f"/admin/nodes/{path}")
        assert found.status_code == 200, path
        surfaces.append(found.content.decode())
    surfaces += [
        browser.get(f"/admin/nodes/{name}/").content.decode() for name in ("nodeevent", "nodeconflict")
    ]
    for arguments in (["list"], ["list", "--json"], ["show", "w1"], ["show", "w1", "--json"], ["conflicts"]):
        out = StringIO()
        call_command("nodes", *arguments, stdout=out)
        surfaces.append(out.getvalue())
    surfaces += [str(rows.read_nodes()), str([rows.render(raw) for raw in rows.read_nodes().values()])]
    claim = registration.claim(told, secret=api.SECRET, source_address="")
    contact, replica = dial_targets.Contact("h:1", MINE), Replica(node.id, node.id, 0, "m", "h:1", MINE)
    surfaces += [repr(one) for one in (node, told, claim, contact, replica)]
    surfaces.append(caplog.text)
    for model in apps.get_models():
        columns = [f.name for f in model._meta.concrete_fields if f.name != "engine_token"]
        surfaces += [str(row) for row in model._default_manager.values(*columns)]
    assert api.node(node.id).engine_token == MINE
    for text in surfaces:
        assert MINE not in text
        assert LATER not in text
