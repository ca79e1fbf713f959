"""Waiting for a cold load: one operation for everyone, its end for everyone, and the budget of each
request."""

import asyncio
import contextlib
import dataclasses
import math
from collections.abc import Awaitable, Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from django.contrib.auth.models import User
from pytest_django import Settings

from localai_cluster.accounts import actors, principals
from localai_cluster.asgi import application
from localai_cluster.kit import clock
from nodes.gateway import gateway
from nodes.loading.load_request import KIND
from nodes.models import BackendNode, NodeEvent
from nodes.models.replica import load_key
from nodes.registry import timeline
from operations.causes import cause_of
from operations.ledger import admission, attempts
from operations.ledger.admission import Requester
from operations.ledger.progress import Tick, record
from operations.models import Event, Operation, Status
from tests.conftest import until
from tests.support import api, backends, hot

pytestmark = pytest.mark.django_db(transaction=True)

PATH = "/v1/embeddings"
BODY = {"model": "echo", "input": "a"}


@pytest.fixture(autouse=True)
def cluster(tmp_path: Path, settings: Settings) -> Callable[..., None]:
    """A models folder with `echo`; answers a function that changes settings."""
    (tmp_path / "echo.yaml").write_text("name: echo\nbackend: echo\nparameters: {model: echo}\n")

    def change(**fields: Any) -> None:
        settings.CLUSTER = dataclasses.replace(settings.CLUSTER, **fields)

    change(models_path=tmp_path, model_load_wait=20.0)
    return change


def run(scenario: Callable[[hot.Client], Awaitable[Any]]) -> Any:
    async def whole() -> Any:
        async with hot.serving() as picker:
            outcome = await scenario(hot.Client(application))
            assert picker.in_flight() == 0
            return outcome

    return asyncio.run(whole())


def claim() -> Operation | None:
    """What a controller does first; None while there is nothing to do."""
    return next(iter(attempts.claim("controller", now=clock.now(), lease=30, limit=1)), None)


async def claimed() -> Operation:
    """The load, taken by a controller."""
    found: list[Operation] = []

    async def taken() -> bool:
        operation = await hot.in_thread(claim)
        found.extend([operation] if operation else [])
        return bool(found)

    await until(taken)
    return found[0]


def end(operation: Operation, event: Event, **said: Any) -> None:
    attempts.finish(operation.pk, operation.fence, event, now=clock.now(), **said)


async def ask_many(client: hot.Client, count: int) -> list[hot.Reply]:
    replies = await asyncio.gather(*(client.post(PATH, BODY) for _ in range(count)))
    return [answered for answered in replies if answered is not None]


@pytest.fixture
def engine_of_node(cluster: None) -> Iterator[tuple[asyncio.Runner, BackendNode, str]]:
    """A web process, and a node with an engine at this address, which is no replica yet."""
    parts = contextlib.AsyncExitStack()

    async def start() -> str:
        await parts.enter_async_context(hot.serving())
        engine = await parts.enter_async_context(backends.running_backend("echo", model="echo"))
        return engine.address

    node = hot.node()
    with asyncio.Runner() as runner:
        address = runner.run(start())
        try:
            yield runner, node, address
        finally:
            runner.run(parts.aclose())
    assert set(hot.counts().values()) == {0}


@pytest.mark.rule("R2.15", "R2.18", "T-JOB-13")
def test_one_load_for_everyone(engine_of_node: tuple[asyncio.Runner, BackendNode, str]) -> None:
    """Fifty requests admit one operation, wait for its end, and are all served at once when it is over."""
    runner, node, address = engine_of_node

    async def scenario() -> list[hot.Reply]:
        asked = asyncio.create_task(ask_many(hot.Client(application), 50))
        operation = await claimed()
        await hot.in_thread(lambda: hot.replica(node, address=address))
        await hot.in_thread(lambda: end(operation, Event.COMPLETE))
        return await asked

    assert [answered.status for answered in runner.run(scenario())] == [200] * 50
    operation = Operation.objects.get()
    assert (operation.kind, operation.key, operation.element) == (KIND, load_key("echo"), "echo")
    assert operation.payload == {"model": "echo"}
    assert operation.actor == "static-key"
    assert operation.client_address == "192.0.2.7"
    assert operation.request_id != "-"


