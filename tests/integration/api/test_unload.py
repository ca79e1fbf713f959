"""Unloading and deleting models, and `/backend/…`, by REST (`contract/http-api.md` §2.11, §6)."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from uuid import uuid4

import pytest
from django.db import OperationalError, connections

from localai_cluster.api_document import document
from localai_cluster.kit import clock, conf
from localai_cluster.kit.errors import Conflict
from localai_cluster.rpc.errors import Lost
from localai_cluster.rpc.messages import StatusResponse
from nodes.api import engines
from nodes.definitions.folder import Folder
from nodes.loading import load_request
from nodes.models import NodeModel
from nodes.models.replica import load_key
from nodes.replicas import drains
from operations.ledger import admission, attempts
from operations.ledger.admission import Requester
from operations.models import Event as State
from operations.models import Operation
from tests.integration.api.test_document import fits
from tests.support import api, hot
from tests.support.backends import TOKEN
from tests.support.fleet import at_once
from tests.support.races import meanwhile
from tests.support.replicas import attempt

pytestmark = pytest.mark.django_db

NODE_ROUTES = ["unload", "delete"]


def ask(verb: str, node: Any, body: Any) -> Any:
    return documented("/api/nodes/{node_id}/models/" + verb, f"/api/nodes/{node}/models/{verb}", body)


def everywhere(verb: str, body: Any) -> Any:
    return documented(f"/api/nodes/models/{verb}", f"/api/nodes/models/{verb}", body)


def documented(template: str, path: str, body: Any = None, method: str = "POST") -> Any:
    """The answer, which the API document describes."""
    answer = api.admin().send(method, path, body)
    told = document()["paths"][template][method.lower()]["responses"][str(answer.status_code)]
    assert fits(told["content"]["application/json"]["schema"], answer.json()) == []
    return answer


def at_once_wish(**more: Any) -> dict[str, Any]:
    return {"model_name": "echo", "wait": False, **more}


@contextmanager
def a_controller(event: State, **said: Any) -> Iterator[None]:
    """Ends every operation that is asked for meanwhile in this way."""

    def work() -> None:
        for operation in attempts.claim("controller", now=clock.now(), lease=60, limit=9):
            attempts.finish(operation.id, operation.fence, event, now=clock.now(), **said)

    with meanwhile(work):
        yield


@pytest.mark.django_db(transaction=True)
@pytest.mark.rule("http-2.11")
@pytest.mark.parametrize("verb", NODE_ROUTES)
def test_the_answer_waits_for_the_end_and_names_the_operation(verb: str) -> None:
    node = hot.node()
    hot.replica(node)
    with a_controller(State.COMPLETE):
        answer = ask(verb, node.id, {"model_name": "echo"})
    operation = Operation.objects.get()
    assert (answer.status_code, answer.json()["jobID"]) == (200, str(operation.id))
    assert answer.json()["message"] == f"model {verb}{'ed' if verb == 'unload' else 'd'} from node"
    assert (operation.kind, operation.element) == (f"model_{verb}", "echo")
    assert [part.node_name for part in operation.targets.all()] == ["one"]
    job = api.admin().get(answer.json()["statusUrl"]).json()
    assert (job["completed"], job["deletion"]) == (True, verb == "delete")


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("verb", NODE_ROUTES)
@pytest.mark.rule("R6.13", "http-2.11")
def test_a_failure_is_a_502_with_the_reason_and_the_node(verb: str) -> None:
    node = hot.node()
    hot.replica(node)
    with a_controller(State.FAIL, error="one: echo#0 may still run: stuck"):
        answer = ask(verb, node.id, {"model_name": "echo"})
    assert answer.status_code == 502
    assert api.message(answer) == "one: echo#0 may still run: stuck"


@pytest.mark.rule("http-2.11")
def test_measured_12_what_is_not_loaded_there_is_404_and_no_operation() -> None:
    node, other = hot.node(), hot.node("two")
    hot.replica(other)
    for body in ({"model_name": "echo"}, {"model_name": "nope"}):
        answer = ask("unload", node.id, body)
        assert (answer.status_code, "is not loaded on node one" in api.message(answer)) == (404, True)
    wrong = ask("unload", other.id, {"model_name": "echo", "replica_index": 3})
    assert (wrong.status_code, "as replica 3" in api.message(wrong)) == (404, True)
    assert not Operation.objects.exists()


@pytest.mark.rule("T-UNL-3", "R6.12")
def test_a_lookup_that_fails_is_not_taken_for_absence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither "not loaded" nor a success."""
    hot.replica(hot.node())

    def away(*_: Any, **__: Any) -> Any:
        raise OperationalError("the connection is lost")

    monkeypatch.setattr(drains, "unloadable_replicas", away)
    answer = everywhere("unload", {"model_name": "echo"})
    assert (answer.status_code, api.message(answer)) == (503, "the database is unavailable")
    assert not Operation.objects.exists()


