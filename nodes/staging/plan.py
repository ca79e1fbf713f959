"""Which files of the models folder an engine needs on another machine, and what it is told of them there.

The options of a definition name them: the model's file, others beside it, and values in `Options` and
`Overrides` (R2.57, worker.md §14). `plan` looks at the folder; `FilePlan.told` turns what came of it into the
options of the engine, without I/O. Nothing leaves the models folder: a path or a link that leads out of it is
not followed.
"""

import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from nodes.definitions.sizes import ADAPTERS, MOST_FILES, NAMED, SIDES, inside, shards, without_side_files
from nodes.staging.keys import NoKey, key_of

MODEL_FILE, MODEL_PATH = "ModelFile", "ModelPath"
_SCALES = "LoraScales"
_KEPT_IF_MISSING = "LoraBase"
_VALUES = ("Options", "Overrides")
"""Their entries `name:value` may name files; the text stays."""


class Unsendable(Exception):
    """What an option names cannot be brought to a worker; the text says why."""


@dataclass(frozen=True)
class LocalFile:
    """One file to bring."""

    relative: str
    """Its path in the models folder, by which a worker keeps it."""
    path: Path
    """Where it really lies, in the models folder too."""
    size: int


@dataclass(frozen=True)
class Named:
    """What one text of the options names: a file, or a folder with all its files."""

    option: str
    text: str
    relative: str
    files: tuple[LocalFile, ...]

    @property
    def needed(self) -> frozenset[str]:
        """The paths of those without which it is lost.

        A checksum in a folder may stay away: our own worker takes none, it would vouch for another file.
        """
        paths = (file.relative for file in self.files)
        return frozenset(path for path in paths if path == self.relative or not path.lower().endswith(SIDES))


@dataclass(frozen=True)
class FilePlan:
    """What to bring for one model."""

    options: Mapping[str, Any]
    """As the definition has them."""
    named: tuple[Named, ...] = ()
    missing: Mapping[tuple[str, str], str] = field(default_factory=dict)
    """By option and text: why there is nothing to bring."""

    @cached_property
    def files(self) -> dict[str, LocalFile]:
        """Each file once, by its path in the folder; those of the model itself first."""
        return {file.relative: file for one in self.named for file in one.files}

    @property
    def total(self) -> int:
        """Bytes."""
        return sum(file.size for file in self.files.values())

    def is_vital(self, relative: str) -> bool:
        """Whether the model cannot be loaded without this file."""
        return any(one.option == MODEL_FILE and relative in one.needed for one in self.named)

    def told(self, root: str, failed: Mapping[str, str]) -> tuple[dict[str, Any], list[str]]:
        """The options for an engine where the model's files lie in `root`, and a warning for each loss.

        `failed` has a reason for each file that did not get there; one of the model itself is no case for
        this.
        """
        lost = dict(self.missing)
        places: dict[tuple[str, str], str] = {}
        for one in self.named:
            if reason := next((why for relative, why in failed.items() if relative in one.needed), ""):
                lost[one.option, one.text] = reason
            else:
                places[one.option, one.text] = f"{root}/{one.relative}"
        options = _rewritten(self.options, places)
        if root:
            options[MODEL_PATH] = root
        return options, [f"{option} {text}: {why}" for (option, text), why in sorted(lost.items())]


def _rewritten(options: Mapping[str, Any], places: Mapping[tuple[str, str], str]) -> dict[str, Any]:
    """The options with the worker's paths; what has none there is cleared."""
    made = dict(options)
    for name in NAMED:
        place = places.get((name, str(made.get(name, ""))))
        if place is not None:
            made[name] = place
        elif name != _KEPT_IF_MISSING:
            made.pop(name, None)
    if ADAPTERS in made:
        found = [(at, places.get((ADAPTERS, text))) for at, text in enumerate(made[ADAPTERS])]
        kept = [(at, place) for at, place in found if place is not None]
        scales = made.get(_SCALES, ())
        if len(scales) == len(made[ADAPTERS]):
            made[_SCALES] = [scales[at] for at, _ in kept]
        made[ADAPTERS] = [place for _, place in kept]
    model = (MODEL_FILE, str(made.get("Model", "")))
    if model in places:
        made[MODEL_FILE] = places[model]
    return made


