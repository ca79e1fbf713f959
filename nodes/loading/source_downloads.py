"""Downloads of files from their sources to the control plane, because a load needs to send the files.

A load needs such a download if its worker cannot download the files itself. The download is an import without
a definition (`nodes/downloads/imports.py`): it resumes after a kill, its files count as used, and loads of
the model share it. The load shows its progress. While the download waits, the load gives back its slot on the
node. The cancellation of the model's last load also cancels the download, because no other operation needs it
and it would exclude imports.
"""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

from django.db import transaction

from localai_cluster.kit import clock, errors, failpoints
from localai_cluster.kit.outbound import SourceChanged
from localai_cluster.kit.transactions import committed, lock_name
from nodes.definitions.files import Definition
from nodes.loading import load_attempts
from nodes.loading.files_in_use import IMPORT
from nodes.loading.load_attempts import Attempt, LoadFailed, NodeRefused
from nodes.loading.load_request import ProgressDeadline
from operations.executor.work import Postpone, WakeUps, in_thread, retry_delay
from operations.ledger import attempts
from operations.ledger.admission import OperationRequest, Requester, admit, cancel, exclusion_error
from operations.models import ACTIVE, TERMINAL, Operation, Status, owner_of

PHASE = "staging"
FILES_ONLY = "files_only"
"""Payload key of an import that downloads files but saves no definition."""
WAITING = "waiting"
"""Step of an import that waits until other imports have ended."""
CHANGE_RETRY_AFTER = timedelta(hours=1)
"""Time for which a file is not downloaded again after it was found changed at its source."""
_CHANGED_MESSAGE = "staging: the file at its source is not the recorded one"
_POLL_SECONDS = 2.0
_MIN_CHECK_DELAY = 2.0
"""Minimum seconds until a load checks a download that waits."""
_MAX_CHECK_DELAY = 60.0
"""Maximum seconds until a load checks a download that waits."""
_DOWNLOADED_FRACTION = 0.45
"""Progress (0 to 1) of a load whose files are on the control plane but not on the node."""


def request_download(
    definition: Definition, paths: Sequence[str], *, parent: Operation, now: Any
) -> Operation:
    """Create the download of these recorded files of the definition, or join the active one of another load.

    Raises Conflict while another import of the model is active, and LeaseLost if the load has lost `parent`.
    """
    files = [definition.files[path] for path in sorted(paths)]
    wanted = [
        {"path": file.path, "url": file.source, "size": file.size, "sha256": file.sha256} for file in files
    ]
    plan = {"name": definition.name, "text": "", "files": wanted, "origin": "import", "source": "its source"}
    request = OperationRequest(
        IMPORT,
        key=f"import:{definition.name}",
        element=definition.name,
        by=Requester(parent.actor, parent.request_id),
        payload={"plan": plan, "load": False, "revision": 0, FILES_ONLY: True},
        parent=parent,
    )
    with transaction.atomic():
        lock_name(owner_of(parent.key))  # a load that has been cancelled requests nothing any more
        attempts.confirm(parent.id, parent.fence)
        admission = admit(request, now=now)
    payload = admission.operation.payload
    # An import that saves a definition may leave the files at their sources.
    if FILES_ONLY not in payload or not all(file in payload["plan"]["files"] for file in wanted):
        raise exclusion_error(admission.operation)
    return admission.operation


def cancel_load(load: Operation, actor: str, now: datetime) -> Operation:
    """Cancel the load, and the download for its model if no other load of the model is active.

    Raise Conflict.
    """
    with committed("load.cancel"):
        # No load of the model is created meanwhile: it would join the download.
        lock_name(owner_of(load.key))
        active = Operation.objects.active().filter(element=load.element)
        ids = [load.id]
        if not active.filter(kind=load.kind).exclude(pk=load.id).exists():
            downloads = active.filter(kind=IMPORT, parent__kind=load.kind, payload__has_key=FILES_ONLY)
            ids += downloads.values_list("pk", flat=True)
        # Before the first change takes the counter of changes: who reports progress has the row already.
        rows = Operation.objects.filter(pk__in=ids).order_by("pk").select_for_update(no_key=True)
        statuses = {row.id: row.status for row in rows}
        cancelled = cancel(load.id, actor=actor, now=now)
        failpoints.passed("load.cancel:download")
        for id in ids[1:]:
            if statuses.get(id) in ACTIVE:
                cancel(id, actor=actor, now=now)
        return cancelled