@pytest.mark.rule("http-2.11")
@pytest.mark.parametrize("verb", NODE_ROUTES)
def test_measured_4_an_unknown_pending_or_agent_node_is_refused(verb: str) -> None:
    assert ask(verb, uuid4(), at_once_wish()).status_code == 404
    assert ask(verb, "nope", at_once_wish()).status_code == 404
    pending = ask(verb, api.make_node(approved=False).id, at_once_wish())
    assert (pending.status_code, "pending" in api.message(pending)) == (409, True)
    agent = api.make_node("a", secret=api.OTHER_SECRET, node_type="agent", address="")
    assert ask(verb, agent.id, at_once_wish()).status_code == 409
    assert not Operation.objects.exists()


@pytest.mark.parametrize("verb", NODE_ROUTES)
def test_without_waiting_it_is_a_202_and_asking_again_joins(verb: str) -> None:
    node = hot.node()
    hot.replica(node)
    first, again = (ask(verb, node.id, at_once_wish(deadline_seconds=5)) for _ in range(2))
    assert (first.status_code, again.status_code) == (202, 202)
    assert first.json()["jobID"] == again.json()["jobID"]
    assert again.json()["deduplicated"] is True
    operation = Operation.objects.get()
    assert operation.payload == {"model": "echo", "grace": 5, "replica_index": None}
    other = ask("delete" if verb == "unload" else "unload", node.id, at_once_wish())
    assert (other.status_code, str(operation.id) in api.message(other)) == (409, True)


@pytest.mark.django_db(transaction=True)
def test_measured_21_simultaneous_clicks_are_one_operation() -> None:
    """Real transactions."""
    node = hot.node()
    hot.replica(node)
    answers = at_once(*(partial(ask, "unload", node.id, at_once_wish()) for _ in range(8)))
    assert {answer.status_code for answer in answers} == {202}
    assert Operation.objects.count() == 1


def test_one_replica_and_all_of_them_are_different_wishes() -> None:
    node = hot.node()
    for index in (0, 1):
        hot.replica(node, index=index)
        hot.replica(node, f"replica:{index}:echo", index)
    wishes: list[dict[str, Any]] = [
        {},
        {"replica_index": 0},
        {"replica_index": 1},
        {"model_name": "replica:0:echo"},
    ]
    jobs = {ask("unload", node.id, at_once_wish(**wish)).json()["jobID"] for wish in wishes}
    assert len(jobs) == 4


