"""Memory that loads reserve on nodes: a column of the node, and the rows of the loads.

`reserved_vram` of a node works as in the reference: a load adds to it, the next reading clears it, and until
then the end of the load or of its replica subtracts its amount (R1.51 to R1.54, R1.33). The rows of loads
hold the needed bytes until readings show them (`placement/memory.py`). Column and rows count the same bytes,
so the larger of both sums applies. The memory of an ended engine counts as free before the next reading shows
it (`credit_stopped_engine`).
"""

import logging
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from django.db import connection, transaction
from django.db.models import BigIntegerField, Case, ExpressionWrapper, F, Q, Value, When
from django.db.models.expressions import CombinedExpression
from django.db.models.functions import Greatest, Least

from nodes.decisions import fleet_cache
from nodes.models import BackendNode, NodeModel, Phase
from nodes.models.replica import NodeModelQuerySet
from nodes.placement.choose import Need
from nodes.placement.evict import Resident
from nodes.placement.memory import (
    CLOCK_TOLERANCE,
    FreeByGpu,
    Reservation,
    add_freed_memory,
    fill_gpus,
    is_in_reading,
    total_bytes,
)
from operations.changes import events

log = logging.getLogger(__name__)

_ZERO_BYTES = Value(0, BigIntegerField())
_UNREAD_FILTER = (
    Q(loaded_at__isnull=True)
    | Q(node__vram_read_at__isnull=True)
    | Q(loaded_at__gt=F("node__vram_read_at") - CLOCK_TOLERANCE)
)


@dataclass(frozen=True)
class GpuShare:
    """A GPU that an engine may use (its id on the worker), and the bytes that the engine may take of it."""

    id: str
    amount: int


@dataclass(frozen=True)
class MemoryReservation:
    """The memory that a load has reserved: the columns of its row, and the GPUs that its engine may see.

    Without GPUs the engine sees all GPUs: the node reports none, or no set of GPUs has enough memory for the
    load.
    """

    columns: Mapping[str, Any]
    gpus: tuple[GpuShare, ...] = ()
    is_tuned: bool = False
    """True if the engine may get the options that are tuned to the node."""


def reserve(node_id: UUID, amount: int, *, now: datetime) -> bool:
    """Reserve `amount` bytes of the node's memory; return False if they are not effectively free (R1.51)."""
    if amount <= 0:
        return True
    free_node = BackendNode.objects.filter(pk=node_id, available_vram__gte=F("reserved_vram") + amount)
    reserved_at = Greatest(F("reserved_at"), now)
    return bool(free_node.update(reserved_vram=F("reserved_vram") + amount, reserved_at=reserved_at))


_RELEASE_SQL = """
    WITH due AS (
        SELECT n.id, sum(r.amount) AS amount
        FROM unnest(%s::uuid[], %s::bigint[], %s::timestamptz[]) AS r(node_id, amount, since)
        JOIN backend_nodes n ON n.id = r.node_id
            AND (n.reserved_cleared_at IS NULL OR n.reserved_cleared_at < r.since)
        GROUP BY n.id
    ), locked AS (
        SELECT n.id, due.amount FROM backend_nodes n JOIN due USING (id)
        WHERE n.reserved_vram >= due.amount ORDER BY n.id FOR NO KEY UPDATE OF n
    )
    UPDATE backend_nodes n SET reserved_vram = n.reserved_vram - locked.amount
    FROM locked WHERE n.id = locked.id AND n.reserved_vram >= locked.amount
"""


def release(reservations: Iterable[tuple[UUID, int, datetime]]) -> None:
    """Subtract reserved bytes from the reserved memory of their nodes, in one statement (R1.52).

    A reservation is a node, its bytes and its time. Bytes that a later reading has cleared, and bytes beyond
    what a node has reserved, are not subtracted.
    """
    amounts = [reservation for reservation in reservations if reservation[1] > 0]
    if amounts:
        with connection.cursor() as cursor:
            cursor.execute(_RELEASE_SQL, [list(column) for column in zip(*amounts, strict=True)])


def fits_after_stops(node: BackendNode, need: Need, *, terminating: Collection[Resident]) -> bool:
    """Return True if the load fits when the replicas in `terminating` have freed their memory.

    Needs the node's lock.
    """
    fits = need.shares(*_after_stops(node, *_free(node), terminating), _needed(node, need)) is not None
    return fits and not need.lacks_card(node.total_vram)


