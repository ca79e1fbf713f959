"""The reader of settings from the environment, for the tables of both programs.

A table is a frozen dataclass whose fields are settings: `conf.py` has the server's. The worker's
(`worker/config.py`) adds flags and help. `msgspec` converts numbers and JSON. A wrong value never raises. It
becomes a `Problem` (setting, error, hint), a safe default takes its place, and all problems are reported
together, so that an operator fixes one list instead of one traceback after another.
A secret may be given as `NAME` or as `NAME_FILE`, the path of a file that holds it; no problem quotes it.
"""

import re
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, TypeVar
from urllib.parse import urlsplit

import msgspec

from localai_cluster.kit import clock, nkeys
from localai_cluster.kit.tls import TlsFiles, WrongFile

T = TypeVar("T")
Parse = Callable[[str], T]
Values = dict[str, Any]
"""The settings of a table that have been read, by field."""

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
    if lowered not in _TRUE | _FALSE:
        raise ValueError("neither true nor false")
    return lowered in _TRUE


def weak_secret(value: str) -> bool:
    """Return True if a secret is too short or too well known to protect the cluster."""
    remainder = value.lower()
    for word in WELL_KNOWN_SECRETS:
        remainder = remainder.replace(word, "")
    return len(value) < SHORTEST_SECRET or len(remainder) < SHORTEST_SECRET // 2 or len(set(value)) < 5


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


def number_parser(kind: type[T], least: float, most: float, words: str = "") -> Parse[T]:
    """Return a parser of numbers from `least` to `most`; `words` replace the reason for a wrong one."""
    bounded = Annotated[kind, msgspec.Meta(ge=least, le=most)]  # type: ignore[valid-type]
    noun = "a whole number" if kind is int else "a number"

    def parse(text: str) -> T:
        try:
            if "_" in text:
                raise ValueError(text)
            value: T = msgspec.convert(kind(text), bounded)  # type: ignore[call-arg]
        except (ValueError, OverflowError, msgspec.ValidationError):
            raise ValueError(words or f"not {noun} from {least:g} to {most:,}") from None
        return value

    return parse


def json_parser(kind: type[T], words: str) -> Parse[T]:
    """Return a parser of JSON of this type; `words` are the reason for JSON of another one."""

    def parse(text: str) -> T:
        try:
            return msgspec.convert(msgspec.json.decode(text), kind)
        except msgspec.ValidationError:
            raise ValueError(words) from None
        except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
            raise ValueError("not JSON") from None

    return parse


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

    def parsed(self, name: str, parse: Parse[T], default: T, hint: str) -> T:
        """Return the value as `parse` returns it; `default` without one, or with a problem."""
        raw = self.values.get(name, "")
        try:
            return parse(raw) if raw else default
        except ValueError as error:
            self.refuse(name, f"{raw!r} is {error}", hint)
            return default

    def parsed_secret(self, name: str, parse: Parse[T], default: T, hint: str) -> T:
        """Return the secret as `parse` returns it, as `parsed` does; a problem never quotes it."""
        raw = self.secret(name)
        try:
            return parse(raw) if raw else default
        except ValueError as error:
            self.refuse(name, f"is {error}", hint)
            return default

    def boolean(self, name: str, default: bool = False) -> bool:
        """Read a switch."""
        return self.parsed(name, parse_bool, default, "Use true or false.")

    def seed(self, name: str, role: nkeys.Role) -> str:
        """Read the seed of a NATS key of this role, as `secret` does; a problem never quotes it."""
        text = self.secret(name)
        try:
            return nkeys.from_seed(text, role).seed if text else ""
        except ValueError as error:
            self.refuse(name, f"is {error}", f"Use the NKEY seed of the {role}.")
            return ""

    def tls(self, prefix: str, *, serves: bool = False) -> tuple[TlsFiles, ssl.SSLContext | None]:
        """Return the files that `<prefix>_CA`, `_CERT` and `_KEY` name, checked, and a client's context.

        There is no context without files, or if our own server `serves` with them.
        """
        files = TlsFiles(*(self.text(f"{prefix}_{part}") for part in ("CA", "CERT", "KEY")))
        try:
            if files and serves:
                files.server(clock.now())
            return files, files.client(clock.now()) if files and not serves else None
        except WrongFile as error:
            self.refuse(f"{prefix}_{error.part}", str(error), _TLS_HINT)
            return TlsFiles(), None

    def refuse(self, setting: str, message: str, hint: str) -> None:
        """Add a problem."""
        self.problems.append(Problem(setting, message, hint))


