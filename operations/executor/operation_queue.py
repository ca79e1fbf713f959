"""The queue of operations with a single lease: loads, unloads, deletions of models.

Progress is written in batches (`work.py`). A handler ends in one of four ways: it returns a result
(completed), raises a ClusterError (failed), raises `Postpone` (requeued, with the reason), or raises
`Abandoned` (cancelled).
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from django.db import InterfaceError, OperationalError

from localai_cluster.kit import clock, errors
from localai_cluster.kit.leases import Attempt, LeaseLost
from localai_cluster.kit.logs import request_id
from localai_cluster.metrics import controller as metrics
from operations.executor.work import Abandoned, Handler, Postpone, Recorder, Work, in_thread, write_batch
from operations.ledger import attempts
from operations.models import Event, Operation
from operations.reconcilers import tasks

log = logging.getLogger(__name__)


class OperationQueue:
    """Queue of operations, each run by the handler of its kind."""

    name = "operations"

    def __init__(self, handlers: Mapping[str, Handler], *, slots: int = 256) -> None:
        self._handlers, self.slots = dict(handlers), slots
        self._lost: Callable[[Attempt], None] = lambda attempt: None
        self._recorder = Recorder(write_batch, lambda attempt: self._lost(attempt))

    def on_lost(self, lost: Callable[[Attempt], None]) -> None:
        """See `Queue`."""
        self._lost = lost

    def claim(self, owner: str, *, now: datetime, lease: float, limit: int) -> Sequence[Operation]:
        """See `Queue`."""
        return attempts.claim(owner, now=now, lease=lease, limit=limit)

    def renew(self, owner: str, ids: Sequence[UUID], *, now: datetime, lease: float) -> dict[UUID, int]:
        """See `Queue`."""
        return attempts.renew(owner, ids, now=now, lease=lease)

    def release(self, owner: str, *, now: datetime) -> int:
        """See `Queue`."""
        return attempts.release(owner, now=now)

    def reap(self) -> None:
        """See `Queue`."""
        tasks.reap()

    def forget(self, attempt: Attempt) -> None:
        """See `Queue`."""
        self._recorder.forget(attempt)

    def close(self) -> None:
        """See `Queue`."""
        self._recorder.close()

    async def carry_out(self, operation: Operation) -> None:
        """Run the handler and record the outcome of the attempt."""
        request_id.set(operation.request_id or str(operation.id))
        work = Work(operation, self._recorder)
        log.info(
            "%s %s (%s): start, fence %d", operation.kind, operation.element, operation.id, operation.fence
        )
        with metrics.attempt(operation.kind) as attempt:
            attempt.outcome = await self._attempt(work)

    async def _attempt(self, work: Work) -> Event:
        """Run the handler, record the outcome and return its event."""
        handler = self._handlers.get(work.operation.kind)
        try:
            if handler is None:
                raise errors.NotFound(f"no handler for operations of kind {work.operation.kind}")
            result = await handler(work)
        except Postpone as pause:
            return await self._put_back(work, pause)
        except Abandoned as reason:
            return await self._finish(work, Event.CANCEL, message=str(reason))
        except errors.ClusterError as failure:
            return await self._finish(work, Event.FAIL, error=failure.message)
        except (LeaseLost, OperationalError, InterfaceError):
            raise
        except Exception:
            log.exception("%s (%s): unexpected failure", work.operation.kind, work.id)
            return await self._finish(
                work, Event.FAIL, error=f"internal error; the log has it under {request_id.get()}"
            )
        else:
            message = str(result.get("message", "")) if result else ""
            return await self._finish(work, Event.COMPLETE, result=result, message=message)

    async def _finish(self, work: Work, event: Event, **said: Any) -> Event:
        log.info(
            "%s %s (%s): %s %s",
            work.operation.kind,
            work.operation.element,
            work.id,
            event,
            said.get("error") or said.get("message") or "",
        )
        ticks = await self._recorder.take(work.attempt)
        await in_thread(attempts.finish, *work.attempt, event, now=clock.now(), ticks=ticks, **said)
        return event

    async def _put_back(self, work: Work, pause: Postpone) -> Event:
        log.info(
            "%s %s (%s): %s; again in %.1f s",
            work.operation.kind,
            work.operation.element,
            work.id,
            pause.reason,
            pause.seconds,
        )
        ticks, now = await self._recorder.take(work.attempt), clock.now()
        event = Event.WAIT if pause.waiting else Event.POSTPONE
        await in_thread(
            attempts.put_back,
            work.id,
            work.operation.fence,
            event,
            now=now,
            until=now + timedelta(seconds=pause.seconds),
            reason=pause.reason,
            payload=pause.payload,
            ticks=ticks,
        )
        return event