@pytest.mark.parametrize("verb", NODE_ROUTES)
@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({}, "model_name"),
        ({"model_name": ""}, "model_name"),
        ({"model_name": 7}, "model_name"),
        ({"model_name": ["echo"]}, "model_name"),
        ({"model_name": " echo"}, "model_name"),
        ({"model_name": "e\0o"}, "model_name"),
        ({"model_name": "e\u202eo"}, "model_name"),
        ({"model_name": "x" * 256}, "model_name"),
        ({"model_name": "echo", "deadline_seconds": -1}, "deadline_seconds"),
        ({"model_name": "echo", "deadline_seconds": 3601}, "deadline_seconds"),
        ({"model_name": "echo", "deadline_seconds": "5"}, "deadline_seconds"),
        ({"model_name": "echo", "wait": "no"}, "wait"),
        (["echo"], ""),
        (b"{bad", ""),
    ],
)
@pytest.mark.rule("http-2.11")
def test_bad_input_is_400_and_names_the_field(verb: str, body: Any, named: str) -> None:
    node = hot.node()
    hot.replica(node)
    for answer in (ask(verb, node.id, body), everywhere(verb, body)):
        assert (answer.status_code, named in api.message(answer)) == (400, True)
    assert not Operation.objects.exists()


@pytest.mark.parametrize("name", ["../x", "/etc", "a//b", "a/../b", ".", "a/"])
def test_a_name_that_leaves_the_models_folder_is_never_sent_to_be_deleted(name: str) -> None:
    node = hot.node()
    for answer in (
        ask("delete", node.id, {"model_name": name}),
        everywhere("delete", {"model_name": name}),
    ):
        assert (answer.status_code, "model_name" in api.message(answer)) == (400, True)


@pytest.mark.rule("R6.11", "T-UNL-38")
def test_everywhere_has_a_part_for_each_node_that_has_the_model() -> None:
    for name in ("b", "a", "c"):
        hot.replica(hot.node(name), "echo" if name != "c" else "other")
    assert everywhere("unload", at_once_wish()).status_code == 202
    operation = Operation.objects.get()
    assert [part.node_name for part in operation.targets.order_by("node_name")] == ["a", "b"]
    assert operation.key == "model:echo#all"


@pytest.mark.rule("T-UNL-1", "T-UNL-4", "T-UNL-39", "R6.11", "R6.12")
def test_everywhere_and_nowhere_is_404() -> None:
    hot.node()
    answer = everywhere("unload", at_once_wish())
    assert (answer.status_code, api.message(answer)) == (404, "model echo is not loaded on any node")
    assert documented("/backend/shutdown", "/backend/shutdown", {"model": "echo"}).status_code == 404


@pytest.mark.rule("T-UNL-12", "R6.39", "T-MGR-29")
def test_files_are_deleted_on_every_approved_node_whether_or_not_it_has_the_model_loaded() -> None:
    assert everywhere("delete", at_once_wish()).status_code == 404
    hot.node("b")
    hot.node("a", offline_at=clock.now())
    api.make_node("p", approved=False)
    assert everywhere("delete", at_once_wish()).status_code == 202
    parts = Operation.objects.get().targets.order_by("node_name")
    assert [part.node_name for part in parts] == ["a", "b"]


def test_a_model_that_is_being_loaded_is_not_unloaded_or_deleted_and_the_load_is_named() -> None:
    node = hot.node()
    now = clock.now()
    wanted = admission.OperationRequest(
        load_request.KIND, key=load_key("echo"), element="echo", by=Requester("test")
    )
    job = admission.admit(wanted, now=now).operation.id
    hot.replica(node, state="loading", owner=attempt(f"{job}:1"))
    for answer in (
        ask("unload", node.id, at_once_wish()),
        ask("delete", node.id, at_once_wish()),
        everywhere("unload", at_once_wish()),
        everywhere("delete", at_once_wish()),
    ):
        assert (answer.status_code, str(job) in api.message(answer)) == (409, True)