@dataclass(frozen=True)
class Setting:
    """One field of a table: `read` gets the environment and the fields before it."""

    names: tuple[str, ...]
    read: Callable[[Environment, Values], Any]
    default: Any


def setting(
    *names: str, read: Callable[[Environment, Values], Any], default: Any = "", secret: bool = False
) -> Any:
    """Return a field of a table; a secret is left out of its `repr`."""
    return field(metadata={"setting": Setting(names, read, default)}, repr=not secret)


def parsed(name: str, parse: Parse[Any], default: Any, hint: str) -> Any:
    """Return a field that a function parses."""
    return setting(name, read=lambda env, _: env.parsed(name, parse, default, hint), default=default)


def text(name: str, default: str = "") -> Any:
    """Return a field of plain text."""
    return setting(name, read=lambda env, _: env.text(name, default), default=default)


def secret(name: str) -> Any:
    """Return a secret field."""
    return setting(name, read=lambda env, _: env.secret(name), secret=True)


def secrets(name: str) -> Any:
    """Return a field with the secrets of a list that is separated by commas."""

    def read(env: Environment, _: Values) -> tuple[str, ...]:
        return tuple(secret for part in env.secret(name).split(",") if (secret := part.strip()))

    return setting(name, read=read, default=(), secret=True)


def seed(name: str, role: nkeys.Role) -> Any:
    """Return a field for the seed of a NATS key."""
    return setting(name, read=lambda env, _: env.seed(name, role), secret=True)


def switch(*names: str, default: bool = False) -> Any:
    """Return a switch; of several variables all must be on."""
    return setting(
        *names,
        read=lambda env, _: False not in [env.boolean(name, default) for name in names],
        default=default,
    )


def choice(name: str, *choices: str) -> Any:
    """Return a field with one of `choices`; the first is the default."""

    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError(f"none of {', '.join(choices)}")
        return text

    return parsed(name, parse, choices[0], f"Use {' or '.join(choices)}.")


def folder(name: str, default: Callable[[Values], Path | None]) -> Any:
    """Return a field with an absolute path."""

    def read(env: Environment, values: Values) -> Path | None:
        path = Path(env.text(name)) if env.text(name) else default(values)
        return path.absolute() if path else None

    return setting(name, read=read)


def seconds(name: str, default: float, minimum: float = 1.0) -> Any:
    """Return a field for a Go duration, in seconds, not shorter than `minimum`."""

    def parse(text: str) -> float:
        value = parse_duration(text)
        if value < minimum:
            raise ValueError(f"shorter than {minimum:g} s")
        return value

    return parsed(name, parse, default, "Use a duration such as 60s or 5m.")


def number(name: str, default: float, least: float, most: float) -> Any:
    """Return a field for a number from `least` to `most`, a whole one if the default is."""
    noun = "a whole number" if isinstance(default, int) else "a number"
    return parsed(
        name, number_parser(type(default), least, most), default, f"Use {noun} such as {default:g}."
    )


def read_table(table: type[T], environment: Environment) -> T:
    """Read all settings of a table, in the order of its fields."""
    values: Values = {}
    for entry in fields(table):  # type: ignore[arg-type]
        values[entry.name] = entry.metadata["setting"].read(environment, values)
    return table(**values)
