"""The environment, read once and typed.

`Environment` is the only reader of settings. `cluster_settings.py` reads those of the server processes,
`settings.py` those that only Django needs, and `worker/config.py` those of the worker.
A wrong value never raises. It becomes a `Problem` (setting, error, hint), a safe default takes its place, and
all problems are reported together, so that an operator fixes one list instead of one traceback after another.
A secret may be given as `NAME` or as `NAME_FILE`, the path of a file that holds it.
"""

import math
import re
import ssl
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

from localai_cluster.kit import clock, nkeys
from localai_cluster.kit.tls import TlsFiles, WrongFile

T = TypeVar("T")

_GO_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_GO_PART = re.compile(r"(\d+(?:\.\d+)?)(ns|us|µs|ms|s|m|h)")
SHORTEST_SECRET = 16
WELL_KNOWN_SECRETS = {
    "changeme",
    "change-me",
    "default",
    "insecure",
    "localai",
    "localai-cluster",
    "password",
    "secret",
}
LONGEST_URL = 512
_TLS_HINT = "Name readable PEM files that belong together."
LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
_TRUE, _FALSE = {"1", "true", "yes", "on", "t"}, {"0", "false", "no", "off", "f", ""}


@dataclass(frozen=True)
class Problem:
    """A wrong setting: its name, the error and a hint."""

    setting: str
    message: str
    hint: str


