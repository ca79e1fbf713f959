"""Stop of exactly one engine process, with confirmation of its end.

`model.stop` names key and address, so it does not affect an engine that was started since under the same key.
A worker without this command gets a stop of the key, and `models.running` reports the result. Every request
is idempotent: a lost or late reply costs one more request, which finds that the engine has ended.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import datetime
from typing import assert_never

from localai_cluster.kit import clock
from localai_cluster.messaging import messages
from nodes.commands.commands import PING_TIMEOUT, Worker
from nodes.commands.outcomes import BusDown, Done, NoResponders, Refused, StillRunning, Unreadable

StillDue = Callable[[], Awaitable[bool]]
"""Callable that returns True while the stop is still due; called before each command after the first."""
NO_CONFIRMATION = "termination not confirmed"


@dataclass(frozen=True)
class StopResult:
    """The result of a stop. `gone`: the engine certainly does not run any more; otherwise see `reason`.

    `silent`: its worker does not answer at all. `sent_at`: time of the stop that ended it; None if it may
    have ended before.
    """

    gone: bool
    reason: str = ""
    silent: bool = False
    sent_at: datetime | None = None


GONE = StopResult(True)


async def stop_exactly(worker: Worker, process_key: str, address: str, still: StillDue) -> StopResult:
    """Stop the engine at this address; "" is an unknown address."""
    sent_at = clock.now()
    outcome = await worker.stop_model(process_key, address)
    if isinstance(outcome, Refused) and outcome.reply.matched and outcome.reply.address:
        recorded_address = outcome.reply.address
        if address and _port(recorded_address) != _port(address):
            return GONE  # another process has the key now, so this one has ended
        if recorded_address != address and await still():
            # A stock worker compares with its own form of the address (nats.md §4.5).
            outcome = await worker.stop_model(process_key, recorded_address)
    match outcome:
        case Done(reply):
            return StopResult(True, sent_at=sent_at if reply.matched else None)
        case NoResponders(reason):
            if not await still():
                return StopResult(False, reason)
            return await _stop_by_key(worker, process_key, address)
        case Refused(reason) | StillRunning(reason) | Unreadable(reason) | BusDown(reason):
            return StopResult(False, reason)
        case _:
            assert_never(outcome)


async def _stop_by_key(worker: Worker, process_key: str, address: str) -> StopResult:
    """Stop the engine of a worker without `model.stop`, or of an absent worker (nats.md §6.3)."""
    if address:
        await worker.unload_model(process_key.rpartition("#")[0], address)
    await worker.stop(process_key)
    answer = await worker.running()
    match answer:
        case Done(reply):
            keys = {messages.process_key(model.model_id, model.replica_index) for model in reply.models}
            return StopResult(False, NO_CONFIRMATION) if process_key in keys else GONE
        case NoResponders(reason):
            # A worker that answers other requests has received the stop but cannot confirm it: that must do.
            is_connected = isinstance(await worker.backends(PING_TIMEOUT), Done)
            return GONE if is_connected else StopResult(False, reason, silent=True)
        case Refused(reason) | StillRunning(reason) | Unreadable(reason) | BusDown(reason):
            return StopResult(False, reason)
        case _:
            assert_never(answer)


def _port(address: str) -> str:
    return address.rpartition(":")[2]
