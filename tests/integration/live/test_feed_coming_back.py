"""`/ws/feed`: a tab that comes back is told what it missed, or everything."""

import asyncio
import itertools

import pytest

from nodes.live import watch as watching
from operations.models import Event
from tests.support import live
from tests.support.feed import Open, admit, drain, end, make_node, process, sees, tab

__all__ = ["process", "tab"]
pytestmark = pytest.mark.django_db(transaction=True)


async def test_coming_back_brings_what_was_missed(tab: Open) -> None:
    """Deltas since the tab's place: what ended meanwhile too, no doubled row, no lost failure."""
    node, other, operation = await make_node(), await make_node("w2"), await admit()
    page = await (await tab()).greeted()
    place = page.place
    await page.socket.disconnect()
    await drain(node)
    await end()
    await make_node("w3")
    again = await tab(place)
    again.nodes, again.operations = dict(page.nodes), dict(page.operations)
    await again.greeted()
    assert not again.told("nodes.snapshot")
    assert not again.told("operations.snapshot")
    (delta,) = again.told("nodes.delta")
    assert {str(node.id)} < {patch["id"] for patch in delta["changed"]}
    assert str(other.id) not in {patch["id"] for patch in delta["changed"]}
    assert again.nodes == (await (await tab()).greeted()).nodes
    assert again.operations[str(operation.id)]["error"] == "no such file"


async def test_coming_back_without_having_missed_anything_is_told(tab: Open) -> None:
    """An empty delta each: the page knows that what it shows is true."""
    page = await (await tab()).greeted()
    again = await (await tab(page.place)).greeted()
    assert (again.told("nodes.delta")[0]["changed"], again.told("operations.delta")[0]["operations"]) == (
        [],
        [],
    )


@pytest.mark.parametrize(
    "cursor", ["", "0123456789ab:1", "{epoch}:99", "{epoch}:-1", "{epoch}:x", "%00", "x"]
)
async def test_a_place_that_is_not_known_starts_anew(
    tab: Open, process: watching.NodeFeed, cursor: str
) -> None:
    """Another process' cursor, one from the future, or none at all."""
    await make_node()
    wanted = cursor.replace("{epoch}", process.history.epoch)
    page = await (await tab(f"?nodes={wanted}&operations=999999")).greeted()
    assert len(page.told("nodes.snapshot")) == len(page.told("operations.snapshot")) == 1


async def test_two_processes_know_nothing_of_each_other(monkeypatch: pytest.MonkeyPatch, tab: Open) -> None:
    """The cursor of one means nothing to the other; both show the same."""
    await make_node()
    first = await (await tab()).greeted()
    monkeypatch.setattr(watching, "_shared_feed", watching.NodeFeed(live.look))
    second = await (await tab(first.place)).greeted()
    assert second.told("nodes.snapshot")
    assert second.nodes == first.nodes
    assert second.cursor.partition(":")[0] != first.cursor.partition(":")[0]


async def test_nothing_is_lost_while_everything_changes(tab: Open) -> None:
    """A tab that is cut again and again while nodes and operations change ends where a fresh one begins."""
    nodes = [await make_node(f"w{number}") for number in range(6)]
    stop = asyncio.Event()

    async def unrest() -> None:
        for turn in itertools.count():
            await drain(nodes[turn % 6], f"turn {turn}")
            await admit(f"m{turn}")
            if turn % 3 == 0:
                await end(Event.COMPLETE, "")
            if stop.is_set():
                return

    changing = asyncio.create_task(unrest())
    page = await (await tab()).greeted()
    kinds = ("nodes.delta", "operations.delta")
    for _ in range(5):
        await sees(page, lambda tab: all(tab.told(kind) for kind in kinds))
        await page.socket.disconnect()
        again = await tab(page.place)
        again.nodes, again.operations = page.nodes, page.operations
        page = again
    stop.set()
    await changing
    now = await (await tab()).greeted()
    await page.until(lambda: page.nodes == now.nodes and page.seq >= now.seq)
    active = {job: one for job, one in page.operations.items() if "finishedAt" not in one}
    assert active == now.operations
    assert not [message for message in page.seen if message["type"].endswith("snapshot")]
