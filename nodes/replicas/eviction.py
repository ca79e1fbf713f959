"""Replicas that a load evicts: the snapshot that the choice uses, and the locked rows that prove it.

A victim terminates in the transaction in which the load takes its slot, with a stop that is due at once. A
controller stops exactly its process until the worker confirms it (`stops.py`), whatever becomes of the load.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from datetime import datetime, timedelta
from uuid import UUID

from django.db.models import Count, Q

from nodes.models import ModelSchedulingConfig, NodeModel, OwnerKind, Phase, PhaseReason, ReplicaState
from nodes.models.replica import NodeModelQuerySet
from nodes.placement.evict import Guard, Resident

STOPS_WITHIN = timedelta(seconds=60)
"""A node whose replicas have not stopped by then is left by the load that waits for them."""
_NOT_COUNTED = (PhaseReason.LOST, PhaseReason.WRONG_MODEL, PhaseReason.LOAD_FAILED)
"""The reasons of engines that may have ended before."""
_COLUMNS = (
    *("id", "node_id", "model_name", "replica_index", "state", "in_flight", "last_used"),
    *("vram_needed", "loaded_at", "gpus"),
)


def residents(node_ids: Collection[UUID], *, now: datetime) -> list[Resident]:
    """The replicas of these nodes that serve or are about to stop; one query."""
    return _residents(NodeModel.objects.filter(Q(state="loaded") | _leaving(now), node_id__in=node_ids))


def serving(replica_id: UUID) -> Resident | None:
    """This replica if it serves; one query."""
    return next(iter(_residents(NodeModel.objects.loaded().filter(pk=replica_id))), None)


def _residents(rows: NodeModelQuerySet) -> list[Resident]:
    return [
        Resident(
            id=row["id"],
            node_id=row["node_id"],
            name=f"{row['model_name']}#{row['replica_index']}",
            model_name=row["model_name"],
            leaving=row["state"] != ReplicaState.LOADED,
            in_flight=row["in_flight"],
            last_used=row["last_used"],
            vram=row["vram_needed"],
            loaded_at=row["loaded_at"],
            gpus=frozenset((one["index"], one["bytes"]) for one in row["gpus"]),
        )
        for row in rows.values(*_COLUMNS)
    ]


def guard(model_name: str, among: Iterable[Resident], *, now: datetime) -> Guard:
    """What the rules say of the models of these replicas, for a load of `model_name`; two queries."""
    models = {one.model_name for one in among}
    rules = ModelSchedulingConfig.objects.filter(model_name__in=models)
    return _guard(model_name, models, rules.values_list("model_name", "min_replicas", "spread_all"), now)


def still_victims(model_name: str, victims: Sequence[Resident], *, now: datetime) -> bool:
    """Whether all of them serve, are idle and may go now; their rows and rules stay locked.

    Two loads that evict replicas of one model follow each other by its rule, so its minimum holds.
    """
    rows = NodeModel.objects.loaded().filter(pk__in=[one.id for one in victims], in_flight=0).order_by("id")
    if len(rows.select_for_update(of=("self",))) < len(victims):
        return False
    models = {one.model_name for one in victims}
    rules = ModelSchedulingConfig.objects.filter(model_name__in=models).order_by("model_name")
    locked = rules.select_for_update(no_key=True).values_list("model_name", "min_replicas", "spread_all")
    now_valid, going = _guard(model_name, models, list(locked), now), Counter[str]()
    for one in victims:
        if now_valid.spares(one, going) is not None:
            return False
        going[one.model_name] += 1
    return True


def about_to_stop(node_id: UUID, *, now: datetime) -> list[Resident]:
    """The replicas of the node that will give their memory back."""
    return [one for one in residents([node_id], now=now) if one.leaving]


def not_gone(replica_ids: Collection[UUID]) -> NodeModelQuerySet:
    """Those of the replicas that still have a row."""
    return NodeModel.objects.filter(pk__in=replica_ids).order_by("model_name", "replica_index")


def _leaving(now: datetime) -> Q:
    """About to stop: out of the picks for good, and nothing runs there or the stop was sent.

    What an upgrade has taken out comes back, and what an unload gives time may take an hour. What a stop has
    failed for counts as long as the load that it makes room for waits: until then that load's claim is on it,
    and the next one would evict others for the same bytes. What left because it did no work may have ended
    before: a reading may show its memory as free already.
    """
    leaving = Q(state="unloading") & ~Q(owner_kind=OwnerKind.INTENT) & ~Q(reason__in=_NOT_COUNTED)
    stopping = Q(in_flight=0) | Q(phase=Phase.STOPPING)
    return leaving & stopping & (Q(stop_error="") | Q(updated_at__gt=now - STOPS_WITHIN))


def _guard(
    model_name: str, models: Collection[str], rules: Iterable[tuple[str, int, bool]], now: datetime
) -> Guard:
    # Only where requests find them: the replica pass counts no others either.
    counted = NodeModel.objects.reached().filter(model_name__in=models).order_by().values_list("model_name")
    found = list(rules)
    return Guard(
        model_name,
        now,
        loaded=dict(counted.annotate(count=Count("id"))),
        minimums={model: least for model, least, _ in found},
        spread={model for model, _, spread in found if spread},
    )
