"""`/ws/feed` while the database, the channel layer, NATS or a controller is away."""

import itertools

import pytest
from asgiref.sync import sync_to_async
from django.db import OperationalError

from localai_cluster.kit import clock, disk
from nodes.live import watch as watching
from operations.changes import topics
from operations.executor import controllers
from tests.support import live
from tests.support.feed import Open, admit, drain, end, make_node, process, shown, tab

__all__ = ["process", "tab"]
pytestmark = pytest.mark.django_db(transaction=True)


async def test_an_outage_is_told_and_what_was_seen_stays(
    tab: Open, process: watching.NodeFeed, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A notice says as of when; looking goes on, one line is logged, and it ends by itself."""
    monkeypatch.setattr(watching, "POLL_SECONDS", 0.05)
    node = await make_node()
    page = await (await tab()).greeted()
    away = True

    def broken() -> watching.Snapshot:
        if away:
            raise OperationalError("the server closed the connection")
        return live.look()

    process._read = broken
    await page.until(lambda: "database-unreachable" in page.notices)
    (notice,) = [one for one in page.told("notices")[-1]["notices"] if one["id"] == "database-unreachable"]
    assert notice["level"] == "error"
    assert "data last updated at" in notice["text"]
    late = await (await tab()).greeted()
    assert late.nodes == page.nodes
    assert "database-unreachable" in late.notices
    await drain(node)
    away = False
    await page.until(lambda: shown(page, node)["status"] == "draining")
    await page.until(lambda: "database-unreachable" not in page.notices)
    assert sum("nodes not read" in line for line in caplog.messages) == 1


async def test_a_full_disk_is_named_while_the_database_is_away(
    tab: Open, process: watching.NodeFeed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Review X4: with its mount and folder, before the notice about the database that it explains."""
    full = disk.DiskUsage("/var/lib/cluster", "/var", 0, 2**30)
    monkeypatch.setattr(disk, "current", lambda: full)
    monkeypatch.setattr(watching, "POLL_SECONDS", 0.05)

    def broken() -> watching.Snapshot:
        raise OperationalError("No space left on device")

    page = await (await tab()).greeted()
    process._read = broken
    await page.until(lambda: {"disk-full", "database-unreachable"} <= set(page.notices))
    told = page.told("notices")[-1]["notices"]
    assert [one["id"] for one in told][:2] == ["disk-full", "database-unreachable"]
    assert "0.0 of 1.0 GiB free on /var (folder /var/lib/cluster)" in told[0]["text"]


async def test_a_look_that_failed_is_not_rested_from(
    tab: Open, process: watching.NodeFeed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that waited half a minute for the database would keep the pages old for two."""
    monkeypatch.setattr(watching, "POLL_SECONDS", 0.05)
    monkeypatch.setattr(watching, "MIN_PAUSE_FACTOR", 1e6)
    calls = itertools.count()

    def broken() -> watching.Snapshot:
        if next(calls) == 0:
            raise OperationalError("the server closed the connection")
        return live.look()

    process._read = broken
    page = await tab()
    await page.until(lambda: page.told("notices"))
    assert "database-unreachable" in page.notices
    await page.until(lambda: page.told("nodes.snapshot"))


async def test_a_defect_in_the_look_does_not_end_it(
    tab: Open, process: watching.NodeFeed, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Who watches is told, the log has the traceback, and the next look may work."""
    monkeypatch.setattr(watching, "POLL_SECONDS", 0.05)
    calls = itertools.count()

    def broken() -> watching.Snapshot:
        if next(calls) == 0:
            raise KeyError("x")
        return live.look()

    process._read = broken
    page = await tab()
    await page.until(lambda: page.told("notices"))
    assert "no data available yet" in page.told("notices")[0]["notices"][0]["text"]
    await page.until(lambda: page.told("nodes.snapshot"))
    assert any("a look at the nodes failed" in line for line in caplog.messages)


@pytest.mark.rule("O87")
async def test_without_the_channel_layer_changes_come_from_the_rows(
    tab: Open, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Valkey is a hint: while it is away the feed is only later, and one line says so."""

    def away() -> None:
        raise ConnectionError("refused")

    monkeypatch.setattr(topics, "get_channel_layer", away)
    monkeypatch.setattr(topics, "RESUBSCRIBE_SECONDS", 0.01)
    monkeypatch.setattr(topics, "READ_INTERVAL", 0.05)
    page = await (await tab()).greeted()
    operation = await admit()
    await page.until(lambda: str(operation.id) in page.operations)
    await end()
    await page.until(lambda: page.operations[str(operation.id)]["status"] == "failed")
    assert sum("changes of operations are not received" in line for line in caplog.messages) == 1


async def test_notices_come_and_go(tab: Open) -> None:
    """No controller, then one without NATS, then a sound one."""
    page = await (await tab()).greeted()
    assert page.notices == {"no-controller"}
    await sync_to_async(controllers.write_heartbeat)("c", bus_connected=False, now=clock.now())
    await page.until(lambda: page.notices == {"nats-unreachable"})
    await sync_to_async(controllers.write_heartbeat)("c", bus_connected=True, now=clock.now())
    await page.until(lambda: page.notices == set())
    await sync_to_async(controllers.delete_heartbeat)("c")
    await page.until(lambda: page.notices == {"no-controller"})
