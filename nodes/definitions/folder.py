"""The models folder: every usable definition in it by name, reloaded when a file changes.

The folder is scanned at most once per second, and only files with a new size or time are read again. An
unusable file is logged once with its reason and stays in `problems` until it is removed or repaired. It does
not affect the other files.

Scans run on a thread of their own, so an unresponsive folder (a mount whose server is down) blocks neither
the event loop nor the process. Definitions that were read before stay in use. Every other lookup is 503 until
the folder responds.
"""

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from localai_cluster.kit import clock, conf, names, untrusted
from localai_cluster.kit.errors import Unavailable
from nodes.definitions.files import Definition, UnusableDefinition, read_definition
from nodes.definitions.files import read_document as read_file
from nodes.definitions.sizes import Sizes, path_inside, template_has_tools

logger = logging.getLogger(__name__)

LOOK_EVERY = 1.0
"""Seconds between two scans of the folder."""
LOOK_AFTER_MISS = 0.05
"""Seconds between two scans after a lookup miss, so that a definition added a moment ago is usable at once.
"""
LOOK_LIMIT = 5.0
"""Seconds that requests wait for one scan; after that the folder counts as unresponsive."""
MAX_FILES = 4096
_SUFFIXES = (".yaml", ".yml")

_Stamp = tuple[int, int, int]
_Files = dict[str, tuple[_Stamp, Definition | UnusableDefinition]]


class FolderUnresponsive(Unavailable):
    """The models folder does not answer."""


@dataclass(frozen=True)
class Problems:
    """The reasons why models of a folder are unusable; each is one displayable line."""

    folder: str = ""
    """The problem of the folder itself; empty if it has none."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Reasons by file name."""

    def __bool__(self) -> bool:
        return bool(self.folder or self.files)