def plan(folder: Path, name: str, options: Mapping[str, Any]) -> FilePlan:
    """Looks at the files that the options of the model `name` mean.

    Raises Unsendable for the model's own file if it is there and must not leave or cannot be read.
    """
    look = _FolderLook(folder, name)
    named: list[Named] = []
    missing: dict[tuple[str, str], str] = {}
    for option, text in _texts(options):
        try:
            found = look.named(option, text)
        except (Unsendable, OSError) as why:
            said = f"cannot be read: {why.strerror}" if isinstance(why, OSError) else str(why)
            if option == MODEL_FILE:
                raise Unsendable(f"the model's file {text} {said}") from why
            missing[option, text] = said
        else:
            if found is not None:
                named.append(found)
            elif option not in _VALUES:
                missing[option, text] = "is not in the models folder"
    return FilePlan(options, tuple(named), missing)


def _texts(options: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Which option names something by which text; the model first, because others may lie beside it."""
    yield MODEL_FILE, str(options.get("Model", ""))
    for name in NAMED:
        if options.get(name):
            yield name, str(options[name])
    for text in options.get(ADAPTERS, ()):
        yield ADAPTERS, text
    for name in _VALUES:
        for entry in options.get(name, ()):
            value = entry.partition(":")[2].strip()
            if value:
                yield name, value


def _raised(error: OSError) -> None:
    """A folder that cannot be read has files all the same."""
    raise error


class _FolderLook:
    """One look at the models folder for one model."""

    def __init__(self, folder: Path, model: str) -> None:
        self._folder, self._real, self._model = folder, folder.resolve(), model
        self._beside: list[Path] = []
        """The model's own folder: values may be relative to it."""

    def named(self, option: str, text: str) -> Named | None:
        """What the text means here, None if there is nothing; raises Unsendable."""
        for path in self._meant(option, text):
            if not os.path.lexists(path):
                continue
            relative = path.relative_to(self._folder).as_posix()
            real = self._inside(path)
            if option == MODEL_FILE:
                self._beside = [path, path.parent] if real.is_dir() else [path.parent]
            if not real.exists():
                continue  # a link to nothing
            return Named(option, text, relative, tuple(self._files(path, real)))
        return None

    def _meant(self, option: str, text: str) -> Iterator[Path]:
        """The places of which the text may speak, in order, all of them in the folder and none the folder."""
        if "\0" in text:
            return
        if option not in _VALUES and not os.path.isabs(text):
            path = inside(self._folder, text)
            yield from () if path is None else (path,)
            return
        for base in (self._folder, *self._beside):
            path = Path(os.path.normpath(base / text))
            if path != self._folder and path.is_relative_to(self._folder):
                yield path

    def _inside(self, path: Path) -> Path:
        """Where the path really leads; Unsendable if that is outside of the folder, or the folder itself."""
        try:
            real = path.resolve()
        except (OSError, RuntimeError) as error:
            raise Unsendable("is a link that leads nowhere") from error
        if real == self._real or not real.is_relative_to(self._real):
            raise Unsendable("is a link that leads out of the models folder")
        return real

    def _files(self, path: Path, real: Path) -> Iterator[LocalFile]:
        """The file with what belongs to it, or all files below the folder."""
        if not real.is_dir():
            belonging = [path.with_name(path.name + ".json")] if path.suffix == ".onnx" else []
            parts = [one for one in (*shards(path), *belonging) if one != path and one.exists()]
            yield self._file(path)
            yield from map(self._file, parts)
            return
        count = 0
        for base, folders, names in os.walk(path, onerror=_raised):
            folders.sort()
            for name in without_side_files(names):
                count += 1
                if count > MOST_FILES:
                    raise Unsendable(f"has more than {MOST_FILES} files")
                yield self._file(Path(base, name))
        if count == 0:
            raise Unsendable("is an empty folder")

    def _file(self, path: Path) -> LocalFile:
        relative = path.relative_to(self._folder).as_posix()
        real = self._inside(path)
        try:
            key_of(self._model, relative)
            found = real.stat()
        except NoKey as why:
            raise Unsendable(f"{relative}: {why}") from why
        except FileNotFoundError as error:
            raise Unsendable(f"{relative}: is a link that leads nowhere") from error
        if not stat.S_ISREG(found.st_mode):
            raise Unsendable(f"{relative}: is no regular file")
        return LocalFile(relative, real, found.st_size)
