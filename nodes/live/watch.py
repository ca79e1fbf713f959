"""The feed of nodes and notices: each web process reads the rows once for all its watchers.

It runs only while there are watchers. A NOTIFY wakes it, and it polls every second without one, because
heartbeats and in-flight counts send none. A watcher has no queue but a position in the history: a slow
watcher gets the changes that it missed as one change, or a new snapshot, so it costs no memory. While the
database cannot be read, all watchers keep their data, and a notice states its age.

Numbered changes are stored for a while for watchers who reconnect. The position of a watcher is a cursor,
`<epoch>:<number>`. Each process has its own epoch, because the numbers of another process have no meaning in
it. The changes that a watcher missed are sent as one change.
"""

import asyncio
import contextlib
import logging
import secrets
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import redis.asyncio
from channels.db import database_sync_to_async
from django.conf import settings
from django.db import Error as DatabaseError

from localai_cluster.kit import cancellation, clock, conf, disk, periodic
from localai_cluster.web import page
from localai_cluster.web.sockets import Scope, encode_message, query_text
from nodes.backends import upgrade_state
from nodes.definitions import rows as definitions
from nodes.live import rows, shapes
from nodes.live.notices import (
    ClusterFacts,
    Notice,
    active_notices,
    database_notice,
    disk_notices,
)
from nodes.live.rows import LiveNode, RawNode, render
from nodes.registry import mass_silence
from nodes.scheduling import store as rules
from operations.changes import events, feed
from operations.executor import controllers

Patch = dict[str, Any]
"""Changed keys of one node, with its id."""

HISTORY_SECONDS = 120.0
"""Seconds for which changes are stored for watchers that reconnect."""
MAX_HISTORY_CHANGES = 1000
"""Maximum number of stored changes."""
MAX_HISTORY_PATCHES = 50_000
"""Maximum number of node patches in all stored changes, which limits the memory for large fleets."""


@dataclass(frozen=True)
class FleetChange:
    """A numbered change from one snapshot to the next: patches by node, and ids of removed nodes."""

    number: int
    at: float
    patches: dict[str, Patch] = field(default_factory=dict)
    removed: frozenset[str] = frozenset()

    @property
    def size(self) -> int:
        return len(self.patches) + len(self.removed)


@dataclass(frozen=True)
class FleetDifference:
    """The differences between a new snapshot and the last accepted one."""

    rows: dict[str, RawNode]
    nodes: dict[str, LiveNode]
    patches: dict[str, Patch]
    removed: frozenset[str]


def _make_patch(node: str, before: LiveNode | None, now: LiveNode) -> Patch:
    """Return a node's changed keys: all keys for a new node, {} if no key has changed."""
    if before is None:
        return now
    changed = {key: value for key, value in now.items() if value != before[key]}
    return {"id": node} | changed if changed else {}


class History:
    """The nodes of the last accepted snapshot, and the latest changes."""

    def __init__(self, epoch: str) -> None:
        self.epoch = epoch
        self.number = 0
        self.nodes: dict[str, LiveNode] = {}
        self._raw: dict[str, RawNode] = {}
        self._kept: deque[FleetChange] = deque()
        self._size = 0

    @property
    def cursor(self) -> str:
        """Cursor of a watcher that has received every change."""
        return f"{self.epoch}:{self.number}"

    def compare(self, rows: dict[str, RawNode]) -> FleetDifference:
        """Return how the rows differ from the last accepted snapshot. Thread-safe: it changes nothing."""
        raw_before, before = self._raw, self.nodes
        nodes, patches = {}, {}
        for node, raw in rows.items():
            if raw != raw_before.get(node):
                nodes[node] = now = render(raw)
                if patch := _make_patch(node, before.get(node), now):
                    patches[node] = patch
        return FleetDifference(rows, nodes, patches, frozenset(raw_before.keys() - rows.keys()))

    def accept(self, difference: FleetDifference, at: float) -> bool:
        """Accept the snapshot of this difference, read at the monotonic time `at`.

        Return True if a node has changed.
        """
        self._raw = difference.rows
        self.nodes.update(difference.nodes)
        for node in difference.removed:
            del self.nodes[node]
        self._drop_old_changes(at)
        change = FleetChange(self.number + 1, at, difference.patches, difference.removed)
        if not change.size:
            return False
        self.number = change.number
        self._kept.append(change)
        self._size += change.size
        self._drop_old_changes(at)
        return True

    def _drop_old_changes(self, at: float) -> None:
        while self._kept and (
            at - self._kept[0].at > HISTORY_SECONDS
            or len(self._kept) > MAX_HISTORY_CHANGES
            or self._size > MAX_HISTORY_PATCHES
        ):
            self._size -= self._kept.popleft().size

    def parse_cursor(self, cursor: str) -> int | None:
        """Return the number in the cursor if all later changes are stored, otherwise None."""
        epoch, _, number = cursor.partition(":")
        if epoch != self.epoch or not (number.isascii() and number.isdecimal() and len(number) <= 18):
            return None
        return int(number) if self.has_changes_after(int(number)) else None

    def has_changes_after(self, number: int) -> bool:
        """Return True if all changes after this number are still stored."""
        oldest = self._kept[0].number if self._kept else self.number + 1
        return oldest - 1 <= number <= self.number

    def since(self, number: int) -> tuple[list[Patch], list[str]]:
        """Merge the changes after this number into patches and ids of removed nodes."""
        patches: dict[str, Patch] = {}
        removed: set[str] = set()
        for change in self._kept:
            if change.number <= number:
                continue
            for node in change.removed:
                patches.pop(node, None)
                removed.add(node)
            for node, patch in change.patches.items():
                removed.discard(node)
                patches[node] = {**patches[node], **patch} if node in patches else patch
        return list(patches.values()), list(removed)


