"""`/ws/feed`: who may watch, what is told first, changes within a second, coming back, outages."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any
from unittest.mock import AsyncMock
from uuid import uuid4

import pytest
from asgiref.sync import sync_to_async
from channels.testing import WebsocketCommunicator
from django.contrib.auth import get_user_model
from django.contrib.sessions.models import Session
from django.db import OperationalError, connections, transaction
from django.test import Client

from localai_cluster import cancel, clock
from localai_cluster.accounts import actors, passwords, principals
from localai_cluster.accounts.models import ApiKey, InitialPassword
from localai_cluster.embedded.valkey import EmbeddedValkey
from localai_cluster.web import sockets
from localai_cluster.websockets import websocket_application
from nodes.backends import upgrade_state
from nodes.backends.upgrade_rules import Offered
from nodes.inference import gateway
from nodes.live import topics
from nodes.live import watch as watching
from nodes.models import BackendNode
from nodes.registry import services
from nodes.scheduling import passes, store
from nodes.scheduling.picture import Ruling
from nodes.scheduling.rules import Rule
from operations.changes import cursor, events, fanout, feed
from operations.executor import controllers
from operations.executor.waiting import Hints
from operations.ledger import admission, lease, outcome
from operations.ledger.progress import Tick
from operations.models import Operation
from operations.states import Event
from tests.support import api, live
from tests.support.live import Tab

pytestmark = pytest.mark.django_db(transaction=True)

PAGE = [(b"host", b"cluster:8080"), (b"origin", b"http://cluster:8080")]
ANN = actors.Actor(actors.ActorKind.USER, "ann")


@pytest.fixture(autouse=True)
def process(valkey: EmbeddedValkey, monkeypatch: pytest.MonkeyPatch) -> watching.NodeFeed:
    """This test's web process."""
    made = watching.NodeFeed(live.look)
    monkeypatch.setattr(watching, "_shared", made)
    return made


Open = Callable[..., Awaitable[Tab]]


@pytest.fixture
async def tab() -> AsyncIterator[Open]:
    """Opens tabs, and closes them afterwards."""
    opened: list[Tab] = []

    async def start(query: str = "", headers: Any = live.ADMIN) -> Tab:
        opened.append(Tab(query, headers))
        return await opened[-1].open()

    yield start
    for one in opened:
        await one.socket.disconnect()
    await sync_to_async(connections.close_all)()


def shown(page: Tab, node: BackendNode) -> dict[str, Any]:
    """The node as the page shows it."""
    return page.nodes[str(node.id)]


async def sees(page: Tab, condition: Callable[[Tab], Any]) -> None:
    """Waits until it holds of what the page has."""
    await page.until(lambda: condition(page))


make_node = sync_to_async(api.make_node)


def admitted(name: str = "mock") -> Operation:
    request = admission.OperationRequest("backend_install", key=name, element=name, actor="x")
    return admission.admit(request, now=clock.now()).operation


admit = sync_to_async(admitted)


@sync_to_async
def admit_many(count: int) -> list[Operation]:
    """In one transaction, so their changes are told at the same time however busy the machine is."""
    with transaction.atomic():
        return [admitted(f"m{number}") for number in range(count)]


@sync_to_async
def end(event: Event = Event.FAIL, error: str = "no such file") -> Operation:
    """Claims what is due first and ends it."""
    (work,) = lease.claim("t", now=clock.now(), lease=30, limit=1)
    outcome.finish(work.id, work.fence, event, now=clock.now(), error=error)
    return work


@sync_to_async
def drain(node: BackendNode, reason: str = "disk") -> None:
    services.drain(node.id, actor=ANN, now=clock.now(), reason=reason)


@sync_to_async
def signed_in(name: str = "root", **fields: Any) -> tuple[Any, list[tuple[bytes, bytes]]]:
    """An admin and the headers of his page."""
    user = get_user_model().objects.create_superuser(name, password="x", **fields)
    (client := Client()).force_login(user)
    cookie = f"sessionid={client.cookies['sessionid'].value}".encode()
    return user, [*PAGE, (b"cookie", cookie)]


