"""The inference edge with a real database and real engines: answers, refusals, and counts on every path."""

import asyncio
import base64
import contextlib
import dataclasses
import struct
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from prometheus_client.parser import text_string_to_metric_families
from pytest_django import Settings

from localai_cluster.accounts.principals import AGENT_KEY_PREFIX, KEY_PREFIX, hash_secret
from localai_cluster.asgi import application
from localai_cluster.kit import clock
from localai_cluster.metrics import kinds, registries
from localai_cluster.rpc.client import BackendClient
from nodes.gateway import gateway
from nodes.gateway.request import Replica
from nodes.models import NodeModel, ReplicaUse
from operations.models import Operation
from tests.conftest import until
from tests.support import backends, hot
from tests.support.ports import free_port

pytestmark = pytest.mark.django_db(transaction=True)

DEFINITION = "name: echo\nbackend: echo\nparameters: {model: echo}\nembeddings: true\n"
PATH = "/v1/embeddings"
KEY = KEY_PREFIX + "a" * 48


@pytest.fixture(autouse=True)
def definitions(tmp_path: Path, settings: Settings) -> None:
    """A models folder with `echo`; requests wait two seconds for a load."""
    (tmp_path / "echo.yaml").write_text(DEFINITION)
    settings.CLUSTER = dataclasses.replace(settings.CLUSTER, models_path=tmp_path, model_load_wait=2.0)


def run(scenario: Callable[[hot.Client, hot.CountedPicker], Awaitable[Any]]) -> Any:
    """Runs a scenario against this process as a web process; afterwards nothing may be in flight."""

    async def whole() -> Any:
        async with hot.serving() as picker:
            outcome = await scenario(hot.Client(application), picker)
            assert picker.in_flight() == 0
            return outcome

    outcome = asyncio.run(whole())
    assert set(hot.counts().values()) <= {0}
    assert not ReplicaUse.objects.exclude(count=0).exists()
    return outcome


def with_engine(scenario: Callable[[hot.Client, hot.CountedPicker], Awaitable[Any]], *options: str) -> Any:
    """The same with one engine that has `echo` loaded and its replica in the database."""

    async def around(client: hot.Client, picker: hot.CountedPicker) -> Any:
        async with backends.running_backend("echo", model="echo", options=options) as engine:
            await hot.in_thread(lambda: hot.replica(hot.node(), address=engine.address))
            return await scenario(client, picker)

    return run(around)


@pytest.mark.rule("R2.1", "R2.7", "R2.11", "T-ROU-1", "T-INF-20")
def test_a_warm_answer_is_counted_for_its_model() -> None:
    """One request, one pick, one latency."""

    def counted() -> tuple[float, ...]:
        families = text_string_to_metric_families(registries.text("web").decode())
        found = {(one.name, *one.labels.values()): one.value for f in families for one in f.samples}
        names: list[tuple[str, ...]] = [
            ("inference_requests_total", "echo", "200"),
            ("inference_request_duration_seconds_count", "echo"),
            ("picks_total", "picked"),
        ]
        return tuple(found.get((kinds.PREFIX + name, *labels), 0.0) for name, *labels in names)

    before = counted()
    answer = with_engine(lambda client, _: reply(client.post(PATH, {"model": "echo", "input": "x"})))
    assert answer.status == 200
    assert counted() == tuple(value + 1 for value in before)


async def seen_in_flight(count: int) -> None:
    """Waits until the database shows so many requests in flight."""

    async def shows() -> bool:
        return sum((await hot.in_thread(hot.counts)).values()) == count

    await until(shows, what=f"never {count} in flight")


async def reply(asked: Awaitable[hot.Reply | None]) -> hot.Reply:
    """A reply that must come."""
    answered = await asked
    assert answered is not None
    return answered


@pytest.fixture
def warm(definitions: None) -> Iterator[tuple[asyncio.Runner, hot.Client]]:
    """A web process that has answered a request of `echo` with 24 dimensions; afterwards nothing may be in
    flight."""
    client, parts = hot.Client(application), contextlib.AsyncExitStack()

    async def start() -> hot.CountedPicker:
        picker = await parts.enter_async_context(hot.serving())
        engine = await parts.enter_async_context(
            backends.running_backend("echo", model="echo", options=("dims:24",))
        )
        await hot.in_thread(lambda: hot.replica(hot.node(), address=engine.address))
        assert (await reply(client.post(PATH, {"model": "echo", "input": "first"}))).status == 200
        return picker

    with asyncio.Runner() as runner:
        picker = runner.run(start())
        try:
            yield runner, client
            assert picker.in_flight() == 0
        finally:
            runner.run(parts.aclose())
    assert set(hot.counts().values()) <= {0}
    assert not ReplicaUse.objects.exclude(count=0).exists()


