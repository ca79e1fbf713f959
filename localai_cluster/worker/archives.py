"""Unpacks an archive or the layers of an image, and trusts nothing in them.

Every layer is a tar file: plain, or packed with gzip or zstd, as its first bytes show. The layers are read
twice, front to back and in bounded pieces. The survey validates every entry, counts the bytes and merges the
layers to one tree before anything is written: a later layer replaces the paths of earlier ones, and a
*whiteout* removes them. Then the files of that tree are written, each once. Links are created last, so no
file is written through one, and each of them must end inside the folder.

An image is a whole file system: links below which a layer has files, and absolute ones, start at its root.
They are followed in the tree alone. An absolute link to a path that the image lacks means the machine's own
file, such as its Python; it is created after everything else, and nothing follows it here.

All functions block and run in a thread.
"""

import errno
import gzip
import os
import posixpath
import shutil
import tarfile
import threading
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import IO, Any, cast

import zstandard

from localai_cluster.worker import source_files
from localai_cluster.worker.source_files import (
    CHUNK_BYTES,
    SHUTDOWN_MESSAGE,
    BadSource,
    OnBytes,
    Throttle,
    WorkCancelled,
)

MAX_UNPACKED_BYTES = 64 * 1024**3
MAX_ENTRIES = 100_000
MAX_GLOBAL_HEADER_BYTES = 64 * 1024
"""Maximum bytes of the extended headers that apply to all later entries."""
MAX_HEADER_LENGTH = CHUNK_BYTES
"""Maximum bytes of an extended header, since `tarfile` reads it into memory at once."""
_MAX_PATH_LENGTH = 4096
_MAX_LINKS_PER_PATH = 40
"""Maximum number of links on the way to one path; the Linux kernel has the same limit."""
_MAX_ZSTD_WINDOW_BYTES = 128 * 1024 * 1024
"""Maximum bytes of memory for a zstd stream; zstd's highest level needs this much."""
_TARFILE_DATA_FILTER = getattr(tarfile, "data_filter", None)
"""`tarfile.data_filter`, which exists since Python 3.11.4; our own rules suffice without it."""
WHITEOUT_PREFIX, OPAQUE_WHITEOUT_NAME = ".wh.", ".wh..wh..opq"
_NO_HARD_LINK_ERRNOS = (errno.EPERM, errno.EMLINK, errno.ENOTSUP, errno.EXDEV)


@dataclass
class _File:
    """A regular file. `source` is the layer with the content, and the index of the entry in that layer."""

    layer: int
    source: tuple[int, int]
    size: int
    mode: int


@dataclass
class _Link:
    """A symbolic link."""

    layer: int
    target: str


@dataclass
class _Folder:
    layer: int
    mode: int = 0o755
    children: "dict[str, _Folder | _File | _Link]" = field(default_factory=dict)


def unpack(
    layers: Sequence[Path],
    target: Path,
    throttle: Throttle,
    stopped: threading.Event,
    on_bytes: OnBytes,
    *,
    is_image: bool = False,
) -> None:
    """Unpack `layers`, the lowest first, to the new folder `target`.

    The layers of an image may have whiteouts, absolute links, and the same path several times. Raise
    BadSource, WorkCancelled or OSError.
    """
    survey = _MergedTree(is_image)
    for number, layer in enumerate(layers):
        survey.add(number, layer, stopped)
    files = _FilesToWrite.of(survey)
    source_files.check_free_space(target.parent, files.total, "unpacked bytes")
    target.mkdir()
    for folder, _ in files.folders:
        (target / folder).mkdir(mode=0o700)
    writer = _TreeWriter(target, throttle, stopped, on_bytes, files)
    for number, layer in enumerate(layers):
        writer.write_layer(number, layer)
    writer.link()


