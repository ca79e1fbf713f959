"""Inventory of each node: the backends on its worker's last list, with the age of that list.

No page waits for a worker. The row of a node stores when its list is due for a refresh (`inventory_due_at`;
null = at the next pass). All controllers claim due nodes: a claim moves the due time forward and skips rows
that another controller has locked, so one controller queries the node. No lock is held during the request,
and a reply never overwrites the reply to a later request (`inventory_at` is when the request was sent). Pages
that show an old list make the list due and wake a controller (`CHANNEL`).
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

from localai_cluster.accounts.actors import CONTROLLER
from localai_cluster.kit import backoff, clock, conf, names
from localai_cluster.kit.batching import CallBatcher
from localai_cluster.kit.leases import claim_rows, seconds_until_due, update_rows
from localai_cluster.kit.periodic_task import WorkPool
from localai_cluster.messaging.bus import Bus
from localai_cluster.messaging.messages import InstalledBackend, process_key
from localai_cluster.metrics import passes
from nodes.backends import intents, upgrade_state
from nodes.commands.commands import LIST_TIMEOUT, Worker
from nodes.commands.outcomes import BusDown, Done, NoResponders, Refused, StillRunning, Unreadable
from nodes.models import BackendNode, NodeBackend
from nodes.models.node import BackendNodeQuerySet
from nodes.placement.memory import CLOCK_TOLERANCE
from nodes.registry import mass_silence
from nodes.replicas.engines import end_unlisted
from nodes.replicas.evidence import Running
from operations.changes import events
from operations.executor.work import in_thread
from operations.models import storable


async def engines_of(worker: Worker) -> Running | None:
    """Request and return the engines that the worker lists (R4.32); None without a reply (R4.34)."""
    reply = await worker.running()
    if not isinstance(reply, Done):
        return None
    return {
        (process_key(model.model_id, model.replica_index), model.address.rpartition(":")[2])
        for model in reply.reply.models
    }


log = logging.getLogger(__name__)

CHANNEL = "cluster_inventory"
"""NOTIFY channel: a reader requested a list that is due."""
REFRESH_INTERVAL = 300.0
"""Seconds after which the list of a node is refreshed."""
POLL_INTERVAL = 30.0
"""Seconds between two passes over the due nodes when no wake-up arrives."""
PARALLEL = 16
MAX_BATCH = 256
"""Lists that are stored in one transaction, which bounds its locks and its memory."""
MAX_BACKENDS = 500
"""Maximum number of backends stored per node."""
SHORT_LIMIT = 5.0
"""Time limit in seconds of a list request for callers that cannot wait for the usual limit."""
_CLAIM_SECONDS = LIST_TIMEOUT + 5.0
_FIRST_PAUSE, _MAX_PAUSE = 5.0, 900.0
_WAKE_UP_GATHER_SECONDS = 0.2
"""Seconds for which wake-ups are collected into one pass."""
_MAX_ERROR_LENGTH = 255
_MAX_LENGTH_BY_COLUMN = {
    "name": 255,
    "installed_at": 64,
    "gallery_url": 2048,
    "version": 255,
    "uri": 2048,
    "digest": 255,
    "alias": 255,
}
_FLAG_COLUMNS = ("is_system", "is_meta")
COLUMNS = ("name", *_FLAG_COLUMNS, "installed_at", "gallery_url", "version", "uri", "digest", "alias", "size")
_MAX_SIZE = 2**63 - 1


@dataclass(frozen=True)
class InventoryReply:
    """A worker's reply, and the time when its request was sent.

    `asked` is the node as it was read for the request: if another caller has changed the due time since, the
    changed time stays, so the node is queried again.
    """

    asked: BackendNode
    listed: Sequence[InstalledBackend]
    asked_at: datetime


def contactable_nodes() -> BackendNodeQuerySet:
    """Return the nodes whose worker may be reachable: approved, not offline, not agents."""
    return BackendNode.objects.filter(node_type="backend", status__in=("healthy", "draining", "unhealthy"))


def claim(limit: int, *, now: datetime) -> list[BackendNode]:
    """Claim at most `limit` due nodes for this caller alone, the longest overdue first."""
    due = contactable_nodes().filter(Q(inventory_due_at__isnull=True) | Q(inventory_due_at__lte=now))
    until = now + timedelta(seconds=_CLAIM_SECONDS)
    longest_overdue = due.order_by(F("inventory_due_at").asc(nulls_first=True))
    nodes = claim_rows(
        longest_overdue.only("id", "name", "instance", "weak_identity"), limit=limit, inventory_due_at=until
    )
    for node in nodes:
        node.inventory_due_at = until
    return nodes


def next_due(*, now: datetime) -> float:
    """Return the seconds until a node is due, at most `POLL_INTERVAL`."""
    return seconds_until_due(contactable_nodes(), "inventory_due_at", now=now, at_most=POLL_INTERVAL)


def wake(node_ids: Sequence[UUID] | None = None, *, older_than: float, now: datetime) -> int:
    """Make the lists of these or all nodes due if older than `older_than` seconds; return their number.

    A node that is due soon is skipped, because its request may be running. A node whose last request failed
    becomes due soon, not at once.
    """
    soon = now + timedelta(seconds=_CLAIM_SECONDS)
    old = Q(inventory_at__isnull=True) | Q(inventory_at__lt=now - timedelta(seconds=older_than))
    stale = contactable_nodes().filter(old, inventory_due_at__gt=soon)
    if node_ids is not None:
        stale = stale.filter(pk__in=node_ids)
    when = Case(When(inventory_error="", then=Value(now)), default=Value(soon), output_field=_TIME_FIELD)
    with transaction.atomic():
        if woken := claim_rows(stale.order_by("id").only("id"), inventory_due_at=when):
            events.notify(CHANNEL, "")
    return len(woken)


_TIME_FIELD: "DateTimeField[Any, Any]" = DateTimeField()


def store(answers: Sequence[InventoryReply]) -> set[UUID]:
    """Replace the rows of these nodes by the lists of their workers, in a constant number of statements.

    Return the updated nodes: without removed nodes and without nodes that have a reply to a later request.
    """
    with transaction.atomic():
        nodes = _locked([answer.asked.id for answer in answers])
        accepted: dict[UUID, InventoryReply] = {}
        for answer in sorted(answers, key=lambda answer: answer.asked_at):
            node = nodes.get(answer.asked.id)
            if node is not None and not _is_superseded(node, answer.asked_at):
                accepted[node.id] = answer
        if not accepted:
            return set()
        changed = _replace({id: _rows(answer.listed) for id, answer in accepted.items()})
        if changed:
            upgrade_state.request_check_after_change()
        first = {id for id in accepted if nodes[id].inventory_at is None or nodes[id].inventory_error}
        if nodes_to_publish := changed | first:
            events.notify(events.NODES, *map(str, nodes_to_publish))
        for id, answer in accepted.items():
            node, at = nodes[id], answer.asked_at
            _set_next_due(node, answer.asked, at + timedelta(seconds=REFRESH_INTERVAL))
            node.inventory_at, node.inventory_error = at, ""
        update_rows([nodes[id] for id in accepted], ["inventory_at", "inventory_error", "inventory_due_at"])
    return set(accepted)


def store_error(query: BackendNode, error: str, *, asked_at: datetime, pause: float) -> bool:
    """Store the reason why there was no list; return False if a later request had a reply.

    The rows of backends do not change.
    """
    error = names.to_single_line(error[:_MAX_ERROR_LENGTH])
    with transaction.atomic():
        node = _locked([query.id]).get(query.id)
        if node is None or _is_superseded(node, asked_at):
            return False
        if node.inventory_error != error:
            events.notify(events.NODES, str(node.id))
        _set_next_due(node, query, asked_at + timedelta(seconds=pause))
        node.inventory_error = error
        update_rows([node], ["inventory_error", "inventory_due_at"])
    return True


def make_due(node_id: UUID, *, now: datetime) -> None:
    """Make the node's list due now."""
    with transaction.atomic():
        if contactable_nodes().filter(pk=node_id).update(inventory_due_at=now):
            events.notify(CHANNEL, "")


