"""Settings from the environment: the fields of a table declare them, and one reader reads them.

A table is a frozen dataclass: `conf.py` has those of the server, `worker/config.py` that of the worker, whose
fields are flags too. The docstring of a field is its text in `--help` and in `docs/configuration.md`. A wrong
value never raises. It becomes a `Problem` (setting, error, hint), the default takes its place, and all
problems are reported together, so that an operator fixes one list instead of one traceback after another. A
secret may be given as `NAME` or as `NAME_FILE`, the path of a file that holds it; no problem quotes it.
"""

import ast
import functools
import inspect
import itertools
import re
import ssl
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from localai_cluster.kit import addresses, clock, nkeys
from localai_cluster.kit.registry_settings import REGISTRIES_EXAMPLE, RegistrySetting, parse_registries
from localai_cluster.kit.tls import TlsFiles, WrongFile, trust_besides

T = TypeVar("T", bound="Table")
Values = dict[str, Any]
"""The settings of a table that have been read, by field."""

_GO_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_GO_PART = re.compile(r"(\d+(?:\.\d+)?)(ns|us|µs|ms|s|m|h)")
SHORTEST_SECRET = 16
WELL_KNOWN_SECRETS = frozenset(
    {"changeme", "change-me", "default", "insecure", "localai", "localai-cluster", "password", "secret"}
)
LONGEST_QUOTE = 200
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


def parse_json(text: str, type: Any, words: str) -> Any:
    """Parse JSON of this type; `words` are the reason for JSON of another one. Raise ValueError."""
    try:
        return msgspec.convert(msgspec.json.decode(text), type)
    except msgspec.ValidationError:
        raise ValueError(words) from None
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
        raise ValueError("not JSON") from None


def weak_secret(value: str) -> bool:
    """Return True if a secret is too short or too well known to protect the cluster."""
    remainder = value.lower()
    for word in WELL_KNOWN_SECRETS:
        remainder = remainder.replace(word, "")
    return len(value) < SHORTEST_SECRET or len(remainder) < SHORTEST_SECRET // 2 or len(set(value)) < 5


@dataclass(frozen=True)
class Kind:
    """A kind of value: its parser, whose ValueError ends a sentence, and the fix for a wrong value."""

    parse: Callable[[str], Any]
    fix: str
    empty: Any = ""
    """The value of a setting that has neither a text nor a default."""
    secret: bool = False


def number(kind: type[int] | type[float], least: float, most: float, fix: str = "") -> Kind:
    """Return the kind of the numbers from `least` to `most`; by default `fix` is what it accepts."""
    words = f"{'a whole number' if kind is int else 'a number'} from {least:,} to {most:,}"
    bounded: Any = Annotated[kind, msgspec.Meta(ge=least, le=most)]

    def parse(text: str) -> Any:
        try:
            return msgspec.convert(text, bounded, strict=False)
        except msgspec.ValidationError:
            raise ValueError(f"not {words}") from None

    return Kind(parse, fix or words)


def duration(least: float) -> Kind:
    """Return the kind of Go durations, in seconds, not shorter than `least`."""

    def parse(text: str) -> float:
        seconds = parse_duration(text)
        if seconds < least:
            raise ValueError(f"shorter than {least:g} s")
        return seconds

    return Kind(parse, "a duration such as 60s or 5m")


def choice(*choices: str) -> Kind:
    """Return the kind of these texts, in any case."""

    def parse(text: str) -> str:
        chosen = next((item for item in choices if item.lower() == text.lower()), None)
        if chosen is None:
            raise ValueError(f"none of {', '.join(choices)}")
        return chosen

    return Kind(parse, " or ".join(choices))


def seed(role: nkeys.Role) -> Kind:
    """Return the kind of the seeds of this role on the message bus."""
    return Kind(lambda text: nkeys.from_seed(text, role).seed, f"the NKEY seed of the {role}", secret=True)


