"""Intents whose node cannot take them: what their parts say meanwhile, and when they end (R1.118 to R1.120).

Nothing ends in silence: an intent that is given up ends its parts with the reason, and the failed operation
waits for an operator. A part whose intent went with its node ends the same way.
"""

import logging
from collections.abc import Collection
from datetime import datetime
from uuid import UUID

from django.db.models import Exists, OuterRef

from localai_cluster.commits import committed
from localai_cluster.locks import Lock, try_lock
from nodes.backends import absence, intents, one_node, waves
from nodes.backends.intents import Ended
from nodes.models import PendingBackendOp
from nodes.replicas import upgrade_drains
from operations import targets
from operations.ledger import parts
from operations.models import OperationTarget, TargetStatus

log = logging.getLogger(__name__)


def clean(*, now: datetime) -> int:
    """Ends intents that have no future, and parts whose intent is gone; answers how many.

    Also catches up on what upgrades in waves have left: parts that wait for other work on their node, and
    replicas that were taken out of the picks by a controller that died. What waiting parts say of their node
    is brought up to date, as the NOTIFY of a change may be lost.

    At once if another process is at it. A constant number of statements for any number of them.
    """
    ended = 0
    # A transaction each: no more rows are locked once the news of the first have a number.
    for step in _STEPS:
        with try_lock(Lock.STALE_INTENTS) as mine:
            ended += step(now) if mine else 0
    if ended:
        log.warning("intents: %d ended, because their nodes cannot take them", ended)
    return ended


def _end_hopeless(now: datetime) -> int:
    """Resting intents of nodes that left, or were away for longer than CLUSTER_INSTALL_WAIT."""
    resting = PendingBackendOp.objects.resting().exclude(node__status="healthy", node__node_type="backend")
    found = {}
    for intent in resting.select_related("node"):
        if reason := one_node.refusal(intent.node):
            found[intent.id] = Ended(error=f"given up: {reason}")
        elif (until := absence.gives_up_at(intent.node)) is None or until <= now:
            found[intent.id] = Ended(error=absence.reason_to_give_up(intent.node))
    return intents.end(found, now=now)


def _catch_up(now: datetime) -> int:
    """Opens parts of waves whose node was busy; none ends."""
    waves.catch_up(now=now)
    return 0


def _put_back(now: datetime) -> int:
    """Replicas whose upgrade is over or rests serve again; nothing ends."""
    if found := upgrade_drains.return_forgotten():
        log.info("%d replicas serve again: no upgrade needs them out of the picks", found)
    return 0


def _explain(now: datetime) -> int:
    """Brings the reasons of waiting parts up to date; nothing ends."""
    explain(None, now=now)
    return 0


def _end_intents_without_part(now: datetime) -> int:
    """A net: an intent that no operation asks for any more must not be carried out."""
    part = OperationTarget.objects.filter(intent_id=OuterRef("pk")).exclude(status__in=targets.ENDED)
    left = PendingBackendOp.objects.resting().filter(~Exists(part))
    reason = "no operation asks for it any more"
    return intents.end({id: Ended(error=reason) for id in left.values_list("id", flat=True)}, now=now)


def _end_parts_without_intent(now: datetime) -> int:
    """A node that is removed takes its intents along."""
    intent = PendingBackendOp.objects.filter(pk=OuterRef("intent_id"))
    left = OperationTarget.objects.filter(intent_id__isnull=False).exclude(status__in=targets.ENDED)
    orphans = dict(left.filter(~Exists(intent)).values_list("intent_id", "node_name"))
    changes = {
        id: parts.end(TargetStatus.ERROR, error=f"node {name} was removed")
        for id, name in orphans.items()
        if id is not None
    }
    waves.conclude(changes, ended=(), now=now)
    return len(changes)


def explain(changed: Collection[UUID] | None, *, now: datetime) -> None:
    """Brings what waiting parts say up to date with their nodes; None = of all nodes. Few statements."""
    resting = PendingBackendOp.objects.resting().select_related("node")
    if changed is not None:
        resting = resting.filter(node__in=changed)
    found = {intent.id: intent for intent in resting}
    if not found:
        return
    left = OperationTarget.objects.filter(intent_id__in=found).exclude(status__in=targets.ENDED)
    said = left.values_list("intent_id", "reason", "waits_for_node")
    changes: dict[UUID, parts.Change] = {}
    for id, reason, waits in said:
        if id is None:
            continue
        intent = found[id]
        absent = intent.node.status != "healthy"
        wanted = absence.reason_to_wait(intent.node, now=now) if absent else intent.last_error or "queued"
        if waits != absent or (absent and reason != wanted):
            changes[id] = parts.rest(wanted, until=None if absent else intent.next_retry_at, node=absent)
    with committed("intents.explain"):
        # An intent that was claimed meanwhile has a part that runs: it must not be put back.
        still = PendingBackendOp.objects.resting().filter(pk__in=changes).order_by("id")
        free = set(still.select_for_update(no_key=True, skip_locked=True).values_list("id", flat=True))
        parts.happen({id: change for id, change in changes.items() if id in free}, now=now)


_STEPS = (
    _end_hopeless,
    _end_parts_without_intent,
    _catch_up,
    _put_back,
    _end_intents_without_part,
    _explain,
)