@pytest.mark.rule("R2.19")
def test_a_replica_that_appears_otherwise_ends_the_wait() -> None:
    """R2.19: the rows decide, not the news: a look every two seconds finds a replica without a notice."""

    async def scenario(client: hot.Client) -> list[hot.Reply]:
        asked = asyncio.create_task(ask_many(client, 3))
        await claimed()
        async with backends.running_backend("echo", model="echo") as engine:
            await hot.in_thread(lambda: hot.replica(hot.node(), address=engine.address))
            return await asked

    assert [answered.status for answered in run(scenario)] == [200] * 3
    assert Operation.objects.get().status == Status.PROCESSING


@pytest.mark.rule("R2.19", "R2.16")
def test_waiting_requests_go_on_when_the_load_changes_hands() -> None:
    """Its controller fell silent: the lease runs out, another one takes over, nobody has to ask again."""

    def falls_silent() -> None:
        Operation.objects.update(lease_until=clock.now() - timedelta(seconds=1))
        assert attempts.reap(now=clock.now()) == (1, 0)

    async def scenario(client: hot.Client) -> list[hot.Reply]:
        asked = asyncio.create_task(ask_many(client, 5))
        first = await claimed()
        await hot.in_thread(falls_silent)
        second = await claimed()
        assert (second.id, second.fence) == (first.id, first.fence + 1)
        async with backends.running_backend("echo", model="echo") as engine:
            await hot.in_thread(lambda: hot.replica(hot.node(), address=engine.address))
            await hot.in_thread(lambda: end(second, Event.COMPLETE))
            return await asked

    assert [answered.status for answered in run(scenario)] == [200] * 5
    assert Operation.objects.count() == 1


@pytest.mark.rule("R2.20", "R2.22", "T-JOB-16", "http-6.1")
def test_the_budget_ends_the_request_not_the_load(cluster: Callable[..., None]) -> None:
    """R2.20, R2.22: 503 with Retry-After, the `loading` object and the operation's reason; it goes on."""
    cluster(model_load_wait=2.0)

    async def scenario(client: hot.Client) -> list[hot.Reply]:
        asked = asyncio.create_task(ask_many(client, 5))
        operation = await claimed()
        await hot.in_thread(
            lambda: attempts.put_back(
                operation.pk, operation.fence, Event.WAIT, now=clock.now(),
                until=clock.now() + timedelta(minutes=1), reason="no node is approved; 1 is pending",
            )
        )  # fmt: skip
        return await asked

    for answered in run(scenario):
        assert answered.status == 503
        assert answered.headers["retry-after"] == "5"
        assert answered.body["error"]["type"] == answered.body["error"]["code"] == "model_loading"
        assert "no node is approved; 1 is pending" in answered.body["error"]["message"]
        assert answered.body["loading"]["state"] == "pending"
    operation = Operation.objects.get()
    assert operation.status == Status.WAITING
    assert operation.needed_until is not None
    assert operation.needed_until < clock.now() + timedelta(seconds=3)


@pytest.mark.rule("R2.22", "http-6.1")
def test_progress_shows_in_the_answer(cluster: Callable[..., None]) -> None:
    """§6.1: node, bytes and percentage of a running installation."""
    cluster(model_load_wait=3.0)

    async def scenario(client: hot.Client) -> list[hot.Reply]:
        asked = asyncio.create_task(ask_many(client, 1))
        operation = await claimed()
        node = await hot.in_thread(hot.node, "w2")
        tick = Tick(
            phase="installing",
            current_bytes=3,
            total_bytes=12,
            percentage=25,
            node_id=node.pk,
            node_name="w2",
        )
        await hot.in_thread(lambda: record({(operation.pk, operation.fence): [tick]}, now=clock.now()))
        return await asked

    (answered,) = run(scenario)
    loading = answered.body["loading"]
    assert (loading["state"], loading["node"]) == ("installing", "w2")
    assert (loading["bytes_sent"], loading["total_bytes"], loading["progress"]) == (3, 12, 25)