TEXT = Kind(str, "a text")
SECRET = Kind(str, "a text", secret=True)
SWITCH = Kind(parse_bool, "true or false", False)
FOLDER = Kind(lambda text: Path(text).expanduser().absolute(), "a path", None)
PEM = Kind(str, "the name of a readable PEM file")
_MORE_CAS = Kind(trust_besides, "the name of a readable PEM file", None)
_REGISTRIES = Kind(parse_registries, f"a JSON list such as {REGISTRIES_EXAMPLE}", (), secret=True)
BASE_URL = Kind(addresses.parse_base_url, "a URL such as http://192.0.2.10:8080")
SECONDS = duration(1)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A declared field of a table."""

    names: tuple[str, ...]
    """Environment variables; the first that is set counts."""
    kind: Kind
    default: str | Callable[[Values], str]
    """Its text, or a function of the fields before this one that returns it; "" for none."""
    shown: str
    """The default for people; "" for none."""
    group: str
    key: str = ""
    """The name of the field."""


def setting(
    names: str | tuple[str, ...],
    kind: Kind = TEXT,
    default: str | Callable[[Values], str] = "",
    shown: str = "",
    *,
    group: str = "",
) -> Any:
    """Declare a field of a table. `group` begins a group, which goes on until the next one begins."""
    names = (names,) if isinstance(names, str) else names
    shown = shown or (default if isinstance(default, str) else "")
    entry = Setting(names=names, kind=kind, default=default, shown=shown, group=group)
    return field(metadata={"setting": entry}, repr=not kind.secret)


class Table:
    """Base of the tables of settings."""

    def problems(self) -> Iterable[Problem]:
        """Return what is wrong with the combination of the settings."""
        return ()


@dataclass(frozen=True, kw_only=True)
class SharedSettings(Table):
    """The settings that server and worker have in common."""

    registries: tuple[RegistrySetting, ...] = setting("LOCALAI_REGISTRIES", _REGISTRIES, group="Sources")
    """JSON list of registries: `host`, `username`, `password`, `realm`, `plain_http`."""
    registry_config: Path | None = setting("LOCALAI_REGISTRY_CONFIG", FOLDER)
    """A `config.json` with credentials of registries, as `docker login` writes it; no helpers are run."""
    registry_ca: ssl.SSLContext | None = setting("LOCALAI_REGISTRY_CA", _MORE_CAS)
    """PEM file with CA certificates that registries and galleries may have besides the usual ones."""
    github_url: str = setting("LOCALAI_GITHUB_URL", BASE_URL, "https://raw.githubusercontent.com")
    """Base URL of the files that `github:` addresses name; it may be a mirror."""
    nats_tls_ca: str = setting("LOCALAI_NATS_TLS_CA", PEM, "", "the system's CAs", group="Message bus")
    """CA certificates that verify the message bus. Any of the three files forces encryption."""
    nats_tls_cert: str = setting("LOCALAI_NATS_TLS_CERT", PEM)
    """Certificate for mutual TLS with the message bus."""
    nats_tls_key: str = setting("LOCALAI_NATS_TLS_KEY", PEM)
    """Private key of that certificate."""

    @functools.cached_property
    def nats_tls(self) -> ssl.SSLContext | None:
        """The TLS context of the connections to the bus; with it, an unencrypted connection is refused."""
        return tls_context(self.nats_tls_ca, self.nats_tls_cert, self.nats_tls_key)

    def problems(self) -> Iterator[Problem]:
        """Return what is wrong with the files."""
        return tls_problems("LOCALAI_NATS_TLS", lambda: self.nats_tls)


def tls_context(*files: str) -> ssl.SSLContext | None:
    """Return the context of a client with these files (CA, certificate, key); None without any. WrongFile."""
    return TlsFiles(*files).client(clock.now()) if any(files) else None


def tls_problems(prefix: str, check: Callable[[], Any]) -> Iterator[Problem]:
    """Return what is wrong with the files that `<prefix>_CA`, `_CERT` and `_KEY` name."""
    try:
        check()
    except WrongFile as error:
        yield Problem(f"{prefix}_{error.part}", str(error), "Name readable PEM files that belong together.")


def declared(table: type[Table]) -> tuple[Setting, ...]:
    """Return the settings of a table, in the order of its fields."""
    settings: list[Setting] = []
    for entry in fields(table):  # type: ignore[arg-type]
        last_group = settings[-1].group if settings else ""
        declared_entry: Setting = entry.metadata["setting"]
        settings.append(replace(declared_entry, key=entry.name, group=declared_entry.group or last_group))
    return tuple(settings)


def texts(table: type[Table]) -> dict[str, str]:
    """Return the docstrings of the fields of a table, from its source, since Python does not keep them."""
    sources = [inspect.getsource(base) for base in table.__mro__ if base not in (Table, object)]
    return {
        node.target.id: " ".join(str(after.value.value).split())
        for definition in ast.parse("\n".join(sources)).body
        for node, after in itertools.pairwise(getattr(definition, "body", ()))
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
    }


@dataclass
class Environment:
    """A view on environment variables that collects problems instead of raising."""

    values: Mapping[str, str]
    problems: list[Problem] = field(default_factory=list)

    def read(self, table: type[T], flags: Mapping[str, str | None] | None = None) -> T:
        """Read all settings of a table; `flags`, by field, count more than variables."""
        values: Values = {}
        for entry in declared(table):
            given = ((flags or {}).get(entry.key) or "").strip()
            values[entry.key] = self._value(entry, given or self._text(entry), values)
        made = table(**values)
        self.problems += made.problems()
        return made

    def text(self, *names: str) -> str:
        """Return the text of the first of these variables that is set; "" if none is."""
        return next((value for name in names if (value := self.values.get(name, "").strip())), "")

    def refuse(self, setting: str, message: str, hint: str) -> None:
        """Add a problem."""
        self.problems.append(Problem(setting, message, hint))

    def _text(self, entry: Setting) -> str:
        """Return the text of a setting; of a secret also the content of the file that `NAME_FILE` names."""
        path = self.text(*(f"{name}_FILE" for name in entry.names)) if entry.kind.secret else ""
        if (given := self.text(*entry.names)) or not path:
            return given
        try:
            return Path(path).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = (error.strerror if isinstance(error, OSError) else "") or "it is not text"
            self.refuse(f"{entry.names[0]}_FILE", f"cannot read {path}: {reason}", "Name a readable file.")
            return ""

    def _value(self, entry: Setting, text: str, values: Values) -> Any:
        try:
            if text:
                return entry.kind.parse(text)
        except ValueError as error:
            quote = "" if entry.kind.secret else f"{text[:LONGEST_QUOTE]!r} "
            self.refuse(entry.names[0], f"{quote}is {error}", f"Use {entry.kind.fix}.")
        default = entry.default(values) if callable(entry.default) else entry.default
        return entry.kind.parse(default) if default else entry.kind.empty
