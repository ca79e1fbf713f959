"""Follows an operation at the command line until it ends, and ends the command as the operation ended.

Its row is read again when a NOTIFY names it, and every few seconds, because a NOTIFY may be lost. The loop
that listens runs only between two reads, so rows are read in the command's own thread, and Ctrl-C ends both.
"""

import asyncio
import logging
from typing import Any
from uuid import UUID

from django.core.management.base import CommandError, OutputWrapper
from django.db import InterfaceError, OperationalError, connection

from localai_cluster.accounts import command_line
from nodes.api.operations import entry_of
from nodes.management import operation_texts as texts
from nodes.management.bars import MOST_LINES, Display, Silent, display_on
from nodes.management.operation_texts import Entry
from operations.changes import events
from operations.models import TERMINAL, Status, TargetStatus, Waves

log = logging.getLogger(__name__)

READ_EVERY = 5.0
GATHER = 0.1
"""Seconds for which news are gathered: parts of many nodes move together."""
_INTERRUPTED = 130
"""The exit code of a command that Ctrl-C has ended."""


def to_its_end(id: UUID, out: OutputWrapper, *, as_json: bool) -> str:
    """Shows the operation until it has ended; answers the last line, or the operation as JSON.

    CommandError if it did not complete, waits for a choice, or when Ctrl-C ends the command.
    """
    display: Display = Silent() if as_json else display_on(out)
    try:
        with display:
            entry = _follow(id, display)
    except KeyboardInterrupt:
        raise CommandError(
            f"operation {id} goes on; `manage.py operations show {id} --follow` shows it,"
            f" `manage.py operations cancel {id}` ends it",
            returncode=_INTERRUPTED,
        ) from None
    if as_json:
        out.write(command_line.as_json(entry))
    if entry["status"] != Status.COMPLETED:
        raise CommandError(ending(entry))
    return "" if as_json else f"operation {texts.short(entry)} completed"


def ending(entry: Entry) -> str:
    """Why it did not complete, by node, and the command that helps."""
    id = texts.short(entry)
    if _asks(entry):
        return (
            f"operation {id} waits for a choice: {command_line.printable(entry['message'])};"
            f" `manage.py operations continue {id}` or `stop {id}`"
        )
    if entry["status"] == Status.CANCELLED:
        return f"operation {id}: {command_line.printable(entry['message'])}"
    failed = [part for part in entry.get("nodes", ()) if part["status"] == TargetStatus.ERROR]
    if not failed:
        why = command_line.printable(entry.get("error") or entry["message"])
        return f"operation {id} failed: {why}; `manage.py operations retry {id}` tries again"
    of = f"{len(failed)} of {len(entry['nodes'])} nodes"
    head = f"operation {id} failed on {of}; `manage.py operations retry {id}` tries again"
    more = [f"and {len(failed) - MOST_LINES} more"] if len(failed) > MOST_LINES else []
    return "\n".join([head, *map(texts.line, failed[:MOST_LINES]), *more])


def _asks(entry: Entry) -> bool:
    waves = entry.get("waves")
    return waves is not None and waves["state"] == Waves.ASKS and entry["status"] not in TERMINAL


def _follow(id: UUID, display: Display) -> dict[str, Any]:
    """The operation when it has ended or waits for a choice."""
    woken = asyncio.Event()
    with asyncio.Runner() as runner:
        # The task stays referenced: a loop keeps only a weak one.
        listening = runner.run(_listen(id, woken))
        while True:
            entry = _read(id)
            if entry is not None:
                display.show(entry)
                if entry["status"] in TERMINAL or _asks(entry):
                    listening.cancel()
                    return entry
            runner.run(_news(woken))


def _read(id: UUID) -> dict[str, Any] | None:
    """The operation; None while the database does not answer. CommandError if its record is gone."""
    try:
        entry = entry_of(id)
    except (OperationalError, InterfaceError) as error:
        log.warning("operation %s not read: %s; reading again", id, type(error).__name__)
        connection.close()
        return None
    if entry is None:
        raise CommandError(f"the record of operation {id} has been cleared")
    return entry


async def _listen(id: UUID, woken: asyncio.Event) -> "asyncio.Task[None]":
    return asyncio.create_task(_hear(id, woken), name="news of an operation")


async def _hear(id: UUID, woken: asyncio.Event) -> None:
    async for _, payload in events.listen(events.OPERATIONS):
        # Without a payload: something may have been missed.
        if not payload or payload.startswith(str(id)):
            woken.set()


async def _news(woken: asyncio.Event) -> None:
    """Returns when the row is worth a look."""
    try:
        async with asyncio.timeout(READ_EVERY):
            await woken.wait()
    except TimeoutError:
        return
    await asyncio.sleep(GATHER)
    woken.clear()
