"""Ollama's `pull`: the import of a model by an administrator, with its progress as lines of JSON.

The import is an operation: it continues when the client disconnects, and another pull of the same model joins
the operation. For a model that is already defined, every caller gets success.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from uuid import UUID

import msgspec
from django.db import DatabaseError

from localai_cluster.kit import clock, conf
from localai_cluster.kit.errors import ClusterError, Forbidden, InvalidInput
from localai_cluster.web import wire
from localai_cluster.web.wire import Answer, Outgoing, Send
from nodes.dialects import ollama
from nodes.dialects.models import PullBody, run_as_caller, run_database_call, status_lines
from nodes.downloads.imports import request_import
from nodes.gateway import gateway
from nodes.gateway.endpoint import CancelOnStop, StreamedAnswer, confirm
from nodes.gateway.gateway import ModelNotFound, find_definition
from nodes.gateway.request import InferenceRequest
from nodes.gateway.streams import STREAM_HEADERS
from nodes.sources import inspection
from nodes.sources.finding import SourceFinder
from nodes.sources.plans import ImportPlan
from nodes.sources.references import HubRef, ImageRef, recognise
from operations.executor.work import in_thread
from operations.models import TERMINAL, Operation, Status

logger = logging.getLogger(__name__)

POLL_SECONDS = 1.0
"""Seconds between two lines of progress."""
_CLEARED_MESSAGE = "the record of the import was cleared"


class PullFailed(ClusterError):
    """The import of the model has failed; the message is the reason."""

    status = 500
    code = "pull_failed"


async def pull(request: InferenceRequest) -> Answer | StreamedAnswer:
    """Import the model if the caller is an administrator. For a defined model, respond with success."""
    await confirm(request)
    body = wire.parse_struct(wire.parse_json_object(request.body), PullBody)
    name = body.model or body.name
    if not name:
        raise wire.field_error("model", "is required", "missing_required_parameter")
    try:
        await find_definition(name)
    except ModelNotFound:
        if not request.principal.is_admin:
            raise
    else:
        return status_lines(["pulling manifest", "success"], body.stream)
    plan = await _plan_import(name)
    admission = await run_as_caller(
        request, lambda: request_import(plan, by=request.requester, now=clock.now())
    )
    progress = PullProgress(admission.operation.id, plan)
    return await progress.wait() if body.stream is False else progress


async def _plan_import(name: str) -> ImportPlan:
    """Return the import plan of a model at Ollama's registry or of `hf.co/owner/repository:tag`."""
    if len(name.split()) != 1:
        raise InvalidInput("model: must be one name without blanks", field="model")
    settings = conf.cluster()
    reference = recognise(f"ollama pull {name}", mirror=settings.hugging_face_url)
    if not isinstance(reference, ImageRef | HubRef):
        raise Forbidden("only models of Ollama's registry and of Hugging Face can be pulled")
    # Not on this event loop: a header of megabytes is parsed.
    found = await asyncio.to_thread(lambda: asyncio.run(SourceFinder(settings).find(reference)))
    return await run_database_call(
        lambda: inspection.plan_of(found, name=name.removesuffix(":latest"), now=clock.now())
    )


class PullProgress:
    """The progress of an import operation as lines of JSON, until the operation ends."""

    def __init__(self, operation_id: UUID, plan: ImportPlan) -> None:
        self._operation_id = operation_id
        main = plan.files[0] if plan.files else None
        self._digest = f"sha256:{main.sha256}" if main is not None and main.sha256 else ""

    async def play(self, send: Send) -> tuple[int, bytes]:
        """Send the progress lines. Return the status and the last line."""
        with Outgoing(send) as client:
            await client.head([(b"content-type", ollama.LINES_CONTENT_TYPE), *STREAM_HEADERS])
            await client.body(_render_line({"status": "pulling manifest"}))
            try:
                with CancelOnStop():
                    return 200, await self._send_states(client)
            except ClusterError as error:
                return error.status, _render_line({"error": error.message})

    async def _send_states(self, client: Outgoing) -> bytes:
        """Send a line for each state of the operation. Return the last line."""
        async with aclosing(self._states()) as states:
            async for operation in states:
                if operation.status in TERMINAL:
                    return _render_end(operation)
                await client.body(_render_line(self._progress(operation)))
        return _render_line({"error": _CLEARED_MESSAGE})

    async def wait(self) -> Answer:
        """Wait until the import ends. Return the answer for success; raise PullFailed."""
        async for operation in self._states():
            if operation.status == Status.COMPLETED:
                return status_lines(["success"], stream=False)
            if operation.status in TERMINAL:
                raise PullFailed(operation.error or operation.message)
        raise PullFailed(_CLEARED_MESSAGE)

    async def _states(self) -> AsyncGenerator[Operation, None]:
        """Yield the operation each time that it may have changed. Stop if its row is deleted.

        The import does not need this process's database connection, so an outage is waited for.
        """
        with gateway.wake_ups().watch(self._operation_id) as watch:
            while True:
                try:
                    operation = await in_thread(Operation.objects.filter(pk=self._operation_id).first)
                except DatabaseError as error:
                    logger.info("The progress of an import cannot be read: %s", type(error).__name__)
                else:
                    if operation is None:
                        return
                    yield operation
                await watch.changed(timeout=POLL_SECONDS)

    def _progress(self, operation: Operation) -> dict[str, str | int]:
        status = f"pulling {self._digest[7:19]}" if self._digest else operation.message or "pulling"
        line: dict[str, str | int] = {"status": status}
        if self._digest:
            line["digest"] = self._digest
        if operation.total_bytes:
            line |= {"total": operation.total_bytes, "completed": operation.current_bytes}
        return line


def _render_end(operation: Operation) -> bytes:
    if operation.status == Status.COMPLETED:
        return _render_line({"status": "success"})
    return _render_line({"error": operation.error or operation.message or "the import was cancelled"})


def _render_line(value: object) -> bytes:
    return msgspec.json.encode(value) + b"\n"