def test_answers_in_both_encodings(warm: tuple[asyncio.Runner, hot.Client]) -> None:
    """OpenAI's JSON: vectors in the order of the texts, as numbers or base64, usage summed from the
    engine."""
    runner, client = warm

    async def scenario() -> None:
        texts = [f"text number {number}" for number in range(20)]
        many = await reply(client.post(PATH, {"model": "echo", "input": texts}))
        assert many.status == 200
        assert [item["index"] for item in many.body["data"]] == list(range(20))
        assert many.body["usage"] == {"prompt_tokens": 60, "total_tokens": 60}
        assert (many.body["object"], many.body["model"]) == ("list", "echo")
        body = {"model": "echo", "input": texts[7], "encoding_format": "base64", "user": "u"}
        packed = await reply(client.post("/embeddings/", body))
        raw = base64.b64decode(packed.body["data"][0]["embedding"])
        assert raw == struct.pack("<24f", *many.body["data"][7]["embedding"])

    runner.run(scenario())


@pytest.mark.rule("http-6.3", "R2.77")
def test_request_ids_and_the_node_header(settings: Settings) -> None:
    """§6.3 and the habits: every answer carries its id; the node's only when that is switched on."""

    async def scenario(client: hot.Client, _: Any) -> tuple[hot.Reply, hot.Reply]:
        body = {"model": "echo", "input": "a"}
        plain = await reply(client.post(PATH, body, headers={"X-Correlation-ID": "mine-1"}))
        settings.CLUSTER = dataclasses.replace(settings.CLUSTER, expose_node_header=True)
        return plain, await reply(client.post(PATH, body, headers={"X-Request-ID": "bad id\n"}))

    plain, shown = with_engine(scenario)
    assert plain.headers["x-correlation-id"] == plain.headers["x-request-id"] == "mine-1"
    assert "x-localai-node" not in plain.headers
    assert shown.headers["x-localai-node"] == str(NodeModel.objects.get().node_id)
    assert len(shown.headers["x-request-id"]) == 32


@pytest.mark.rule("R2.78")
def test_wrong_dimensions_are_refused_and_counted_out() -> None:
    """`dimensions` other than the model's is a 400 that names the field and both numbers."""

    async def scenario(client: hot.Client, _: Any) -> hot.Reply:
        right = await reply(client.post(PATH, {"model": "echo", "input": "a", "dimensions": 24}))
        assert right.status == 200
        return await reply(client.post(PATH, {"model": "echo", "input": "a", "dimensions": 25}))

    wrong = with_engine(scenario, "dims:24")
    assert (wrong.status, wrong.body["error"]["param"]) == (400, "dimensions")
    assert "24" in wrong.body["error"]["message"]
    assert serving() == [(NodeModel.objects.get().address, "")], "a refusal takes no replica out"


def test_refusals_in_order() -> None:
    """Authentication comes before content, both before the model; each in its envelope, none costs a
    replica."""

    async def scenario(client: hot.Client, _: Any) -> list[hot.Reply]:
        anonymous, wrong = hot.Client(application, key=None), hot.Client(application, key="nonsense")
        unknown, user = hot.Client(application, key=KEY_PREFIX + "b" * 48), hot.Client(application, key=KEY)
        await hot.in_thread(lambda: hot.api_key(hash_secret(KEY)))
        asks = [
            anonymous.post(PATH, b"{"), wrong.post(PATH, b"{"), unknown.post(PATH, b"{"),
            unknown.post(PATH, {"model": "nope", "input": "a"}),
            unknown.post(PATH, {"model": "echo", "input": "a"}),
            unknown.request("GET", "/v1/models"), anonymous.request("GET", PATH),
            user.post(PATH, b"{"), user.post(PATH, {"model": "nope", "input": "a"}),
            user.request("GET", "/v1/models"), client.request("GET", PATH),
            client.post(PATH, b"x" * 5_000_000),
        ]  # fmt: skip
        return [await reply(ask) for ask in asks]

    replies = run(scenario)
    assert [answer.status for answer in replies] == [401] * 7 + [400, 404, 200, 405, 400]
    for answer in replies[:7]:
        assert answer.headers["www-authenticate"] == "Bearer"
        assert answer.body["error"]["type"] == "invalid_request_error"
    missing = replies[8].body["error"]
    assert (missing["code"], missing["param"], missing["type"]) == (
        "model_not_found",
        "model",
        "invalid_request_error",
    )
    assert replies[9].body["object"] == "list"
    assert [one["id"] for one in replies[9].body["data"]] == ["echo"]
    assert replies[11].body["error"]["param"] == "input"


def test_an_agent_node_calls_models_with_its_own_key() -> None:
    """§7: inference is open to agent nodes, by the key that their registration gave them."""

    async def scenario(_: hot.Client, __: Any) -> hot.Reply:
        key = AGENT_KEY_PREFIX + "c" * 64
        await hot.in_thread(lambda: hot.api_key(hash_secret(key), user="agent-one"))
        return await reply(hot.Client(application, key=key).post(PATH, {"model": "echo", "input": "a"}))

    assert with_engine(scenario).status == 200


