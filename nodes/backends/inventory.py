"""What is installed on each node: a worker is asked for its list, the rows keep the last one with its age.

No page waits for a worker. A row says when its node is to be asked again
(`inventory_due_at`; null = as soon as somebody looks). Any number of controllers look at what is due: the
claim moves that time forward and skips rows that another one holds, so a node is asked by one of them. No
lock is held over the question, and an answer never overwrites one to a later question (`inventory_at` is
when the question left). Pages that show an old list make it due and wake a controller (`CHANNEL`).
"""

import asyncio
import contextlib
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, assert_never
from uuid import UUID

from django.db import Error as DatabaseError
from django.db import transaction
from django.db.models import Case, DateTimeField, F, Q, Value, When

from localai_cluster import clock, conf, names
from localai_cluster.accounts.actors import CONTROLLER
from localai_cluster.messaging.bus import Bus
from localai_cluster.messaging.messages import InstalledBackend
from localai_cluster.metrics import passes
from nodes.backends import intents, upgrade_state
from nodes.backends.commands import LIST_TIMEOUT, Worker
from nodes.backends.outcomes import BusDown, Done, NoResponders, Refused, StillRunning, Unreadable
from nodes.backends.processes import engines_of
from nodes.backends.together import Together
from nodes.models import BackendNode, NodeBackend
from nodes.models.node import BackendNodeQuerySet
from nodes.registry import mass_silence
from nodes.replicas.retire import retire_unlisted
from operations.changes import events
from operations.executor.work import in_thread
from operations.ledger.progress import update

log = logging.getLogger(__name__)

CHANNEL = "cluster_inventory"
"""NOTIFY channel: somebody wants to see a list that is old."""
EVERY = 300.0
"""Seconds after which a list is asked for again."""
LOOK_EVERY = 30.0
"""Seconds between two looks at what is due when no hint arrives."""
PARALLEL = 16
MOST = 500
"""Backends kept of one node."""
QUICK = 5.0
"""How long something that has better to do waits for a list, in seconds."""
_CLAIMED_FOR = LIST_TIMEOUT + 5.0
_FIRST_PAUSE, _LONGEST_PAUSE = 5.0, 900.0
_GATHER = 0.2
"""Hints of so many seconds are one look."""
_ERROR_LENGTH = 255
_LENGTHS = {
    "name": 255,
    "installed_at": 64,
    "gallery_url": 2048,
    "version": 255,
    "uri": 2048,
    "digest": 255,
    "alias": 255,
}
_FLAGS = ("is_system", "is_meta")
COLUMNS = ("name", *_FLAGS, "installed_at", "gallery_url", "version", "uri", "digest", "alias")


@dataclass(frozen=True)
class Question:
    """A node that is to be asked: its worker process, and when it was due at the time of asking."""

    id: UUID
    name: str
    instance: str
    stock: bool
    due_at: datetime | None


@dataclass(frozen=True)
class Listed:
    """What a worker listed, and when the question left."""

    asked: Question
    listed: Sequence[InstalledBackend]
    asked_at: datetime


def askable() -> BackendNodeQuerySet:
    """Nodes whose worker may be there: approved, not offline, no agents."""
    return BackendNode.objects.filter(node_type="backend", status__in=("healthy", "draining", "unhealthy"))


def question(node: BackendNode) -> Question:
    """What is to be asked of one node out of turn.

    A due time that was moved since the node was read stays: then it is asked once more.
    """
    return Question(node.id, node.name, node.instance, node.weak_identity, node.inventory_due_at)


def claim(limit: int, *, now: datetime) -> list[Question]:
    """Nodes that are due, at most `limit`, for this caller alone; the longest waiting first."""
    due = askable().filter(Q(inventory_due_at__isnull=True) | Q(inventory_due_at__lte=now))
    until = now + timedelta(seconds=_CLAIMED_FOR)
    with transaction.atomic():
        # Rows that somebody holds are skipped, so the order of the locks does not matter.
        order = F("inventory_due_at").asc(nulls_first=True)
        rows = due.order_by(order).select_for_update(no_key=True, skip_locked=True, of=("self",))
        found = list(rows.values_list("id", "name", "instance", "weak_identity")[:limit])
        if found:
            BackendNode.objects.filter(pk__in=[row[0] for row in found]).update(inventory_due_at=until)
    return [Question(*row, until) for row in found]


def next_due(*, now: datetime) -> float:
    """Seconds until a node is due, `LOOK_EVERY` at most."""
    order = F("inventory_due_at").asc(nulls_first=True)
    first = list(askable().order_by(order).values_list("inventory_due_at", flat=True)[:1])
    if not first:
        return LOOK_EVERY
    # Null is due: nodes may be left over when there were more than could be asked at once.
    return 0.0 if first[0] is None else min(max((first[0] - now).total_seconds(), 0.0), LOOK_EVERY)


