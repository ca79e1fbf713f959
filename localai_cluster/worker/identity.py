"""Who this worker is: a secret made at its first start, the one that shall replace it, and a lock so that one
data folder has one worker.

A rotation lasts from `prepare` to `promote`, with a call to the controller between them. Before that call
the successor lies safely in a file of its own, and a rename puts it in place: whenever the worker ends, one
of the two files holds the secret that the controller knows.
"""

import fcntl
import hashlib
import logging
import os
import secrets
from contextlib import suppress
from pathlib import Path
from typing import IO

from localai_cluster.errors import ClusterError

log = logging.getLogger(__name__)

SECRET_BYTES = 32
SECRET_FILE = "node-secret"
NEXT_FILE = "node-secret.next"
LOCK_FILE = "worker.lock"


class IdentityProblem(ClusterError):
    """The worker's data folder cannot be used; the message names the mend."""


class Identity:
    """The secret in use and, while a rotation is under way, its successor ("" if there is none)."""

    def __init__(self, folder: Path) -> None:
        """Reads both; makes a first secret. IdentityProblem."""
        self._path, self._next = folder / SECRET_FILE, folder / NEXT_FILE
        self.successor = _read(self._next)
        if self.successor and not os.path.lexists(self._path):
            self._take_place()
        self.secret = _read(self._path) or _keep(self._path)

    @property
    def fingerprint(self) -> str:
        """What an admin compares before approving: SHA-256 of the secret in use, hex."""
        return hashlib.sha256(self.secret.encode()).hexdigest()

    def prepare(self) -> str:
        """The successor, made and safely on disk; that of a rotation that did not end. IdentityProblem."""
        try:
            if self.successor == self.secret:
                self._take_place()
        except OSError as error:
            raise IdentityProblem(f"cannot write {self._path}: {error.strerror}") from error
        self.successor = self.successor or _keep(self._next)
        return self.successor

    def promote(self) -> None:
        """The successor is the secret from now on, whatever becomes of the files."""
        self.secret = self.successor
        try:
            self._take_place()
        except OSError as error:
            # The next start finds the successor where it is and tries it too.
            log.error("cannot put the new secret in %s: %s", self._path, error.strerror)

    def _take_place(self) -> None:
        os.rename(self._next, self._path)
        _sync(self._path.parent)
        self.successor = ""


def _keep(path: Path) -> str:
    """Makes a secret, 64 hex digits in a file of mode 0600, unless there is one; it survives a power cut."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_hex(SECRET_BYTES) + "\n")
            file.flush()
            os.fsync(descriptor)
        # A link appears whole or not at all, and never replaces the secret somebody else made first.
        with suppress(FileExistsError):
            os.link(fresh, path)
        _sync(path.parent)
    except OSError as error:
        raise IdentityProblem(
            f"cannot keep the node's secret in {path}: {error.strerror}. "
            "Set LOCALAI_WORKER_DATA_DIR to a folder this user can write."
        ) from error
    finally:
        fresh.unlink(missing_ok=True)
    return _read(path)


def _read(path: Path) -> str:
    """The secret in `path`, "" if there is no such file. IdentityProblem."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        with os.fdopen(descriptor) as file:
            if os.fstat(descriptor).st_mode & 0o077:
                os.fchmod(descriptor, 0o600)
            text = file.read(2 * SECRET_BYTES + 2).strip()
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError) as error:
        raise IdentityProblem(f"cannot read {path}: {error}. Make it a plain file of this user.") from error
    if len(text) != 2 * SECRET_BYTES or any(digit not in "0123456789abcdef" for digit in text):
        raise IdentityProblem(
            f"{path} does not hold a secret (64 hex digits). "
            "Restore it from a copy, or remove it and have the node enrolled anew."
        )
    return text


def _sync(folder: Path) -> None:
    """Makes the names in `folder` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def claim(folder: Path) -> IO[str]:
    """Holds the data folder for this process until the file is closed. IdentityProblem when it is taken."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = open(folder / LOCK_FILE, "a+")  # noqa: SIM115 -- held as long as the process lives
    except OSError as error:
        raise IdentityProblem(
            f"cannot use {folder}: {error.strerror}. "
            "Set LOCALAI_WORKER_DATA_DIR to a folder this user can write."
        ) from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        raise IdentityProblem(
            f"another worker uses {folder}. "
            "Stop it, or give this one its own LOCALAI_WORKER_DATA_DIR and LOCALAI_BACKENDS_PATH."
        ) from error
    return file
