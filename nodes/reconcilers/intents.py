"""End pending commands (intents) that a node cannot run, and state why others wait (R1.118 to R1.120).

No command disappears without a record: if it is given up, its targets end with the reason, and the failed
operation waits for an operator. If a command was removed with its node, its targets end in the same way.
"""

import logging
from collections.abc import Collection
from datetime import datetime
from uuid import UUID

from django.db.models import Exists, OuterRef

from localai_cluster.kit.leases import lock_free
from localai_cluster.kit.transactions import Lock, committed, try_lock_across
from nodes.backends import intents, node_commands, waves
from nodes.backends.intents import Ended
from nodes.models import PendingBackendOp
from nodes.replicas import drains
from operations import targets
from operations.ledger import target_changes
from operations.models import OperationTarget, TargetStatus

log = logging.getLogger(__name__)


def end_stale_intents(*, now: datetime) -> int:
    """End intents that cannot succeed any more, and targets whose intent was removed; return their number.

    The pass also repeats work that may have been lost. For upgrades in waves it opens targets that waited for
    other work on their node, and reopens replicas that a dead controller withdrew from requests. It refreshes
    the reasons of waiting targets, because the NOTIFY of a change may be lost.

    Returns at once if another process holds the lock. A constant number of statements for any number of
    intents.
    """
    ended = 0
    # For the whole pass: two passes that take the lock for each step can both skip the same step.
    with try_lock_across(Lock.STALE_INTENTS) as locked:
        for step in _STEPS if locked else ():
            # Each commits on its own: once its events have numbers, no more rows may be locked.
            ended += step(now)
    if ended:
        log.warning("intents: %d ended, because their nodes cannot take them", ended)
    return ended


def _end_hopeless_intents(now: datetime) -> int:
    """End idle intents of nodes that were removed from service or absent longer than CLUSTER_INSTALL_WAIT."""
    resting = PendingBackendOp.objects.resting().exclude(node__status="healthy", node__node_type="backend")
    ended = {}
    for intent in resting.select_related("node"):
        if reason := node_commands.refusal(intent.node):
            ended[intent.id] = Ended(error=f"given up: {reason}")
        elif (until := intents.gives_up_at(intent.node)) is None or until <= now:
            ended[intent.id] = Ended(error=intents.reason_to_give_up(intent.node))
    return intents.end(ended, now=now)


def _open_ready_targets(now: datetime) -> int:
    """Open the wave targets that waited for a busy node. Return 0, because this ends no intent."""
    waves.catch_up(now=now)
    return 0


def _reopen_replicas(now: datetime) -> int:
    """Return to service replicas that no upgrade needs withdrawn. Return 0, because this ends no intent."""
    if restored := drains.return_without_upgrade():
        log.info("%d replicas serve again: no upgrade needs them out of the picks", restored)
    return 0


def _refresh_all_reasons(now: datetime) -> int:
    """Refresh the reasons of all waiting targets. Return 0, because this ends no intent."""
    refresh_reasons(None, now=now)
    return 0


def _end_unneeded_intents(now: datetime) -> int:
    """End intents without an unfinished target: a safety net."""
    open_targets = OperationTarget.objects.filter(intent_id=OuterRef("pk"), status__in=targets.UNFINISHED)
    orphans = PendingBackendOp.objects.resting().filter(~Exists(open_targets))
    reason = "no operation asks for it any more"
    return intents.end({id: Ended(error=reason) for id in orphans.values_list("id", flat=True)}, now=now)


def _end_targets_without_intent(now: datetime) -> int:
    """End targets whose node was removed together with its intents."""
    intent = PendingBackendOp.objects.filter(pk=OuterRef("intent_id"))
    open_targets = OperationTarget.objects.filter(intent_id__isnull=False, status__in=targets.UNFINISHED)
    orphans = dict(open_targets.filter(~Exists(intent)).values_list("intent_id", "node_name"))
    changes = {
        id: target_changes.end(TargetStatus.ERROR, error=f"node {name} was removed")
        for id, name in orphans.items()
        if id is not None
    }
    waves.conclude(changes, ended=(), now=now)
    return len(changes)


def refresh_reasons(changed: Collection[UUID] | None, *, now: datetime) -> None:
    """Refresh the reasons of the targets that wait for these nodes; None = all nodes. Few statements."""
    resting = PendingBackendOp.objects.resting().select_related("node")
    if changed is not None:
        resting = resting.filter(node__in=changed)
    intents_by_id = {intent.id: intent for intent in resting}
    if not intents_by_id:
        return
    open_targets = OperationTarget.objects.filter(intent_id__in=intents_by_id, status__in=targets.UNFINISHED)
    current = open_targets.values_list("intent_id", "reason", "waits_for_node")
    changes: dict[UUID, target_changes.Change] = {}
    for id, reason, waits in current:
        if id is None:
            continue
        intent = intents_by_id[id]
        absent = intent.node.status != "healthy"
        expected = intents.reason_to_wait(intent.node, now=now) if absent else intent.last_error or "queued"
        if waits != absent or (absent and reason != expected):
            changes[id] = target_changes.queue_again(
                expected, until=None if absent else intent.next_retry_at, node=absent
            )
    with committed("intents.explain"):
        # An intent that was claimed meanwhile has a running target, which must not return to the queue.
        still_resting = PendingBackendOp.objects.resting().filter(pk__in=changes).order_by("id")
        free = lock_free(still_resting.only("pk"))
        target_changes.record_changes({intent.pk: changes[intent.pk] for intent in free}, now=now)


_STEPS = (
    _end_hopeless_intents,
    _end_targets_without_intent,
    _open_ready_targets,
    _reopen_replicas,
    _end_unneeded_intents,
    _refresh_all_reasons,
)