def wake(node_ids: Sequence[UUID] | None = None, *, older_than: float, now: datetime) -> int:
    """Makes lists older than `older_than` seconds due, of these nodes or of all; answers how many.

    A node that is due soon is left alone: it may be being asked. One that did not answer becomes due soon.
    """
    soon = now + timedelta(seconds=_CLAIMED_FOR)
    old = Q(inventory_at__isnull=True) | Q(inventory_at__lt=now - timedelta(seconds=older_than))
    stale = askable().filter(old, inventory_due_at__gt=soon)
    if node_ids is not None:
        stale = stale.filter(pk__in=node_ids)
    with transaction.atomic():
        rows = stale.order_by("id").select_for_update(no_key=True, skip_locked=True, of=("self",))
        if found := list(rows.values_list("id", flat=True)):
            when = Case(When(inventory_error="", then=Value(now)), default=Value(soon), output_field=_TIME)
            BackendNode.objects.filter(pk__in=found).update(inventory_due_at=when)
            events.notify(CHANNEL, "")
    return len(found)


_TIME: "DateTimeField[Any, Any]" = DateTimeField()


def store(answers: Sequence[Listed]) -> set[UUID]:
    """Makes the rows of these nodes what their workers listed; a constant number of statements.

    Answers the nodes for which it did: not those that are gone, nor one whose later answer came first.
    """
    with transaction.atomic():
        nodes = _locked([answer.asked.id for answer in answers])
        taken: dict[UUID, Listed] = {}
        for answer in sorted(answers, key=lambda one: one.asked_at):
            node = nodes.get(answer.asked.id)
            if node is not None and not _overtaken(node, answer.asked_at):
                taken[node.id] = answer
        if not taken:
            return set()
        changed = _replace({id: _rows(answer.listed) for id, answer in taken.items()})
        if changed:
            upgrade_state.installed_changed()
        first = {id for id in taken if nodes[id].inventory_at is None or nodes[id].inventory_error}
        if told := changed | first:
            events.notify(events.NODES, *map(str, told))
        for id, answer in taken.items():
            node, at = nodes[id], answer.asked_at
            _next_look(node, answer.asked, at + timedelta(seconds=EVERY))
            node.inventory_at, node.inventory_error = at, ""
        update([nodes[id] for id in taken], ["inventory_at", "inventory_error", "inventory_due_at"])
    return set(taken)


def store_error(asked: Question, error: str, *, asked_at: datetime, pause: float) -> bool:
    """Notes why there was no answer, unless there was one to a later question; the rows stay as they are."""
    error = names.plain(error[:_ERROR_LENGTH])
    with transaction.atomic():
        node = _locked([asked.id]).get(asked.id)
        if node is None or _overtaken(node, asked_at):
            return False
        if node.inventory_error != error:
            events.notify(events.NODES, str(node.id))
        _next_look(node, asked, asked_at + timedelta(seconds=pause))
        node.inventory_error = error
        update([node], ["inventory_error", "inventory_due_at"])
    return True


def make_due(node_id: UUID, *, now: datetime) -> None:
    """The node is to be asked at once."""
    with transaction.atomic():
        if askable().filter(pk=node_id).update(inventory_due_at=now):
            events.notify(CHANNEL, "")


def _locked(ids: Collection[UUID]) -> dict[UUID, BackendNode]:
    rows = BackendNode.objects.filter(pk__in=ids).order_by("id")
    found = rows.select_for_update(no_key=True, of=("self",))
    return {node.id: node for node in found.only("id", "inventory_at", "inventory_error", "inventory_due_at")}


def _overtaken(node: BackendNode, asked_at: datetime) -> bool:
    return node.inventory_at is not None and node.inventory_at > asked_at


def _next_look(node: BackendNode, asked: Question, due_at: datetime) -> None:
    """A due time that somebody has set since the question counts."""
    if node.inventory_due_at == asked.due_at:
        node.inventory_due_at = due_at


def _rows(listed: Sequence[InstalledBackend]) -> dict[str, dict[str, Any]]:
    """By name, cut to the columns; what has no name, or the name of an earlier one, is left out."""
    found: dict[str, dict[str, Any]] = {}
    for entry in listed[:MOST]:
        row = {name: _kept(getattr(entry, name))[:length] for name, length in _LENGTHS.items()}
        if row["name"].strip():
            found.setdefault(row["name"], row | {name: getattr(entry, name) for name in _FLAGS})
    return found


def _kept(text: str) -> str:
    """The text as a column can keep it."""
    return text.replace("\x00", "\ufffd")


def _replace(wanted: Mapping[UUID, dict[str, dict[str, Any]]]) -> set[UUID]:
    """Brings the rows of these nodes to `wanted`; answers the nodes where anything changed."""
    known: dict[UUID, dict[str, dict[str, Any]]] = {id: {} for id in wanted}
    pks: dict[tuple[UUID, str], Any] = {}
    for pk, node, *row in NodeBackend.objects.filter(node__in=wanted).values_list("pk", "node_id", *COLUMNS):
        known[node][row[0]], pks[node, row[0]] = dict(zip(COLUMNS, row, strict=True)), pk
    gone = [(id, name) for id, rows in known.items() for name in rows if name not in wanted[id]]
    changed = [
        NodeBackend(node_id=id, **row)
        for id, rows in wanted.items()
        for name, row in rows.items()
        if known[id].get(name) != row
    ]
    if gone:
        NodeBackend.objects.filter(pk__in=[pks[one] for one in gone]).delete()
    if changed:
        NodeBackend.objects.bulk_create(
            changed, update_conflicts=True, unique_fields=["node", "name"], update_fields=list(COLUMNS[1:])
        )
    return {id for id, _ in gone} | {row.node_id for row in changed}


