"""The worker's identity: its secret, the servers that have accepted it, and a lock on the data folder.

The secret is created at the first start; the lock allows one worker for each data folder. A rotation consists
of `prepare`, a call to the control plane, and `promote`. `prepare` writes the successor safely to its own
file; `promote` renames that file. Whenever the worker ends, one of the two files holds the secret that the
control plane accepts. A server that has accepted the secret is remembered: at its address the worker trusts
no server that does not know the secret (`control_plane.DowngradeRefused`).
"""

import fcntl
import hashlib
import logging
import os
import secrets
from pathlib import Path
from typing import IO
from urllib.parse import urlsplit

from localai_cluster.kit.errors import ClusterError
from localai_cluster.kit.files import create_file, replace_file, sync_folder

log = logging.getLogger(__name__)

SECRET_BYTES = 32
SECRET_FILE = "node-secret"
NEXT_SECRET_FILE = "node-secret.next"
ACCEPTED_SERVERS_FILE = "node-servers"
"""Name of the file with the servers that have accepted a secret of this folder: one origin per line.

Older workers did not write the file. Without the file, any server may have accepted the secret.
"""
LOCK_FILE = "worker.lock"


class IdentityError(ClusterError):
    """The worker's data folder cannot be used; the message states the fix."""


class NodeIdentity:
    """The secret in use and, during a rotation, its successor; the successor is "" otherwise."""

    def __init__(self, folder: Path, *, read_only: bool = False) -> None:
        """Read both secrets; create the first secret, which `read_only` does not store.

        Raise IdentityError.
        """
        self._path, self._next = folder / SECRET_FILE, folder / NEXT_SECRET_FILE
        self._servers_path = folder / ACCEPTED_SERVERS_FILE
        self._servers = _read_accepted_servers(self._servers_path)
        self.successor = _read_secret(self._next)
        if read_only:
            self.secret = _read_secret(self._path) or self.successor
            if not self.secret:
                self.secret, self._servers = secrets.token_hex(SECRET_BYTES), self._servers or []
            return
        if self.successor and not os.path.lexists(self._path):
            self._rename_successor()
        self.secret = _read_secret(self._path) or self._create_first_secret()

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the secret in use, in hex; admins compare it before they approve the node."""
        return hashlib.sha256(self.secret.encode()).hexdigest()

    def prepare(self) -> str:
        """Create, store and return the next secret. An unfinished rotation keeps its next secret.

        Raise IdentityError.
        """
        try:
            if self.successor == self.secret:
                self._rename_successor()
        except OSError as error:
            raise IdentityError(f"cannot write {self._path}: {error.strerror}") from error
        self.successor = self.successor or _create_secret_file(self._next)
        return self.successor

    def promote(self) -> None:
        """Make the successor the secret in use, even if the files cannot be changed."""
        self.secret = self.successor
        try:
            self._rename_successor()
        except OSError as error:
            # The next start finds the successor in its own file and tries it too.
            log.error("cannot write the new secret to %s: %s", self._path, error.strerror)

    def is_accepted_by(self, url: str) -> bool:
        """Return True if the server at `url` has accepted this worker's secret before."""
        return self._servers is None or _url_origin(url) in self._servers

    def record_acceptance(self, url: str) -> None:
        """Store that the server at `url` has accepted the secret."""
        known = self._servers or []
        if _url_origin(url) in known:
            return
        try:
            self._write_accepted_servers([*known, _url_origin(url)])
        except OSError as error:
            log.error("cannot write %s: %s", self._servers_path, error.strerror)

    def _create_first_secret(self) -> str:
        if self._servers is None:  # first, so that no secret is without it
            try:
                self._write_accepted_servers([])
            except OSError as error:
                raise _unwritable_error(self._servers_path, error) from error
        return _create_secret_file(self._path)

    def _write_accepted_servers(self, origins: list[str]) -> None:
        self._servers = origins
        replace_file(self._servers_path, "".join(f"{origin}\n" for origin in origins))

    def _rename_successor(self) -> None:
        os.rename(self._next, self._path)
        sync_folder(self._path.parent)
        self.successor = ""


def _url_origin(url: str) -> str:
    """Return scheme, host and port of a URL."""
    parts = urlsplit(url)
    port = parts.port or {"http": 80, "https": 443}.get(parts.scheme, 0)
    return f"{parts.scheme}://{parts.hostname}:{port}"


def _read_accepted_servers(path: Path) -> list[str] | None:
    try:
        return path.read_text(encoding="utf-8").split()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise IdentityError(f"cannot read {path}: {error}. Make it a file that this user owns.") from error


def _create_secret_file(path: Path) -> str:
    """Create a file with a secret (64 hex digits, mode 0600) that survives a power cut, unless it exists."""
    try:
        create_file(path, f"{secrets.token_hex(SECRET_BYTES)}\n")
    except OSError as error:
        raise _unwritable_error(path, error) from error
    return _read_secret(path)


def _unwritable_error(path: Path, error: OSError) -> IdentityError:
    return IdentityError(
        f"cannot write the node's identity to {path}: {error.strerror}. "
        "Set LOCALAI_WORKER_DATA_DIR to a folder that this user can write to."
    )


def _read_secret(path: Path) -> str:
    """Read the secret in `path`; empty if the file does not exist. Raise IdentityError."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        with os.fdopen(descriptor) as file:
            if os.fstat(descriptor).st_mode & 0o077:
                os.fchmod(descriptor, 0o600)
            text = file.read(2 * SECRET_BYTES + 2).strip()
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError) as error:
        raise IdentityError(
            f"cannot read {path}: {error}. Make it a regular file that this user owns."
        ) from error
    if len(text) != 2 * SECRET_BYTES or any(digit not in "0123456789abcdef" for digit in text):
        raise IdentityError(
            f"{path} does not contain a secret (64 hex digits). "
            "Restore it from a backup, or delete it and approve the node again."
        )
    return text


def is_in_use(folder: Path) -> bool:
    """Return True if a worker runs with this data folder; change nothing in the folder."""
    try:
        with open(folder / LOCK_FILE) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False  # the start reports what is wrong with the folder
    return False


def lock_data_folder(folder: Path) -> IO[str]:
    """Lock the data folder until the returned file is closed. Raise IdentityError if it is in use."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = open(folder / LOCK_FILE, "a+")  # noqa: SIM115 -- held for the life of the process
    except OSError as error:
        raise IdentityError(
            f"cannot use {folder}: {error.strerror}. "
            "Set LOCALAI_WORKER_DATA_DIR to a folder that this user can write to."
        ) from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        raise IdentityError(
            f"another worker uses {folder}. "
            "Stop it, or give this one its own LOCALAI_WORKER_DATA_DIR and LOCALAI_BACKENDS_PATH."
        ) from error
    return file