def test_no_credential_means_no_body_is_read() -> None:
    """A request without any credential is refused before its body is asked for."""

    async def scenario(_: hot.Client, __: Any) -> None:
        sent: list[Any] = []

        async def receive() -> Any:
            raise AssertionError("the body was read")

        async def send(message: Any) -> None:
            sent.append(message)

        scope: dict[str, Any] = {
            "type": "http",
            "method": "POST",
            "path": PATH,
            "headers": [],
            "client": None,
        }
        await application(scope, receive, send)
        assert sent[0]["status"] == 401

    run(scenario)


@pytest.mark.rule("R2.7")
def test_two_statements_with_a_database_held_key() -> None:
    """The hot path: at most one statement in and one out, the key's check included."""

    async def scenario(_admin: hot.Client, picker: hot.CountedPicker) -> int:
        await hot.in_thread(lambda: hot.api_key(hash_secret(KEY)))
        client = hot.Client(application, key=KEY)
        before = picker.connection.executed
        for _ in range(10):
            answered = await reply(client.post(PATH, {"model": "echo", "input": ["a", "b"]}))
            assert answered.status == 200
        return picker.connection.executed - before

    assert with_engine(scenario) <= 20


@pytest.mark.rule("R2.73")
def test_a_leaving_client_is_counted_out() -> None:
    """R2.73: a client that hangs up cancels the call and is no longer in flight."""

    async def scenario(client: hot.Client, _: Any) -> None:
        leave = asyncio.Event()
        asked = asyncio.create_task(client.post(PATH, {"model": "echo", "input": ["a"] * 9}, leave=leave))
        await seen_in_flight(1)
        leave.set()
        assert await asked is None
        await seen_in_flight(0)

    with_engine(scenario, "delay_ms:60000")


@pytest.mark.rule("T-ROU-43")
def test_a_cancelled_application_is_counted_out() -> None:
    """A server that cuts the application (it is stopping) leaves no count."""

    async def scenario(client: hot.Client, _: Any) -> None:
        asked = asyncio.create_task(client.post(PATH, {"model": "echo", "input": "a"}))
        await seen_in_flight(1)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        await seen_in_flight(0)

    with_engine(scenario, "delay_ms:60000")


@pytest.mark.rule("T-INF-19", "R2.78")
def test_a_slow_engine_ends_in_a_503(settings: Settings) -> None:
    """*Build* of the engine sheet: a call has a deadline; a stuck engine holds no count forever."""
    settings.CLUSTER = dataclasses.replace(settings.CLUSTER, request_timeout=0.3)

    async def scenario(client: hot.Client, _: Any) -> hot.Reply:
        return await reply(client.post(PATH, {"model": "echo", "input": "a"}))

    answered = with_engine(scenario, "delay_ms:60000")
    assert (answered.status, answered.body["error"]["code"]) == (503, "backend_timeout")
    assert int(answered.headers["retry-after"]) >= 1
    assert NodeModel.objects.get().state == "loaded", "slow is not dead"
    assert not Operation.objects.exists()


def serving(state: str = "loaded") -> list[tuple[str, str]]:
    """Addresses of the rows in this state, and who has them."""
    rows = NodeModel.objects.filter(state=state).order_by("address")
    return list(rows.values_list("address", "reason"))


@pytest.mark.rule("R2.9", "T-ROU-42")
def test_a_dead_replica_is_taken_out_and_the_request_goes_on() -> None:
    """A replica that refuses the connection is taken out; the same request is served by the next one."""

    async def scenario(client: hot.Client, _: Any) -> list[hot.Reply]:
        dead = f"127.0.0.1:{free_port()}"
        await hot.in_thread(lambda: hot.replica(hot.node("dead"), address=dead, last_used=hot.EPOCH))
        async with backends.running_backend("echo", model="echo") as engine:
            await hot.in_thread(
                lambda: hot.replica(hot.node("live"), address=engine.address, last_used=clock.now())
            )
            asks = [reply(client.post(PATH, {"model": "echo", "input": "a"})) for _ in range(10)]
            replies = await asyncio.gather(*asks)
            assert await hot.in_thread(serving) == [(engine.address, "")]
            assert await hot.in_thread(lambda: serving("unloading")) == [(dead, "lost")]
            return replies

    assert [answer.status for answer in run(scenario)] == [200] * 10


