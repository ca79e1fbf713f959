"""The shell command that joins another machine, and the script that the command downloads.

The command contains the server's URL and a token. The script (`join_script.sh`) contains no secret: it
installs the package that the server offers, checks the SHA-256 of the package and of all its dependencies,
and starts the worker with the variables that the command has set. Over plain HTTP a machine on the network
path could send another script. There the command contains the SHA-256 of the script and runs no other script.
"""

import hashlib
import re
import shlex
import zipfile
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from urllib.parse import urlsplit

from localai_cluster import __version__
from localai_cluster.kit import addresses

_WHEEL_NAME_PATTERN = re.compile(r"localai_cluster-([0-9][0-9A-Za-z.+!_]*)-py3-none-any\.whl\Z")
_SCRIPT_PATH = Path(__file__).with_suffix(".sh")
_REQUIREMENTS_IN_WHEEL = "localai_cluster/bundled/worker.txt"
_CHANGED_SCRIPT_ERROR = (
    "localai-cluster: this is not the script that the line was made for, so it is not run. The server has"
    " another package by now, or something between changed it: make another line."
)
NO_WHEEL_ERROR = "the server has no worker package: run `make package` there, or set CLUSTER_WHEEL_DIR"


@dataclass(frozen=True)
class Wheel:
    """The worker's package. pip parses its file name, so the name must stay."""

    path: Path
    sha256: str
    requirements: str = ""
    """Dependencies as pip requirements with hashes; "" for a wheel of an earlier version."""


def join_warnings(url: str, *, host: str, wheel: Wheel | None) -> list[str]:
    """Return the problems and risks of the join command for `url` on another machine, as sentences.

    The server listens on `host`. The list is empty if no problem is known.
    """
    parts, found = urlsplit(url), []
    if wheel is None:
        found.append(f"The line cannot work yet: {NO_WHEEL_ERROR}.")
    if addresses.is_loopback(parts.hostname or ""):
        found.append(
            f"Other machines cannot reach {url}. "
            + (
                "This server listens on this machine only: stop it and start it with `HOST=0.0.0.0 make run`."
                if addresses.is_loopback(host)
                else "Open the page by an address that other machines reach, or set CLUSTER_PUBLIC_URL."
            )
        )
    elif parts.scheme == "http":
        found.append(
            "The line uses plain HTTP. It runs only the script that it was made for, but whoever is on the"
            " way can read the token. Use it on a network that you trust, or serve HTTPS (CLUSTER_TLS_CERT)."
        )
    return found


def join_command(url: str, token: str, wheel: Wheel | None = None) -> str:
    """Return the shell command that joins another machine. It contains the token.

    Over plain HTTP the command runs only the script for `wheel`.
    """
    # By a pipe: other users of that machine can read arguments.
    header = """printf 'header = "Authorization: Bearer %s"' "$T\""""
    fetch = f"{header} | curl -fgsS -K - {shlex.quote(f'{url}/join')}"
    told = f"LOCALAI_REGISTER_TO={shlex.quote(url)} LOCALAI_REGISTRATION_TOKEN=$T"
    if wheel is None or urlsplit(url).scheme != "http":
        return f"T={shlex.quote(token)}; {fetch} | {told} sh"
    digest = hashlib.sha256(join_script_for(wheel).encode()).hexdigest()
    again = """printf '%s\\n' "$S\""""
    return (
        f"T={shlex.quote(token)}; S=$({fetch});"
        f" if {again} | (sha256sum || shasum -a 256) | grep -q ^{digest}; then {again} | {told} sh;"
        f" else echo {shlex.quote(_CHANGED_SCRIPT_ERROR)} >&2; false; fi"
    )


def join_script_for(wheel: Wheel | None) -> str:
    """Return the join script for `wheel`; for None, a script that reports the missing wheel and stops."""
    wheel = wheel or Wheel(Path(), "")
    told = {
        "WHEEL": wheel.path.name,
        "SHA256": wheel.sha256,
        "REQUIREMENTS": wheel.requirements,
        "NO_WHEEL": NO_WHEEL_ERROR,
    }
    head = "".join(f"{key}={shlex.quote(value)}\n" for key, value in told.items())
    return f"#!/bin/sh\n{head}{_SCRIPT_PATH.read_text(encoding='utf-8').rstrip()}\n"


def find_wheel(folder: Path) -> Wheel | None:
    """Return the package of this version in `folder`, else the newest package; None if there is none."""
    try:
        found = [path for path in folder.iterdir() if _WHEEL_NAME_PATTERN.match(path.name) and path.is_file()]
        stats = {path: path.stat() for path in found}
    except OSError:
        return None
    if not found:
        return None
    best = max(found, key=lambda path: (_wheel_version(path) == __version__, stats[path].st_mtime_ns))
    return _read_wheel(best, stats[best].st_mtime_ns, stats[best].st_size)


def _wheel_version(path: Path) -> str:
    match = _WHEEL_NAME_PATTERN.match(path.name)
    return match[1] if match else ""


@lru_cache(maxsize=4)
def _read_wheel(path: Path, changed: int, size: int) -> Wheel:
    requirements = ""
    with suppress(zipfile.BadZipFile, KeyError), zipfile.ZipFile(path) as archive:
        requirements = archive.read(_REQUIREMENTS_IN_WHEEL).decode()
    return Wheel(path, hashlib.sha256(path.read_bytes()).hexdigest(), requirements)