@pytest.mark.rule("R2.17", "C33", "T-JOB-10", "T-JOB-14")
def test_a_failed_load_reaches_everyone_and_is_not_repeated(cluster: Callable[..., None]) -> None:
    """R2.17: all waiters get 503 with the cause; within the grace so does a new request, without a new
    load."""

    async def scenario(client: hot.Client) -> list[hot.Reply]:
        asked = asyncio.create_task(ask_many(client, 20))
        operation = await claimed()
        await hot.in_thread(lambda: end(operation, Event.FAIL, error="exit 3\nlast line of stderr"))
        replies = [*await asked, *await ask_many(client, 3)]
        assert await hot.in_thread(Operation.objects.count) == 1
        cluster(load_failure_grace=0.0, model_load_wait=0.5)
        (later,) = await ask_many(client, 1)
        assert later.body["error"]["code"] == "model_loading"
        return replies

    for answered in run(scenario):
        assert answered.status == 503
        assert 1 <= int(answered.headers["retry-after"]) <= 15
        assert "last line of stderr" in answered.body["error"]["message"]
        assert "loading" not in answered.body
    assert Operation.objects.count() == 2


@pytest.mark.rule("http-6.1", "http-6.3")
def test_only_administrators_read_the_names_of_nodes_in_refusals(cluster: Callable[..., None]) -> None:
    """While the model is loading and when the load has failed; a setting shows them to all."""
    cluster(model_load_wait=1.0)
    ann = User.objects.create_user(username="ann")
    hers = {"authorization": f"Bearer {principals.create_api_key(ann, 'hers')[1]}"}

    async def scenario(client: hot.Client) -> list[hot.Reply]:
        async def refusals() -> list[hot.Reply]:
            replies = await asyncio.gather(client.post(PATH, BODY, headers=hers), client.post(PATH, BODY))
            return [reply for reply in replies if reply is not None]

        asked = asyncio.create_task(refusals())
        operation = await claimed()
        node = await hot.in_thread(hot.node, "gpu-7")
        tick = Tick("staging", "sending echo.gguf to gpu-7", node_id=node.pk, node_name="gpu-7")
        await hot.in_thread(lambda: record({(operation.pk, operation.fence): [tick]}, now=clock.now()))
        replies = await asked
        replies += await refusals()
        await hot.in_thread(lambda: end(operation, Event.FAIL, error="gpu-7: exit code 3"))
        replies += await refusals()
        cluster(expose_node_header=True)
        return [*replies, *await refusals()]

    replies = run(scenario)
    messages = [reply.body["error"]["message"] for reply in replies]
    assert [reply.status for reply in replies] == [503] * 8
    assert messages[2] == "model echo is staging"
    assert messages[4] == "loading model echo failed: …: exit code 3"
    assert messages[5:] == ["loading model echo failed: gpu-7: exit code 3"] * 3
    assert [("gpu-7" in str(reply.body)) for reply in replies[2:]] == [False, True, False, True, True, True]
    assert "gpu-7" not in str(replies[0].body)
    assert 1 <= int(replies[4].headers["retry-after"]) <= 15


@pytest.mark.rule("R2.22", "UW9")
def test_who_may_not_see_nodes_reads_why_a_load_waits_without_their_names(
    cluster: Callable[..., None],
) -> None:
    """Issue 23: the refusal that a client gets says what is missing; one query for all that ask."""
    cluster(model_load_wait=5.0)  # the reason must be there before it ends, also on a busy machine
    ann = User.objects.create_user(username="ann")
    hers = {"authorization": f"Bearer {principals.create_api_key(ann, 'hers')[1]}"}
    reason = "no node can take it: 1 without the VRAM it needs (100.0 GiB: gpu-7 has 23.0 GiB free)"

    async def scenario(client: hot.Client) -> list[hot.Reply | None]:
        asked = asyncio.gather(*(client.post(PATH, BODY, headers=hers) for _ in range(3)))
        operation = await claimed()
        await hot.in_thread(hot.node, "gpu-7")
        until = clock.now() + timedelta(minutes=1)
        await hot.in_thread(
            lambda: attempts.put_back(
                operation.pk, operation.fence, Event.WAIT, now=clock.now(), until=until, reason=reason
            )
        )
        return await asked

    with patch("nodes.loading.wait.cause_of", wraps=cause_of) as shortened:
        replies = run(scenario)
    assert {reply.body["error"]["message"] for reply in replies if reply} == {
        "model echo is pending: no node can take it: … without the VRAM it needs (…: … has … free)"
    }
    assert shortened.call_count == 1