async def test_hello_comes_first_and_then_everything(tab: Open) -> None:
    """Who we are, whom we take the client for; operations, nodes and notices as they are."""
    node, operation = await make_node(), await admit()
    _, headers = await signed_in()
    page = await (await tab(headers=headers)).greeted()
    assert page.seen[0] | {"at": "", "build": ""} == {
        "type": "hello",
        "at": "",
        "build": "",
        "version": "0.1.0",
        "user": {"name": "root", "role": "admin"},
    }
    assert [one["name"] for one in page.nodes.values()] == [node.name]
    assert list(page.operations) == [str(operation.id)]
    assert len(page.told("nodes.snapshot")) == len(page.told("operations.snapshot")) == 1


async def test_a_sign_of_life_comes_again_and_again(tab: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a page can tell a quiet cluster from a dead socket."""
    monkeypatch.setattr(topics, "ALIVE_EVERY", 0.05)
    page = await tab()
    await page.until(lambda: len(page.told("alive")) > 2)
    assert page.told("alive")[0]["at"] < page.told("alive")[1]["at"]


async def test_two_tabs_see_a_change_at_once(tab: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """A NOTIFY wakes the look, long before the next one; the patch carries only the keys that changed."""
    monkeypatch.setattr(watching, "LOOK_EVERY", 120.0)
    node = await make_node()
    pages = [await (await tab()).greeted() for _ in range(2)]
    began = clock.monotonic()
    await drain(node)
    for page in pages:
        await sees(page, lambda tab: shown(tab, node)["status"] == "draining")
    assert clock.monotonic() - began < 60
    (patch,) = pages[0].told("nodes.delta")[-1]["changed"]
    assert set(patch) == {"id", "status", "reason", "since", "drain", "revision"}
    assert patch["reason"] == "drained by ann: disk"
    assert pages[0].nodes == pages[1].nodes


async def test_nodes_come_and_go(tab: Open) -> None:
    """A new node comes whole, a removed one by its id."""
    page = await (await tab()).greeted()
    node = await make_node()
    await page.until(lambda: str(node.id) in page.nodes)
    (whole,) = page.told("nodes.delta")[-1]["changed"]
    assert whole == page.nodes[str(node.id)]
    await sync_to_async(services.deregister)(node.id, actor=ANN, now=clock.now())
    await page.until(lambda: not page.nodes)
    assert page.told("nodes.delta")[-1]["removed"] == [str(node.id)]


@pytest.mark.rule("O52", "O48", "O81", "O83")
async def test_a_failure_stays_until_anybody_dismisses_it(tab: Open) -> None:
    """Every tab sees the failure and who dismissed it, by the numbers of the ledger."""
    operation = await admit()
    pages = [await (await tab()).greeted() for _ in range(2)]
    await end()
    for page in pages:
        await sees(page, lambda tab: tab.operations[str(operation.id)]["status"] == "failed")
    await sync_to_async(api.admin().post)(f"/api/operations/{operation.id}/dismiss")
    for page in pages:
        await sees(page, lambda tab: "dismissedAt" in tab.operations[str(operation.id)])
        assert page.operations[str(operation.id)]["dismissedBy"] == "static-key"
        assert page.seq == await sync_to_async(feed.current_seq)()


async def test_changes_at_the_same_time_are_one_message(tab: Open) -> None:
    """Ten thousand a minute are no ten thousand messages; of one operation only the last state counts."""
    page = await (await tab()).greeted()
    operations = await admit_many(40)
    await page.until(lambda: len(page.operations) == 40)
    deltas = page.told("operations.delta")
    assert len(deltas) < 40
    for message in deltas:
        numbers = [one["seq"] for one in message["operations"]]
        assert numbers == sorted(numbers)
        assert len({one["jobID"] for one in message["operations"]}) == len(numbers)
        assert message["seq"] >= numbers[-1]
    assert page.seq == operations[-1].seq


async def test_a_part_that_moves_is_told_alone(tab: Open) -> None:
    """A page that was there and one that opens late show what the rows say."""
    nodes = [(uuid4(), f"n{number}") for number in range(3)]
    asked = admission.OperationRequest("backend_install", key="k", element="e", actor="x", targets=nodes)
    admitted = await sync_to_async(admission.admit)(asked, now=clock.now())
    id = str(admitted.operation.id)
    page = await (await tab()).greeted()
    (work,) = await sync_to_async(lease.claim)("t", now=clock.now(), lease=30, limit=1)
    tick = Tick("downloading", current_bytes=3, total_bytes=12, percentage=25, node_id=nodes[1][0])
    await sync_to_async(outcome.progress)(work.id, work.fence, tick, now=clock.now())

    def moved(tab: Tab) -> list[float]:
        return [part["percentage"] for part in tab.operations[id]["nodes"]]

    await sees(page, lambda tab: moved(tab) == [0, 25, 0])
    late = await (await tab()).greeted()
    assert page.operations[id] == late.operations[id]
    await sync_to_async(outcome.progress)(work.id, work.fence, replace(tick, percentage=50), now=clock.now())
    for one in (page, late):
        await sees(one, lambda tab: moved(tab) == [0, 50, 0])
        (last,) = one.told("operations.delta")[-1]["operations"]
        whole = id not in one.told("operations.delta")[-1].get("partial", ())
        assert len(last["nodes"]) == (3 if whole else 1)
    assert any(message.get("partial") == [id] for message in page.told("operations.delta"))


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
    monkeypatch.setattr(watching, "_shared", watching.NodeFeed(live.look))
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


async def test_the_look_rests_while_no_one_watches(tab: Open, process: watching.NodeFeed) -> None:
    """One look for all; none without a tab; the next tab sees the present."""
    node = await make_node()
    pages = [await (await tab()).greeted() for _ in range(3)]
    assert process.watchers == 3
    for page in pages:
        await page.socket.disconnect()
    assert process.watchers == 0
    looks = process.looks
    await drain(node)
    page = await (await tab()).greeted()
    assert process.looks == looks + 1
    assert shown(page, node)["status"] == "draining"


async def test_an_outage_is_told_and_what_was_seen_stays(
    tab: Open, process: watching.NodeFeed, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A notice says as of when; looking goes on, one line is logged, and it ends by itself."""
    monkeypatch.setattr(watching, "LOOK_EVERY", 0.05)
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


async def test_a_look_that_failed_is_not_rested_from(
    tab: Open, process: watching.NodeFeed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that waited half a minute for the database would keep the pages old for two."""
    monkeypatch.setattr(watching, "LOOK_EVERY", 0.05)
    monkeypatch.setattr(watching, "REST", 1e6)
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
    monkeypatch.setattr(watching, "LOOK_EVERY", 0.05)
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

    monkeypatch.setattr(fanout, "get_channel_layer", away)
    monkeypatch.setattr(fanout, "RETRY_AFTER", 0.01)
    monkeypatch.setattr(cursor, "READ_EVERY", 0.05)
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
    await sync_to_async(controllers.beat)("c", bus_connected=False, now=clock.now())
    await page.until(lambda: page.notices == {"nats-unreachable"})
    await sync_to_async(controllers.beat)("c", bus_connected=True, now=clock.now())
    await page.until(lambda: page.notices == set())
    await sync_to_async(controllers.sign_off)("c")
    await page.until(lambda: page.notices == {"no-controller"})


async def refused(headers: Any) -> tuple[bool, int]:
    """Whether the socket was opened first, and the code with which it was closed."""
    socket = WebsocketCommunicator(websocket_application, "/ws/feed", headers=list(headers))
    accepted, code = await socket.connect(timeout=30)
    if accepted:
        code = (await socket.receive_output(timeout=30))["code"]
    await socket.disconnect()
    return accepted, int(code or 0)


async def test_only_admins_may_watch() -> None:
    """Our own page learns the reason from the close code; programs and other pages are not let in at all."""
    user = await sync_to_async(get_user_model().objects.create_user)("ann", password="x")
    _, plain = await sync_to_async(principals.create_api_key)(user, "k")
    key = (b"x-api-key", plain.encode())
    foreign = [(b"host", b"cluster:8080"), (b"origin", b"http://evil.example")]
    found = [
        await refused(headers)
        for headers in ([], [key], PAGE, [*PAGE, key], foreign, [*live.ADMIN, *foreign])
    ]
    await sync_to_async(connections.close_all)()
    assert found == [(False, 4401), (False, 4403), (True, 4401), (True, 4403), (False, 4401), (False, 4403)]


ENDS: dict[str, Callable[[Any], Any]] = {
    "signed out": lambda user: Client.logout,
    "deactivated": lambda user: get_user_model().objects.filter(pk=user.pk).update(is_active=False),
    "password changed": lambda user: (user.set_password("y"), user.save()),
    "password to be changed": lambda user: InitialPassword.objects.create(user=user),
}


@pytest.mark.parametrize("how", ENDS)
async def test_a_session_that_ends_closes_its_sockets(
    tab: Open, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Asked again while the socket is open; 4401 sends the page to sign in."""
    monkeypatch.setattr(sockets, "CHECK_EVERY", 0.05)
    user, headers = await signed_in()
    page = await (await tab(headers=headers)).greeted()
    if how == "signed out":
        key = headers[-1][1].decode().removeprefix("sessionid=")
        await sync_to_async(_sign_out)(key)
    else:
        await sync_to_async(ENDS[how])(user)
    assert await page.closed() == 4401


def _sign_out(key: str) -> None:
    from django.contrib.sessions.backends.db import SessionStore

    SessionStore(key).flush()


@pytest.fixture
async def told(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    """What a web process hears from the database; nothing is looked at without that."""
    plain, heard = sockets.look_again, asyncio.Event()

    def look_again(whose: str = "") -> None:
        heard.set()
        plain(whose)

    monkeypatch.setattr(sockets, "look_again", look_again)
    monkeypatch.setattr(sockets, "CHECK_EVERY", 3600)
    listening = asyncio.create_task(gateway._listen(Hints()))
    await asyncio.wait_for(heard.wait(), 60)
    yield
    await cancel.end(listening)


async def test_an_access_that_ends_while_the_socket_opens_closes_it_at_once(
    tab: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it is among the open sockets no hint can reach it, and no timer does."""
    monkeypatch.setattr(sockets, "CHECK_EVERY", 3600)
    _, headers = await signed_in()
    key = headers[-1][1].decode().removeprefix("sessionid=")
    plain = sockets.LiveSocket.connect

    async def late(socket: sockets.LiveSocket) -> None:
        await sync_to_async(_sign_out)(key)
        await plain(socket)

    monkeypatch.setattr(sockets.LiveSocket, "connect", late)
    assert await (await tab(headers=headers)).closed() == 4401


ACCESS_ENDS: dict[str, Callable[[Any, str], Any]] = {
    "signed out": lambda user, key: _sign_out(key),
    "password changed": lambda user, key: passwords.change(user.pk, "x", "a-longer-sentence-9"),
    "password set in the admin": lambda user, key: (user.set_password("y"), user.save()),
    "deactivated": lambda user, key: get_user_model().objects.filter(pk=user.pk).update(is_active=False),
    "deleted": lambda user, key: get_user_model().objects.filter(pk=user.pk).delete(),
    "no admin any more": lambda user, key: (
        get_user_model().objects.filter(pk=user.pk).update(is_staff=False, is_superuser=False)
    ),
}


@pytest.mark.parametrize("how", ACCESS_ENDS)
async def test_the_end_of_an_access_closes_its_sockets_at_once(tab: Open, told: None, how: str) -> None:
    """Join, the edge: the database tells; somebody else's sockets stay open and are not even looked at."""
    user, headers = await signed_in()
    page = await (await tab(headers=headers)).greeted()
    await (await tab(headers=live.ADMIN)).greeted()
    scopes: list[Any] = [one.scope for one in sockets._open]
    (other,) = [scope for scope in scopes if scope["principal"] == principals.STATIC_ADMIN]
    other["principal_again"] = AsyncMock()
    key = headers[-1][1].decode().removeprefix("sessionid=")
    await sync_to_async(ACCESS_ENDS[how])(user, key)
    assert await page.closed() == (4403 if how == "no admin any more" else 4401)
    other["principal_again"].assert_not_awaited()


@pytest.mark.parametrize("how", ["revoked", "deleted"])
async def test_the_end_of_a_key_closes_its_sockets_at_once(tab: Open, told: None, how: str) -> None:
    """A program's socket is its key's."""
    user, _ = await signed_in()
    key, plain = await sync_to_async(principals.create_api_key)(user, "k")
    program = await (await tab(headers=[(b"x-api-key", plain.encode())])).greeted()
    keys = ApiKey.objects.filter(pk=key.pk)
    if how == "revoked":
        await sync_to_async(keys.update)(revoked_at=clock.now())
    else:
        await sync_to_async(keys.delete)()
    assert await program.closed() == 4401


async def test_many_sessions_that_end_at_once_are_one_notice(tab: Open, told: None) -> None:
    """Of thousands no one wants to be told one by one."""
    _, headers = await signed_in()
    page = await (await tab(headers=headers)).greeted()
    rows = [
        Session(session_key=f"{number:032}", session_data="", expire_date=clock.now())
        for number in range(101)
    ]
    await sync_to_async(Session.objects.bulk_create)(rows)
    await sync_to_async(Session.objects.all().delete)()
    assert await page.closed() == 4401


async def test_what_was_missed_while_no_one_listened_is_looked_at(
    tab: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection that hears the database may be cut: after each new one all sockets find out again."""
    monkeypatch.setattr(sockets, "CHECK_EVERY", 3600)
    user, headers = await signed_in()
    page = await (await tab(headers=headers)).greeted()
    await sync_to_async(get_user_model().objects.filter(pk=user.pk).update)(is_active=False)
    heard = asyncio.create_task(gateway._listen(Hints()))
    assert await page.closed() == 4401
    await cancel.end(heard)


async def test_a_revoked_key_and_a_lost_role_close_the_socket(
    tab: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program's key is looked at again too; who is no admin any more gets 4403."""
    monkeypatch.setattr(sockets, "CHECK_EVERY", 0.05)
    user, headers = await signed_in()
    key, plain = await sync_to_async(principals.create_api_key)(user, "k")
    program = await (await tab(headers=[(b"x-api-key", plain.encode())])).greeted()
    page = await (await tab(headers=headers)).greeted()
    await sync_to_async(ApiKey.objects.filter(pk=key.pk).update)(revoked_at=clock.now())
    assert await program.closed() == 4401
    users = get_user_model().objects.filter(pk=user.pk)
    await sync_to_async(users.update)(is_staff=False, is_superuser=False)
    assert await page.closed() == 4403


@pytest.mark.rule("A51", "O101")
async def test_a_tab_hears_that_lists_have_changed_and_how_the_check_stands(
    tab: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once, by a NOTIFY; the revision says when to read the lists again."""
    monkeypatch.setattr(watching, "LOOK_EVERY", 120.0)
    page = await (await tab()).greeted()
    await page.until(lambda: page.told("backends"))
    first = page.told("backends")[-1]
    assert (first["checked_at"], first["checking"], first["problems"]) == (None, False, {})
    await sync_to_async(upgrade_state.installed_changed)()
    await page.until(lambda: page.told("backends")[-1]["checking"])
    assert page.told("backends")[-1]["revision"] == first["revision"] + 1
    now = clock.now()
    mine = await sync_to_async(upgrade_state.claim)("x", now=now)
    assert mine is not None
    finish = sync_to_async(upgrade_state.finish)
    await finish(mine, {"minilm": Offered("2")}, problems={"local": "gone"}, galleries="", now=now)
    await page.until(lambda: not page.told("backends")[-1]["checking"])
    last = page.told("backends")[-1]
    assert (last["revision"], last["problems"]) == (first["revision"] + 2, {"local": "gone"})
    assert live.wrong_with(last) == []


@pytest.mark.rule("UW10", "UI-6.2")
async def test_a_tab_hears_that_rules_or_what_a_pass_made_of_them_have_changed(
    tab: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once for a rule that was set or deleted; with the next look for what a pass writes."""
    monkeypatch.setattr(watching, "LOOK_EVERY", 120.0)
    page = await (await tab()).greeted()
    await page.until(lambda: page.told("rules"))
    set_rule, record = sync_to_async(store.set_rule), sync_to_async(passes.record)
    await set_rule(Rule("m", min_replicas=1), clock.now())
    await page.until(lambda: len(page.told("rules")) == 2)
    (demand,) = await sync_to_async(passes.demands)()
    await record([Ruling("m", 1, 0, 0, "no node")], {"m": demand}, clock.now())
    await sync_to_async(events.notify)(events.NODES, "")  # as the next second would
    await page.until(lambda: len(page.told("rules")) == 3)
    await sync_to_async(store.delete_rule)("m", clock.now())
    await page.until(lambda: len(page.told("rules")) == 4)
    revisions = [told["revision"] for told in page.told("rules")]
    assert revisions[3] == revisions[0]
    assert len(set(revisions)) == 3
