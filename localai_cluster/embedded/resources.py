"""Private directories and files, the runtime directory for sockets, free ports, and `SetupError`.

The path of a Unix socket is limited to about 107 bytes. If the data directory's path is too long, sockets go
to a short directory under the temporary one, which no other user can have prepared.
"""

import hashlib
import os
import socket
import stat
import tempfile
from pathlib import Path

MAX_SOCKET_PATH_LENGTH = 100
_MAX_SOCKET_NAME_LENGTH = len("/.s.PGSQL.5432.lock")


class SetupError(Exception):
    """An error that the operator can fix; `hint` states how."""

    def __init__(self, message: str, hint: str) -> None:
        self.hint = hint
        super().__init__(message)

    def __str__(self) -> str:
        return f"{self.args[0]} {self.hint}"


def private_directory(path: Path) -> Path:
    """Create `path` with mode 0700; withdraw access of others from an existing directory.

    Raise SetupError if the directory belongs to another user.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise SetupError(f"{path} belongs to another user.", "Remove it or choose another CLUSTER_DATA_DIR.")
    if stat.S_IMODE(found.st_mode) & 0o077:
        path.chmod(0o700)
    return path


def runtime_directory(data_dir: Path) -> Path:
    """Return the directory for sockets and pid files of `data_dir`.

    Every run on `data_dir` uses the same directory.
    """
    inside = data_dir.absolute() / "run"
    if len(os.fsencode(inside)) + _MAX_SOCKET_NAME_LENGTH <= MAX_SOCKET_PATH_LENGTH:
        return private_directory(inside)
    tag = hashlib.sha256(os.fsencode(data_dir.resolve())).hexdigest()[:12]
    base = tempfile.gettempdir()
    if len(os.fsencode(base)) > MAX_SOCKET_PATH_LENGTH - 50:
        base = "/tmp"
    return private_directory(Path(base) / f"localai-cluster-{os.geteuid()}-{tag}")


def port_is_free(port: int, host: str) -> bool:
    """Return True if a server could now listen on this port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True


def free_port(host: str = "127.0.0.1", *, preferred: int = 0) -> int:
    """Return the preferred port if it is free, else a port that the system chooses."""
    if preferred and port_is_free(preferred, host):
        return preferred
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port
