"""The definitions of models by name: the files of the models folder, and rows of the database.

A file wins over a row of the same name. A file that becomes unusable still wins, so that a slip in it does
not bring another definition into force; a file that never was usable wins by the name that it states. A
disabled row and a definition that says `disabled: true` define nothing. The folder is scanned at most once
per second, and only files with a new size or time are read again. Rows are polled as often, and at once after
a NOTIFY (`rows_changed`). A lookup of a known name waits for the read after a NOTIFY, but not for the regular
polls. An unusable file or row is logged once with its reason and stays in `problems` until it is removed or
repaired. It does not affect other definitions. While the folder cannot be listed, or a file's status cannot
be read, the definitions that were read before stay in force.

Each poll runs on a thread of its own, so an unresponsive folder (a mount whose server is down) or database
blocks neither the event loop nor the process. Definitions that were read before stay in use. Every other
lookup is 503 until both respond.
"""

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any
from uuid import UUID

from localai_cluster.kit import clock, conf, names, untrusted
from localai_cluster.kit.errors import Unavailable
from nodes.definitions import rows
from nodes.definitions.files import (
    Definition,
    UnusableDefinition,
    load_document,
    read_content,
    read_definition,
)
from nodes.definitions.polls import Poll
from nodes.definitions.recorded_files import LACKS_MARKER, MARKER
from nodes.definitions.rows import StoredDefinition
from nodes.definitions.sizes import Sizes, files_of, template_has_tools

logger = logging.getLogger(__name__)

POLL_EVERY = 1.0
"""Seconds between two polls of the folder, and of the rows."""
MISS_POLL_EVERY = 0.05
"""Seconds between two scans because of unknown names. Each such lookup waits for a scan that begins later."""
SIZE_POLL_EVERY = 10.0
"""Seconds between two measurements of the files of all models."""
POLL_LIMIT = 5.0
"""Seconds after which a poll that has not ended makes the folder or the database count as unresponsive."""
MAX_FILES = 4096
_FILE_SUFFIXES = (".yaml", ".yml")

_Stamp = tuple[int, int, int]
_NO_STAMP = (0, 0, 0)
_Files = dict[str, tuple[_Stamp, Definition | UnusableDefinition]]
ReadRows = Callable[[rows.Rows], dict[UUID, StoredDefinition]]


class FolderUnresponsive(Unavailable):
    """The models folder, or the database with the stored definitions, does not answer or cannot be read."""


@dataclass(frozen=True)
class Problems:
    """Why the folder, files by name, and rows by `Definition.source` are unusable, as displayable texts."""

    folder: str = ""
    files: Mapping[str, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.folder or self.files)


