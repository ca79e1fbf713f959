"""Show an operation at the command line until it ends; then the command ends too.

The row is read again when a NOTIFY names it, and every few seconds, because a NOTIFY may be lost. The loop
that listens runs only between two reads, so rows are read in the command's own thread, and Ctrl-C ends both.

On a terminal the display has bars, otherwise one line for each change. Both displays get the whole operation
at each read, and show the differences.
"""

import asyncio
import logging
from collections.abc import Iterable
from typing import IO, Any, Self, cast
from uuid import UUID

from django.core.management.base import CommandError, OutputWrapper
from django.db import InterfaceError, OperationalError, connection
from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    Progress,
    Task,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Column
from rich.text import Text

from localai_cluster.accounts import command_line
from localai_cluster.accounts.command_line import Argument, Options, printable
from operations.api.jobs import read_entry
from operations.changes import events
from operations.management import operation_texts as texts
from operations.management.operation_texts import Entry, Part
from operations.models import TERMINAL, Status, TargetStatus, Waves

MAX_LINES_SHOWN = 20
"""Maximum lines of an operation on a terminal; the last line counts the targets that have no line."""
_PERCENT_STEP = 10
"""A download gets another line after this many percent."""
_STATUS_ORDER = (
    TargetStatus.DOWNLOADING,
    TargetStatus.RUNNING_ON_WORKER,
    TargetStatus.ERROR,
    TargetStatus.QUEUED,
)
"""Order of targets on a terminal, by their status."""


CONFIRM_LAST: Argument = (
    "--confirm-last",
    {
        "action": "append",
        "default": [],
        "metavar": "MODEL",
        "help": "the last replica of this model may stop; repeatable",
    },
)