def _locked(ids: Collection[UUID]) -> dict[UUID, BackendNode]:
    rows = BackendNode.objects.filter(pk__in=ids).order_by("id")
    locked_rows = rows.select_for_update(no_key=True, of=("self",))
    return {
        node.id: node
        for node in locked_rows.only("id", "inventory_at", "inventory_error", "inventory_due_at")
    }


def _is_superseded(node: BackendNode, asked_at: datetime) -> bool:
    """Return True if the node has the reply to a later request, unless that is in the future.

    Then the clock of another controller is ahead, or this clock was set back.
    """
    return node.inventory_at is not None and asked_at < node.inventory_at <= clock.now()


def _set_next_due(node: BackendNode, query: BackendNode, due_at: datetime) -> None:
    """Set the next due time, unless another caller has changed it since the request was created."""
    if node.inventory_due_at == query.inventory_due_at:
        node.inventory_due_at = due_at


def _rows(listed: Sequence[InstalledBackend]) -> dict[str, dict[str, Any]]:
    """Return the rows by name, cut to the lengths of the columns.

    The result omits entries without a name and entries with the name of an earlier entry.
    """
    rows_by_name: dict[str, dict[str, Any]] = {}
    for entry in listed[:MAX_BACKENDS]:
        row = {name: storable(getattr(entry, name), length) for name, length in _MAX_LENGTH_BY_COLUMN.items()}
        if row["name"].strip():
            flags = {name: getattr(entry, name) for name in _FLAG_COLUMNS}
            rows_by_name.setdefault(row["name"], row | flags | {"size": min(max(entry.size, 0), _MAX_SIZE)})
    return rows_by_name