def _needed(node: BackendNode, need: Need) -> int:
    # An engine takes its share of the card, whatever the node's budget.
    return need.vram_on(node.total_vram // max(len(node.gpus), 1))


def _free(node: BackendNode) -> tuple[int, FreeByGpu]:
    reservations = by_node(NodeModel.engines.filter(node=node)).get(node.pk, ())
    return fleet_cache.effectively_free_bytes(vars(node), reservations), fleet_cache.free_by_gpu(
        vars(node), reservations
    )


def _after_stops(
    node: BackendNode, free: int, free_by_gpu: FreeByGpu, terminating: Collection[Resident]
) -> tuple[int, FreeByGpu]:
    return add_freed_memory(
        free,
        free_by_gpu,
        [(replica.vram, replica.gpus) for replica in terminating],
        most=fleet_cache.max_free_bytes(vars(node)),
        gpu_totals=fleet_cache.gpu_totals(vars(node)),
    )


def reserve_for_load(
    node: BackendNode,
    need: Need,
    tuned: Need | None = None,
    *,
    now: datetime,
    terminating: Collection[Resident] = (),
) -> MemoryReservation | None:
    """Reserve a load's memory on the node and its GPUs; return None if the node lacks required memory.

    `tuned`: the need with the options tuned to the node, which replaces `need` if it fits. `terminating`:
    replicas that free their memory before the load uses its reservation. Needs the node's lock, so that no
    other load reserves memory and no reading arrives between the check and the write of the row.
    """
    free, free_by_gpu = _free(node)
    free_later, later = _after_stops(node, free, free_by_gpu, terminating)
    is_tuned = False
    if tuned is not None and tuned.shares(free_later, later, _needed(node, tuned)) is not None:
        need, is_tuned = tuned, True
    needed = _needed(node, need)
    shares = need.shares(free_later, later, needed)
    is_reported = max(node.total_vram, node.available_vram) > 0
    if need.lacks_card(node.total_vram) or (shares is None and need.requires_memory(is_reported=is_reported)):
        return None
    if shares is None and node.total_vram:
        # Without a GPU all models use the main memory, and there is nothing to report.
        log.warning("%s has too little free VRAM for a load that needs %d bytes", node.name, needed)
    # With GPUs that its definition names, it is unknown which of them it fills.
    expected = shares if shares is not None else {} if need.own_gpus else fill_gpus(later, needed)
    amount = total_bytes(shares or {}, needed)
    fits_after_stops = need.shares(free, free_by_gpu, needed) is not None and reserve(
        node.pk, amount, now=now
    )
    by_index = {gpu["index"]: gpu for gpu in node.gpus}
    columns = {
        "vram_needed": amount,
        "vram_on_node": fits_after_stops,
        "vram_seen": node.available_vram,
        "vram_seen_at": node.vram_read_at,
        "gpus": [_row(by_index[index], share) for index, share in expected.items()],
        # With memory that others still hold, or on GPUs that it may not keep to, its own part is unknown.
        "vram_alone": bool(shares or not expected)
        and not terminating
        and has_device_alone(node, shares or ()),
    }
    reserved = () if need.own_gpus else sorted((shares or {}).items())
    gpus = tuple(GpuShare(by_index[index]["uuid"] or str(index), share) for index, share in reserved)
    return MemoryReservation(columns, gpus, is_tuned=is_tuned)


def reserve_unknown(node: BackendNode) -> MemoryReservation:
    """Reserve nothing for a load whose need is unknown; its engine sees all GPUs. Needs the node's lock."""
    reading = {"vram_seen": node.available_vram, "vram_seen_at": node.vram_read_at}
    return MemoryReservation({**reading, "vram_alone": has_device_alone(node, ())}, is_tuned=True)


def note_ended_engines(node_ids: Collection[UUID]) -> None:
    """Record that an engine on these nodes has ended after their last readings; one statement.

    Must not run in the transaction that locks replicas. If the record is lost, a load may be measured against
    a reading that shows too little free memory; such a measurement counts only if it is plausible
    (`fit.apply_readings`).
    """
    stale = BackendNode.objects.filter(pk__in=node_ids, vram_read_at__isnull=False)
    stale = stale.exclude(returned_beside=F("vram_read_at")).order_by("id")
    with transaction.atomic():
        locked = stale.select_for_update(no_key=True).values("pk")
        BackendNode.objects.filter(pk__in=locked).update(returned_vram=0, returned_beside=F("vram_read_at"))


def has_device_alone(node: BackendNode, gpus: Collection[int]) -> bool:
    """Return True if no other engine uses these GPUs and no other load runs on the node.

    Without `gpus`, no other engine at all may run on the node. Needs the node's lock.
    """
    read_at = node.vram_read_at
    if read_at is None or node.returned_beside == read_at:
        return False
    others = NodeModel.engines.filter(node=node).values_list("phase", "loaded_at", "gpus")
    return all(
        phase == Phase.SERVING
        and is_in_reading(loaded_at, read_at)
        and gpus
        and used
        and not {gpu["index"] for gpu in used} & set(gpus)
        for phase, loaded_at, used in others
    )


def taken_since_load(row: NodeModel) -> int:
    """Return the bytes of GPU memory that the replica has taken since its load began; 0 if unknown.

    The number is known only if the load was alone on its GPUs, and no other load began on the node before the
    last reading. Without GPUs it is unknown if the node has a VRAM budget, which hides a part of the total.
    """
    node = row.node
    if not row.vram_alone or node.newest_load != row.pk:
        return 0
    if not row.gpus:
        return 0 if node.vram_budget_bytes else max(row.vram_seen - node.available_vram, 0)
    free: dict[int, int] = {gpu["index"]: gpu["free_vram"] for gpu in node.gpus}
    if any(gpu["index"] not in free for gpu in row.gpus):
        return 0
    taken: int = sum(gpu["seen"] - free[gpu["index"]] for gpu in row.gpus)
    return max(taken, 0)


def credit_stopped_engine(gone: NodeModel, *, stop_sent: datetime) -> None:
    """Count the memory of a stopped engine as free before a reading shows it.

    The engine ran until its stop was sent. The credit applies only to a reading that includes the engine:
    after the load, and before the stop by more than `CLOCK_TOLERANCE`. It is limited to the memory that the
    node uses, because the need of the engine may have been overestimated. Must not run in the transaction
    that locks replicas, because nodes are locked before replicas. If the credit is lost, the next reading
    corrects the free memory.
    """
    shows = Q(vram_read_at__gte=gone.loaded_at, vram_read_at__lt=stop_sent - CLOCK_TOLERANCE)
    beside = Case(When(returned_beside=F("vram_read_at"), then=F("returned_vram")), default=_ZERO_BYTES)
    with transaction.atomic():
        node = BackendNode.objects.filter(shows, pk=gone.node_id)
        if node.update(
            returned_vram=_limit_to_used(beside + gone.vram_needed), returned_beside=F("vram_read_at")
        ):
            events.notify(events.NODES, str(gone.node_id))


def _limit_to_used(returned: CombinedExpression) -> Case:
    """Limit `returned` to the bytes that the reading shows as used, if the total memory is known."""
    amount = ExpressionWrapper(returned, BigIntegerField())
    used = ExpressionWrapper(F("total_vram") - F("available_vram"), BigIntegerField())
    return Case(When(total_vram__gt=0, then=Greatest(Least(amount, used), _ZERO_BYTES)), default=amount)


def _row(gpu: Mapping[str, Any], share: int) -> dict[str, Any]:
    return {"index": gpu["index"], "uuid": gpu["uuid"], "bytes": share, "seen": gpu["free_vram"]}


def by_node(rows: NodeModelQuerySet) -> dict[UUID, list[Reservation]]:
    """Return the reservations of `rows` by node; one query.

    A node is left out if its reading shows all of them.
    """
    unread = NodeModel.engines.filter(_UNREAD_FILTER, vram_needed__gt=0).values("node")
    reservations: defaultdict[UUID, list[Reservation]] = defaultdict(list)
    reserving = rows.filter(node__in=unread, vram_needed__gt=0).values_list(
        "node_id", *fleet_cache.RESERVATION_COLUMNS
    )
    for node_id, *columns in reserving:
        reservations[node_id].append(fleet_cache.reservation(*columns))
    return reservations


def shown_gpus(node: Mapping[str, Any], reservations: Sequence[Reservation]) -> list[dict[str, Any]]:
    """Return the GPUs of the node, each with the bytes that loads have reserved on it."""
    reserved = fleet_cache.reserved_on_gpus(node, reservations)
    return [gpu | {"reserved_vram": max(reserved[gpu["index"]], 0)} for gpu in node["gpus"]]
