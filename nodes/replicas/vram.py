"""Memory that loads reserve on nodes: the column of the node, and beside it the rows of the loads.

`reserved_vram` of a node is the reference's: a load adds to it, a load that ends without a replica takes its
share back, and the next reading clears it (R1.51 to R1.54, R1.33). The rows of loads say what is needed until
readings show it (`placement/reservations.py`). Both are about the same bytes, so the larger one counts. What
an engine gives back counts as free until the next reading (`credit`).
"""

import logging
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from django.db import transaction
from django.db.models import BigIntegerField, Case, ExpressionWrapper, F, Q, Value, When
from django.db.models.expressions import CombinedExpression
from django.db.models.functions import Greatest, Least

from nodes.models import BackendNode, NodeModel
from nodes.models.replica import NodeModelQuerySet
from nodes.placement.choose import Need
from nodes.placement.evict import Resident
from nodes.placement.gpus import Rooms, Shares, filled, fit, given_back, total
from nodes.placement.reservations import NEVER, MemoryReading, Reservation, on_gpu, outstanding
from operations.changes import events

log = logging.getLogger(__name__)

_CLOCKS_DIFFER = timedelta(seconds=1)
_ZERO = Value(0, BigIntegerField())
_UNREAD = (
    Q(loaded_at__isnull=True) | Q(node__vram_read_at__isnull=True) | Q(loaded_at__gt=F("node__vram_read_at"))
)
RESERVING = ("vram_needed", "vram_seen", "vram_seen_at", "loaded_at", "gpus")
"""What `reservation` needs of a replica's row, in this order."""


@dataclass(frozen=True)
class GpuShare:
    """A GPU that an engine is given, by what its worker knows it by, and the bytes that it may take there."""

    id: str
    amount: int


@dataclass(frozen=True)
class Taken:
    """What a load has reserved: the columns of its row, and the only GPUs that its engine may see.

    No GPUs: all of them, because its node does not tell them or the load fits on no set of them.
    """

    columns: Mapping[str, Any]
    gpus: tuple[GpuShare, ...] = ()


def reserve(node_id: UUID, amount: int, *, now: datetime) -> bool:
    """R1.51: adds to the node's column if that much is effectively free; False and nothing written if not."""
    if amount <= 0:
        return True
    roomy = BackendNode.objects.filter(pk=node_id, available_vram__gte=F("reserved_vram") + amount)
    moved = Greatest(F("reserved_at"), now)
    return bool(roomy.update(reserved_vram=F("reserved_vram") + amount, reserved_at=moved))


def release(node_id: UUID, amount: int, *, since: datetime) -> None:
    """R1.52: takes back what was reserved at `since`, unless a reading after that has cleared it already."""
    if amount <= 0:
        return
    there = Q(vram_read_at__isnull=True) | Q(vram_read_at__lt=since)
    holding = BackendNode.objects.filter(there, pk=node_id, reserved_vram__gte=amount)
    holding.update(reserved_vram=F("reserved_vram") - amount)


def fits(node: BackendNode, need: Need, *, soon: Collection[Resident]) -> bool:
    """Whether a load finds its memory when these have given theirs back; needs the node's lock, as `take`."""
    return fit(*_when_gone(*_free(node, need), soon), need.vram) is not None


def _free(node: BackendNode, need: Need) -> tuple[int, Rooms]:
    reservations = by_node(NodeModel.engines.filter(node=node)).get(node.pk, ())
    rooms = frozenset() if need.own_gpus else rooms_of(vars(node), reservations)
    return effectively_free(vars(node), reservations), rooms


def _when_gone(free: int, rooms: Rooms, soon: Collection[Resident]) -> tuple[int, Rooms]:
    for one in soon:
        free, rooms = free + one.vram, given_back(rooms, one.gpus)
    return free, rooms


def take(node: BackendNode, need: Need, *, now: datetime, soon: Collection[Resident] = ()) -> Taken | None:
    """Reserves what a load needs, on the node and on its GPUs; None if the node lacks what is required.

    `soon`: replicas whose memory will be given back before the load uses what it reserves.
    Needs the node's lock: then nobody else reserves, and no reading comes, between the look and the row.
    """
    free, rooms = _free(node, need)
    free_later, later = _when_gone(free, rooms, soon)
    shares = fit(free_later, later, need.vram)
    if shares is None and need.vram_required:
        return None
    if shares is None and node.total_vram:
        # Without a GPU all models use the main memory, and there is nothing to be said.
        log.warning("%s has too little free VRAM for a load that needs %d bytes", node.name, need.vram)
    expected = filled(later, need.vram) if shares is None else shares
    amount = total(shares or {}, need.vram)
    fits = fit(free, rooms, need.vram) is not None and reserve(node.pk, amount, now=now)
    by_index = {one["index"]: one for one in node.gpus}
    columns = {
        "vram_needed": amount,
        "vram_on_node": fits,
        "vram_seen": node.available_vram,
        "vram_seen_at": node.vram_read_at,
        "gpus": [_row(by_index[index], share) for index, share in expected.items()],
    }
    return Taken(columns, _given(by_index, shares or {}))


