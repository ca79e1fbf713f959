"""One more replica of a model, beside those that serve or are being loaded.

Such a load is nobody's request: it is needed for as long as a load may take, and when it could not be done by
then, it ends with what it waited for. Who still wants the replica asks again.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import timedelta
from uuid import UUID

from django.db import transaction

from localai_cluster.kit import clock
from nodes.loading import progress_deadline
from nodes.loading.load import KIND
from nodes.loading.load_request import ALLOWED_NODES, LACKS_ROOM, REASON, REPLACES, SCALE_UP
from nodes.models.replica import load_key
from operations.ledger import admission
from operations.models import Operation, Status


@dataclass(frozen=True)
class ActiveLoads:
    """The loads of some models that have not ended yet."""

    counts: Mapping[str, int]
    pinned: Mapping[str, frozenset[UUID]]
    """The nodes, by model, that have a load for them alone."""
    replacing: Mapping[UUID, bool]
    """The replicas that one of them will replace, and whether it waits for the room that they take."""


def request_scale_up(
    model_name: str,
    *,
    only: Collection[UUID] | None,
    actor: str,
    reason: str,
    replaces: UUID | None = None,
) -> Operation:
    """Asks durably for one more replica, on one of the nodes `only`, or on any that the model's rule allows.

    Every call asks for one: `under_way` says how many are asked for already. The replica that it `replaces`
    goes when the new one serves. Raises Conflict while the
    model is being unloaded or deleted, and RuntimeError inside a transaction: that would hold the counter of
    changes while it waits for the next model's line.
    """
    now = clock.now()
    wanted = admission.OperationRequest(
        KIND,
        key=load_key(model_name),
        element=model_name,
        actor=actor,
        payload={
            "model": model_name,
            SCALE_UP: True,
            ALLOWED_NODES: None if only is None else sorted(map(str, only)),
            REASON: reason,
        }
        | ({} if replaces is None else {REPLACES: str(replaces)}),
        needed_until=now + timedelta(seconds=progress_deadline.initial_seconds()),
    )
    with transaction.atomic(durable=True):
        return admission.admit_one_more(wanted, now=now)


def active_loads(model_names: Collection[str]) -> ActiveLoads:
    """The loads of these models that have not ended yet; one query."""
    loads = Operation.objects.active().filter(kind=KIND, element__in=model_names).order_by()
    counts = Counter(dict.fromkeys(model_names, 0))
    pinned: dict[str, frozenset[UUID]] = defaultdict(frozenset)
    replacing: dict[UUID, bool] = {}
    for name, status, payload in loads.values_list("element", "status", "payload"):
        counts[name] += 1
        if payload.get(ALLOWED_NODES):
            pinned[name] |= frozenset(map(UUID, payload[ALLOWED_NODES]))
        if payload.get(REPLACES):
            replacing[UUID(payload[REPLACES])] = status == Status.WAITING and bool(payload.get(LACKS_ROOM))
    return ActiveLoads(dict(counts), dict(pinned), replacing)