async def download(attempt: Attempt, paths: Sequence[str], wake_ups: WakeUps) -> None:
    """Download these files to the control plane, and wait for the download.

    Raise NodeRefused, LoadFailed, Postpone and Abandoned.
    """
    await in_thread(check_former_load, attempt.work.operation, attempt.definition)
    name, parent = attempt.slot.node_name, attempt.work.operation
    listed = paths[0] if len(paths) == 1 else f"{len(paths)} files"
    message = f"the control plane downloads {listed}, which {name} does not"
    try:
        child = await in_thread(request_download, attempt.definition, paths, parent=parent, now=clock.now())
    except errors.Conflict as busy:
        raise await _postpone_or_end(attempt, busy.message, retry_delay(parent.attempts)) from busy
    await attempt.report(PHASE, message)
    deadline = ProgressDeadline(attempt.work)
    with wake_ups.watch(child.id) as watch:
        while (state := await in_thread(_read_download, child.id)).status not in TERMINAL:
            await _show_progress(attempt, state, message)
            await deadline.extend_on_progress(state.current_bytes)
            await watch.changed(timeout=_POLL_SECONDS)
    if state.status == Status.CANCELLED:
        raise LoadFailed(f"staging: the download of {listed} to the control plane was cancelled")
    if state.status == Status.FAILED and state.result.get("code") == SourceChanged.code:
        raise LoadedFileChanged(state.error)
    if state.status == Status.FAILED:
        # The worker of another node may reach the source.
        raise NodeRefused(f"staging: {message}, and it failed: {state.error}")


class LoadedFileChanged(LoadFailed):
    """A file that the load needs has changed at its source, so the load would fail on every node."""

    code = SourceChanged.code

    def __init__(self, reason: str) -> None:
        super().__init__(f"{_CHANGED_MESSAGE} ({reason}); import the model again")


def check_former_load(load: Operation, definition: Definition) -> None:
    """Raise LoadFailed if a recent load of this definition found a file changed at its source.

    Without this check each request would download the whole file again. Recent means within
    `CHANGE_RETRY_AFTER`; the failure that this function raises does not count. One query.
    """
    changed = datetime.fromtimestamp(definition.changed + 1, UTC)  # whole seconds, rounded down
    since = max(clock.now() - CHANGE_RETRY_AFTER, changed)
    former = Operation.objects.filter(
        key=load.key, finished_at__gt=since, status=Status.FAILED, result__code=SourceChanged.code
    )
    if (found_at := former.order_by("-finished_at").values_list("finished_at", flat=True).first()) is None:
        return
    until = found_at + CHANGE_RETRY_AFTER
    raise LoadFailed(
        f"{_CHANGED_MESSAGE}, a load found at {found_at:%H:%M} UTC; import the model again."
        f" Without that it is tried again from {until:%H:%M} UTC on"
    )


def _read_download(child: UUID) -> Operation:
    """Return the download; raise Postpone if its record was deleted."""
    if (state := Operation.objects.filter(pk=child).first()) is None:
        raise Postpone("the record of the download was removed", seconds=_MIN_CHECK_DELAY)
    return state


async def _show_progress(attempt: Attempt, state: Operation, message: str) -> None:
    """Show the progress of the download as the load's.

    If the download waits, raise Postpone, or Abandoned if the load is no longer needed.
    """
    due, now = state.next_attempt_at, clock.now()
    if state.status != Status.PROCESSING and due is not None and due > now:
        seconds = min(max((due - now) / timedelta(seconds=1), _MIN_CHECK_DELAY), _MAX_CHECK_DELAY)
        raise await _postpone_or_end(attempt, f"{message}: {state.message}", seconds)
    if state.status == Status.PROCESSING and state.phase == WAITING:
        pause = retry_delay(attempt.work.operation.attempts)
        raise await _postpone_or_end(attempt, f"{message}: {state.message}", pause)
    figures: dict[str, Any] = {}
    if state.total_bytes:
        figures = {"current_bytes": state.current_bytes, "total_bytes": state.total_bytes}
    tick = attempt.tick(
        PHASE,
        f"{message}: {state.message}" if state.message else message,
        percentage=state.progress * _DOWNLOADED_FRACTION,
        progress_at=state.last_progress_at,
        **figures,
    )
    attempt.work.progress(tick)


async def _postpone_or_end(attempt: Attempt, reason: str, seconds: float) -> Exception:
    operation = await in_thread(Operation.objects.get, pk=attempt.work.id)
    return load_attempts.retry_or_end(operation, reason, seconds=seconds, waiting=False)
