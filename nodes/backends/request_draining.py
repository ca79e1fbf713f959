"""Wait for running requests before an upgrade in waves, or an install that drains, stops engines.

The node's replicas of the backend are withdrawn from the picks. The wait ends when they run no more requests,
or after `CLUSTER_UPGRADE_DRAIN`. A model's last replica stays in the picks until another node has one, which
is requested here, or until an operator has confirmed that it may stop. That wait has a limit too: then the
target shows what it needs, and is checked less and less often until an operator has chosen. At the end of the
attempt, replicas that it did not stop return to the picks.
"""

import asyncio
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import datetime, timedelta
from uuid import UUID

from localai_cluster.kit import clock, conf, errors
from localai_cluster.kit.commit_hooks import committed
from nodes.backends import intents
from nodes.backends.intents import Intent, PutBack, Settlement
from nodes.models import NodeModel
from nodes.placement.deadlines import load_limit
from nodes.replicas import drains
from nodes.replicas.drains import UpgradeDrain
from operations import targets
from operations.executor.work import Recorder, in_thread
from operations.ledger.progress import Tick
from operations.models import ACTIVE, TERMINAL, Operation, OperationTarget, Status

LOOK_EVERY = 0.25
"""Seconds between two counts of the running requests, because their end sends no message."""
LOOK_AT_LOAD = 1.0
BLOCKED_PAUSE, LONGEST_BLOCKED_PAUSE = 15.0, 900.0
"""Seconds until the next check of a blocked last replica.

The pause equals the age of the intent, so it doubles each time.
"""

LoadElsewhere = Callable[[str, UUID, UUID | None], Operation]
"""Request a replica of a model on any other node.

Called again with the operation of the first call, it keeps that operation needed.
"""


class Blocked(Exception):
    """A last replica must not stop yet; the text names it and the reason why there is no other one."""


@dataclass(frozen=True)
class AsksOperator(PutBack):
    """The attempt ended because of a last replica; `confirmed` holds the models confirmed until then."""

    confirmed: Collection[str] = ()


async def spare(intent: Intent, recorder: Recorder, load_elsewhere: LoadElsewhere) -> PutBack | None:
    """Wait until the command may be sent; return PutBack if it must not. Raise LeaseLost."""
    if not intent.row.spares_requests or intent.row.unanswered_since is not None:
        return None
    loads: dict[str, UUID] = {}
    last_message = ""
    cluster = conf.cluster()
    patience = clock.monotonic() + cluster.install_timeout + load_limit(0, cluster.model_load_timeout)
    while True:
        confirmed = await in_thread(_confirmed, intent)
        withdrawal, is_overdue = await in_thread(_withdraw, intent, confirmed)
        if withdrawal.last_of:
            try:
                if clock.monotonic() >= patience:
                    reason = _last_replica_reason(withdrawal.last_of)
                    raise Blocked(f"{reason} ({last_message or 'no other node has it in time'})")
                message = await in_thread(_replace, intent, withdrawal.last_of, loads, load_elsewhere)
            except Blocked as blocked:
                pause = _blocked_pause(intent, clock.now())
                return AsksOperator(str(blocked), pause, confirmed=confirmed)
        elif is_overdue or not withdrawal.running:
            return None
        else:
            requests = "1 request" if withdrawal.running == 1 else f"{withdrawal.running} requests"
            message = f"waiting for {requests} on {intent.node.name}"
        if message != last_message:
            last_message = message
            tick = Tick("draining", message, node_id=intent.node.id, node_name=intent.node.name)
            recorder.add((intent.id, intent.fence), tick)
        await asyncio.sleep(LOOK_AT_LOAD if withdrawal.last_of else LOOK_EVERY)


async def over(intent: Intent, settlement: Settlement | None = None) -> None:
    """Return replicas that the attempt did not stop to the picks, unless the worker may still be busy."""
    if intent.row.spares_requests and not (isinstance(settlement, PutBack) and settlement.busy):
        await in_thread(drains.end_upgrade, intent.id, intent.fence)


async def settled(intent: Intent, settlement: Settlement) -> None:
    """Make the intent due now if an operator confirmed between the last check and the settlement."""
    if isinstance(settlement, AsksOperator):
        await in_thread(_apply_late_confirmation, intent, settlement)


def _apply_late_confirmation(intent: Intent, settlement: AsksOperator) -> None:
    if _confirmed(intent) != settlement.confirmed:
        with committed("sparing.hear"):
            intents.nudge([intent.id], now=clock.now())


def _confirmed(intent: Intent) -> Collection[str]:
    """Return the models whose last replica may stop, by any of the active operations that share the intent.

    An operation that only drains protects none.
    """
    sharing = OperationTarget.objects.filter(intent_id=intent.id, operation__status__in=ACTIVE)
    payloads = list(sharing.exclude(status__in=targets.ENDED).values_list("operation__payload", flat=True))
    if any(payload.get("drains") for payload in payloads):
        node_replicas = NodeModel.objects.filter(node_id=intent.node.id).of_backend(intent.row.backend)
        return frozenset(node_replicas.values_list("model_name", flat=True))
    return frozenset(
        model for payload in payloads for model in payload.get("waves", {}).get("last_replicas", ())
    )


def _blocked_pause(intent: Intent, now: datetime) -> float:
    age = (now - intent.row.created_at).total_seconds()
    return min(max(age, BLOCKED_PAUSE), LONGEST_BLOCKED_PAUSE)


def _last_replica_reason(models: Collection[str]) -> str:
    names = ", ".join(models)
    return f"it would stop the last replica of {names}; confirm, or load it on another node"


def _withdraw(intent: Intent, confirmed: Collection[str]) -> tuple[UpgradeDrain, bool]:
    """Withdraw the replicas; return the result, and True if the time for running requests is over."""
    intents.confirm(intent)
    now = clock.now()
    deadline = intent.row.drain_until or now + timedelta(seconds=conf.cluster().upgrade_drain)
    withdrawal = drains.drain_for_upgrade(
        intent.node.id, intent.row.backend, intent_id=intent.id, confirmed=confirmed, deadline=deadline
    )
    if withdrawal.last_of:
        return withdrawal, False
    return withdrawal, intents.drain_until(intent, now=now) <= now


def _replace(
    intent: Intent, models: Collection[str], loads: dict[str, UUID], load_elsewhere: LoadElsewhere
) -> str:
    """Load each model on another node; return the progress as text. Raise Blocked."""
    messages = []
    for model in models:
        reason = _last_replica_reason([model])
        try:
            load = load_elsewhere(model, intent.node.id, loads.get(model))
        except errors.ClusterError as refusal:
            raise Blocked(f"{reason} ({refusal.message})") from refusal
        loads[model] = load.id
        if load.status in TERMINAL:
            del loads[model]
            if load.status != Status.COMPLETED:
                raise Blocked(f"{reason} ({load.error or load.message})")
        messages.append(f"{model} is loaded on another node first: {load.message}")
    return "; ".join(messages)