log = logging.getLogger(__name__)

POLL_SECONDS = 1.0
"""Seconds between two reads of the rows without a wake-up."""
GATHER_SECONDS = 0.2
"""Seconds for which further wake-ups are awaited before the rows are read."""
MIN_PAUSE_FACTOR = 4.0
"""Minimum pause between two reads, as a multiple of the duration of a read."""
PING_SECONDS = 5.0
"""Seconds between two pings of Redis."""
PING_TIMEOUT_SECONDS = 2.0
"""Seconds within which Redis must answer a ping."""
READ_TIMEOUT_SECONDS = 5.0
"""Seconds after which a read counts as failed. Its thread is still awaited."""


@dataclass(frozen=True)
class Snapshot:
    """The rows of one read."""

    nodes: dict[str, rows.RawNode]
    controllers: controllers.LastHeartbeats
    backends: upgrade_state.UpgradeCheckState
    rules: str
    """Revision of the scheduling rules, which changes with each change of them."""
    definitions: str = ""
    """Revision of the stored definitions, which changes with each change of them."""
    tasks_wait_since: datetime | None = None
    mass_hold: mass_silence.CurrentHold | None = None


def read_snapshot() -> Snapshot:
    """Read all rows of the feed in one database snapshot, with a constant number of queries."""
    with feed.shared_snapshot():
        tasks = periodic.waiting_since(now=clock.now())
        mass_hold, revision = mass_silence.current_hold(), rules.rules_revision()
        return Snapshot(
            rows.read_nodes(),
            controllers.last_heartbeats(),
            upgrade_state.read_state(),
            revision,
            definitions.definitions_revision(),
            tasks,
            mass_hold,
        )


async def ping_redis() -> bool:
    client = redis.asyncio.Redis.from_url(
        conf.cluster().redis_url,
        socket_timeout=PING_TIMEOUT_SECONDS,
        socket_connect_timeout=PING_TIMEOUT_SECONDS,
    )
    try:
        return bool(await client.ping())
    except (redis.RedisError, OSError, ValueError):
        return False
    finally:
        await client.aclose()


