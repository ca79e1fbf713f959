"""One more replica of a model, on chosen nodes, without a request that waits for it.

At most one load of a model is under way: who asks meanwhile joins it.
"""

from collections.abc import Collection
from datetime import timedelta
from uuid import UUID

from django.db.models import Count

from localai_cluster import clock
from nodes.loading.load import BESIDES, KIND, key
from nodes.models import BackendNode, NodeModel
from operations.ledger import admission
from operations.models import Operation

WANTED_FOR = timedelta(minutes=5)
"""For how long a load that waits for nodes is wanted; then the next pass decides again."""


def load_another(
    model_name: str, *, only: Collection[UUID] | None, actor: str = "system", reason: str
) -> Operation:
    """Asks for one more replica, on one of the nodes `only`, None = on any.

    Raises Conflict while other work on the model is in progress.
    """
    now = clock.now()
    besides = set(NodeModel.objects.of(model_name).values_list("node_id", flat=True))
    if only is not None:
        besides |= set(BackendNode.objects.exclude(pk__in=only).values_list("id", flat=True))
    wanted = admission.OperationRequest(
        KIND,
        key=key(model_name),
        element=model_name,
        actor=actor,
        payload={"model": model_name, "reason": reason, BESIDES: sorted(map(str, besides))},
        needed_until=now + WANTED_FOR,
    )
    return admission.admit(wanted, now=now).operation


def loads_under_way(names: Collection[str]) -> dict[str, int]:
    """Loads of these models that have not ended; one query."""
    active = Operation.objects.active().filter(kind=KIND, element__in=names).order_by()
    return dict(active.values_list("element").annotate(count=Count("id")))
