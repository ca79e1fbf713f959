"""Where embedded parts live: the runtime directory for sockets, free ports, and the one-line trouble.

A Unix socket's path may have about 107 bytes. When the data directory lies too deep for that, sockets go to
a short directory of our own under the temporary one, made so that nobody else can have prepared it.
"""

import hashlib
import os
import socket
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

LONGEST_SOCKET_PATH = 100
_LONGEST_SOCKET_NAME = len("/.s.PGSQL.5432.lock")


class Trouble(Exception):
    """Something an operator can mend: one line on what is wrong and one on what to do."""

    def __init__(self, message: str, mend: str) -> None:
        self.mend = mend
        super().__init__(message)

    def __str__(self) -> str:
        return f"{self.args[0]} {self.mend}"


def private_directory(path: Path) -> Path:
    """Makes `path` with mode 0700 if it is missing; an existing one must be ours and closed to others."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise Trouble(f"{path} belongs to somebody else.", "Remove it or choose another CLUSTER_DATA_DIR.")
    if stat.S_IMODE(found.st_mode) & 0o077:
        path.chmod(0o700)
    return path


def runtime_directory(data_dir: Path) -> Path:
    """The directory for sockets and pid files of this data directory: the same one in every run."""
    inside = data_dir.absolute() / "run"
    if len(os.fsencode(inside)) + _LONGEST_SOCKET_NAME <= LONGEST_SOCKET_PATH:
        return private_directory(inside)
    tag = hashlib.sha256(os.fsencode(data_dir.resolve())).hexdigest()[:12]
    base = tempfile.gettempdir()
    if len(os.fsencode(base)) > LONGEST_SOCKET_PATH - 50:
        base = "/tmp"
    return private_directory(Path(base) / f"localai-cluster-{os.geteuid()}-{tag}")


def port_is_free(port: int, host: str = "127.0.0.1") -> bool:
    """Whether a server could listen there now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True


def free_port(host: str = "127.0.0.1", *, preferred: int = 0) -> int:
    """The preferred port if it is free, else one that the system picks."""
    if preferred and port_is_free(preferred, host):
        return preferred
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


def write_private(path: Path, text: str) -> None:
    """Writes `text` to a file of mode 0600, whole or not at all."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    with suppress(FileNotFoundError):
        draft.unlink()
    with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(text)
    draft.replace(path)
