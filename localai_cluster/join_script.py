"""What another machine runs to join: one line to paste, and the script that the line fetches.

The line carries the server's URL and a token. The script (`join_script.sh`) carries no secret: it installs
the package that the server offers, checks its SHA-256, and starts the worker with what the line has set.
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
    """The package of the worker; its file name means something to pip."""

    path: Path
    sha256: str


def command(url: str, token: str) -> str:
    """The line for a shell on the other machine. It holds the token."""
    # By a pipe: other users of that machine can read arguments.
    header = """printf 'header = "Authorization: Bearer %s"' "$T\""""
    fetch = f"{header} | curl -fgsS -K - {shlex.quote(f'{url}/join')}"
    told = f"LOCALAI_REGISTER_TO={shlex.quote(url)} LOCALAI_REGISTRATION_TOKEN=$T"
    return f"T={shlex.quote(token)}; {fetch} | {told} sh"


def script(wheel: Wheel | None) -> str:
    """The script for `wheel`; without one it says so and stops."""
    name, digest = (wheel.path.name, wheel.sha256) if wheel else ("", "")
    told = {"WHEEL": name, "SHA256": digest, "NO_WHEEL": NO_WHEEL}
    head = "".join(f"{key}={shlex.quote(value)}\n" for key, value in told.items())
    return f"#!/bin/sh\n{head}{_SCRIPT.read_text(encoding='utf-8')}"


def find_wheel(folder: Path) -> Wheel | None:
    """The package of this version in `folder`, else the newest one; None if there is none."""
    try:
        found = [path for path in folder.iterdir() if _WHEEL.match(path.name) and path.is_file()]
        stats = {path: path.stat() for path in found}
    except OSError:
        return None
    if not found:
        return None
    best = max(found, key=lambda path: (_version(path) == __version__, stats[path].st_mtime_ns))
    return Wheel(best, _digest(best, stats[best].st_mtime_ns, stats[best].st_size))


def _version(path: Path) -> str:
    match = _WHEEL.match(path.name)
    return match[1] if match else ""


@lru_cache(maxsize=4)
def _digest(path: Path, changed: int, size: int) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
