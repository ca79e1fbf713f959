"""One more replica of a model, beside those that serve or are being loaded.

Such a load is nobody's request: it is needed for as long as a load may take, and when it could not be done by
then, it ends with what it waited for. Who still wants the replica asks again.
"""

from collections.abc import Collection
from datetime import timedelta
from uuid import UUID

from django.db import transaction
from django.db.models import Count

from localai_cluster import clock, conf
from nodes.loading.load import KIND, key
from nodes.loading.wish import ANOTHER, ONLY, REASON
from operations.ledger import admission
from operations.models import Operation


def load_another(model_name: str, *, only: Collection[UUID] | None, actor: str, reason: str) -> Operation:
    """Asks durably for one more replica, on one of the nodes `only`, or on any that the model's rule allows.

    Every call asks for one: `loads_under_way` says how many are asked for already. Raises Conflict while the
    model is being unloaded or deleted, and RuntimeError inside a transaction: that would hold the counter of
    changes while it waits for the next model's line.
    """
    now, cluster = clock.now(), conf.cluster()
    wanted = admission.OperationRequest(
        KIND,
        key=key(model_name),
        element=model_name,
        actor=actor,
        payload={
            "model": model_name,
            ANOTHER: True,
            ONLY: None if only is None else sorted(map(str, only)),
            REASON: reason,
        },
        needed_until=now + timedelta(seconds=cluster.install_timeout + cluster.model_load_timeout),
    )
    with transaction.atomic(durable=True):
        return admission.admit_one_more(wanted, now=now)


def nodes_of_loads(model_names: Collection[str]) -> dict[str, frozenset[UUID]]:
    """The nodes that an active load is for, of these models' loads for chosen nodes; one query."""
    loads = Operation.objects.active().filter(kind=KIND, element__in=model_names)
    found: dict[str, frozenset[UUID]] = {}
    for name, only in loads.values_list("element", f"payload__{ONLY}"):
        found[name] = found.get(name, frozenset()) | frozenset(map(UUID, only or ()))
    return found


def loads_under_way(model_names: Collection[str]) -> dict[str, int]:
    """How many loads of each of these models have not ended yet; one query."""
    loads = Operation.objects.active().filter(kind=KIND, element__in=model_names).order_by()
    found = dict(loads.values_list("element").annotate(loads=Count("id")))
    return {name: found.get(name, 0) for name in model_names}
