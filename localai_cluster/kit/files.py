"""Files that are created or replaced in one step and survive a power cut. All functions block."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def replace_file(path: Path, content: str | bytes, *, prefix: str = ".") -> None:
    """Write `content` to a file of mode 0600 in place of a former file. Raise OSError.

    The name of the draft begins with `prefix`; a kill leaves the draft.
    """
    with _draft(path, content, prefix) as draft:
        os.replace(draft, path)
        sync_folder(path.parent)


def create_file(path: Path, content: str | bytes) -> None:
    """Create a file of mode 0600 unless it exists, even if another process creates it now. Raise OSError."""
    with _draft(path, content, ".") as draft:
        with suppress(FileExistsError):
            os.link(draft, path)
        sync_folder(path.parent)


@contextmanager
def _draft(path: Path, content: str | bytes, prefix: str) -> Iterator[Path]:
    draft = path.with_name(f"{prefix}{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        yield draft
    finally:
        draft.unlink(missing_ok=True)


def boot_id() -> str:
    """Return the id of the machine's current boot; "" if the system has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def sync_folder(folder: Path) -> None:
    """Sync the directory entries of a folder to disk; a missing folder is no error."""
    with suppress(FileNotFoundError, NotADirectoryError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
