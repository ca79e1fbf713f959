"""The command with which another machine joins, and the script that the command fetches.

The command contains the server's URL and a token. The script (`join_script.sh`) contains no secret: it
installs the package that the server offers, checks its SHA-256, and starts the worker with the variables that
the command has set.
"""

import hashlib
import re
import shlex
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from localai_cluster import __version__

_WHEEL = re.compile(r"localai_cluster-([0-9][0-9A-Za-z.+!_]*)-py3-none-any\.whl\Z")
_SCRIPT = Path(__file__).with_suffix(".sh")
NO_WHEEL = "the server has no worker package: run `make package` there, or set CLUSTER_WHEEL_DIR"


@dataclass(frozen=True)
class Wheel:
    """The package of the worker; pip needs its file name."""

    path: Path
    sha256: str


def command(url: str, token: str) -> str:
    """Return the shell command for the other machine. It contains the token."""
    # Through a pipe, because other users of that machine can read arguments.
    header = """printf 'header = "Authorization: Bearer %s"' "$T\""""
    fetch = f"{header} | curl -fgsS -K - {shlex.quote(f'{url}/join')}"
    environment = f"LOCALAI_REGISTER_TO={shlex.quote(url)} LOCALAI_REGISTRATION_TOKEN=$T"
    return f"T={shlex.quote(token)}; {fetch} | {environment} sh"


def script(wheel: Wheel | None) -> str:
    """Return the script for `wheel`; without a wheel it prints an error and stops."""
    name, digest = (wheel.path.name, wheel.sha256) if wheel else ("", "")
    variables = {"WHEEL": name, "SHA256": digest, "NO_WHEEL": NO_WHEEL}
    head = "".join(f"{key}={shlex.quote(value)}\n" for key, value in variables.items())
    return f"#!/bin/sh\n{head}{_SCRIPT.read_text(encoding='utf-8')}"


def find_wheel(folder: Path) -> Wheel | None:
    """Return the package of this version in `folder`, otherwise the newest one; None if there is none."""
    try:
        wheels = [path for path in folder.iterdir() if _WHEEL.match(path.name) and path.is_file()]
        stats = {path: path.stat() for path in wheels}
    except OSError:
        return None
    if not wheels:
        return None
    best = max(wheels, key=lambda path: (_version(path) == __version__, stats[path].st_mtime_ns))
    return Wheel(best, _digest(best, stats[best].st_mtime_ns, stats[best].st_size))


def _version(path: Path) -> str:
    match = _WHEEL.match(path.name)
    return match[1] if match else ""


@lru_cache(maxsize=4)
def _digest(path: Path, changed: int, size: int) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