def parse_duration(text: str) -> float:
    """Return the seconds of a Go duration such as `90s`, `1m30s`, `500ms` or `0`; raise ValueError."""
    text = text.strip()
    if text == "0":
        return 0.0
    parts = _GO_PART.findall(text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        raise ValueError("not a duration such as 60s, 1m30s or 500ms")
    return float(sum(float(number) * _GO_UNITS[unit] for number, unit in parts))


def parse_bool(text: str) -> bool:
    """Parse a switch: true/false, 1/0, yes/no, on/off; raise ValueError."""
    lowered = text.strip().lower()
    if lowered in _TRUE:
        return True
    if lowered in _FALSE:
        return False
    raise ValueError("neither true nor false")


def weak_secret(value: str) -> bool:
    """Return True if a secret is too short or too well known to protect the cluster."""
    remainder = value.lower()
    for word in WELL_KNOWN_SECRETS:
        remainder = remainder.replace(word, "")
    return len(value) < SHORTEST_SECRET or len(remainder) < SHORTEST_SECRET // 2 or len(set(value)) < 5


def parse_port(text: str) -> int:
    """Parse a TCP port; raise ValueError."""
    if not text.isascii() or not text.isdigit() or not 0 < int(text) < 65536:
        raise ValueError("not a port between 1 and 65535")
    return int(text)


def parse_count(text: str) -> int:
    """Parse a whole number from 1; raise ValueError."""
    if not text.isascii() or not text.isdigit() or not 0 < int(text) < 2**31:
        raise ValueError("not a whole number from 1")
    return int(text)


def parse_base_url(text: str) -> str:
    """Return the base URL of a web server without its trailing slash; raise ValueError."""
    plain = text.isascii() and text.isprintable() and " " not in text and len(text) <= LONGEST_URL
    try:
        parts = urlsplit(text if plain else "")
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        usable = False
    if not usable or parts.username is not None or parts.query or parts.fragment:
        raise ValueError("not a base URL such as http://192.0.2.10:8080")
    return text.rstrip("/")


def parse_log_level(text: str) -> str:
    """Return a level of `logging` in upper case; raise ValueError."""
    level = text.strip().upper()
    if level not in LOG_LEVELS:
        raise ValueError(f"none of {', '.join(LOG_LEVELS)}")
    return level


@dataclass
class Environment:
    """A view on environment variables that collects problems instead of raising."""

    values: Mapping[str, str]
    problems: list[Problem] = field(default_factory=list)

    def text(self, name: str, default: str = "") -> str:
        """Return the variable's text, or `default` if it is unset or empty."""
        return self.values.get(name, "") or default

    def secret(self, name: str) -> str:
        """Return the secret, or the content of the file that `NAME_FILE` names; empty if neither is set."""
        path = self.values.get(f"{name}_FILE", "")
        if self.values.get(name) or not path:
            return self.text(name)
        try:
            return Path(path).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = (error.strerror if isinstance(error, OSError) else "") or "it is not text"
            self.refuse(f"{name}_FILE", f"cannot read {path}: {reason}", "Name a readable file.")
            return ""

    def parsed(self, name: str, parse: Callable[[str], T], default: T, hint: str) -> T:
        """Return the variable's value as `parse` returns it.

        A value that `parse` refuses is recorded as a problem, and `default` is returned.
        """
        raw = self.values.get(name, "")
        if not raw:
            return default
        try:
            return parse(raw)
        except ValueError as error:
            self.refuse(name, f"{raw!r} is {error}", hint)
            return default

    def boolean(self, name: str, default: bool = False) -> bool:
        """Read a switch."""
        return self.parsed(name, parse_bool, default, "Use true or false.")

    def choice(self, name: str, choices: Sequence[str]) -> str:
        """Read one of `choices`; the first is the default."""

        def parse(text: str) -> str:
            if text not in choices:
                raise ValueError(f"none of {', '.join(choices)}")
            return text

        return self.parsed(name, parse, choices[0], f"Use {' or '.join(choices)}.")

    def folder(self, name: str, default: Path) -> Path:
        """Read an absolute path."""
        return Path(self.text(name, str(default))).absolute()

    def seconds(self, name: str, default: float, minimum: float = 1.0) -> float:
        """Read a Go duration, in seconds, not shorter than `minimum`."""

        def parse(text: str) -> float:
            value = parse_duration(text)
            if value < minimum:
                raise ValueError(f"shorter than {minimum:g} s")
            return value

        return self.parsed(name, parse, default, "Use a duration such as 60s or 5m.")

    def number(self, name: str, default: float, least: float, most: float, *, whole: bool = False) -> float:
        """Read a number from `least` to `most`."""
        kind = "a whole number" if whole else "a number"

        def parse(text: str) -> float:
            # NaN compares false with everything.
            try:
                value = float(text)
            except ValueError:
                value = math.nan
            if not least <= value <= most or (whole and value != int(value)):
                raise ValueError(f"not {kind} from {least:g} to {most:,}")
            return value

        return self.parsed(name, parse, default, f"Use {kind} such as {default:g}.")

    def seed(self, name: str, role: nkeys.Role) -> str:
        """Read the seed of a NATS key of this role, as `secret` does; a problem never quotes it."""
        text = self.secret(name)
        try:
            return nkeys.from_seed(text, role).seed if text else ""
        except ValueError as error:
            self.refuse(name, f"is {error}", f"Use the NKEY seed of the {role}.")
            return ""

    def tls_files(self, prefix: str) -> TlsFiles:
        """Return the files that `<prefix>_CA`, `_CERT` and `_KEY` name."""
        return TlsFiles(*(self.text(f"{prefix}_{part}") for part in ("CA", "CERT", "KEY")))

    def tls(self, prefix: str) -> ssl.SSLContext | None:
        """Return a context of those files for connections that we open; None without files."""
        files = self.tls_files(prefix)
        try:
            return files.client(clock.now()) if files else None
        except WrongFile as error:
            self.refuse(f"{prefix}_{error.part}", str(error), _TLS_HINT)
            return None

    def tls_server(self, prefix: str) -> TlsFiles:
        """Return the checked files of our own server."""
        files = self.tls_files(prefix)
        try:
            if files:
                files.server(clock.now())
        except WrongFile as error:
            self.refuse(f"{prefix}_{error.part}", str(error), _TLS_HINT)
            return TlsFiles()
        return files

    def refuse(self, setting: str, message: str, hint: str) -> None:
        """Add a problem."""
        self.problems.append(Problem(setting, message, hint))
