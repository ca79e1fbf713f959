"""The models folder: every usable definition in it, by name, re-read when a file changed.

The folder is looked at no more than once a second and only files whose size or time changed are read again. A
file that cannot be used is logged once with its reason, is listed by `problems` as long as it is there, and
does not take the others down.

Looks have a thread of their own, so a folder that hangs (a mount whose server is gone) stops neither the
event loop nor the process: what was read before goes on serving, everything else is 503 until the folder
answers.
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

from localai_cluster import clock, conf, names, yaml_text
from localai_cluster.errors import Unavailable
from nodes.definitions.files import Definition, Unusable, read
from nodes.definitions.sizes import Sizes

logger = logging.getLogger(__name__)

LOOK_EVERY = 1.0
"""Seconds between two looks at the folder."""
LOOK_AFTER_MISS = 0.05
"""The same when a name is not found: a definition that was added a moment ago should serve at once."""
LOOK_LIMIT = 5.0
"""Seconds that requests wait for one look; after that the folder counts as one that hangs."""
MAX_FILES = 4096
_SUFFIXES = (".yaml", ".yml")

_Stamp = tuple[int, int, int]
_Files = dict[str, tuple[_Stamp, Definition | Unusable]]


class FolderHangs(Unavailable):
    """The models folder does not answer."""


@dataclass(frozen=True)
class Problems:
    """The reasons why models of a folder do not serve; each is one line that can be shown."""

    folder: str = ""
    """Of the folder as a whole."""
    files: Mapping[str, str] = field(default_factory=dict)
    """By name of the file."""

    def __bool__(self) -> bool:
        return bool(self.folder or self.files)


@dataclass(frozen=True)
class _Look:
    """One look that is under way; `done` when its thread has ended."""

    began: float
    done: "Future[None]" = field(default_factory=Future)


class Folder:
    """The definitions of one folder. Safe to use from several threads and loops."""

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
        self._look: _Look | None = None
        self._looked_at = float("-inf")
        self._files: _Files = {}
        self._by_name: Mapping[str, Definition] | None = None
        self._problems = Problems()
        self._hangs = False

    async def find(self, name: str) -> Definition | None:
        """The definition that clients know as `name`.

        Raises FolderHangs when it is not known and the folder does not answer.
        """
        found = (await self._current()).get(name) or (await self._current(LOOK_AFTER_MISS)).get(name)
        if found is None and self._hangs:
            raise self._hanging()
        return found

    async def all(self) -> list[Definition]:
        """Every usable definition, by name; FolderHangs if the folder has never answered."""
        return sorted((await self._current()).values(), key=lambda definition: definition.name)

    async def problems(self) -> Problems:
        """Return the reasons why files, or the whole folder, do not serve now."""
        with suppress(FolderHangs):
            await self._current()
        return replace(self._problems, folder="does not answer") if self._hangs else self._problems

    async def conflicting(self, definition: Definition) -> frozenset[str]:
        """The models that should have no node in common with this one (R2.81)."""
        if not definition.groups:
            return frozenset()
        every = (await self._current()).values()
        return frozenset(other.name for other in every if definition.conflicts_with(other))

    async def _current(self, every: float = LOOK_EVERY) -> Mapping[str, Definition]:
        look = self._begin(every)
        if look is not None and not await self._ended(look):
            self._report_hanging()
        if self._by_name is None:
            raise self._hanging()
        return self._by_name

    def _begin(self, every: float) -> _Look | None:
        """The look to wait for, a new one unless one is under way; None if the last one is recent enough."""
        with self._lock:
            now = self._monotonic()
            if now - self._looked_at < every:
                return None
            if self._look is not None:
                return self._look
            look = self._look = _Look(now)
        look.done.set_running_or_notify_cancel()  # a request that leaves must not cancel it
        threading.Thread(target=self._carry_out, args=(look,), name="definitions", daemon=True).start()
        return look

    async def _ended(self, look: _Look) -> bool:
        """Waits for the look; False when its time is over."""
        left = look.began + self._limit - self._monotonic()
        if look.done.done() or left <= 0:
            return look.done.done()
        waiting = asyncio.wrap_future(look.done)
        try:
            await asyncio.wait([waiting], timeout=left)
        finally:
            waiting.cancel()
        return look.done.done()

    def _carry_out(self, look: _Look) -> None:
        """One look, on a thread of its own."""
        try:
            stamps, problem = self._stamps()
            files = self._read_files(stamps)
            by_name, broken = _indexed(files)
            with self._lock:
                self._files, self._by_name = files, by_name
                self._looked_at, self._look = look.began, None
            self._report(Problems(problem, broken))
            if self._hangs:
                self._hangs = False
                logger.warning("The models folder %s answers again", self._path)
        except Exception as error:
            with self._lock:
                self._by_name = self._by_name or {}
                self._looked_at, self._look = look.began, None
            self._report(Problems(_line(f"cannot be read: {yaml_text.reason_of(error)}")), error)
        finally:
            look.done.set_result(None)

    def _report_hanging(self) -> None:
        if not self._hangs:
            self._hangs = True
            logger.warning(
                "The models folder %s has not answered for %g s; definitions that are known go on serving",
                self._path,
                self._limit,
            )

    def _hanging(self) -> FolderHangs:
        return FolderHangs(f"the models folder {self._path.name!r} of the control plane does not answer")

    def _read_files(self, stamps: Mapping[str, _Stamp]) -> _Files:
        """Read the files that are new or changed; the others are kept as they were read."""
        known = self._files
        return {
            name: known[name]
            if name in known and known[name][0] == stamp
            else (stamp, self._try(name, stamp))
            for name, stamp in sorted(stamps.items())
        }

    def _stamps(self) -> tuple[dict[str, _Stamp], str]:
        """Return the definitions that there are, and what is wrong with the folder."""
        try:
            with os.scandir(self._path) as entries:
                listed = sorted(entry.name for entry in entries if entry.name.endswith(_SUFFIXES))
        except OSError as error:
            return {}, _line(f"cannot be listed: {error.strerror}")
        problem = ""
        if len(listed) > MAX_FILES:
            problem = f"holds more than {MAX_FILES} definitions; the rest is ignored"
        return {
            name: stamp for name in listed[:MAX_FILES] if (stamp := self._stamp(name)) is not None
        }, problem

    def _stamp(self, name: str) -> _Stamp | None:
        try:
            status = (self._path / name).stat()
        except OSError:
            return None
        return (status.st_mtime_ns, status.st_size, status.st_ino)

    def _try(self, name: str, stamp: _Stamp) -> Definition | Unusable:
        try:
            return replace(read(self._path / name), changed=stamp[0] // 1_000_000_000)
        except Unusable as error:
            return error

    def _report(self, problems: Problems, error: Exception | None = None) -> None:
        """Keep the problems, and log those that the look before this one did not find."""
        before, self._problems = self._problems, problems
        if problems.folder not in ("", before.folder):
            logger.warning("The models folder %s %s", self._path, problems.folder, exc_info=error)
        for name, reason in problems.files.items():
            if before.files.get(name) != reason:
                logger.warning("Model definition %s %s", name, reason)


def _indexed(files: _Files) -> tuple[dict[str, Definition], dict[str, str]]:
    """Return the definitions by model, and the reasons why files do not serve by file."""
    by_name: dict[str, Definition] = {}
    broken: dict[str, str] = {}
    for name, (_, content) in files.items():
        if isinstance(content, Unusable):
            broken[_line(name)] = _line(str(content))
        elif (first := by_name.setdefault(content.name, content)) is not content:
            broken[_line(name)] = _line(f"defines {content.name!r} again; {first.source} stays in force")
    return by_name, broken


def _line(text: str) -> str:
    """Return the text as a page and a log can show it; names of files may be no text at all."""
    return names.plain(text[:1000])


@lru_cache(maxsize=8)
def _folder(path: Path) -> Folder:
    return Folder(path)


def folder() -> Folder:
    """The models folder of this process's settings."""
    return _folder(conf.cluster().models_path)


async def find(name: str) -> Definition | None:
    """The definition that clients know as `name`; FolderHangs if that cannot be told now."""
    return await folder().find(name)


async def every() -> list[Definition]:
    """Every usable definition, by name; FolderHangs if that cannot be told now."""
    return await folder().all()


async def problems() -> Problems:
    """Return the reasons why files of the models folder, or all of it, do not serve now."""
    return await folder().problems()