@pytest.mark.parametrize("returned", ["another", "refused", "agent", "away"])
def test_a_failure_stands_no_longer_than_until_another_node_has_come_back(
    cluster: Callable[..., None], returned: str
) -> None:
    """Review R9: a node that could load it was back, and requests were refused for 15 s all the same."""

    async def scenario(client: hot.Client) -> hot.Reply:
        asked = asyncio.create_task(ask_many(client, 1))
        operation = await claimed()

        def fails() -> None:
            fields: dict[str, Any] = {"node_type": "agent"} if returned == "agent" else {}
            node = hot.node("w1", offline_at=clock.now(), **fields)
            if returned == "refused":
                Operation.objects.update(payload={"refusals": [[str(node.id), "w1", "no room"]]})
            end(operation, Event.FAIL, error="no node could load it")
            if returned != "away":
                BackendNode.objects.update(offline_at=None)
            beat = timeline.Entry(
                node.id, "w1", NodeEvent.Kind.HEARD_AGAIN, actors.WORKER, before="offline", after="healthy"
            )
            timeline.record(beat, at=clock.now())

        await hot.in_thread(fails)
        await asked
        cluster(model_load_wait=0.5)
        (later,) = await ask_many(client, 1)
        return later

    later = run(scenario)
    assert later.status == 503
    loads_again = returned == "another"
    assert later.body["error"]["code"] == ("model_loading" if loads_again else "model_load_failed")
    assert Operation.objects.count() == (2 if loads_again else 1)


@pytest.mark.rule("R2.19", "T-JOB-15")
def test_a_leaving_client_takes_only_itself_away() -> None:
    """Disconnecting ends one wait; the others and the load go on."""

    async def scenario(client: hot.Client) -> list[hot.Reply]:
        leave = asyncio.Event()
        leaving = asyncio.create_task(client.post(PATH, BODY, leave=leave))
        staying = asyncio.create_task(ask_many(client, 2))
        operation = await claimed()
        leave.set()
        assert await leaving is None
        async with backends.running_backend("echo", model="echo") as engine:
            await hot.in_thread(lambda: hot.replica(hot.node(), address=engine.address))
            await hot.in_thread(lambda: end(operation, Event.COMPLETE))
            return await staying

    assert [answered.status for answered in run(scenario)] == [200, 200]


def test_each_request_that_attaches_moves_the_wish_forward(cluster: Callable[..., None]) -> None:
    """An operation says until when it is wanted; a later request extends that, an earlier end does not cut
    it."""
    cluster(model_load_wait=1.0)

    async def scenario(client: hot.Client) -> None:
        first = asyncio.create_task(ask_many(client, 1))
        await claimed()
        before = (await hot.in_thread(Operation.objects.get)).needed_until
        cluster(model_load_wait=6.0)
        second = asyncio.create_task(client.post(PATH, BODY, leave=(leave := asyncio.Event())))

        async def moved() -> bool:
            after = (await hot.in_thread(Operation.objects.get)).needed_until
            assert before is not None
            assert after is not None
            return after > before + timedelta(seconds=3)

        await until(moved)
        leave.set()
        await asyncio.gather(first, second)

    run(scenario)


def test_another_operation_on_the_model_is_a_503() -> None:
    """A model that is being worked on otherwise is not loadable right now; the answer names what is under
    way."""
    other = admission.OperationRequest(
        "model_delete", key=load_key("echo"), element="echo", by=Requester("x")
    )
    admission.admit(other, now=clock.now())

    async def scenario(client: hot.Client) -> list[hot.Reply]:
        return await ask_many(client, 1)

    (answered,) = run(scenario)
    assert (answered.status, "retry-after" in answered.headers) == (503, True)
    assert "model_delete" in answered.body["error"]["message"]


@pytest.mark.rule("C34")
def test_loads_that_end_without_a_replica_are_not_repeated_for_ever() -> None:
    """C34: after three completed loads without a replica the request says so."""

    async def scenario(client: hot.Client) -> hot.Reply:
        asked = asyncio.create_task(ask_many(client, 1))
        for _ in range(gateway.MAX_LOADS_PER_REQUEST):
            operation = await claimed()
            await hot.in_thread(lambda done=operation: end(done, Event.COMPLETE))
        return (await asked)[0]

    answered = run(scenario)
    assert answered.status == 503
    assert "no replica of it is available" in answered.body["error"]["message"]


