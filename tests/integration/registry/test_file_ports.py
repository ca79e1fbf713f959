"""Checks of nodes' file ports: at approval, again after growing pauses, and what a load's failure adds."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from localai_cluster.accounts import actors
from localai_cluster.kit import clock
from nodes.decisions import fleet_cache
from nodes.models import BackendNode
from nodes.placement import choose
from nodes.registry import file_port, lifecycle
from nodes.registry.file_port import FIRST_PAUSE, MAX_PAUSE, FilePorts, record_check, record_failure
from operations.executor.work import in_thread
from tests.conftest import until
from tests.support import api, hot
from tests.support.file_server import file_server

pytestmark = pytest.mark.django_db(transaction=True)

CLOSED = "127.0.0.1:1"
REFUSED = f"its file port {CLOSED} does not answer: connection refused"


@asynccontextmanager
async def checking() -> AsyncIterator[FilePorts]:
    """The controller's loop."""
    ports = FilePorts()
    task = asyncio.create_task(ports.run())
    try:
        yield ports
        assert not task.done()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def stored(node: BackendNode) -> BackendNode:
    return BackendNode.objects.get(pk=node.pk)


async def becomes(node: BackendNode, **columns: Any) -> None:
    async def holds() -> bool:
        row = await in_thread(stored, node)
        return all(getattr(row, name) == value for name, value in columns.items())

    await until(holds, seconds=30)


async def test_the_port_is_tested_at_approval_and_a_failure_shows_until_it_answers(tmp_path: Path) -> None:
    """Review R4. A pending node is not contacted; the check needs no token."""
    node = await in_thread(lambda: hot.node(approved_at=None, weak_identity=True, http_address=CLOSED))
    assert await in_thread(lambda: file_port.claim_due(9, now=clock.now())) == []
    await in_thread(lambda: lifecycle.approve(node.id, actor=actors.AUTO_APPROVAL, now=clock.now()))
    async with checking() as ports:
        await becomes(node, file_port_error=REFUSED)
        async with file_server(tmp_path) as worker:
            worker.token = "another"
            rows = BackendNode.objects.filter(pk=node.pk)
            due = {"http_address": worker.address, "file_port_next_check_at": None}
            await in_thread(lambda: rows.update(**due))
            ports.wake()
            await becomes(node, file_port_error="", file_port_failures=0, file_port_failed_at=None)
            assert "authorization" not in worker.asked[0].headers


def test_each_failure_doubles_the_pause_and_is_seen_by_placement() -> None:
    """The first one stays known as the beginning."""
    node, began = hot.node(http_address=CLOSED), clock.now()
    now, pauses = began, []
    for _ in range(8):
        record_check(node.id, "refused", now=now)
        due_at = stored(node).file_port_next_check_at
        assert due_at is not None
        pauses.append((due_at - now).total_seconds())
        now = due_at
    assert pauses[:4] == [FIRST_PAUSE * 2**times for times in range(4)]
    assert pauses[-1] == MAX_PAUSE
    assert stored(node).file_port_failed_at == began
    (candidate,) = fleet_cache.read_fleet("echo")
    assert choose.find_refusal(candidate, need=choose.Need(files=1)) is choose.Reason.FILE_PORT
    record_check(node.id, "", now=now)
    (candidate,) = fleet_cache.read_fleet("echo")
    assert choose.find_refusal(candidate, need=choose.Need(files=1)) is None


def test_loads_that_fail_at_once_count_as_one_failure() -> None:
    """While a check is pending; a node that is gone is no error."""
    node, now = hot.node(http_address=CLOSED), clock.now()
    for seconds in (0, 1, 2):
        record_failure(node.id, "refused", now=now + timedelta(seconds=seconds))
    assert stored(node).file_port_failures == 1
    record_failure(node.id, "refused", now=now + timedelta(seconds=FIRST_PAUSE))
    assert stored(node).file_port_failures == 2
    BackendNode.objects.all().delete()
    record_failure(node.id, "refused", now=now)
    record_check(node.id, "", now=now)


def test_a_check_belongs_to_one_controller_and_a_registration_begins_anew() -> None:
    """A node without an HTTP address, an agent and one that is offline have none."""
    now = clock.now()
    hot.node("silent")
    hot.node("agent", node_type="agent", http_address=CLOSED)
    hot.node("gone", offline_at=now, http_address=CLOSED)
    node = hot.node("one", http_address=CLOSED)
    assert [due.name for due in file_port.claim_due(9, now=now)] == ["one"]
    assert file_port.claim_due(9, now=now) == []
    record_check(node.id, "refused", now=now)
    assert file_port.next_due(now=now, at_most=30.0) == pytest.approx(FIRST_PAUSE)
    for error in ("refused", ""):
        api.register(api.registration("two", http_address=CLOSED))
        again = BackendNode.objects.get(name="two")
        assert (again.file_port_error, again.file_port_failures) == ("", 0)
        record_check(again.id, error, now=now)