class Folder:
    """The definitions of one folder. Thread-safe, and usable from several event loops."""

    def __init__(
        self,
        path: Path,
        monotonic: Callable[[], float] = clock.monotonic,
        *,
        limit: float = LOOK_LIMIT,
    ) -> None:
        self.sizes = Sizes(path)
        self._path = path
        self._monotonic = monotonic
        self._limit = limit
        self._lock = threading.Lock()
        self._scan: Future[None] | None = None
        self._scan_began_at = 0.0
        self._scanned_at = float("-inf")
        self._files: _Files = {}
        self._by_name: Mapping[str, Definition] | None = None
        self._problems = Problems()
        self._hangs = False

    async def find(self, name: str) -> Definition | None:
        """Return the definition that clients request as `name`, or None.

        Raises FolderUnresponsive when the name is unknown and the folder does not respond.
        """
        definition = (await self._current()).get(name) or (await self._current(LOOK_AFTER_MISS)).get(name)
        if definition is None and self._hangs:
            raise self._hang_error()
        return definition

    async def all(self) -> list[Definition]:
        """Return every usable definition, sorted by name; raise FolderUnresponsive before the first scan."""
        return sorted((await self._current()).values(), key=lambda definition: definition.name)

    async def reload(self) -> list[Definition]:
        """Scan the folder now; return every usable definition."""
        return sorted((await self._current(0.0)).values(), key=lambda definition: definition.name)

    async def document(self, name: str) -> Any:
        """Return the content of the file that defines the model; None if there is none or it is unusable."""
        definition = await self.find(name)
        if definition is None:
            return None
        try:
            return await asyncio.to_thread(read_file, self._path / definition.source)
        except UnusableDefinition:
            return None

    async def has_tools(self, definition: Definition) -> bool:
        """Return True if the model's file is known to have a chat template with tools."""
        path = path_inside(self._path, definition.model)
        return path is not None and await asyncio.to_thread(template_has_tools, path)

    async def problems(self) -> Problems:
        """Return the reasons why files, or the whole folder, are unusable now."""
        with suppress(FolderUnresponsive):
            await self._current()
        return replace(self._problems, folder="does not answer") if self._hangs else self._problems

    async def unreadable_files(self) -> frozenset[str] | None:
        """Return the names of files that are there and no definitions; None if the folder cannot be read."""
        problems = await self.problems()
        if self._hangs or (problems.folder and not self._files):
            return None
        return frozenset(
            name for name, (_, content) in self._files.items() if isinstance(content, UnusableDefinition)
        )

    async def conflicting(self, definition: Definition) -> frozenset[str]:
        """Return the names of the models that must not share a node with this one (R2.81)."""
        if not definition.groups:
            return frozenset()
        definitions = (await self._current()).values()
        return frozenset(candidate.name for candidate in definitions if definition.conflicts_with(candidate))

    async def _current(self, interval: float = LOOK_EVERY) -> Mapping[str, Definition]:
        scan = self._begin_scan(interval)
        if scan is not None:
            limit = max(self._scan_began_at + self._limit - self._monotonic(), 0)
            if not await untrusted.wait_until_done(scan, timeout=limit):
                self._report_hanging()
        if self._by_name is None:
            raise self._hang_error()
        return self._by_name

    def _begin_scan(self, interval: float) -> "Future[None] | None":
        """Return the running or a new scan to wait for; None if the last one is recent enough."""
        with self._lock:
            now = self._monotonic()
            if now - self._scanned_at < interval:
                return None
            if self._scan is None:
                self._scan_began_at = now
                self._scan = untrusted.in_daemon_thread(self._scan_folder, now)
            return self._scan

    def _scan_folder(self, began_at: float) -> None:
        """Scan the folder once. Runs on a thread of its own."""
        try:
            stamps, problem = self._stamps()
            files = self._read_files(stamps)
            by_name, broken = _indexed(files)
            with self._lock:
                self._files, self._by_name = files, by_name
                self._scanned_at, self._scan = began_at, None
            self._report(Problems(problem, broken))
            if self._hangs:
                self._hangs = False
                logger.warning("The models folder %s answers again", self._path)
        except Exception as error:
            with self._lock:
                self._by_name = self._by_name or {}
                self._scanned_at, self._scan = began_at, None
            self._report(Problems(_displayable(f"cannot be read: {untrusted.yaml_reason(error)}")), error)

    def _report_hanging(self) -> None:
        if not self._hangs:
            self._hangs = True
            logger.warning(
                "The models folder %s has not answered for %g s; definitions that are known go on serving",
                self._path,
                self._limit,
            )

    def _hang_error(self) -> FolderUnresponsive:
        return FolderUnresponsive(
            f"the models folder {self._path.name!r} of the control plane does not answer"
        )

    def _read_files(self, stamps: Mapping[str, _Stamp]) -> _Files:
        """Read the files that are new or changed; keep the results of the others."""
        files: _Files = {}
        for name, stamp in sorted(stamps.items()):
            cached = self._files.get(name)
            if cached is not None and cached[0] == stamp:
                files[name] = cached
                continue
            try:
                definition = read_definition(self._path / name)
                files[name] = stamp, replace(definition, changed=stamp[0] // 1_000_000_000)
            except UnusableDefinition as error:
                files[name] = stamp, error
        return files

    def _stamps(self) -> tuple[dict[str, _Stamp], str]:
        """Return a stamp for each definition file, and the folder's problem ("" if none)."""
        try:
            with os.scandir(self._path) as entries:
                listed = sorted(entry.name for entry in entries if entry.name.endswith(_SUFFIXES))
        except OSError as error:
            return {}, _displayable(f"cannot be listed: {error.strerror}")
        problem = ""
        if len(listed) > MAX_FILES:
            problem = f"holds more than {MAX_FILES} definitions; the rest is ignored"
        stamps: dict[str, _Stamp] = {}
        for name in listed[:MAX_FILES]:
            if (status := _status(self._path / name)) is not None:
                stamps[name] = (status.st_mtime_ns, status.st_size, status.st_ino)
        return stamps, problem

    def _report(self, problems: Problems, error: Exception | None = None) -> None:
        """Store the problems, and log those that the previous scan did not have."""
        previous, self._problems = self._problems, problems
        if problems.folder not in ("", previous.folder):
            logger.warning("The models folder %s %s", self._path, problems.folder, exc_info=error)
        for name, reason in problems.files.items():
            if previous.files.get(name) != reason:
                logger.warning("Model definition %s %s", name, reason)


def _status(path: Path) -> os.stat_result | None:
    """Return the file's status, of a link that leads nowhere its own; None if the file has been removed."""
    for stat in (path.stat, path.lstat):
        with suppress(OSError):
            return stat()
    return None


def _indexed(files: _Files) -> tuple[dict[str, Definition], dict[str, str]]:
    """Return the definitions by model name, and the reasons for unusable files by file name."""
    by_name: dict[str, Definition] = {}
    broken: dict[str, str] = {}
    for name, (_, content) in files.items():
        if isinstance(content, UnusableDefinition):
            broken[_key(name)] = _displayable(str(content))
        elif (first := by_name.setdefault(content.name, content)) is not content:
            broken[_key(name)] = _displayable(
                f"defines {content.name!r} again; {first.source} stays in force"
            )
    return by_name, broken


def _displayable(text: str) -> str:
    """Return the text in a displayable form for pages and logs."""
    return names.plain(text[:1000])


def _key(name: str) -> str:
    """Return a file's name in a displayable form. Names that differ stay different, also undecodable ones."""
    return "".join(
        "".join(f"\\x{byte:02x}" for byte in os.fsencode(character))
        if character == "\\" or names.unprintable(character)
        else character
        for character in name
    )


@lru_cache(maxsize=8)
def _folder(path: Path) -> Folder:
    return Folder(path)


def folder() -> Folder:
    """Return the models folder of this process's settings."""
    return _folder(conf.cluster().models_path)
