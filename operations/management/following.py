"""Follow an operation at the command line until it ends; its end is that of the command.

Its row is read again when a NOTIFY names it, and every few seconds, because a NOTIFY may be lost. The loop
that listens runs only between two reads, so rows are read in the command's own thread, and Ctrl-C ends both.

How an operation that is followed is shown: bars on a terminal, otherwise one line a change.

Both are told the whole operation whenever it was read, and show what differs.
"""

import asyncio
import logging
from collections.abc import Iterable
from types import TracebackType
from typing import IO, Any, Protocol, Self, cast
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
from localai_cluster.accounts.command_line import Options, printable
from operations.api.jobs import entry_of
from operations.changes import events
from operations.management import operation_texts as texts
from operations.management.operation_texts import Entry, Part
from operations.models import TERMINAL, Status, TargetStatus, Waves

MOST_LINES = 20
"""Lines of one operation on a terminal; parts without a line of their own are counted in the last one."""
_STEP = 10
"""Percent between two lines about one download."""
_FIRST = (
    TargetStatus.DOWNLOADING,
    TargetStatus.RUNNING_ON_WORKER,
    TargetStatus.ERROR,
    TargetStatus.QUEUED,
)
"""States that get a line, the most interesting first."""


class Display(Protocol):
    """The display of a running operation."""

    def show(self, entry: Entry) -> None:
        """Show its present state."""

    def __enter__(self) -> Self:
        """Begin."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End; the last lines stay."""


class Silent:
    """No display: the caller prints the end."""

    def show(self, entry: Entry) -> None:
        """Do nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None


class Lines(Silent):
    """One line for each change of a part, and each tenth of a download."""

    def __init__(self, out: OutputWrapper) -> None:
        self._out = out
        self._said: dict[str, tuple[object, ...]] = {}

    def show(self, entry: Entry) -> None:
        """Print the changes."""
        parts = entry.get("nodes", ())
        for part in parts:
            tenths = part["percentage"] // _STEP if part["status"] == TargetStatus.DOWNLOADING else 0
            self._say(part["node_id"], (texts.state(part), tenths, texts.reason(part)), texts.line(part))
        if len(parts) != 1:
            self._say("", (entry["message"],), printable(entry["message"]))

    def _say(self, about: str, now: tuple[object, ...], line: str) -> None:
        if self._said.get(about) != now:
            self._said[about] = now
            self._out.write(line)


class _Picture(Progress):
    """The head, the bars, and the parts without one."""

    head = rest = Text()

    def get_renderables(self) -> Iterable[RenderableType]:
        """Yield them from the top."""
        yield self.head
        yield self.make_tasks_table(self.tasks)
        if self.rest.plain:
            yield self.rest


class _Left(TimeRemainingColumn):
    """Estimate of the time left, for progress that is measured in bytes."""

    def render(self, task: Task) -> Text:
        """Return it, or an empty text without a download."""
        return super().render(task) if task.fields["measured"] and not task.finished else Text("")


class Bars:
    """A bar a part, drawn again in place."""

    def __init__(self, out: OutputWrapper, console: Console) -> None:
        self._out, self._ending = out, out.ending
        self._progress = _Picture(
            _text("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            _text("{task.fields[size]}"),
            _Left(compact=True),
            _text("{task.fields[said]}"),
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
        """Draw the most interesting parts, and count the others."""
        parts = list(entry.get("nodes", ())) or [_whole(entry)]
        ordered = sorted(parts, key=_interest)
        room = MOST_LINES - 1  # below the head
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
        progress.rest = _line(f"and {len(left)} more: {texts.counts(left)}" if left else "")
        progress.refresh()

    def _draw(self, part: Part) -> None:
        total = part.get("total_bytes", 0)
        downloads = bool(total) and part["status"] == TargetStatus.DOWNLOADING
        values: dict[str, Any] = {
            "description": printable(part["node_name"]),
            "total": total if downloads else 100,
            "completed": part.get("current_bytes", 0) if downloads else part["percentage"],
            "size": texts.size(part),
            "measured": downloads,
            "said": printable(f"{texts.state(part)}: {texts.reason(part)}".removesuffix(": ")),
        }
        known = self._tasks.get(part["node_id"])
        if known is None:
            self._tasks[part["node_id"]] = self._progress.add_task(**values)
        else:
            self._progress.update(known, **values)


def display_on(out: OutputWrapper) -> Display:
    """Return the display for the stream: bars need a terminal that can move its cursor."""
    console = Console(file=cast(IO[str], out), highlight=False)
    return Bars(out, console) if out.isatty() and not console.is_dumb_terminal else Lines(out)


def _text(template: str) -> TextColumn:
    """A column that takes texts of workers as they are, in one line."""
    return TextColumn(template, markup=False, table_column=Column(no_wrap=True, overflow="ellipsis"))


def _line(text: str) -> Text:
    return Text(printable(text), no_wrap=True, overflow="ellipsis")


def _interest(part: Part) -> tuple[int, str]:
    place = _FIRST.index(part["status"]) if part["status"] in _FIRST else len(_FIRST)
    return place, str(part["node_name"])


def _whole(entry: Entry) -> Part:
    """Return an operation without targets in the form of a target."""
    return {
        "node_id": "",
        "node_name": entry.get("nodeName", ""),
        "status": TargetStatus.RUNNING_ON_WORKER,
        "percentage": entry["progress"],
        "phase": entry.get("phase", ""),
    }


log = logging.getLogger(__name__)

READ_EVERY = 5.0
GATHER = 0.1
"""Seconds for which changes are gathered: parts of many nodes move together."""
_INTERRUPTED = 130
"""The exit code of a command that Ctrl-C has ended."""


def to_its_end(id: UUID, out: OutputWrapper, *, as_json: bool) -> str:
    """Show the operation until it has ended; return the last line, or the operation as JSON.

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


def unless_detached(options: Options, id: UUID, subject: str, body: dict[str, Any]) -> str:
    """Show the operation until it has ended, or with `--detach` return how it can be shown."""
    if not options["detach"]:
        return to_its_end(id, options["out"], as_json=options["json"])
    if options["json"]:
        return command_line.as_json(body)
    return f"{subject}: operation {id}; `manage.py operations show {id} --follow` shows it"


def ending(entry: Entry) -> str:
    """Return the reason of its failure, by node, and the command that helps."""
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
    """Return the operation when it has ended or waits for a choice."""
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
    """Return the operation; None while the database is away. Raise CommandError if its record is gone."""
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
    """Wait until the row may have changed."""
    try:
        async with asyncio.timeout(READ_EVERY):
            await woken.wait()
    except TimeoutError:
        return
    await asyncio.sleep(GATHER)
    woken.clear()