class NodeFeed:
    """Reads the rows while there are watchers, and gives each watcher the changes that it missed."""

    def __init__(
        self, read: Callable[[], Snapshot] = read_snapshot, ping: Callable[[], Awaitable[bool]] | None = None
    ) -> None:
        self._read, self._ping = read, ping
        self._unanswered = 0
        """Number of consecutive Redis pings without an answer."""
        self.history = History(secrets.token_hex(6))
        self.notices: list[Notice] = []
        self.revision_messages: dict[str, dict[str, Any]] = {}
        """Messages about changed lists, by message type."""
        self.watchers = 0
        self._running: asyncio.Task[None] | None = None
        self._turn = asyncio.Event()
        self._has_read = False
        """True once the running task has read the rows; state from before is stale."""
        self._as_of: datetime | None = None
        self._failing = False
        self._readable_since: datetime | None = None
        self._texts: dict[int | None, str] = {}
        self._disk: disk.DiskUsage | None = None

    async def follow(self, cursor: str = "") -> AsyncGenerator[str, None]:
        """Yield messages for a watcher at `cursor`, without end.

        The first message about nodes is sent even if there is no change. Close the iterator to stop watching.
        """
        async with self._count_watcher():
            position = self.history.parse_cursor(cursor) if cursor else None
            sent_notices: list[Notice] | None = None
            hints: dict[str, dict[str, Any]] = {}
            greeted = False
            while True:
                turn = self._turn
                if self._has_read and sent_notices is not self.notices:
                    sent_notices = self.notices
                    yield encode_message(shapes.NOTICES.of(notices=sent_notices))
                for kind, hint in self.revision_messages.items() if self._has_read else ():
                    if hints.get(kind) != hint:
                        hints[kind] = hint
                        yield encode_message(hint)
                if (
                    self._as_of is not None
                    and self._has_read
                    and (not greeted or position != self.history.number)
                ):
                    position = (
                        position
                        if position is not None and self.history.has_changes_after(position)
                        else None
                    )
                    message, position, greeted = self._message(position), self.history.number, True
                    yield message
                if turn is self._turn:
                    await turn.wait()

    def _message(self, position: int | None) -> str:
        """Return the message that brings a watcher at `position` up to date; None means a full snapshot.

        All watchers at one position get the same text.
        """
        if position not in self._texts:
            if position is None:
                nodes = list(self.history.nodes.values())
                message = shapes.NODES_SNAPSHOT.of(cursor=self.history.cursor, nodes=nodes)
            else:
                changed, removed = self.history.since(position)
                cursor = self.history.cursor
                message = shapes.NODES_DELTA.of(cursor=cursor, changed=changed, removed=removed)
            self._texts[position] = encode_message(message)
        return self._texts[position]

    @contextlib.asynccontextmanager
    async def _count_watcher(self) -> AsyncIterator[None]:
        self.watchers += 1
        if self._running is None:
            self._has_read, self._turn = False, asyncio.Event()
            self._running = asyncio.create_task(self._run(), name="node feed")
        try:
            yield
        finally:
            self.watchers -= 1
            if not self.watchers:
                running, self._running = self._running, None
                await cancellation.cancel_and_wait(running)

    async def _run(self) -> None:
        woken = asyncio.Event()
        hearing = asyncio.create_task(self._set_on_change(woken), name="node feed hears")
        pinging = asyncio.create_task(self._keep_pinging(), name="node feed pings")
        measuring = asyncio.create_task(self._keep_measuring(), name="node feed measures the disk")
        try:
            while True:
                began = clock.monotonic()
                woken.clear()
                await self._refresh()
                # An outage is over when it is over, however long the last look waited for its end.
                pause = 0.0 if self._failing else MIN_PAUSE_FACTOR * (clock.monotonic() - began)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(max(POLL_SECONDS, pause)):
                        await woken.wait()
                        await asyncio.sleep(max(GATHER_SECONDS, pause))
        finally:
            await cancellation.cancel_and_wait(hearing, pinging, measuring)

    async def _keep_pinging(self) -> None:
        self._unanswered = 0
        while self._ping is not None:
            self._unanswered = 0 if await self._ping() else self._unanswered + 1
            await asyncio.sleep(PING_SECONDS)

    async def _keep_measuring(self) -> None:
        while True:
            # In a thread: a disk that hangs must not hold up what else the pages are told.
            self._disk = await asyncio.to_thread(disk.current)
            await asyncio.sleep(disk.MAX_READING_AGE_SECONDS)

    @staticmethod
    async def _set_on_change(woken: asyncio.Event) -> None:
        async for _ in events.listen(events.NODES, upgrade_state.CHANNEL, rules.CHANNEL, definitions.CHANNEL):
            woken.set()

    async def _refresh(self) -> None:
        # In a thread, comparing included: that takes a quarter of a second for thousands of nodes.
        reading = asyncio.ensure_future(database_sync_to_async(self._compare, thread_sensitive=False)())
        try:
            if not (await asyncio.wait({reading}, timeout=READ_TIMEOUT_SECONDS))[0]:
                self._report_failure("no answer")
            self._apply(*await asyncio.shield(reading))
        except DatabaseError as error:
            self._report_failure(type(error).__name__)
        except Exception:
            # A defect; to stop looking would hide it from everyone who watches.
            log.exception("a look at the nodes failed")
            self._report_failure("internal error")
        finally:
            # A thread cannot be cancelled: who stops watching waits until it has given its connection back.
            await asyncio.wait({reading}, timeout=READ_TIMEOUT_SECONDS)

    def _compare(self) -> tuple[Snapshot, FleetDifference]:
        snapshot = self._read()
        return snapshot, self.history.compare(snapshot.nodes)

    def _apply(self, snapshot: Snapshot, difference: FleetDifference) -> None:
        now = clock.now()
        if self._failing:
            log.info("nodes are read again")
            self._failing, self._readable_since = False, now
        self._as_of = now
        moved = self.history.accept(difference, clock.monotonic())
        before, self.revision_messages = self.revision_messages, _revision_messages(snapshot)
        self._wake_watchers(
            active_notices(self._collect_facts(snapshot), conf.cluster(), now),
            moved,
            self.revision_messages != before,
        )

    def _collect_facts(self, snapshot: Snapshot) -> ClusterFacts:
        return ClusterFacts(
            controllers=snapshot.controllers,
            open_conflicts=sum(raw.open_conflicts for raw in snapshot.nodes.values()),
            weak_nodes=sum(node["weak_identity"] for node in self.history.nodes.values()),
            skewed_nodes=sum(bool(node["version_skew"]) for node in self.history.nodes.values()),
            readable_since=self._readable_since,
            tasks_wait_since=snapshot.tasks_wait_since,
            redis_away=self._unanswered > 1,
            mass_hold=snapshot.mass_hold,
            disk=self._disk,
        )

    def _report_failure(self, reason: str) -> None:
        if not self._failing:
            log.warning("nodes not read: %s; looking again", reason)
            self._failing = True
        other_notices = [
            notice for notice in self.notices if notice["id"] not in ("database-unreachable", "disk-full")
        ]
        self._wake_watchers([*disk_notices(self._disk), database_notice(self._as_of), *other_notices], False)

    def _wake_watchers(self, notices: list[Notice], moved: bool, has_messages: bool = False) -> None:
        """Wake the watchers if notices, nodes or other messages have changed."""
        has_news = moved or has_messages or not self._has_read or notices != self.notices
        if notices != self.notices:
            self.notices = notices
        if moved:
            self._texts.clear()
        self._has_read = True
        if has_news:
            turn, self._turn = self._turn, asyncio.Event()
            turn.set()