class Folder:
    """All definitions, of files and (with `read_rows`) of rows. Thread-safe, for any event loop."""

    def __init__(
        self,
        path: Path,
        monotonic: Callable[[], float] = clock.monotonic,
        *,
        limit: float = POLL_LIMIT,
        read_rows: ReadRows | None = None,
    ) -> None:
        self.sizes = Sizes(path)
        self.path, self._limit = path, limit
        self._lock = threading.Lock()
        self._reads = untrusted.SharedCalls(limit)
        self._scans = Poll(self._scan_folder, monotonic, limit)
        self._files: _Files = {}
        self._has_files, self._has_marker = False, True
        self._read_rows = read_rows
        self._row_polls = Poll(self._poll_rows, monotonic, limit)
        self._rows: rows.Rows | None = None if read_rows is not None else {}
        self._by_name: Mapping[str, Definition] = {}
        self._disabled: Mapping[str, Definition] = {}
        """The definitions that say `disabled: true`, by name."""
        self._file_names: Mapping[str, str] = {}
        """The files that define a model, or did before they became unusable, by its name."""
        self._size_polls = Poll(self._measure, monotonic, limit)
        self._total_sizes: Mapping[str, int] = {}
        self._folder_problem, self._problems = "", Problems()
        self._hangs = self._rows_hang = False

    async def find(self, name: str) -> Definition | None:
        """Return the model's definition, or None if it is not defined.

        Raises FolderUnresponsive when the name is unknown and the folder or the database does not respond.
        """
        definition = (await self._current(waits_for_rows=False)).get(name)
        if definition is None:
            await self._scans.request_call(MISS_POLL_EVERY)
            definition = (await self._current()).get(name)
        if definition is None and (self._hangs or self._rows_hang):
            raise self._hang_error()
        return definition

    async def all(self) -> list[Definition]:
        """Return every usable definition, sorted by name; raise FolderUnresponsive before the first scan."""
        return await self.reload(POLL_EVERY)

    async def reload(self, interval: float = 0.0) -> list[Definition]:
        """Read the folder and the rows unless they are recent enough; return every usable definition."""
        return sorted((await self._current(interval)).values(), key=lambda definition: definition.name)

    async def disabled(self) -> Mapping[str, Definition]:
        """Return the definitions that say `disabled: true`, by name: requests and rules do not find them."""
        await self._current()
        return self._disabled

    async def stored_rows(self) -> "list[MergedRow]":
        """Return all stored rows, also disabled and unusable ones; none before they were first read."""
        await self._current()
        with self._lock:
            return [MergedRow(row, self._file_names.get(row.name, "")) for row in (self._rows or {}).values()]

    async def file_of(self, name: str) -> str:
        """Return the file that defines the model, also if it has become unusable; "" if none does."""
        await self._current()
        return self._file_names.get(name, "")

    async def all_contents(self) -> list[Definition | UnusableDefinition]:
        """Return the current content of every file and row, in force or not; raise FolderUnresponsive."""
        await self._current(0.0)
        if self._hangs or self._rows_hang:
            raise self._hang_error()
        with self._lock:
            contents = [content for _, content in self._files.values()]
            return contents + [row.content for row in (self._rows or {}).values()]

    async def unusable_files(self) -> dict[str, UnusableDefinition]:
        """Return the errors of unusable files, by their displayable names."""
        await self._current()
        return {
            _displayable_name(name): content
            for name, (_, content) in self._files.items()
            if isinstance(content, UnusableDefinition)
        }

    async def text(self, name: str) -> str | None:
        """Return the YAML that defines the model; None if there is none.

        Raises UnusableDefinition, and FolderUnresponsive if the file cannot be read in time.
        """
        definition = await self.find(name) or self._disabled.get(name)
        if definition is None:
            return None
        if definition.source.startswith(rows.SOURCE_PREFIX):
            return await asyncio.wrap_future(untrusted.in_daemon_thread(rows.read_text, name))
        key = ("text", definition.source, definition.revision)
        try:
            content = await self._reads.call(key, read_content, self.path / definition.source)
        except TimeoutError as error:
            raise self._folder_error("does not answer") from error
        return content.decode("utf-8", "replace")

    async def document(self, name: str) -> Any:
        """Return the parsed YAML that defines the model; None if there is none or it is unusable."""
        try:
            text = await self.text(name)
            return None if text is None else load_document(text.encode())
        except UnusableDefinition:
            return None

    def rows_changed(self) -> None:
        """Make the next lookup read the rows, because one of them has changed."""
        self._row_polls.announce_change()

    async def file_lists(self, definitions: Sequence[Definition]) -> list[list[tuple[str, int]]]:
        """Return path and size of the files of each model; [] if the files cannot be read in time."""
        key = ("files", *((definition.name, definition.revision) for definition in definitions))
        with suppress(TimeoutError):
            return await self._reads.call(key, lambda: list(map(self._files_of, definitions)))
        return [[] for _ in definitions]

    def _files_of(self, definition: Definition) -> list[tuple[str, int]]:
        with suppress(OSError):
            return files_of(self.path, definition)
        return []

    async def total_sizes(self, definitions: Sequence[Definition]) -> list[int]:
        """Return the bytes of all files of each model, a few seconds old; 0 if they cannot be read."""
        is_new = any(definition.name not in self._total_sizes for definition in definitions)
        await self._size_polls.wait(POLL_EVERY if is_new else SIZE_POLL_EVERY)
        return [self._total_sizes.get(definition.name, 0) for definition in definitions]

    def _measure(self) -> None:
        """Measure the files of all models. Runs in its own thread."""
        sizes = {}
        for name, definition in self._by_name.items():
            sizes[name] = 0
            with suppress(OSError):
                sizes[name] = sum(size for _, size in files_of(self.path, definition))
        self._total_sizes = sizes

    async def has_tools(self, definition: Definition) -> bool:
        """Return True if the model's file is known to have a chat template with tools; False if it hangs."""
        with suppress(TimeoutError):
            key = ("tools", definition.name, definition.revision)
            return await self._reads.call(key, template_has_tools, self.path, definition)
        return False

    async def problems(self) -> Problems:
        """Return the current reasons why files, or the whole folder, are unusable."""
        with suppress(FolderUnresponsive):
            await self._current()
        return replace(self._problems, folder="does not answer") if self._hangs else self._problems

    async def unreadable_files(self) -> frozenset[str] | None:
        """Return the sources of unusable definitions; None if the folder or the rows are not fully known."""
        problems = await self.problems()
        if self._hangs or self._rows is None or problems.folder:
            return None
        names = (name for name, (_, content) in self._files.items() if _is_unusable(content))
        return frozenset(names) | {
            row.source
            for row in self._rows.values()
            if _is_unusable(row.content) and not row.disabled and row.name not in self._file_names
        }

    async def conflicting(self, definition: Definition) -> frozenset[str]:
        """Return the names of the models that must not share a node with the model (R2.81)."""
        if not definition.groups:
            return frozenset()
        definitions = (await self._current()).values()
        return frozenset(candidate.name for candidate in definitions if definition.conflicts_with(candidate))

    async def _current(
        self, interval: float = POLL_EVERY, *, waits_for_rows: bool = True
    ) -> Mapping[str, Definition]:
        """Return the definitions. Rows may be a second old unless `waits_for_rows`.

        After an announced change the rows are always read first.
        """
        # One that does not respond is not waited for: its definitions are known, or the caller is told.
        was_hanging = self._rows_hang
        row_poll = self._row_polls.begin(interval) if self._read_rows is not None else None
        if not waits_for_rows and self._rows is not None and not self._row_polls.has_changes():
            row_poll = None
            if self._row_polls.is_overdue():
                self._report_rows(f"no answer within {self._limit:g} s")
        if not await self._scans.wait(interval):
            self._report_hanging()
        if not was_hanging and not await self._row_polls.finish(row_poll):
            self._report_rows(f"no answer within {self._limit:g} s")
        if not self._has_files:
            raise self._hang_error()
        return self._by_name

    def _scan_folder(self) -> None:
        """Scan the folder once. Runs in its own thread."""
        try:
            stamps, problem = self._read_stamps()
            files = None if stamps is None else self._read_files(stamps)
            has_marker = os.path.lexists(self.path / MARKER)
            with self._lock:
                if files is not None:
                    self._files, self._has_files, self._has_marker = files, True, has_marker
                self._folder_problem = problem
                self._merge()
            if self._hangs:
                self._hangs = False
                logger.warning("The models folder %s answers again", self.path)
        except Exception as error:
            with self._lock:
                self._folder_problem = _make_displayable(f"cannot be read: {untrusted.yaml_reason(error)}")
                self._report(Problems(self._folder_problem), error)

    def _poll_rows(self) -> None:
        """Read the rows once. Runs in its own thread."""
        assert self._read_rows is not None
        try:
            stored = self._read_rows(self._rows or {})
            with self._lock:
                self._rows = stored
                self._merge()
        except Exception as error:
            self._report_rows(untrusted.yaml_reason(error))
            return
        if self._rows_hang:
            self._rows_hang = False
            logger.warning("Stored model definitions are read again")

    def _merge(self) -> None:
        """Compute the definitions by name from the files and the rows. The caller must hold the lock."""
        by_name, broken = _index_definitions(self._files)
        # By the stated name where the former one is not known: a process that starts decides as the others.
        files = {
            content.former or content.name: name
            for name, (_, content) in self._files.items()
            if isinstance(content, UnusableDefinition) and (content.former or content.name)
        }
        files |= {name: definition.source for name, definition in by_name.items()}
        for row in (self._rows or {}).values():
            if row.disabled or row.name in files:
                continue
            if isinstance(row.content, UnusableDefinition):
                broken[row.source] = _make_displayable(str(row.content))
            else:
                by_name[row.name] = row.content
        self._disabled = {name: by_name.pop(name) for name in [*by_name] if by_name[name].disabled}
        self._by_name, self._file_names = by_name, files
        is_replaced = not self._has_marker and any(row.expects_marker for row in (self._rows or {}).values())
        self._report(Problems(self._folder_problem or (LACKS_MARKER if is_replaced else ""), broken))

    def _report_hanging(self) -> None:
        if not self._hangs:
            self._hangs = True
            logger.warning(
                "The models folder %s has not answered for %g s; definitions that are known go on serving",
                self.path,
                self._limit,
            )

    def _report_rows(self, reason: str) -> None:
        if not self._rows_hang:
            self._rows_hang = True
            logger.warning("Stored model definitions cannot be read: %s; known ones go on serving", reason)

    def _hang_error(self) -> FolderUnresponsive:
        if self._hangs or not self._has_files:
            return self._folder_error(self._folder_problem if not self._hangs else "does not answer")
        return FolderUnresponsive("the database with the model definitions does not answer")

    def _folder_error(self, problem: str) -> FolderUnresponsive:
        return FolderUnresponsive(f"the models folder {self.path.name!r} of the control plane {problem}")

    def _read_files(self, stamps: Mapping[str, _Stamp]) -> _Files:
        """Read new and changed files; keep the results of the other files."""
        files: _Files = {}
        for name, stamp in sorted(stamps.items()):
            cached = self._files.get(name)
            if cached is not None and cached[0] == stamp:
                files[name] = cached
                continue
            try:
                definition = read_definition(self.path / name)
                files[name] = stamp, replace(definition, changed=stamp[0] // 1_000_000_000)
            except UnusableDefinition as error:
                if cached is not None:
                    former = cached[1]
                    error.former = former.name if isinstance(former, Definition) else former.former
                files[name] = stamp, error
        return files

    def _read_stamps(self) -> tuple[dict[str, _Stamp] | None, str]:
        """Return a stamp for each definition file, and the folder's problem ("" if none).

        None instead of the stamps if the folder cannot be listed. One that has never existed has no files.
        """
        try:
            with os.scandir(self.path) as entries:
                listed = sorted(entry.name for entry in entries if entry.name.endswith(_FILE_SUFFIXES))
        except OSError as error:
            has_no_files = isinstance(error, FileNotFoundError) and not self._has_files
            return {} if has_no_files else None, _make_displayable(f"cannot be listed: {error.strerror}")
        problem = ""
        if len(listed) > MAX_FILES:
            problem = f"holds more than {MAX_FILES} definitions; the rest is ignored"
        stamps: dict[str, _Stamp] = {}
        for name in listed[:MAX_FILES]:
            try:
                status = _stat_file(self.path / name)
            except OSError as error:  # not removed: what is known of it stays in use
                shown = _displayable_name(name)
                problem = f"has files that cannot be examined, such as {shown}: {error.strerror}"
                stamps[name] = self._files[name][0] if name in self._files else _NO_STAMP
                continue
            if status is not None:
                stamps[name] = (status.st_mtime_ns, status.st_size, status.st_ino)
        return stamps, problem

    def _report(self, problems: Problems, error: Exception | None = None) -> None:
        """Store the problems, and log the problems that the previous scan did not have."""
        previous, self._problems = self._problems, problems
        if problems.folder not in ("", previous.folder):
            logger.warning("The models folder %s %s", self.path, problems.folder, exc_info=error)
        for name, reason in problems.files.items():
            if previous.files.get(name) != reason:
                logger.warning("Model definition %s %s", name, reason)


@dataclass(frozen=True)
class MergedRow:
    """A row, and the file that overrides it ("" = none)."""

    row: StoredDefinition
    file: str


def _is_unusable(content: Definition | UnusableDefinition) -> bool:
    return isinstance(content, UnusableDefinition)


def _stat_file(path: Path) -> os.stat_result | None:
    """Return the file's status (of a broken link the link's own); None if the file has been removed.

    Raises OSError.
    """
    with suppress(OSError):
        return path.stat()
    try:
        return path.lstat()
    except FileNotFoundError:
        return None


def _index_definitions(files: _Files) -> tuple[dict[str, Definition], dict[str, str]]:
    """Return the definitions by model name, and the reasons for unusable files by file name."""
    by_name: dict[str, Definition] = {}
    broken: dict[str, str] = {}
    for name, (_, content) in files.items():
        if isinstance(content, UnusableDefinition):
            broken[_displayable_name(name)] = _make_displayable(str(content))
        elif (first := by_name.setdefault(content.name, content)) is not content:
            broken[_displayable_name(name)] = _make_displayable(
                f"defines {content.name!r} again; {first.source} stays in force"
            )
    return by_name, broken


def _make_displayable(text: str) -> str:
    """Return the text in a form that pages and logs can display."""
    return names.to_single_line(text[:1000])


def _displayable_name(name: str) -> str:
    """Return a displayable form of a file's name. Different names, even undecodable ones, stay different."""
    return "".join(
        "".join(f"\\x{byte:02x}" for byte in os.fsencode(character))
        if character == "\\" or names.find_unprintable(character)
        else character
        for character in name
    )


@lru_cache(maxsize=8)
def _folder(path: Path) -> Folder:
    return Folder(path, read_rows=rows.read_rows)


def folder() -> Folder:
    """Return the definitions according to this process's settings."""
    return _folder(conf.cluster().models_path)
