"""Removal of unused files of the models folder.

An attempt first moves the files into its hidden folder. Then it reads again which files are in use, and only
then deletes the moved files. An import or a definition that is saved in between either finds its file
missing, or is read as a user of the file: then the file is moved back. Files that an attempt leaves in its
hidden folder are moved back too: at the end of the attempt or, if its process was killed, at the beginning of
the next removal or import.

Only plain files in the models folder itself are removed: no links, no files outside that a link leads to, no
files on shares.
"""

import os
import stat
import threading
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from localai_cluster.kit import conf, failpoints, untrusted
from localai_cluster.kit.leases import Attempt
from nodes.definitions import sizes
from nodes.loading.files_in_use import FilesInUse, in_folder_thread, is_on_share, read_files_in_use
from operations.executor.work import in_thread
from operations.models import Operation

FOLDER = ".removed"
_RETURN_TIMEOUT = 5.0
"""Seconds that an ending attempt waits until its files have been moved back."""


@dataclass
class FileRemoval:
    """The result of a removal: the paths of the removed files, and the kept files with the reason."""

    removed: list[str] = field(default_factory=list)
    kept: dict[str, str] = field(default_factory=dict)
    size: int = 0


async def remove_files(paths: Iterable[str], attempt: Attempt) -> FileRemoval:
    """Remove the unused files among `paths`. Raise FolderUnresponsive."""
    models = conf.cluster().models_path
    await return_files(models)
    aside = _MovedFiles(models, attempt)
    try:
        await in_folder_thread(aside.take, list(paths), await read_files_in_use())
        failpoints.passed("files.removal:set_aside")
        return await in_folder_thread(aside.delete, await read_files_in_use())
    finally:
        # In a thread: the attempt may have been cancelled because the folder hangs.
        await untrusted.wait_until_done(untrusted.in_daemon_thread(aside.close), timeout=_RETURN_TIMEOUT)


async def return_files(models: Path) -> None:
    """Move files back to their places that ended attempts left in their hidden folders.

    Raises FolderUnresponsive.
    """
    if names := await in_folder_thread(_list_attempt_folders, models):
        # After the names: an attempt of these that is under way now has not begun since.
        running = await in_thread(_running_attempts)
        await in_folder_thread(_move_back, models, names - running)


def removal_obstacle(models: Path, path: Path) -> str:
    """Return the reason why the file must not be removed (a link, or on a share); "" if it may be."""
    parent = path.parent.resolve()
    if not parent.is_relative_to(models.resolve()) or is_on_share(parent):
        return "it lies on a share"
    with suppress(FileNotFoundError, NotADirectoryError):
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode):
            return "it is no plain file"
        if status.st_dev != models.stat().st_dev:
            return "it lies on a share"
    return ""


class _MovedFiles:
    """Files that an attempt moves into its hidden folder before it deletes them.

    Thread-safe. After `close` the methods do nothing.
    """

    def __init__(self, models: Path, attempt: Attempt) -> None:
        self._models, self._root = models, models / FOLDER / _folder_name(attempt)
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._taken: list[str] = []
        self._removal = FileRemoval()

    def take(self, paths: Iterable[str], in_use: FilesInUse) -> None:
        """Move the files into the hidden folder, each with its checksum files."""
        with self._lock:
            for path in paths:
                file = sizes.safe_join(self._models, path)
                if file is None or self._closed.is_set():
                    continue
                if reason := self._reason_to_keep(path, file, in_use):
                    self._removal.kept[path] = reason
                    continue
                try:
                    # An attempt that is repeated finds the checksum files by their file.
                    for suffix in ("", *sizes.SIDES):
                        self._move_file(path + suffix)
                except OSError as error:
                    self._keep(path, f"it cannot be removed: {error.strerror}")
                else:
                    self._taken.append(path)

    def delete(self, in_use: FilesInUse) -> FileRemoval:
        """Delete the moved files; move a file back if it is in use again."""
        with self._lock:
            for path in self._taken:
                if self._closed.is_set():
                    break
                if reason := self._reason_to_keep(path, self._models / path, in_use):
                    self._keep(path, reason)
                else:
                    self._delete(path)
            return self._removal

    def close(self) -> None:
        """Move back the files that were not deleted."""
        self._closed.set()
        with self._lock:
            _move_back(self._models, {self._root.name})

    def _reason_to_keep(self, path: str, file: Path, in_use: FilesInUse) -> str:
        """Return the reason why the file must stay; "" if it may be removed."""
        if in_use.problem:
            return in_use.problem
        if reason := removal_obstacle(self._models, file):
            return reason
        real = (file.parent.resolve() / file.name).relative_to(self._models.resolve())
        return "it is in use" if in_use.has(path) or in_use.has(real.as_posix()) else ""

    def _move_file(self, path: str) -> None:
        source, target = self._models / path, self._root / path
        if removal_obstacle(self._models, source) or not source.exists():
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):
            source.rename(target)

    def _keep(self, path: str, reason: str) -> None:
        self._removal.kept[path] = reason
        for suffix in ("", *sizes.SIDES):
            with suppress(FileNotFoundError):
                _return_file(self._root / (path + suffix), self._models / (path + suffix))

    def _delete(self, path: str) -> None:
        file = self._root / path
        try:
            for suffix in sizes.SIDES:
                file.with_name(file.name + suffix).unlink(missing_ok=True)
            with suppress(FileNotFoundError):
                size = file.lstat().st_size
                file.unlink()
                self._removal.removed.append(path)
                self._removal.size += size
            _remove_empty_folders(self._models, (self._models / path).parent)
        except OSError as error:
            self._keep(path, f"it cannot be removed: {error.strerror}")


def _folder_name(attempt: Attempt) -> str:
    return f"{attempt[0]}.{attempt[1]}"


def _running_attempts() -> set[str]:
    return {_folder_name(attempt) for attempt in Operation.objects.active().values_list("id", "fence")}


def _list_attempt_folders(models: Path) -> set[str]:
    with suppress(FileNotFoundError):
        return set(os.listdir(models / FOLDER))
    return set()


def _move_back(models: Path, names: Iterable[str]) -> None:
    """Move the files in these folders of `FOLDER` back to their paths, except where a new file exists."""
    for name in names:
        root = models / FOLDER / name
        for base, _, files in os.walk(root, topdown=False):
            for file in files:
                with suppress(OSError):
                    source = Path(base, file)
                    _return_file(source, models / source.relative_to(root))
            with suppress(OSError):
                os.rmdir(base)
    with suppress(OSError):
        os.rmdir(models / FOLDER)


def _return_file(source: Path, target: Path) -> None:
    """Move the file back, unless a new file exists at its place because it was downloaded meanwhile.

    Raises OSError.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except FileExistsError:
        pass
    except FileNotFoundError:
        raise
    except OSError:  # the file system has no hard links
        source.rename(target)
        return
    source.unlink()


def _remove_empty_folders(models: Path, parent: Path) -> None:
    while parent != models:
        try:
            os.rmdir(parent)
        except FileNotFoundError:
            pass
        except OSError:
            return
        parent = parent.parent
