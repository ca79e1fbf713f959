"""The files of the models folder that are in use: named by definitions, or fetched by active imports.

Both removals of files depend on this module: the removal of unused files, and the deletion of a definition
with its files. A file may count as in use without need: every path that an option may mean counts, and every
target of a link. The opposite never happens: while a definition cannot be used, or a folder cannot be read,
`problem` states it and nothing may be removed.
"""

import errno
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, ParamSpec, Self, TypeVar

from localai_cluster.kit import conf, untrusted
from nodes.definitions import sizes
from nodes.definitions.files import Definition, UnusableDefinition
from nodes.definitions.folder import FolderUnresponsive, folder
from nodes.loading.source_files import named_texts
from nodes.models import ModelDefinition
from operations.executor.work import in_thread
from operations.models import Operation

IMPORT = "model_import"
"""Kind of the operation that fetches the files of a model."""
ANSWER_WITHIN = 60.0
"""Seconds that one call into the models folder may take."""
MAX_OVERDUE_CALLS = 32
"""Number of overdue calls from which on further ones are refused at once: each keeps a thread."""
_overdue_calls: set[Future[Any]] = set()

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class FilesInUse:
    """The paths of the models folder that are in use, whether a file or folder exists there or not."""

    paths: frozenset[str]
    problem: str = ""
    """Why further files may be in use that are unknown, so that nothing may be removed; "" if there are
    none."""

    @classmethod
    def of(
        cls,
        models: Path,
        definitions: Iterable[Definition],
        fetched: Iterable[str] = (),
        problem: str = "",
    ) -> Self:
        """Return the files that these definitions name, and the `fetched` files. Blocks."""
        reader = _LinkReader(models)
        for definition in definitions:
            for path in _named_paths(models, definition):
                for part in sizes.shards_and_sidecar(path):
                    reader.add(part)
        for text in fetched:
            if (file := sizes.safe_join(models, text)) is not None:
                reader.add(file)
        return cls(frozenset(reader.paths), problem or reader.problem)

    def has(self, path: str) -> bool:
        """Return True if the path is in use, is in a folder in use, or is a checksum file of one."""
        plain = next((path.removesuffix(side) for side in sizes.SIDES if path.endswith(side)), path)
        return any(str(part) in self.paths for part in (plain, *PurePosixPath(plain).parents))


async def read_files_in_use() -> FilesInUse:
    """Return the files that are in use now. Raise FolderUnresponsive."""
    # Imports first: one that ends meanwhile has saved its definition before.
    imported = await in_thread(paths_of_active_imports)
    fetched = await in_thread(_paths_of_stored_definitions)
    known = await folder().all_contents()
    usable = [entry for entry in known if isinstance(entry, Definition)]
    problem = await _describe_problem([entry for entry in known if isinstance(entry, UnusableDefinition)])
    models = conf.cluster().models_path
    return await in_folder_thread(FilesInUse.of, models, usable, imported | fetched, problem)


async def in_folder_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run the function in its own thread. Raise FolderUnresponsive after `ANSWER_WITHIN` seconds."""
    if len(_overdue_calls) < MAX_OVERDUE_CALLS:
        call = untrusted.in_daemon_thread(function, *args, **kwargs)
        if await untrusted.wait_until_done(call, timeout=ANSWER_WITHIN):
            return call.result()
        _overdue_calls.add(call)
        call.add_done_callback(_overdue_calls.discard)
    raise FolderUnresponsive("the models folder does not answer")


def paths_of_active_imports() -> set[str]:
    """Return the paths of the files of all active imports. One query."""
    plans = Operation.objects.active().filter(kind=IMPORT).values_list("payload__plan__files", flat=True)
    return {file["path"] for files in plans for file in files or ()}


def is_on_share(path: Path) -> bool:
    """Return True if the path is on a configured share; nothing is ever removed from shares."""
    return any(path.resolve().is_relative_to(root.resolve()) for root in conf.cluster().share_roots)


def _paths_of_stored_definitions() -> set[str]:
    """Return the paths of the files that imports have fetched for stored definitions. One query."""
    lists = ModelDefinition.objects.filter(deleted_at__isnull=True).values_list("files", flat=True)
    return {file["path"] for files in lists for file in files}


async def _describe_problem(unusable: list[UnusableDefinition]) -> str:
    problems = await folder().problems()
    if problems.folder:
        return f"the models folder {problems.folder}"
    if not unusable:
        return ""
    source = next(iter(problems.files), "a definition that is not in force")
    return f"{source} cannot be used and may name any of the files: repair or remove it first"


def _named_paths(models: Path, definition: Definition) -> Iterator[Path]:
    """Yield all paths that a definition's options may mean.

    A value may be relative to the folder of the model.
    """
    root = Path(os.path.normpath(models))
    bases = (root, root / definition.model, (root / definition.model).parent)
    for _, text in named_texts(definition.options):
        for base in () if "\0" in text or "\0" in definition.model else bases:
            path = Path(os.path.normpath(base / text))
            if path != root and path.is_relative_to(root):
                yield models / path.relative_to(root)


class _LinkReader:
    """Collects paths and the targets of links: of links in a path itself, and of links in a folder."""

    def __init__(self, models: Path) -> None:
        self.paths: set[str] = set()
        self.problem = ""
        self._models, self._root = models, models.resolve()
        self._left = sizes.MAX_FILES
        self._walked: set[Path] = set()

    def add(self, path: Path) -> None:
        """Add the path and, if it is a link, its target in the models folder."""
        self.paths.add(path.relative_to(self._models).as_posix())
        self._add_resolved(path)

    def _add_resolved(self, path: Path) -> None:
        pending = [path]
        while pending:
            with suppress(RuntimeError):  # a link to itself
                try:
                    real = pending.pop().resolve()
                    if not real.is_relative_to(self._root) or real in self._walked:
                        continue
                    self._walked.add(real)
                    self.paths.add(real.relative_to(self._root).as_posix())
                    if real.is_dir():
                        pending += self._links_in(real)
                except OSError as error:
                    if error.errno == errno.ENAMETOOLONG:  # no file, but another value of the definition
                        continue
                    self.problem = f"{path.name} cannot be read and may need any file: {error.strerror}"

    def _links_in(self, folder: Path) -> list[Path]:
        """Return the links in a folder and below it. Raise OSError."""

        def fail(error: OSError) -> None:
            raise error

        links: list[Path] = []
        for base, folders, files in os.walk(folder, onerror=fail):
            self._left -= len(folders) + len(files)
            if self._left < 0:
                self.problem = f"the folders of models have more than {sizes.MAX_FILES} files"
                return []
            links += [path for name in (*folders, *files) if (path := Path(base, name)).is_symlink()]
        return links
