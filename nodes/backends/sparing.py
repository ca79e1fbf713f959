"""Before an upgrade in waves, or an install that drains, stops engines: their requests may end first.

The node's replicas of the backend leave the picks.
The wait ends when nothing runs on them any more, or at `CLUSTER_UPGRADE_DRAIN`. A model's last replica stays
in the picks until another node has one, which is asked for here, or until an operator has confirmed that it
may go. That wait has an end too: then the part says what it needs, and is looked at less and less often until
an operator has chosen. When the attempt is over, what it did not stop serves again.
"""

import asyncio
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import datetime, timedelta
from uuid import UUID

from localai_cluster import clock, conf, errors
from localai_cluster.commits import committed
from nodes.backends import intents
from nodes.backends.intents import Intent, PutBack, Settlement
from nodes.models import NodeModel
from nodes.placement.deadlines import load_limit
from nodes.replicas import upgrade_drains
from nodes.replicas.upgrade_drains import Withdrawal
from operations import targets
from operations.executor.recorder import Recorder
from operations.executor.work import in_thread
from operations.ledger.progress import Tick
from operations.models import ACTIVE, TERMINAL, Operation, OperationTarget, Status

LOOK_EVERY = 0.25
"""Seconds between two looks at the requests that run: their end is no message."""
LOOK_AT_LOAD = 1.0
BLOCKED_PAUSE, LONGEST_BLOCKED_PAUSE = 15.0, 900.0
"""Seconds before a last replica is looked at again: as long as the intent is old already, so it doubles."""

LoadElsewhere = Callable[[str, UUID, UUID | None], Operation]
"""Asks for a replica of a model on any node but this one; with its operation, keeps it wanted."""


class Blocked(Exception):
    """A last replica has to stay for now; the text says which, and why there is no other."""


@dataclass(frozen=True)
class AsksOperator(PutBack):
    """The attempt ended because of a last replica, with these confirmed."""

    confirmed: Collection[str] = ()


async def spare(intent: Intent, recorder: Recorder, load_elsewhere: LoadElsewhere) -> PutBack | None:
    """Returns when the command may be sent, or why it may not. Raises LeaseLost."""
    if not intent.row.spares_requests or intent.row.unanswered_since is not None:
        return None
    loads: dict[str, UUID] = {}
    said = ""
    cluster = conf.cluster()
    patience = clock.monotonic() + cluster.install_timeout + load_limit(0, cluster.model_load_timeout)
    while True:
        confirmed = await in_thread(_confirmed, intent)
        found, late = await in_thread(_withdraw, intent, confirmed)
        if found.last_of:
            try:
                if clock.monotonic() >= patience:
                    raise Blocked(f"{_keep(found.last_of)} ({said or 'no other node has it in time'})")
                message = await in_thread(_replace, intent, found.last_of, loads, load_elsewhere)
            except Blocked as blocked:
                pause = _blocked_pause(intent, clock.now())
                return AsksOperator(str(blocked), pause, confirmed=confirmed)
        elif late or not found.running:
            return None
        else:
            requests = "1 request" if found.running == 1 else f"{found.running} requests"
            message = f"waiting for {requests} on {intent.node.name}"
        if message != said:
            said = message
            tick = Tick("draining", message, node_id=intent.node.id, node_name=intent.node.name)
            recorder.add((intent.id, intent.fence), tick)
        await asyncio.sleep(LOOK_AT_LOAD if found.last_of else LOOK_EVERY)


async def over(intent: Intent, settlement: Settlement | None = None) -> None:
    """The attempt is over: replicas whose engines it did not stop serve again, unless the worker is busy."""
    if intent.row.spares_requests and not (isinstance(settlement, PutBack) and settlement.busy):
        await in_thread(upgrade_drains.end, intent.id, intent.fence)


async def settled(intent: Intent, settlement: Settlement) -> None:
    """What was confirmed between the last look and the settlement is heard now, not after the pause."""
    if isinstance(settlement, AsksOperator):
        await in_thread(_hear, intent, settlement)


def _hear(intent: Intent, settlement: AsksOperator) -> None:
    if _confirmed(intent) != settlement.confirmed:
        with committed("sparing.hear"):
            intents.nudge([intent.id], now=clock.now())


def _confirmed(intent: Intent) -> Collection[str]:
    """Return the models whose last replica may stop, by any of the active operations that share the intent.

    An operation that only drains protects none.
    """
    asking = OperationTarget.objects.filter(intent_id=intent.id, operation__status__in=ACTIVE)
    payloads = list(asking.exclude(status__in=targets.ENDED).values_list("operation__payload", flat=True))
    if any(one.get("drains") for one in payloads):
        mine = NodeModel.objects.filter(node_id=intent.node.id).of_backend(intent.row.backend)
        return frozenset(mine.values_list("model_name", flat=True))
    return frozenset(model for one in payloads for model in one.get("waves", {}).get("last_replicas", ()))


def _blocked_pause(intent: Intent, now: datetime) -> float:
    age = (now - intent.row.created_at).total_seconds()
    return min(max(age, BLOCKED_PAUSE), LONGEST_BLOCKED_PAUSE)


def _keep(models: Collection[str]) -> str:
    which = ", ".join(models)
    return f"it would stop the last replica of {which}; confirm, or load it on another node"


def _withdraw(intent: Intent, confirmed: Collection[str]) -> tuple[Withdrawal, bool]:
    """What became of it, and whether the time for requests is over."""
    intents.confirm(intent)
    now = clock.now()
    deadline = intent.row.drain_until or now + timedelta(seconds=conf.cluster().upgrade_drain)
    found = upgrade_drains.drain(
        intent.node.id, intent.row.backend, intent_id=intent.id, confirmed=confirmed, deadline=deadline
    )
    if found.last_of:
        return found, False
    return found, intents.drain_until(intent, now=now) <= now


def _replace(
    intent: Intent, models: Collection[str], loads: dict[str, UUID], load_elsewhere: LoadElsewhere
) -> str:
    """Has each model loaded on another node; answers how that goes. Raises Blocked."""
    said = []
    for model in models:
        keep = _keep([model])
        try:
            load = load_elsewhere(model, intent.node.id, loads.get(model))
        except errors.ClusterError as refusal:
            raise Blocked(f"{keep} ({refusal.message})") from refusal
        loads[model] = load.id
        if load.status in TERMINAL:
            del loads[model]
            if load.status != Status.COMPLETED:
                raise Blocked(f"{keep} ({load.error or load.message})")
        said.append(f"{model} is loaded on another node first: {load.message}")
    return "; ".join(said)