class TestShutdown:
    @pytest.mark.django_db(transaction=True)
    @pytest.mark.rule("R6.11", "R6.12", "T-UNL-2")
    def test_it_unloads_from_every_node_and_says_so_when_it_is_done(self) -> None:
        hot.replica(hot.node())
        with a_controller(State.COMPLETE):
            answer = documented("/backend/shutdown", "/backend/shutdown", {"model": "echo"})
        assert (answer.status_code, answer.json()["message"]) == (200, "model unloaded")

    @pytest.mark.parametrize("body", [{}, {"model": ""}, {"model": 5}, {"model_name": "echo"}])
    def test_a_body_without_a_model_is_400_and_names_the_field(self, body: Any) -> None:
        answer = documented("/backend/shutdown", "/backend/shutdown", body)
        assert (answer.status_code, answer.json()["error"]["field"]) == (400, "model")


class TestLoad:
    @pytest.fixture(autouse=True)
    def _defined(self, monkeypatch: pytest.MonkeyPatch) -> None:
        async def find(_: Folder, name: str) -> Any:
            return object() if name == "echo" else None

        monkeypatch.setattr(Folder, "find", find)

    def post(self, body: Any) -> Any:
        return api.admin().post("/backend/load", body)

    def test_a_model_that_serves_is_answered_at_once(self) -> None:
        hot.replica(hot.node())
        answer = self.post({"model": "echo"})
        assert (answer.status_code, answer.json()["loaded"]) == (200, ["echo"])
        assert not Operation.objects.exists()

    @pytest.mark.django_db(transaction=True)
    def test_it_is_a_load_like_any_other_and_waits_for_its_end(self) -> None:
        with a_controller(State.COMPLETE):
            answer = self.post({"model": "echo"})
        operation = Operation.objects.get()
        assert (operation.kind, operation.key) == (load_request.KIND, "model:echo#0")
        assert (answer.status_code, answer.json()["loaded"]) == (200, ["echo"])
        assert answer.json()["jobID"] == str(operation.id)

    @pytest.mark.django_db(transaction=True)
    def test_a_failure_has_the_shape_of_a_success_and_the_reason(self) -> None:
        with a_controller(State.FAIL, error="no room"):
            answer = self.post({"model": "echo"})
        assert (answer.status_code, answer.json()["loaded"]) == (503, [])
        assert "no room" in answer.json()["message"] == api.message(answer)

    @pytest.mark.parametrize(
        ("body", "status"),
        [({}, 400), ({"model": ""}, 400), ({"model": 1}, 400), ({"model": "nope"}, 404), (b"[", 400)],
    )
    def test_what_cannot_be_loaded_is_refused(self, body: Any, status: int) -> None:
        assert self.post(body).status_code == status

    def test_without_waiting_it_is_a_202(self) -> None:
        answer = self.post({"model": "echo", "wait": False})
        assert (answer.status_code, answer.json()["loaded"]) == (202, [])

    @pytest.mark.django_db(transaction=True)
    def test_more_replicas_are_a_load_each_on_the_node_that_is_named(self) -> None:
        """Also of a model that serves already."""
        node = hot.node()
        hot.replica(node)
        answer = self.post({"model": "echo", "replicas": 2, "node_id": str(node.id), "wait": False})
        loads = {str(operation.id): operation for operation in Operation.objects.all()}
        assert (answer.status_code, sorted(answer.json()["jobIDs"])) == (202, sorted(loads))
        for operation in loads.values():
            request = load_request.request_of(operation)
            assert (request.is_scale_up, request.allowed_nodes) == (True, frozenset({node.id}))
            assert operation.client_address == "127.0.0.1"

    @pytest.mark.django_db(transaction=True)
    def test_several_loads_are_requested_all_or_none(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail_when_written(operations: Any) -> None:
            assert Operation.objects.count() == len(operations) == 3
            raise Conflict("an unload began")

        monkeypatch.setattr(admission, "emit", fail_when_written)
        assert self.post({"model": "echo", "replicas": 3, "wait": False}).status_code == 409
        assert not Operation.objects.exists()

    @pytest.mark.parametrize(
        ("body", "status"),
        [
            ({"replicas": 0}, 400),
            ({"replicas": 65}, 400),
            ({"replicas": "2"}, 400),
            ({"node_id": 7}, 400),
            ({"node_id": "nothing"}, 404),
            ({"node_id": "0f7d3f0e-58b6-4c9e-b7d7-3c1a3a0e8a55"}, 404),
        ],
    )
    def test_a_wrong_number_or_node_is_refused(self, body: Any, status: int) -> None:
        answer = self.post({"model": "echo", **body})
        assert (answer.status_code, Operation.objects.exists()) == (status, False)


class PlayedEngine:
    """An engine that is ready, or gone if its port says so."""

    def __init__(self, address: str, token: str) -> None:
        self.address = address

    async def status(self, timeout: float) -> StatusResponse:
        await asyncio.sleep(0)
        if self.address.endswith("50001"):
            raise Lost("the engine is gone")
        answer = StatusResponse(state=StatusResponse.READY)
        answer.memory.total = 42
        answer.memory.breakdown["gpu"] = 40
        return answer

    async def close(self) -> None:
        await asyncio.sleep(0)


class TestMonitor:
    def get(self, model: str = "echo") -> Any:
        return documented("/backend/monitor", f"/backend/monitor?model={model}", method="GET")

    @pytest.fixture
    def _engines(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(engines, "BackendClient", PlayedEngine)

    @pytest.mark.usefixtures("_engines")
    def test_it_asks_every_replica_and_answers_with_the_first(self) -> None:
        node = hot.node()
        hot.replica(node, index=1)
        hot.replica(node, index=0)
        hot.replica(node, index=2, state="unloading")
        answer = self.get().json()
        assert (answer["state"], answer["memory"]) == (2, {"total": 42, "breakdown": {"gpu": 40}})
        assert [one["replica_index"] for one in answer["replicas"]] == [0, 1]
        assert [one.get("error", "") for one in answer["replicas"]] == ["", "the engine is gone"]

    @pytest.mark.django_db(transaction=True)
    def test_the_wait_for_engines_holds_no_database_connection(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Engines may be silent for seconds, and there are fewer connections than requests."""
        own, held = connections["default"], []

        class Observed(PlayedEngine):
            async def status(self, timeout: float) -> StatusResponse:
                held.append(own.connection is not None)
                return await super().status(timeout)

        monkeypatch.setattr(engines, "BackendClient", Observed)
        hot.replica(hot.node())
        assert (self.get().status_code, held) == (200, [False])

    @pytest.mark.parametrize("is_stock", [True, False])
    def test_an_engine_gets_the_token_that_it_expects(
        self, monkeypatch: pytest.MonkeyPatch, is_stock: bool
    ) -> None:
        """The engines of a stock worker expect the registration token; without it they refuse the call."""
        tokens = []

        class Recorded(PlayedEngine):
            def __init__(self, address: str, token: str) -> None:
                super().__init__(address, token)
                tokens.append(token)

        monkeypatch.setattr(engines, "BackendClient", Recorded)
        hot.replica(hot.node(weak_identity=is_stock, engine_token="" if is_stock else TOKEN))
        assert self.get().status_code == 200
        assert tokens == [conf.cluster().registration_token if is_stock else TOKEN]

    @pytest.mark.usefixtures("_engines")
    def test_a_model_whose_engines_are_silent_is_502(self) -> None:
        hot.replica(hot.node(), index=1)
        assert self.get().status_code == 502

    def test_a_model_that_is_loaded_nowhere_is_404_and_named(self) -> None:
        answer = self.get()
        assert (answer.status_code, api.message(answer)) == (404, "model echo is not loaded on any node")

    @pytest.mark.parametrize("query", ["", "?model=", "?model=" + "x" * 256, "?name=echo"])
    def test_a_query_without_a_model_is_400(self, query: str) -> None:
        answer = api.admin().get(f"/backend/monitor{query}")
        assert answer.status_code == 400
        assert not NodeModel.objects.exists()