class Display:
    """The display of a running operation; this one shows nothing, because the caller prints the result."""

    def show(self, entry: Entry) -> None:
        """Show the operation's present state."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """End the display; its last lines stay."""


class Lines(Display):
    """Prints one line for each change of a target, and for each tenth of a download."""

    def __init__(self, out: OutputWrapper) -> None:
        self._out = out
        self._printed: dict[str, tuple[object, ...]] = {}

    def show(self, entry: Entry) -> None:
        """Print the changes since the last call."""
        parts = entry.get("nodes", ())
        for part in parts:
            tenths = part["percentage"] // _PERCENT_STEP if part["status"] == TargetStatus.DOWNLOADING else 0
            self._print_if_new(
                part["node_id"],
                (texts.target_state(part), tenths, texts.target_reason(part)),
                texts.target_line(part),
            )
        if len(parts) != 1:
            self._print_if_new("", (entry["message"],), printable(entry["message"]))

    def _print_if_new(self, about: str, now: tuple[object, ...], line: str) -> None:
        if self._printed.get(about) != now:
            self._printed[about] = now
            self._out.write(line)


class _ProgressDisplay(Progress):
    """The lines of an operation: title, bars, and a line that counts the targets without a bar."""

    head = rest = Text()

    def get_renderables(self) -> Iterable[RenderableType]:
        """Yield title, bars and count, in this order."""
        yield self.head
        yield self.make_tasks_table(self.tasks)
        if self.rest.plain:
            yield self.rest


class _TimeLeftColumn(TimeRemainingColumn):
    """Column with the estimated time left of a download."""

    def render(self, task: Task) -> Text:
        """Return the estimate; an empty text for a target that downloads nothing."""
        return super().render(task) if task.fields["measured"] and not task.finished else Text("")


class Bars(Display):
    """Draws one bar for each target, and redraws the bars in place."""

    def __init__(self, out: OutputWrapper, console: Console) -> None:
        self._out, self._ending = out, out.ending
        self._progress = _ProgressDisplay(
            _text_column("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            _text_column("{task.fields[size]}"),
            _TimeLeftColumn(compact=True),
            _text_column("{task.fields[said]}"),
            console=console,
            auto_refresh=False,
        )
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        # The stream of a command ends everything that is written with a new line.
        self._out.ending = ""
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
        self._out.ending = self._ending

    def show(self, entry: Entry) -> None:
        """Draw a bar for the first targets in the order of their states, and count the rest."""
        parts = list(entry.get("nodes", ())) or [_as_target(entry)]
        ordered = sorted(parts, key=_sort_key)
        room = MAX_LINES_SHOWN - 1  # below the head
        shown = ordered if len(parts) <= room else ordered[: room - 1]
        chosen = {part["node_id"] for part in shown}
        left = [part for part in ordered if part["node_id"] not in chosen]
        progress = self._progress
        progress.disable = True  # a bar that comes would draw all of them
        for gone in self._tasks.keys() - chosen:
            progress.remove_task(self._tasks.pop(gone))
        for part in shown:
            self._draw(part)
        progress.disable = False
        progress.head = _line(f"{texts.kind_text(entry)} of {entry['id']}: {entry['message']}")
        progress.rest = _line(f"and {len(left)} more: {texts.state_counts(left)}" if left else "")
        progress.refresh()

    def _draw(self, part: Part) -> None:
        total = part.get("total_bytes", 0)
        downloads = bool(total) and part["status"] == TargetStatus.DOWNLOADING
        values: dict[str, Any] = {
            "description": printable(part["node_name"]),
            "total": total if downloads else 100,
            "completed": part.get("current_bytes", 0) if downloads else part["percentage"],
            "size": texts.target_size(part),
            "measured": downloads,
            "said": printable(f"{texts.target_state(part)}: {texts.target_reason(part)}".removesuffix(": ")),
        }
        known = self._tasks.get(part["node_id"])
        if known is None:
            self._tasks[part["node_id"]] = self._progress.add_task(**values)
        else:
            self._progress.update(known, **values)


def display_on(out: OutputWrapper) -> Display:
    """Return the display for the stream: bars on a terminal that can move its cursor, otherwise lines."""
    console = Console(file=cast(IO[str], out), highlight=False)
    return Bars(out, console) if out.isatty() and not console.is_dumb_terminal else Lines(out)


def _text_column(template: str) -> TextColumn:
    """Return a column with texts of workers, without markup and in one line."""
    return TextColumn(template, markup=False, table_column=Column(no_wrap=True, overflow="ellipsis"))


def _line(text: str) -> Text:
    return Text(printable(text), no_wrap=True, overflow="ellipsis")


def _sort_key(part: Part) -> tuple[int, str]:
    place = _STATUS_ORDER.index(part["status"]) if part["status"] in _STATUS_ORDER else len(_STATUS_ORDER)
    return place, str(part["node_name"])


def _as_target(entry: Entry) -> Part:
    """Return an operation without targets in the form of a target."""
    return {
        "node_id": "",
        "node_name": entry.get("nodeName", ""),
        "status": TargetStatus.RUNNING_ON_WORKER,
        "percentage": entry["progress"],
        "phase": entry.get("phase", ""),
    }


log = logging.getLogger(__name__)

READ_INTERVAL = 5.0
GATHER_SECONDS = 0.1
"""Seconds for which changes are gathered, because targets of many nodes change together."""
_INTERRUPTED_EXIT_CODE = 130
"""Exit code of a command that Ctrl-C has ended."""


def follow_to_end(id: UUID, out: OutputWrapper, *, as_json: bool) -> str:
    """Show the operation until it has ended; return the last line of text, or "" if JSON was printed.

    Raises CommandError if the operation did not complete or waits for a choice, and after Ctrl-C.
    """
    display = Display() if as_json else display_on(out)
    try:
        with display:
            entry = _follow(id, display)
    except KeyboardInterrupt:
        raise CommandError(
            f"operation {id} goes on; `manage.py operations show {id} --follow` shows it,"
            f" `manage.py operations cancel {id}` ends it",
            returncode=_INTERRUPTED_EXIT_CODE,
        ) from None
    if as_json:
        out.write(command_line.as_json(entry))
    if entry["status"] != Status.COMPLETED:
        raise CommandError(outcome_text(entry))
    return "" if as_json else f"operation {texts.short_id(entry)} completed"


def follow_unless_detached(options: Options, id: UUID, subject: str, body: dict[str, Any]) -> str:
    """Show the operation until it has ended; with `--detach` return the command that would show it."""
    if not options["detach"]:
        return follow_to_end(id, options["out"], as_json=options["json"])
    if options["json"]:
        return command_line.as_json(body)
    return f"{subject}: operation {id}; `manage.py operations show {id} --follow` shows it"


def outcome_text(entry: Entry) -> str:
    """Return the text about an operation that did not complete: reasons by node, and the next command."""
    id = texts.short_id(entry)
    if _waits_for_choice(entry):
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
    more = [f"and {len(failed) - MAX_LINES_SHOWN} more"] if len(failed) > MAX_LINES_SHOWN else []
    return "\n".join([head, *map(texts.target_line, failed[:MAX_LINES_SHOWN]), *more])


def _waits_for_choice(entry: Entry) -> bool:
    waves = entry.get("waves")
    return waves is not None and waves["state"] == Waves.ASKS and entry["status"] not in TERMINAL


def _follow(id: UUID, display: Display) -> dict[str, Any]:
    """Show the operation until it has ended or waits for a choice; return it."""
    changed = asyncio.Event()
    with asyncio.Runner() as runner:
        # The task stays referenced: a loop keeps only a weak one.
        listening = runner.run(_start_listening(id, changed))
        while True:
            entry = _read(id)
            if entry is not None:
                display.show(entry)
                if entry["status"] in TERMINAL or _waits_for_choice(entry):
                    listening.cancel()
                    return entry
            runner.run(_wait_for_change(changed))


def _read(id: UUID) -> dict[str, Any] | None:
    """Return the operation; None during a database outage. Raise CommandError if its record was deleted."""
    try:
        entry = read_entry(id)
    except (OperationalError, InterfaceError) as error:
        log.warning("operation %s not read: %s; reading again", id, type(error).__name__)
        connection.close()
        return None
    if entry is None:
        raise CommandError(f"the record of operation {id} has been cleared")
    return entry


async def _start_listening(id: UUID, changed: asyncio.Event) -> "asyncio.Task[None]":
    return asyncio.create_task(_set_on_change(id, changed), name="news of an operation")


async def _set_on_change(id: UUID, changed: asyncio.Event) -> None:
    async for _, payload in events.listen(events.OPERATIONS):
        # Without a payload: something may have been missed.
        if not payload or payload.startswith(str(id)):
            changed.set()


async def _wait_for_change(changed: asyncio.Event) -> None:
    """Wait until a NOTIFY names the operation, or the next read is due."""
    try:
        async with asyncio.timeout(READ_INTERVAL):
            await changed.wait()
    except TimeoutError:
        return
    await asyncio.sleep(GATHER_SECONDS)
    changed.clear()