async def _store_together(answers: Sequence[Listed]) -> None:
    await in_thread(store, answers)


_answers = Together(_store_together)


async def ask(bus: Bus, asked: Question, *, pause: float = _FIRST_PAUSE) -> bool:
    """Asks one worker and keeps what it says; answers whether it gave a list.

    Without one the node is due again after `pause` seconds. Raises DatabaseError.
    """
    asked_at, silence = clock.now(), ""
    worker = Worker(bus, str(asked.id), asked.name)
    answer = await worker.backends()
    match answer:
        case Done(reply):
            await _answers.put(Listed(asked, reply.backends, asked_at))
            if asked.stock:
                await compare_replicas(bus, asked.id, asked.name)
            return True
        case Refused(reason):
            problem = f"the worker cannot read its backends: {reason}"
        case NoResponders(reason) | StillRunning(reason):
            problem = "the worker is not responding"
            silence = reason if worker.is_settled else ""
        case BusDown(reason):
            problem = reason
        case Unreadable(reason):
            problem = f"the worker's list cannot be read: {reason}"
        case _:
            assert_never(answer)
    await in_thread(store_error, asked, problem, asked_at=asked_at, pause=pause)
    if silence:
        await in_thread(_not_reached, asked.id, silence, isinstance(answer, NoResponders))
    return False


def _not_reached(node_id: UUID, reason: str, deaf: bool) -> None:
    """Act on a question that the worker did not answer; `deaf` if nothing listened for it."""
    now, limit = clock.now(), conf.cluster().node_stale_after
    if not deaf or not mass_silence.give_up(node_id, limit=limit, actor=CONTROLLER, now=now):
        intents.contact_failed(node_id, reason, now=now)


async def compare_replicas(bus: Bus, node_id: UUID, node_name: str) -> None:
    """Removes replicas that a worker no longer runs, by its own word (`models.running`).

    Registrations of stock workers do not say (nats.md §9.3), and the report of a command may be lost. A
    worker that does not know the question keeps its replicas; requests find out which of them are dead.
    """
    asked_at = clock.now()
    running = await engines_of(Worker(bus, str(node_id), node_name))
    if running is None:
        return
    gone = await in_thread(retire_unlisted, node_id, running, before=asked_at)
    if gone:
        log.info("node %s does not run these any more: %s", node_name, ", ".join(gone))


async def refresh(bus: Bus, node: BackendNode) -> bool:
    """Brings one node's list up to date after something was done there; never fails, never takes long.

    Answers whether it did. What could not be done now is due at once.
    """
    with contextlib.suppress(DatabaseError):
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(QUICK):
                if await ask(bus, question(node)):
                    return True
        await in_thread(make_due, node.id, now=clock.now())
    return False


class Inventory:
    """A controller's part: asks the nodes that are due, at most `PARALLEL` at once."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._look = asyncio.Event()
        self._asking = 0
        self._silent: dict[UUID, tuple[str, int]] = {}
        """How often in a row the worker process of a node gave no list."""

    def hint(self) -> None:
        """Something may be due; look now."""
        self._look.set()

    async def run(self) -> None:
        """Looks when it is told, when something is due, and every `LOOK_EVERY` seconds, until cancelled."""
        async with asyncio.TaskGroup() as group:
            while True:
                self._look.clear()
                pause = await self._look_once(group)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause):
                        await self._look.wait()
                await asyncio.sleep(_GATHER)

    async def _look_once(self, group: asyncio.TaskGroup) -> float:
        """Starts the questions that are due; answers after how many seconds there is more to do."""
        free = PARALLEL - self._asking
        if free <= 0 or not self._bus.connected:
            return LOOK_EVERY if free <= 0 else 1.0
        try:
            with passes.counted("inventory"):
                for asked in await in_thread(claim, free, now=clock.now()):
                    self._asking += 1
                    group.create_task(self._ask(asked), name=f"inventory of {asked.name}")
                return await in_thread(next_due, now=clock.now())
        except DatabaseError as error:
            log.warning("cannot see which lists of backends are due: %s", error)
            return LOOK_EVERY

    async def _ask(self, asked: Question) -> None:
        try:
            instance, times = self._silent.get(asked.id, ("", 0))
            times = times if instance == asked.instance else 0
            pause = min(_FIRST_PAUSE * 2 ** min(times, 10), _LONGEST_PAUSE)
            if await ask(self._bus, asked, pause=pause):
                self._silent.pop(asked.id, None)
            else:
                self._silent[asked.id] = (asked.instance, times + 1)
                self._look.set()  # to see when it is due again
        except DatabaseError as error:
            log.warning("the list of backends of %s was not kept: %s", asked.name, error)
        finally:
            if self._asking == PARALLEL:
                self._look.set()
            self._asking -= 1