def _replace(desired: Mapping[UUID, dict[str, dict[str, Any]]]) -> set[UUID]:
    """Change the rows of these nodes to `desired`; return the nodes with changes."""
    current: dict[UUID, dict[str, dict[str, Any]]] = {id: {} for id in desired}
    pks: dict[tuple[UUID, str], Any] = {}
    for pk, node, *row in NodeBackend.objects.filter(node__in=desired).values_list("pk", "node_id", *COLUMNS):
        current[node][row[0]], pks[node, row[0]] = dict(zip(COLUMNS, row, strict=True)), pk
    removed = [(id, name) for id, rows in current.items() for name in rows if name not in desired[id]]
    changed = [
        NodeBackend(node_id=id, **row)
        for id, rows in desired.items()
        for name, row in rows.items()
        if current[id].get(name) != row
    ]
    if removed:
        NodeBackend.objects.filter(pk__in=[pks[key] for key in removed]).delete()
    if changed:
        NodeBackend.objects.bulk_create(
            changed, update_conflicts=True, unique_fields=["node", "name"], update_fields=list(COLUMNS[1:])
        )
    return {id for id, _ in removed} | {row.node_id for row in changed}


async def _store_batch(answers: Sequence[InventoryReply]) -> Sequence[bool]:
    updated_ids = await in_thread(store, answers)
    return [answer.asked.id in updated_ids for answer in answers]


_reply_batcher = CallBatcher(_store_batch, most=MAX_BATCH, one_by_one=(DatabaseError,))


async def request_list(bus: Bus, query: BackendNode, *, pause: float = _FIRST_PAUSE) -> bool:
    """Request one worker's list and store it; return True if it is stored.

    Without a list the node is due again after `pause` seconds. Raise DatabaseError.
    """
    asked_at, silence = clock.now(), ""
    worker = Worker(bus, str(query.id), query.name)
    answer = await worker.backends()
    match answer:
        case Done(reply):
            is_stored = await _reply_batcher.put(InventoryReply(query, reply.backends, asked_at))
            if query.weak_identity:
                await compare_replicas(bus, query.id, query.name)
            return is_stored
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
    await in_thread(store_error, query, problem, asked_at=asked_at, pause=pause)
    if silence:
        await in_thread(_handle_silence, query.id, silence, isinstance(answer, NoResponders))
    return False


def _handle_silence(node_id: UUID, reason: str, is_not_listening: bool) -> None:
    """Handle a request without a reply; `is_not_listening` is True if no worker received it."""
    now, limit = clock.now(), conf.cluster().node_stale_after
    if not is_not_listening or not mass_silence.release_silent_node(
        node_id, limit=limit, actor=CONTROLLER, now=now
    ):
        intents.record_failed_contact(node_id, reason, now=now)


async def compare_replicas(bus: Bus, node_id: UUID, node_name: str) -> bool:
    """Remove replicas that the worker, by its own report (`models.running`), does not run any more.

    Return False without a report.

    Registrations of stock workers do not report engines (nats.md §9.3), and the report of a command may be
    lost. If a worker does not support `models.running`, its replicas stay; inference requests detect dead
    engines.
    """
    asked_at = clock.now()
    running = await engines_of(Worker(bus, str(node_id), node_name))
    if running is None:
        return False
    retired = await in_thread(end_unlisted, node_id, running, before=asked_at - CLOCK_TOLERANCE)
    if retired:
        log.info("node %s does not run these any more: %s", node_name, ", ".join(retired))
    return True


async def refresh(bus: Bus, node: BackendNode) -> bool:
    """Update one node's list after a change. Never raise, and take at most `SHORT_LIMIT` seconds.

    Return True if the list was updated. Otherwise the list is due at once.
    """
    with contextlib.suppress(DatabaseError):
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SHORT_LIMIT):
                if await request_list(bus, node):
                    return True
        await in_thread(make_due, node.id, now=clock.now())
    return False


class Inventory(WorkPool[BackendNode]):
    """Queries the due nodes of a controller."""

    def __init__(self, bus: Bus) -> None:
        super().__init__(
            "inventory",
            parallel=PARALLEL,
            interval=POLL_INTERVAL,
            gather=_WAKE_UP_GATHER_SECONDS,
            retry_on=(DatabaseError,),
        )
        self._bus = bus
        self._silent: dict[UUID, tuple[str, int]] = {}
        """The number of failed requests in a row, by node, for one process (`instance`) of its worker."""

    async def claim_due(self, limit: int) -> Sequence[BackendNode]:
        """Claim due nodes while the bus is connected."""
        if not self._bus.connected:
            return []
        with passes.count_pass("inventory"):
            return await in_thread(claim, limit, now=clock.now())

    async def next_due(self) -> float:
        """Return the seconds until a node is due, or until the connection is checked again."""
        if not self._bus.connected:
            return 1.0
        return await in_thread(next_due, now=clock.now())

    async def run_item(self, item: BackendNode) -> None:
        """Query one node."""
        try:
            instance, times = self._silent.get(item.id, ("", 0))
            times = times if instance == item.instance else 0
            pause = backoff.delay(times + 1, first=_FIRST_PAUSE, longest=_MAX_PAUSE)
            if await request_list(self._bus, item, pause=pause):
                self._silent.pop(item.id, None)
            else:
                self._silent[item.id] = (item.instance, times + 1)
                self.wake()  # to see when it is due again
        except DatabaseError as error:
            log.warning("the list of backends of %s was not kept: %s", item.name, error)
