"""Evictions of replicas by a load: the snapshot for the choice, and the locks under which it is verified.

A victim is a replica that is evicted. It terminates in the transaction in which the load takes its slot, and
its stop is due at once. A controller stops this process until the worker confirms the stop (`stops.py`), even
if the load fails.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence, Set
from dataclasses import replace
from datetime import datetime, timedelta
from uuid import UUID

from django.db.models import Count, Q

from localai_cluster.kit import conf
from nodes.models import ModelSchedulingConfig, NodeModel, OwnerKind, Phase, PhaseReason, ReplicaState
from nodes.models.replica import NodeModelQuerySet
from nodes.models.scheduling import RULE_LOCK_ORDER
from nodes.placement.evict import ProtectionRules, Resident

STOPS_WITHIN = timedelta(seconds=60)
"""Time in which evicted replicas must stop; after it the load tries another node."""
_MAY_HAVE_ENDED_REASONS = (PhaseReason.LOST, PhaseReason.WRONG_MODEL, PhaseReason.LOAD_FAILED)
"""Reasons with which a replica terminates although its engine may have ended before the stop."""
_RESIDENT_COLUMNS = (
    *("id", "node_id", "model_name", "replica_index", "state", "in_flight", "last_used"),
    *("vram_needed", "loaded_at", "gpus", "started_at"),
)


def residents(node_ids: Collection[UUID], *, now: datetime) -> list[Resident]:
    """Return the replicas of these nodes that serve or are about to stop; one query."""
    return _residents(NodeModel.objects.filter(Q(state="loaded") | _about_to_stop(now), node_id__in=node_ids))


def serving(replica_id: UUID) -> Resident | None:
    """Return the replica if it serves, otherwise None; one query."""
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
            gpus=frozenset((gpu["index"], gpu["bytes"]) for gpu in row["gpus"]),
            started_at=row["started_at"],
        )
        for row in rows.values(*_RESIDENT_COLUMNS)
    ]


def guard(
    model_name: str, among: Iterable[Resident], *, now: datetime, claimed: Set[UUID] = frozenset()
) -> ProtectionRules:
    """Read the rules that protect these replicas from a load of `model_name`; two queries.

    `claimed`: the nodes whose memory goes first to older loads that wait.
    """
    models = {replica.model_name for replica in among}
    rules = ModelSchedulingConfig.objects.filter(model_name__in=models)
    columns = rules.values_list("model_name", "min_replicas", "spread_all")
    return replace(_protection_rules(model_name, models, columns, now), claimed=claimed)


def lock_victims(model_name: str, victims: Sequence[Resident], *, now: datetime) -> bool:
    """Lock the replicas to evict and the rules of their models; return True if all can be evicted now.

    Every replica must serve, one that was idle must still be idle, and no rule may protect it. The lock on a
    model's rule serializes evictions of its replicas, so the model keeps its minimum.
    """
    idle = [victim.id for victim in victims if not victim.in_flight]
    busy = [victim.id for victim in victims if victim.in_flight]
    rows = NodeModel.objects.loaded().filter(Q(pk__in=idle, in_flight=0) | Q(pk__in=busy)).order_by("id")
    if len(rows.select_for_update(of=("self",))) < len(victims):
        return False
    models = {victim.model_name for victim in victims}
    rules = ModelSchedulingConfig.objects.filter(model_name__in=models).order_by(RULE_LOCK_ORDER)
    locked = rules.select_for_update(no_key=True).values_list("model_name", "min_replicas", "spread_all")
    current_guard, evictions = _protection_rules(model_name, models, list(locked), now), Counter[str]()
    for victim in victims:
        if current_guard.find_protection(victim, evictions) is not None:
            return False
        evictions[victim.model_name] += 1
    return True


def terminating_replicas(node_id: UUID, *, now: datetime) -> list[Resident]:
    """Return the replicas of the node that are about to stop and free their memory."""
    return [replica for replica in residents([node_id], now=now) if replica.leaving]


def remaining_rows(replica_ids: Collection[UUID]) -> NodeModelQuerySet:
    """Return the rows of these replicas that still exist."""
    return NodeModel.objects.filter(pk__in=replica_ids).order_by("model_name", "replica_index")


def _about_to_stop(now: datetime) -> Q:
    """Return a filter for replicas that stop soon: they never serve again, and are idle or get a stop.

    Excluded are replicas that an upgrade drains, because they serve again, and replicas with running
    requests, for which an unload may wait an hour. An evicted replica counts even with running requests,
    because its memory belongs to the load that evicted it.

    A replica whose stop has failed counts for `STOPS_WITHIN`, as long as the load that evicted it waits.
    Without it the next load would evict other replicas for the same bytes. Replicas with a reason in
    `_MAY_HAVE_ENDED_REASONS` do not count, because a reading may already show their memory as free.
    """
    terminating = (
        Q(state="unloading") & ~Q(owner_kind=OwnerKind.INTENT) & ~Q(reason__in=_MAY_HAVE_ENDED_REASONS)
    )
    stopping = Q(in_flight=0) | Q(phase=Phase.STOPPING) | Q(reason=PhaseReason.EVICTED)
    return terminating & stopping & (Q(stop_error="") | Q(updated_at__gt=now - STOPS_WITHIN))


def _protection_rules(
    model_name: str, models: Collection[str], rules: Iterable[tuple[str, int, bool]], now: datetime
) -> ProtectionRules:
    # Count only replicas that requests can reach, as the replica pass does.
    counted = NodeModel.objects.reached().filter(model_name__in=models).order_by().values_list("model_name")
    rule_rows, cluster = list(rules), conf.cluster()
    return ProtectionRules(
        model_name,
        now,
        loaded=dict(counted.annotate(count=Count("id"))),
        minimums={model: least for model, least, _ in rule_rows},
        spread={model for model, _, spread in rule_rows if spread},
        least_serving=cluster.least_serving if cluster.vram_policy == "fit" else None,
    )