def credit(gone: NodeModel, *, stop_sent: datetime) -> None:
    """An engine that ran until its stop was sent has gone: what it needed is free before a reading says so.

    Only beside a reading that shows the engine: from after its load, and from before the stop, by more than
    clocks differ; and no more than the node has, for it may have been estimated larger. Not in the
    transaction that locks replicas, for nodes are locked before them; if it is lost the next reading makes up
    for it.
    """
    shows = Q(vram_read_at__gte=gone.loaded_at, vram_read_at__lt=stop_sent - _CLOCKS_DIFFER)
    beside = Case(When(returned_beside=F("vram_read_at"), then=F("returned_vram")), default=_ZERO)
    with transaction.atomic():
        node = BackendNode.objects.filter(shows, pk=gone.node_id)
        if node.update(returned_vram=_at_most(beside + gone.vram_needed), returned_beside=F("vram_read_at")):
            events.notify(events.NODES, str(gone.node_id))


def _at_most(returned: CombinedExpression) -> Case:
    """No more than the node's reading shows as used, if its size is known."""
    every, used = (
        ExpressionWrapper(one, BigIntegerField()) for one in (returned, F("total_vram") - F("available_vram"))
    )
    return Case(When(total_vram__gt=0, then=Greatest(Least(every, used), _ZERO)), default=every)


def _row(gpu: Mapping[str, Any], share: int) -> dict[str, Any]:
    return {"index": gpu["index"], "uuid": gpu["uuid"], "bytes": share, "seen": gpu["free_vram"]}


def _given(by_index: Mapping[int, Mapping[str, Any]], shares: Shares) -> tuple[GpuShare, ...]:
    return tuple(
        GpuShare(by_index[index]["uuid"] or str(index), share) for index, share in sorted(shares.items())
    )


def given_back_beside(gone: NodeModel, loads: Collection[NodeModel], *, stop_sent: datetime | None) -> None:
    """An engine has gone beside these locked loads: later readings show so much more than the one they have
    seen.

    Otherwise what it gave back would count as theirs until they have ended. One whose reading was from before
    that engine had allocated it sees no more than it saw; nor one whose reading may be from after its end,
    for it ran until its stop was sent, if that is known.
    """
    if gone.loaded_at is None or stop_sent is None:
        return
    until = stop_sent - _CLOCKS_DIFFER
    its = {one["index"]: one["bytes"] for one in gone.gpus}
    saw_it = [row for row in loads if row.vram_seen_at and gone.loaded_at < row.vram_seen_at < until]
    for row in saw_it:
        row.vram_seen += gone.vram_needed
        row.gpus = [one | {"seen": one["seen"] + its.get(one["index"], 0)} for one in row.gpus]
    NodeModel.engines.bulk_update(saw_it, ["vram_seen", "gpus"])


def by_node(rows: NodeModelQuerySet) -> dict[UUID, list[Reservation]]:
    """The reservations among the rows by node, of nodes where any is not read yet; one query."""
    unread = NodeModel.engines.filter(_UNREAD, vram_needed__gt=0).values("node")
    found: defaultdict[UUID, list[Reservation]] = defaultdict(list)
    reserving = rows.filter(node__in=unread, vram_needed__gt=0).values_list("node_id", *RESERVING)
    for node_id, *columns in reserving:
        found[node_id].append(reservation(*columns))
    return found


def reservation(
    needed: int,
    seen: int,
    seen_at: datetime | None,
    loaded_at: datetime | None,
    gpus: Sequence[Mapping[str, Any]],
) -> Reservation:
    """What a replica's row reserves."""
    shares = {one["index"]: (one["bytes"], one["seen"]) for one in gpus}
    return Reservation(needed, seen, seen_at or NEVER, loaded_at, shares)


def effectively_free(node: Mapping[str, Any], reservations: Sequence[Reservation]) -> int:
    """R1.51: bytes of the node, given by its columns, that nothing uses and no load has reserved."""
    ceiling: int = node["vram_budget_bytes"]
    available: int = node["available_vram"]
    if node["returned_beside"] is not None and node["returned_beside"] == node["vram_read_at"]:
        available += node["returned_vram"]
        available = min(available, ceiling) if ceiling else available
    reading = MemoryReading(available, node["vram_read_at"] or NEVER, ceiling)
    reserved: int = max(node["reserved_vram"], outstanding(reservations, reading))
    return available - reserved


def rooms_of(node: Mapping[str, Any], reservations: Sequence[Reservation]) -> Rooms:
    """Bytes of each GPU of the node, given by its columns, that nothing uses and no load has reserved."""
    reserved = reserved_on_gpus(node, reservations)
    return frozenset((one["index"], one["free_vram"] - reserved[one["index"]]) for one in node["gpus"])


def reserved_on_gpus(node: Mapping[str, Any], reservations: Sequence[Reservation]) -> dict[int, int]:
    """What loads have reserved on each GPU of the node and its last reading does not show."""
    read_at = node["vram_read_at"] or NEVER
    return {
        one["index"]: on_gpu(reservations, one["index"], MemoryReading(one["free_vram"], read_at))
        if reservations
        else 0
        for one in node["gpus"]
    }


def shown_gpus(node: Mapping[str, Any], reservations: Sequence[Reservation]) -> list[dict[str, Any]]:
    """The GPUs of the node, given by its columns, each with what loads have reserved there."""
    reserved = reserved_on_gpus(node, reservations)
    return [one | {"reserved_vram": max(reserved[one["index"]], 0)} for one in node["gpus"]]