class _ForwardReader:
    """A file that `tarfile` reads from front to back, in pieces of bounded size.

    Bytes of a plain file that `tarfile` skips are not read.
    """

    def __init__(self, file: IO[bytes], size: int | None, stopped: threading.Event) -> None:
        self._file, self._size, self._stopped = file, size, stopped
        self._position = 0
        # `TarFile` reads the first entry when it is opened.
        self._header_bytes: int | None = 0

    @contextmanager
    def headers(self) -> Iterator[None]:
        """Limit the bytes read inside the `with` block: `tarfile` keeps one entry's headers in memory."""
        self._header_bytes = 0
        try:
            yield
        finally:
            self._header_bytes = None

    def tell(self) -> int:
        return self._position

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= MAX_HEADER_LENGTH:
            raise BadSource("a header in the archive is too long")
        if self._header_bytes is not None:
            self._header_bytes += size
            if self._header_bytes > 2 * MAX_HEADER_LENGTH:
                raise BadSource("the headers of an entry of the archive are too long")
        return self._read_bytes(size)

    def _read_bytes(self, size: int) -> bytes:
        if self._stopped.is_set():
            raise WorkCancelled(SHUTDOWN_MESSAGE)
        data = self._file.read(size)
        self._position += len(data)
        return data

    def seek(self, position: int) -> int:
        if position < self._position:
            raise BadSource("an entry of the archive begins before the end of the previous one")
        if self._size is not None:
            self._position = self._file.seek(min(position, self._size))
        while self._position < position and self._read_bytes(min(CHUNK_BYTES, position - self._position)):
            pass
        return self._position

    def drain(self) -> None:
        """Read the remaining bytes of a packed file, so that its checksum is verified."""
        while self._size is None and self.read(CHUNK_BYTES):
            if self._position > 2 * MAX_UNPACKED_BYTES:
                raise BadSource("the archive does not end")