def _revision_messages(snapshot: Snapshot) -> dict[str, dict[str, Any]]:
    check_state = snapshot.backends
    backends = shapes.BACKENDS_CHANGED.of(
        revision=check_state.revision,
        checked_at=check_state.checked_at.isoformat() if check_state.checked_at else None,
        checking=check_state.checking,
        problems=dict(check_state.problems),
    )
    messages = (
        backends,
        shapes.RULES_CHANGED.of(revision=snapshot.rules),
        shapes.DEFINITIONS_CHANGED.of(revision=snapshot.definitions),
    )
    return {hint["type"]: hint for hint in messages}


_shared_feed: NodeFeed | None = None


def shared_feed() -> NodeFeed:
    """Return the node feed of this process."""
    global _shared_feed
    if _shared_feed is None:
        _shared_feed = NodeFeed(ping=ping_redis)
    return _shared_feed


ALIVE_SECONDS = 5.0
"""Seconds between two `alive` messages."""


def hello_message(scope: Scope) -> str:
    """Return the first message of a socket: the server's version and the authenticated user."""
    principal = scope["principal"]
    return encode_message(
        shapes.HELLO.of(
            at=clock.now().isoformat(),
            build=page.build_id(),
            version=str(settings.SPECTACULAR_SETTINGS["VERSION"]),
            user=shapes.FEED_USER.of(name=principal.name, role=principal.kind),
        )
    )


async def node_messages(scope: Scope) -> AsyncGenerator[str, None]:
    """Yield the messages about nodes and notices for one client."""
    async with contextlib.aclosing(shared_feed().follow(query_text(scope, "nodes"))) as messages:
        async for message in messages:
            yield message


async def alive_messages(scope: Scope) -> AsyncGenerator[str, None]:
    """Yield `alive` periodically, so that a page can distinguish a quiet cluster from a dead socket."""
    while True:
        await asyncio.sleep(ALIVE_SECONDS)
        yield encode_message(shapes.ALIVE.of(at=clock.now().isoformat()))
