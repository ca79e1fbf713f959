"""`ended_processes` in a heartbeat: engines that have ended by themselves, as workers report them."""

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import psycopg
import pytest

from localai_cluster.kit import clock
from nodes.api.heartbeats import HeartbeatApplication
from nodes.models import BackendNode, NodeModel
from nodes.registry.heartbeats import IdentityCache
from nodes.replicas import checks
from tests.support import api, hot
from tests.support.beating import Counted, beat, made, now_of
from tests.support.hot import in_thread

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.rule("http-1.2", "worker-6")]
ADDRESS = "127.0.0.1:50000"
REPORT = {"process_key": "echo#0", "address": ADDRESS}


async def node_with_replica() -> BackendNode:
    node = await made()
    await in_thread(hot.replica, node)
    return node


async def in_question() -> list[str]:
    return [str(row) async for row in NodeModel.objects.filter(exit_reported=True)]


async def test_a_report_puts_the_replica_in_question(application: HeartbeatApplication) -> None:
    """The row stays until the worker's list confirms it; the controllers hear of it at once."""
    node = await node_with_replica()
    with psycopg.connect(hot.database_url(), autocommit=True) as link:
        link.execute(f"LISTEN {checks.CHANNEL}")
        body = {"available_ram": 7, "ended_processes": [REPORT, REPORT]}
        assert (await beat(application, node.id, body))[0] == 200
        assert [note.channel for note in link.notifies(timeout=10, stop_after=1)] == [checks.CHANNEL]
    assert (await in_question(), (await now_of(node)).available_ram) == (["echo#0"], 7)


async def test_without_a_word_of_it_a_beat_costs_nothing_more(database: Counted) -> None:
    node = await node_with_replica()
    application = HeartbeatApplication(lambda: database, IdentityCache())
    bodies: list[dict[str, Any]] = [{}, {"ended_processes": []}, {"ended_processes": None}]
    for body in bodies:
        assert (await beat(application, node.id, body))[0] == 200
    assert not [text for text in database.statements if "node_models" in text]


@pytest.mark.parametrize("secret", [api.OTHER_SECRET, None], ids=["another node's", "none"])
async def test_only_the_node_itself_is_heard(application: HeartbeatApplication, secret: str | None) -> None:
    node, other = await node_with_replica(), await made(name="other", secret=api.OTHER_SECRET)
    body = {"ended_processes": [REPORT]}
    assert (await beat(application, node.id, body, secret=secret))[0] in (401, 403)
    assert (await beat(application, other.id, body, secret=api.OTHER_SECRET))[0] == 200
    assert await in_question() == []


TOO_LONG = {"process_key": "x" * 301, "address": ADDRESS}
HOSTILE: list[tuple[Any, str]] = [
    ("echo#0", "ended_processes"),
    ({"0": REPORT}, "ended_processes"),
    ([REPORT] * 65, "ended_processes"),
    (["echo#0"], "ended_processes.0"),
    ([REPORT, None], "ended_processes.1"),
    ([{"address": ADDRESS}], "ended_processes.0.process_key"),
    ([{"process_key": "echo#0"}], "ended_processes.0.address"),
    ([{**REPORT, "process_key": ""}], "ended_processes.0.process_key"),
    ([{**REPORT, "process_key": 7}], "ended_processes.0.process_key"),
    ([TOO_LONG], "ended_processes.0.process_key"),
    ([{**REPORT, "address": "x" * 513}], "ended_processes.0.address"),
    ([{**REPORT, "process_key": "a\x00#0"}], "ended_processes.0.process_key"),
    ([{**REPORT, "address": "\ud800"}], "ended_processes.0.address"),
]


@pytest.mark.parametrize(("told", "field"), HOSTILE, ids=[str(number) for number in range(len(HOSTILE))])
async def test_what_is_no_report_is_refused_by_name_and_the_beat_counts(
    application: HeartbeatApplication, told: Any, field: str
) -> None:
    node = await node_with_replica()
    await BackendNode.objects.filter(pk=node.pk).aupdate(last_heartbeat=clock.now() - timedelta(seconds=50))
    status, body = await beat(application, node.id, {"ended_processes": told})
    assert (status, field in str(body)) == (400, True), body
    assert await in_question() == []
    assert (clock.now() - (await now_of(node)).last_heartbeat).total_seconds() < 40  # type: ignore[operator]


async def test_what_cannot_be_noted_is_not_answered_well(database: Counted) -> None:
    """The worker repeats it then."""
    node = await node_with_replica()

    class Cut(Counted):
        async def fetch_rows(self, statement: str, parameters: Mapping[str, Any], /) -> list[tuple[Any, ...]]:
            if "node_models" in statement:
                raise psycopg.OperationalError("cut")
            return await super().fetch_rows(statement, parameters)

    application = HeartbeatApplication(lambda: Cut(database.pool), IdentityCache())
    assert (await beat(application, node.id, {"ended_processes": [REPORT]}))[0] == 503
