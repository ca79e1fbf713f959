"""Stopping exactly one engine process, and knowing whether it is gone.

`model.stop` names key and address, so an engine that was started since under the same key is left alone. A
worker that has no such command is asked to stop the key, and `models.running` says what came of it. Every
question may be asked again: a reply that was lost or late costs one more, which finds the engine gone.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import datetime
from typing import assert_never

from localai_cluster import clock
from localai_cluster.messaging import messages
from nodes.backends.commands import PING_TIMEOUT, Worker
from nodes.backends.outcomes import BusDown, Done, NoResponders, Refused, StillRunning, Unreadable

Still = Callable[[], Awaitable[bool]]
"""Whether the engine is still to be stopped; asked before each command after the first."""
NO_CONFIRMATION = "termination not confirmed"


@dataclass(frozen=True)
class Stopped:
    """Whether the engine certainly does not run any more; if not, why that is not known.

    `silent`: its worker does not answer at all. `sent_at`: of the stop that ended it; None if it may
    have ended before.
    """

    gone: bool
    reason: str = ""
    silent: bool = False
    sent_at: datetime | None = None


GONE = Stopped(True)


async def stop_exactly(worker: Worker, process_key: str, address: str, still: Still) -> Stopped:
    """Has the engine at this address stopped; "" is an address that is not known."""
    sent_at = clock.now()
    outcome = await worker.stop_model(process_key, address)
    if isinstance(outcome, Refused) and outcome.reply.matched and outcome.reply.address:
        recorded = outcome.reply.address
        if address and _port(recorded) != _port(address):
            return GONE  # another process has the key now, so this one has gone
        if recorded != address and await still():
            # A stock worker compares with its own form of the address (nats.md §4.5).
            outcome = await worker.stop_model(process_key, recorded)
    match outcome:
        case Done(reply):
            return Stopped(True, sent_at=sent_at if reply.matched else None)
        case NoResponders(reason):
            if not await still():
                return Stopped(False, reason)
            return await _stop_by_key(worker, process_key, address)
        case Refused(reason) | StillRunning(reason) | Unreadable(reason) | BusDown(reason):
            return Stopped(False, reason)
        case _:
            assert_never(outcome)


async def _stop_by_key(worker: Worker, process_key: str, address: str) -> Stopped:
    """The same with a worker that has no `model.stop`, or is not there (nats.md §6.3)."""
    if address:
        await worker.unload_model(process_key.rpartition("#")[0], address)
    await worker.stop(process_key)
    answer = await worker.running()
    match answer:
        case Done(reply):
            keys = {messages.process_key(model.model_id, model.replica_index) for model in reply.models}
            return Stopped(False, NO_CONFIRMATION) if process_key in keys else GONE
        case NoResponders(reason):
            # One that answers elsewhere cannot tell: it was asked to stop, no more can be done.
            there = isinstance(await worker.backends(PING_TIMEOUT), Done)
            return GONE if there else Stopped(False, reason, silent=True)
        case Refused(reason) | StillRunning(reason) | Unreadable(reason) | BusDown(reason):
            return Stopped(False, reason)
        case _:
            assert_never(answer)


def _port(address: str) -> str:
    return address.rpartition(":")[2]