@contextmanager
def _open_tar(archive: Path, stopped: threading.Event) -> Iterator[tarfile.TarFile]:
    """Open the archive as a tar file; errors in it become BadSource."""
    try:
        # Neither follows a link nor waits for a pipe.
        descriptor = os.open(archive, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as raw:
            plain = _open_unpacked(raw)
            size = os.fstat(raw.fileno()).st_size if plain is raw else None
            forward = _ForwardReader(plain, size, stopped)
            with tarfile.TarFile(fileobj=cast(Any, forward), mode="r", errorlevel=2) as tar:
                yield tar
                forward.drain()
    except (tarfile.TarError, gzip.BadGzipFile, zlib.error, zstandard.ZstdError, EOFError) as error:
        raise BadSource(f"the archive is damaged: {error}") from error
    except (ValueError, IndexError, OverflowError, RecursionError) as error:
        raise BadSource(f"the archive cannot be read: {error}") from error


def _iterate_entries(tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """Yield the entries of the archive in order, without storing them in `tar`. Raise BadSource."""
    reader = cast(_ForwardReader, tar.fileobj)
    while True:
        with reader.headers():
            entry = tar.next()
        if entry is None:
            return
        tar.members = []  # type: ignore[attr-defined]
        if sum(len(key) + len(value) for key, value in tar.pax_headers.items()) > MAX_GLOBAL_HEADER_BYTES:
            raise BadSource("the global headers of the archive are too long")
        yield entry


def _open_unpacked(raw: IO[bytes]) -> IO[bytes]:
    """Return a file object of the unpacked content; the first bytes of the file determine the format."""
    first = raw.read(4)
    raw.seek(0)
    if first.startswith(b"\x1f\x8b"):
        return cast(IO[bytes], gzip.GzipFile(fileobj=raw))
    if first == b"\x28\xb5\x2f\xfd":
        decompressor = zstandard.ZstdDecompressor(max_window_size=_MAX_ZSTD_WINDOW_BYTES)
        return cast(IO[bytes], decompressor.stream_reader(raw, read_across_frames=True, closefd=False))
    return raw


class _MergedTree:
    """The tree that results from merging layers, the lowest first. `root` is the top folder."""

    def __init__(self, is_image: bool) -> None:
        self.root = _Folder(-1)
        self._is_image = is_image
        self._bytes = self._entries = 0

    def add(self, layer: int, path: Path, stopped: threading.Event) -> None:
        """Validate every entry of a layer and merge it into the tree. Raise BadSource."""
        with _open_tar(path, stopped) as tar:
            for number, entry in enumerate(_iterate_entries(tar)):
                _validate_entry(entry, self._is_image)
                self._count_entry(entry.size if entry.isreg() else 0)
                self._merge_entry(layer, number, entry)

    def resolve_absolute_target(self, link: str, target: str) -> str:
        """Return an absolute target as a path relative to `link`.

        Return a target outside of the tree unchanged.
        """
        if target.startswith("/"):
            inside = PurePosixPath(posixpath.normpath(target).lstrip("/"))
            with suppress(BadSource):
                if self._find_node(self._resolve_links(inside)) is not None:
                    return posixpath.relpath(f"/{inside}", f"/{posixpath.dirname(link)}")
        return target

    def _count_entry(self, size: int) -> None:
        self._entries += 1
        self._bytes += size
        if self._bytes > MAX_UNPACKED_BYTES:
            raise BadSource(f"the archive unpacks to more than {MAX_UNPACKED_BYTES} bytes")
        if self._entries > MAX_ENTRIES:
            raise BadSource(f"the archive has more than {MAX_ENTRIES} entries")

    def _merge_entry(self, layer: int, number: int, entry: tarfile.TarInfo) -> None:
        path = self._resolve_links(PurePosixPath(entry.name))
        if not path.parts:
            return
        if self._is_image and path.name.startswith(WHITEOUT_PREFIX):
            self._apply_whiteout(path, layer)
        elif entry.isdir():
            self._ensure_folder(path, layer).mode = entry.mode & 0o755 | 0o700
        elif entry.islnk():
            node = self._find_node(self._resolve_links(PurePosixPath(entry.linkname)))
            if not isinstance(node, _File | _Link if self._is_image else _File):
                raise BadSource(f"{str(path)!r} in the archive is a link to a file that is not in it")
            self._put_node(path, layer, replace(node, layer=layer))
        elif entry.issym():
            self._put_node(path, layer, _Link(layer, entry.linkname))
        else:
            # Never setuid, never writable by others.
            self._put_node(path, layer, _File(layer, (layer, number), entry.size, entry.mode & 0o755 | 0o600))

    def _apply_whiteout(self, whiteout: PurePosixPath, layer: int) -> None:
        """Remove the entry that a whiteout names, if it comes from a layer below `layer`."""
        folder = self._find_node(whiteout.parent)
        if not isinstance(folder, _Folder):
            return
        if whiteout.name == OPAQUE_WHITEOUT_NAME:
            _remove_lower_layers(folder, layer)
            return
        name = whiteout.name.removeprefix(WHITEOUT_PREFIX)
        node = folder.children.get(name)
        if isinstance(node, _Folder):
            _remove_lower_layers(node, layer)
        if node is not None and node.layer < layer and not getattr(node, "children", None):
            del folder.children[name]

    def _resolve_links(self, path: PurePosixPath) -> PurePosixPath:
        """Return the real path of a path in an image, after following the links of its folders in the tree.

        Raise BadSource if the path leaves the tree.
        """
        if not self._is_image or isinstance(self._find_node(path.parent), _Folder):
            return path
        problem = BadSource(f"{str(path)!r} in the archive lies below a link that leaves it")
        names: list[str] = []
        nodes: list[_Folder | _File | _Link | None] = [self.root]
        pending, hops = [*reversed(path.parent.parts)], 0
        while pending:
            part, folder = pending.pop(), nodes[-1]
            node = folder.children.get(part) if isinstance(folder, _Folder) else None
            if isinstance(node, _Link):
                self._count_entry(0)
                hops += 1
                if node.target.startswith("/"):
                    del names[:], nodes[1:]
                pending += [word for word in reversed(node.target.split("/")) if word not in ("", ".")]
            elif part != "..":
                names.append(part)
                nodes.append(node)
            elif names:
                del names[-1], nodes[-1]
            else:
                raise problem
            if hops > _MAX_LINKS_PER_PATH:
                raise problem
        return PurePosixPath(*names, path.name)

    def _ensure_folder(self, path: PurePosixPath, layer: int, *, is_parent: bool = False) -> _Folder:
        """Return the folder at `path`; create missing folders. Raise BadSource."""
        source_files.check_depth(path, "the archive")
        folder = self.root
        for depth, part in enumerate(path.parts):
            node = folder.children.get(part)
            if not isinstance(node, _Folder):
                is_last = depth == len(path.parts) - 1 and not is_parent
                if node is not None and not (is_last and (self._is_image or node.layer != layer)):
                    raise BadSource(f"{str(path)!r} in the archive lies below a file or a link, or is both")
                if not is_last:
                    self._count_entry(0)
                node = folder.children[part] = _Folder(layer)
            node.layer = layer
            folder = node
        return folder

    def _put_node(self, path: PurePosixPath, layer: int, node: _File | _Link) -> None:
        folder = self._ensure_folder(path.parent, layer, is_parent=True)
        current = folder.children.get(path.name)
        if current is not None and current.layer == layer and not self._is_image:
            raise BadSource(f"{str(path)!r} occurs twice in the archive")
        folder.children[path.name] = node

    def _find_node(self, path: PurePosixPath) -> "_Folder | _File | _Link | None":
        node: _Folder | _File | _Link | None = self.root
        for part in path.parts:
            node = node.children.get(part) if isinstance(node, _Folder) else None
        return node


def _remove_lower_layers(folder: _Folder, layer: int) -> None:
    """Remove everything below `folder` that comes from a layer below `layer`."""
    pending = [folder]
    while pending:
        current = pending.pop()
        current.children = {name: node for name, node in current.children.items() if node.layer >= layer}
        pending += [node for node in current.children.values() if isinstance(node, _Folder)]


def _validate_entry(entry: tarfile.TarInfo, is_image: bool) -> None:
    """Raise BadSource for a forbidden entry, by our own rules and those of `tarfile`'s data filter."""
    name, is_absolute_link = entry.name, entry.issym() and entry.linkname.startswith("/")
    if not (entry.isreg() or entry.isdir() or entry.issym() or entry.islnk()) or entry.issparse():
        raise BadSource(f"{name!r} in the archive is not a plain file, folder or link")
    is_odd = any("\0" in text or len(text) > _MAX_PATH_LENGTH for text in (name, entry.linkname))
    if _leaves_folder(name) or is_odd or entry.size < 0:
        raise BadSource(f"{name[:200]!r} in the archive is not a path inside it")
    if (entry.islnk() and _leaves_folder(entry.linkname)) or (is_absolute_link and not is_image):
        raise BadSource(f"{name!r} in the archive is a link that leaves it")
    if _TARFILE_DATA_FILTER is not None and not is_absolute_link:
        try:
            _TARFILE_DATA_FILTER(entry, "/nowhere/in/particular")
        except tarfile.FilterError as error:
            raise BadSource(f"{name!r} in the archive: {error}") from error


def _leaves_folder(name: str) -> bool:
    return not name or name.startswith("/") or ".." in PurePosixPath(name).parts


@dataclass
class _FilesToWrite:
    """The content of a tree: each file once, with all its paths. Folders precede their content."""

    folders: list[tuple[str, int]] = field(default_factory=list)
    links: list[tuple[str, str]] = field(default_factory=list)
    system_links: list[tuple[str, str]] = field(default_factory=list)
    """Links to files of this machine that are not in the tree: path and target."""
    paths: dict[tuple[int, int], list[str]] = field(default_factory=dict)
    files: dict[tuple[int, int], _File] = field(default_factory=dict)
    total: int = 0

    @classmethod
    def of(cls, survey: _MergedTree) -> "_FilesToWrite":
        files = cls()
        pending: list[tuple[str, _Folder]] = [("", survey.root)]
        while pending:
            prefix, folder = pending.pop()
            for name, node in folder.children.items():
                path = prefix + name
                if isinstance(node, _Folder):
                    files.folders.append((path, node.mode))
                    pending.append((f"{path}/", node))
                elif isinstance(node, _Link):
                    target = survey.resolve_absolute_target(path, node.target)
                    (files.system_links if target.startswith("/") else files.links).append((path, target))
                else:
                    files._add(path, node)
        return files

    def _add(self, path: str, file: _File) -> None:
        if file.source not in self.files:
            self.files[file.source] = file
            self.total += file.size
        self.paths.setdefault(file.source, []).append(path)


class _TreeWriter:
    """Writes the files of a tree, and counts their bytes."""

    def __init__(
        self,
        target: Path,
        throttle: Throttle,
        stopped: threading.Event,
        on_bytes: OnBytes,
        files: _FilesToWrite,
    ) -> None:
        self._target, self._files, self._done = target, files, 0
        self._throttle, self._stopped, self._on_bytes = throttle, stopped, on_bytes

    def write_layer(self, layer: int, path: Path) -> None:
        """Write the files of one layer that no later layer has replaced or removed."""
        remaining = sum(key[0] == layer for key in self._files.files)
        if not remaining:
            return
        with _open_tar(path, self._stopped) as tar:
            for number, entry in enumerate(_iterate_entries(tar)):
                file = self._files.files.get((layer, number))
                if file is not None:
                    self._write(tar, entry, file)
                    remaining -= 1
                if not remaining:
                    break
        if remaining:
            raise BadSource("the archive has changed while it was unpacked")

    def _write(self, tar: tarfile.TarFile, entry: tarfile.TarInfo, file: _File) -> None:
        path, *others = self._files.paths[file.source]
        reader = tar.extractfile(entry) if entry.isreg() else None
        if reader is None:
            raise BadSource("the archive has changed while it was unpacked")
        remaining = file.size
        with reader, open(self._target / path, "xb") as writer:
            while remaining and (piece := reader.read(min(self._throttle.piece_bytes, remaining))):
                writer.write(piece)
                remaining -= len(piece)
                self._done += len(piece)
                self._on_bytes(self._done, self._files.total, path)
                if self._stopped.wait(self._throttle.pause(len(piece))):
                    raise WorkCancelled(SHUTDOWN_MESSAGE)
            if remaining:
                raise BadSource("the archive is damaged: it ends inside of a file")
            os.fchmod(writer.fileno(), file.mode)
        for other in others:
            if self._stopped.is_set():
                raise WorkCancelled(SHUTDOWN_MESSAGE)
            _link_or_copy(self._target / path, self._target / other)

    def link(self) -> None:
        """Set folder modes and create the links.

        A link must lead into the folder or to a file of this machine.
        """
        for path, mode in reversed(self._files.folders):
            (self._target / path).chmod(mode)
        for path, destination in self._files.links:
            os.symlink(destination, self._target / path)
        root = os.path.realpath(self._target)
        for path, _ in self._files.links:
            if not Path(os.path.realpath(self._target / path)).is_relative_to(root):
                raise BadSource(f"{path!r} in the archive is a link that leaves it")
        for path, destination in self._files.system_links:
            os.symlink(destination, self._target / path)


def _link_or_copy(source: Path, target: Path) -> None:
    """Create a hard link, or a copy if the filesystem has no hard links, or no more for this file.

    Raise DiskFull: the bytes of copies are not in the total of the archive.
    """
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in _NO_HARD_LINK_ERRNOS:
            raise
        source_files.check_free_space(target.parent, source.stat().st_size)
        shutil.copy2(source, target)
