"""Who this worker is: a secret made at its first start, and a lock so that one data folder has one worker."""

import fcntl
import os
import secrets
from contextlib import suppress
from pathlib import Path
from typing import IO

from localai_cluster.errors import ClusterError

SECRET_BYTES = 32
SECRET_FILE = "node-secret"
LOCK_FILE = "worker.lock"


class IdentityProblem(ClusterError):
    """The worker's data folder cannot be used; the message names the mend."""


def load_or_create_secret(folder: Path) -> str:
    """The node's secret, 64 hex digits in a file of mode 0600; made if there is none. IdentityProblem."""
    path = folder / SECRET_FILE
    try:
        return _read(path)
    except FileNotFoundError:
        pass
    fresh = path.with_name(f".{SECRET_FILE}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_hex(SECRET_BYTES) + "\n")
            file.flush()
            os.fsync(descriptor)
        # A link appears whole or not at all, and never replaces the secret somebody else made first.
        with suppress(FileExistsError):
            os.link(fresh, path)
        return _read(path)
    except OSError as error:
        raise IdentityProblem(
            f"cannot keep the node's secret in {path}: {error.strerror}. "
            "Set LOCALAI_WORKER_DATA_DIR to a folder this user can write."
        ) from error
    finally:
        fresh.unlink(missing_ok=True)


def _read(path: Path) -> str:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    with os.fdopen(descriptor) as file:
        if os.fstat(descriptor).st_mode & 0o077:
            os.fchmod(descriptor, 0o600)
        text = file.read(2 * SECRET_BYTES + 2).strip()
    if len(text) != 2 * SECRET_BYTES or any(digit not in "0123456789abcdef" for digit in text):
        raise IdentityProblem(
            f"{path} does not hold a secret (64 hex digits). "
            "Restore it from a copy, or remove it and have the node enrolled anew."
        )
    return text


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
