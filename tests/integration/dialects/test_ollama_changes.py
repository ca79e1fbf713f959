"""Ollama's pull, and the audit of what administrators change over Ollama's routes (review C6)."""

import asyncio
import json
from typing import Any

import pytest
from django.db import OperationalError
from django.db.models import QuerySet

from localai_cluster.accounts.models import AuditEntry
from localai_cluster.asgi import application
from localai_cluster.kit import clock
from nodes.dialects import pulls
from nodes.gateway import endpoint
from nodes.sources.plans import ImportPlan
from operations.ledger import admission
from operations.models import Operation, Status
from tests.conftest import until
from tests.support import hot, streaming
from tests.support.answering import definitions, play, reply
from tests.support.scripted import Scripted
from tests.support.streaming import Streamed

__all__ = ["definitions"]
pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.rule("http-6a")]

PULL = "/api/pull"
ADDRESS = "192.0.2.7"
"""Address of the test's client."""


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pull is an import without files."""

    async def plan(name: str) -> ImportPlan:
        return ImportPlan(name, f"name: {name}\nbackend: b\nparameters:\n  model: f\n", (), "import", "x")

    monkeypatch.setattr(pulls, "_plan_import", plan)


async def cancel_pull() -> None:
    """Cancel the only import once it is requested."""

    def cancel() -> bool:
        operation = next(iter(Operation.objects.filter(kind="model_import")), None)
        if operation is not None:
            admission.cancel(operation.id, actor="ann", now=clock.now())
        return operation is not None

    await until(lambda: hot.in_thread(cancel))


def test_what_an_administrator_changes_is_in_the_audit() -> None:
    """The audit lists every change of a person, with the address from which it came."""

    async def scenario(client: hot.Client, _: Any) -> None:
        for path, body in (
            ("/api/generate", {"model": "m", "keep_alive": 0}),
            ("/api/copy", {"source": "m", "destination": "copy"}),
        ):
            assert (await reply(client.post(path, body))).status == 200
        await asyncio.gather(reply(client.post(PULL, {"model": "tiny", "stream": False})), cancel_pull())

    play(scenario, Scripted())
    assert set(AuditEntry.objects.values_list("kind", "subject", "actor", "address")) == {
        ("operation.asked", "model unload of m", "static-key", ADDRESS),
        ("definition.saved", "definition copy", "static-key", ADDRESS),
        ("operation.asked", "model import of tiny", "static-key", ADDRESS),
    }


def test_a_pull_goes_on_after_an_outage_of_the_database(monkeypatch: pytest.MonkeyPatch) -> None:
    """The import does not end with the connection of the process that tells about it."""
    errors = [OperationalError("gone"), OperationalError("gone")]
    first = QuerySet.first

    def failing(rows: Any) -> Any:
        if rows.model is Operation and errors:
            raise errors.pop()
        return first(rows)

    async def have_failed() -> bool:
        return not errors

    async def scenario(_: hot.Client, __: Any) -> Streamed:
        async with streaming.asked(application, PULL, {"model": "tiny"}) as (answer, work):
            await until(have_failed)
            await cancel_pull()
            await work
            return answer

    monkeypatch.setattr(QuerySet, "first", failing)
    monkeypatch.setattr(pulls, "POLL_SECONDS", 0.01)
    answer = play(scenario)
    assert answer.whole, "the connection was cut"
    assert "error" in json.loads(answer.taken.splitlines()[-1])


def test_a_process_that_stops_ends_a_pull() -> None:
    """The client gets a line with the reason; the import goes on."""

    async def scenario(_: hot.Client, __: Any) -> Streamed:
        async with streaming.asked(application, PULL, {"model": "tiny"}) as (answer, work):
            while answer.taken.count(b"\n") < 2:
                await answer.news()
            endpoint.cancel_all_answers()
            await asyncio.wait([work], timeout=10)
            return answer

    answer = play(scenario)
    assert answer.whole, "the pull has not ended"
    assert json.loads(answer.taken.splitlines()[-1]) == {"error": "this web process is stopping"}
    assert Operation.objects.get(kind="model_import").status == Status.PENDING