@pytest.mark.rule("C34")
def test_a_load_that_ends_while_its_request_picks_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of these loads ends between a turn of the wait and the result of the pick that follows it."""
    pick = gateway.Gateway._pick

    async def picks_late(self: gateway.Gateway, request: Any) -> Any:
        replica = await pick(self, request)
        if operation := await hot.in_thread(claim):
            await hot.in_thread(lambda: end(operation, Event.COMPLETE))
            await until(is_over)
        return replica

    async def is_over() -> bool:
        return not gateway.current()._loads._loads

    monkeypatch.setattr(gateway.Gateway, "_pick", picks_late)
    (answered,) = run(lambda client: ask_many(client, 1))
    assert "no replica of it is available" in answered.body["error"]["message"]
    assert Operation.objects.count() == gateway.MAX_LOADS_PER_REQUEST


@pytest.mark.rule("C34")
def test_a_load_given_up_as_unwanted_is_asked_for_again() -> None:
    """C34: a request that attached while it was being cancelled does not fail with it, but asks again."""

    async def scenario(client: hot.Client) -> hot.Reply:
        asked = asyncio.create_task(ask_many(client, 1))
        unwanted = await claimed()
        await hot.in_thread(lambda: end(unwanted, Event.CANCEL, message="no request waits for it any more"))
        operation = await claimed()
        async with backends.running_backend("echo", model="echo") as engine:
            await hot.in_thread(lambda: hot.replica(hot.node(), address=engine.address))
            await hot.in_thread(lambda: end(operation, Event.COMPLETE))
            return (await asked)[0]

    assert run(scenario).status == 200


@pytest.mark.rule("C32", "T-JOB-17", "R2.20")
def test_zero_means_no_limit(cluster: Callable[..., None]) -> None:
    """C32: a budget of 0 waits without a limit and keeps the operation wanted a minute ahead."""
    cluster(model_load_wait=0.0)
    assert math.isinf(gateway.load_wait_deadline())

    async def scenario(client: hot.Client) -> list[hot.Reply]:
        asked = asyncio.create_task(ask_many(client, 1))
        operation = await claimed()
        wanted = (await hot.in_thread(Operation.objects.get)).needed_until
        assert wanted is not None
        assert wanted > clock.now() + timedelta(seconds=50)
        async with backends.running_backend("echo", model="echo") as engine:
            await hot.in_thread(lambda: hot.replica(hot.node(), address=engine.address))
            await hot.in_thread(lambda: end(operation, Event.COMPLETE))
            return await asked

    assert run(scenario)[0].status == 200


@pytest.mark.rule("R2.23", "http-6.2")
def test_the_status_of_a_load_is_what_its_answer_says_until_there_is_none() -> None:
    """Any user may look; the keys are those that the reference sent while an engine loaded (recorded)."""

    def status(client: Any) -> tuple[int, Any]:
        answered = client.get("/api/models/echo/load-status")
        return answered.status_code, answered.json()

    ann = User.objects.create_user(username="ann")
    user = api.bearer(principals.create_api_key(ann, "hers")[1])
    none = {"code": 404, "message": "no load is running for model echo", "type": "not_found_error"}
    assert status(api.admin()) == (404, {"error": none})
    wanted = admission.OperationRequest(
        KIND, key=load_key("echo"), element="echo", payload={"model": "echo"}, by=Requester("a")
    )
    admission.admit(wanted, now=clock.now())
    counters = {"progress": 0.0, "bytes_sent": 0, "total_bytes": 0, "file_index": 0, "total_files": 0}
    assert status(user) == (200, {"model": "echo", "state": "pending", **counters})
    operation = claim()
    assert operation is not None
    tick = Tick(phase="loading", node_id=hot.node("w2").pk, node_name="w2")
    record({(operation.pk, operation.fence): [tick]}, now=clock.now())
    code, body = status(user)
    assert 0 <= body.pop("progress") < 100
    del counters["progress"]
    assert (code, body) == (200, {"model": "echo", "state": "loading", **counters})
    assert status(api.admin())[1]["node"] == "w2", "an administrator reads the node's name"
    end(operation, Event.FAIL, error="no such file")
    code, body = status(user)
    assert (code, body["state"]) == (200, "failed")
    finished = clock.now() - timedelta(seconds=16)
    Operation.objects.update(finished_at=finished)
    assert status(user)[0] == 404