@pytest.mark.rule(
    "R2.13", "C19", "C20", "T-ROU-46", "T-ROU-47", "T-ROU-48", "T-ROU-49", "T-ROU-50", "T-ROU-51", "T-ROU-52"
)
def test_requests_that_fail_at_one_moment_share_one_health_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the next ones ask again, there or elsewhere: what was said before the failure proves nothing."""
    asked: list[float] = []

    async def health(self: BackendClient, timeout: float) -> bool:
        asked.append(timeout)
        await asyncio.sleep(0)
        return len(asked) != 2

    monkeypatch.setattr(BackendClient, "health", health)

    async def scenario(client: hot.Client, _: Any) -> None:
        there = Replica(uuid4(), uuid4(), 0, "echo", "127.0.0.1:1")
        found = gateway.current()
        for count, lives in ((1, True), (2, False), (3, True)):
            answers = await asyncio.gather(*(found._is_responding(there) for _ in range(20)))
            assert (answers, len(asked)) == ([lives] * 20, count)
        other = Replica(uuid4(), uuid4(), 0, "echo", "127.0.0.1:2")
        assert all(await asyncio.gather(found._is_responding(there), found._is_responding(other)))
        assert asked == [2.0] * 5

    run(scenario)


@pytest.mark.rule("R2.76", "T-INF-18", "T-INF-22", "T-INF-26", "T-INF-27")
def test_an_engine_without_its_model_is_replaced() -> None:
    """R2.76, and on to the next: an engine that holds no model is to be stopped; one with another model
    too."""

    async def scenario(client: hot.Client, _: Any) -> hot.Reply:
        async with (
            backends.running_backend("echo") as empty,
            backends.running_backend("echo", model="another") as wrong,
            backends.running_backend("echo", model="echo") as right,
        ):
            for number, engine in enumerate((empty, wrong, right)):
                await hot.in_thread(
                    lambda n=number, e=engine: hot.replica(hot.node(f"n{n}"), index=n, address=e.address)
                )
            answered = await reply(client.post(PATH, {"model": "echo", "input": "a"}))
            assert await hot.in_thread(serving) == [(right.address, "")]
            gone = await hot.in_thread(lambda: serving("unloading"))
            assert gone == [(one, "wrong_model") for one in sorted((empty.address, wrong.address))]
            return answered

    assert run(scenario).status == 200


def test_a_request_does_not_kill_every_replica() -> None:
    """A connection that breaks halfway is repeated once only: the request may be what kills engines."""

    async def scenario(client: hot.Client, _: Any) -> hot.Reply:
        async with (
            backends.running_backend("echo", model="echo", options=("delay_ms:60000",)) as one,
            backends.running_backend("echo", model="echo", options=("delay_ms:60000",)) as two,
            backends.running_backend("echo", model="echo") as three,
        ):
            for number, engine in enumerate((one, two, three)):
                await hot.in_thread(
                    lambda n=number, e=engine: hot.replica(hot.node(f"n{n}"), index=n, address=e.address)
                )
            asked = asyncio.create_task(client.post(PATH, {"model": "echo", "input": "a"}))
            for engine in (one, two):
                await called(engine)
                engine.kill()
            answered = await reply(asked)
            assert await hot.in_thread(serving) == [(three.address, "")]
            return answered

    answered = run(scenario)
    assert (answered.status, answered.body["error"]["code"]) == (503, "backend_lost")


async def called(engine: backends.Backend) -> None:
    """Waits until the engine works on an embedding."""
    client = BackendClient(engine.address, backends.TOKEN)

    async def works() -> bool:
        return (await client.status(2.0)).memory.breakdown["embedding_calls"] > 0

    try:
        await until(works)
    finally:
        await client.close()


def test_an_unexpected_error_stays_inside(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No stack trace leaves: the answer is a plain 500 with the request's id, the log has the cause."""

    def broken(_: Any) -> Any:
        raise RuntimeError("a secret detail")

    monkeypatch.setattr("nodes.dialects.retrieval.parse_request", broken)

    async def scenario(client: hot.Client, _: Any) -> hot.Reply:
        return await reply(
            client.post(PATH, {"model": "echo", "input": "a"}, headers={"X-Request-ID": "id-7"})
        )

    answered = run(scenario)
    assert answered.status == 500
    assert answered.body["error"] == {
        "message": "internal error",
        "type": "server_error",
        "param": None,
        "code": "internal_error",
    }
    assert answered.headers["x-request-id"] == "id-7"
    assert "a secret detail" in caplog.text


@pytest.mark.parametrize("path", ["/static/../../etc/passwd", "/static/a\0b", "/static//etc/passwd"])
def test_a_path_out_of_the_static_files_is_unknown(path: str, caplog: pytest.LogCaptureFixture) -> None:
    """Anonymous input is never a 500, and writes no traceback."""

    async def ask() -> hot.Reply | None:
        return await hot.Client(application, key=None).request("GET", path)

    answered = asyncio.run(ask())
    assert answered is not None
    assert answered.status == 404
    assert not [record for record in caplog.records if record.exc_info]
