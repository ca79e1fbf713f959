"""Settings from the environment: the annotated fields of a table declare them, and one reader reads them.

A table is a frozen dataclass: `conf.py` has those of the server, `worker/config.py` that of the worker, whose
fields are flags too. The annotation of a field is its format (`Seconds`, `Annotated[int, number(…)]`), its
docstring the text in `--help` and in `docs/configuration.md`. A wrong value never raises. It becomes a
`Problem`, the default takes its place, and all problems are reported together. A secret may be given as
`NAME` or as `NAME_FILE`, the path of a file that holds it; no problem and no `repr` shows it.
"""

import ast
import functools
import inspect
import itertools
import re
import ssl
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from localai_cluster.kit import addresses, clock, nkeys
from localai_cluster.kit.errors import ClusterError
from localai_cluster.kit.tls import TlsFiles, WrongFile, trust_besides

T = TypeVar("T", bound="Table")
Values = dict[str, Any]
"""The settings of a table that have been read, by field."""
Default = str | Callable[[Values], str]
"""The text of a default, or a function of the fields before this one that returns it; "" for none."""
_GO_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_GO_PART = re.compile(r"(\d+(?:\.\d+)?)(ns|us|µs|ms|s|m|h)")
SHORTEST_SECRET = 16
WELL_KNOWN_SECRETS = frozenset(
    {"changeme", "change-me", "default", "insecure", "localai", "localai-cluster", "password", "secret"}
)
LONGEST_QUOTE = 200
_TRUE, _FALSE = {"1", "true", "yes", "on", "t"}, {"0", "false", "no", "off", "f", ""}


@dataclass(frozen=True)
class Problem:
    """A wrong setting: its name, the error and a hint."""

    setting: str
    message: str
    hint: str


def weak_secret(value: str) -> bool:
    """Return True if a secret is too short or too well known to protect the cluster."""
    remainder = value.lower()
    for word in WELL_KNOWN_SECRETS:
        remainder = remainder.replace(word, "")
    return len(value) < SHORTEST_SECRET or len(remainder) < SHORTEST_SECRET // 2 or len(set(value)) < 5


def parse_duration(text: str) -> float:
    """Return the seconds of a Go duration such as `90s`, `1m30s`, `500ms` or `0`; raise ValueError."""
    text = text.strip()
    parts = _GO_PART.findall("0s" if text == "0" else text)
    if not parts or text not in ("0", "".join(number + unit for number, unit in parts)):
        raise ValueError("not a duration such as 60s, 1m30s or 500ms")
    return float(sum(float(number) * _GO_UNITS[unit] for number, unit in parts))


def _parse_bool(text: str) -> bool:
    if (lowered := text.strip().lower()) not in _TRUE | _FALSE:
        raise ValueError("neither true nor false")
    return lowered in _TRUE


@dataclass(frozen=True)
class Format:
    """What the text of a setting is, and how it becomes a value: the annotation of its field."""

    fix: str
    """The fix for a wrong value, after "Use"."""
    parse: Callable[[str], Any] = str
    """Raises ValueError, which ends a sentence, an error of msgspec or a ClusterError, where `fix` does."""
    secret: bool = False


def split_list(text: str) -> tuple[str, ...]:
    """Return the parts of a list that commas separate, without empty ones."""
    return tuple(item for part in text.split(",") if (item := part.strip()))


def number(kind: type[int] | type[float], least: float, most: float, fix: str = "") -> Format:
    """Return the format of the numbers from `least` to `most`; by default `fix` is what it accepts."""
    words = f"{'a whole number' if kind is int else 'a number'} from {least:,} to {most:,}"
    bounded: Any = Annotated[kind, msgspec.Meta(ge=least, le=most)]
    return Format(fix or words, lambda text: msgspec.convert(text, bounded, strict=False))


def duration(least: float) -> Format:
    """Return the format of Go durations, in seconds, not shorter than `least`."""
    bounded: Any = Annotated[float, msgspec.Meta(ge=least)]
    words = (
        f"a duration of at least {least:g} s, such as 60s or 2h" if least else "a duration such as 60s or 5m"
    )
    return Format(words, lambda text: msgspec.convert(parse_duration(text), bounded))


def choice(*choices: str) -> Format:
    """Return the format of these texts, in any case."""
    by_name = {item.lower(): item for item in choices}
    literal = Annotated[str, msgspec.Meta(pattern=f"^({'|'.join(choices)})$")]
    return Format(
        " or ".join(choices), lambda text: msgspec.convert(by_name.get(text.lower(), text), literal)
    )


def json_of(type: Any, fix: str, *, secret: bool = False) -> Format:
    """Return the format of JSON of this type."""
    return Format(fix, lambda text: msgspec.convert(msgspec.json.decode(text.encode()), type), secret)


def seed(role: nkeys.Role) -> Format:
    """Return the format of a setting that holds the NKey seed of this NATS role."""
    return Format(f"the NKEY seed of the {role}", lambda text: nkeys.from_seed(text, role).seed, secret=True)


class RegistrySetting(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One registry of LOCALAI_REGISTRIES: a host without a path, as registry.example:5000."""

    host: Annotated[str, msgspec.Meta(pattern="^[^/]+$")]
    username: str = ""
    password: str = ""
    realm: Annotated[str, msgspec.Meta(pattern="^(https?://.*)?$")] = ""
    """URL of the token service that may get the credential, if it is not on the registry's host."""
    plain_http: bool | None = None

    def __repr__(self) -> str:
        return f"RegistrySetting({self.host!r})"


SWITCH, TEXT = Format("true or false", _parse_bool), Format("a text")
REGISTRIES = json_of(
    tuple[RegistrySetting, ...],
    'a JSON list such as [{"host": "registry.example:5000", "username": "reader", "password": "…"}]',
    secret=True,
)
Secret = Annotated[str, Format("a text", secret=True)]
Pem = Annotated[str, Format("the name of a readable PEM file")]
Folder = Annotated[Path, Format("a path", lambda text: Path(text).expanduser().absolute())]
BaseUrl = Annotated[str, Format("a URL such as http://192.0.2.10:8080", addresses.parse_base_url)]
Seconds = Annotated[float, duration(1)]
_MoreCAs = Annotated[ssl.SSLContext, Format("the name of a readable PEM file", trust_besides)]


@dataclass(frozen=True)
class Setting:
    """A declared field of a table."""

    key: str
    """The name of the field."""
    names: tuple[str, ...]
    """Environment variables; the first that is set counts."""
    default: Default
    shown: str
    """The default for people; "" for none."""
    group: str
    format: Format
    empty: Any
    """The value without a text and a default."""


def setting(
    name: str,
    default: Default = "",
    shown: str = "",
    *,
    group: str = "",
    short: bool = False,
    others: tuple[str, ...] = (),
) -> Any:
    """Declare a field of a table. `group` begins a group, which goes on until the next one begins.

    `short`: the variable without `LOCALAI_` counts too, as do the `others`.
    """
    names = (name, *((name.removeprefix("LOCALAI_"),) if short else ()), *others)
    shown = shown or (default if isinstance(default, str) else "")
    return field(metadata={"names": names, "default": default, "shown": shown, "group": group}, repr=False)


class Table:
    """Base of the tables of settings."""

    def problems(self) -> Iterable[Problem]:
        """Return what is wrong with the combination of the settings."""
        return ()


@dataclass(frozen=True, kw_only=True)
class SharedSettings(Table):
    """The settings that server and worker have in common."""

    registries: Annotated[tuple[RegistrySetting, ...], REGISTRIES] = setting(
        "LOCALAI_REGISTRIES", group="Sources"
    )
    """JSON list of registries: `host`, `username`, `password`, `realm`, `plain_http`."""
    registry_config: Folder | None = setting("LOCALAI_REGISTRY_CONFIG")
    """A `config.json` with credentials of registries, as `docker login` writes it; no helpers are run."""
    registry_ca: _MoreCAs | None = setting("LOCALAI_REGISTRY_CA")
    """PEM file with CA certificates that registries and galleries may have besides the usual ones."""
    github_url: BaseUrl = setting("LOCALAI_GITHUB_URL", "https://raw.githubusercontent.com")
    """Base URL of the files that `github:` addresses name; it may be a mirror."""
    nats_tls_ca: Pem = setting("LOCALAI_NATS_TLS_CA", "", "the system's CAs", group="Message bus")
    """CA certificates that verify the message bus. Any of the three files forces encryption."""
    nats_tls_cert: Pem = setting("LOCALAI_NATS_TLS_CERT")
    """Certificate for mutual TLS with the message bus."""
    nats_tls_key: Pem = setting("LOCALAI_NATS_TLS_KEY")
    """Private key of that certificate."""

    @functools.cached_property
    def nats_tls(self) -> ssl.SSLContext | None:
        """The TLS context of the connections to the bus; with it, an unencrypted connection is refused."""
        files = TlsFiles(self.nats_tls_ca, self.nats_tls_cert, self.nats_tls_key)
        return files.client(clock.now()) if files else None

    def problems(self) -> Iterator[Problem]:
        """Return what is wrong with the files."""
        return tls_problems("LOCALAI_NATS_TLS", lambda: self.nats_tls)


def tls_problems(prefix: str, check: Callable[[], Any]) -> Iterator[Problem]:
    """Return what is wrong with the files that `<prefix>_CA`, `_CERT` and `_KEY` name."""
    try:
        check()
    except WrongFile as error:
        yield Problem(f"{prefix}_{error.part}", str(error), "Name readable PEM files that belong together.")


def declared(table: type[Table]) -> tuple[Setting, ...]:
    """Return the settings of a table, in the order of its fields."""
    settings: list[Setting] = []
    hints = get_type_hints(table, include_extras=True)
    group = ""
    for entry in fields(table):  # type: ignore[arg-type]
        hint, group = hints[entry.name], entry.metadata["group"] or group
        if is_optional := NoneType in get_args(hint):
            hint = get_args(hint)[0]
        base, *formats = (*get_args(hint), None) if get_origin(hint) is Annotated else (hint, None)
        format = formats[0] or (SWITCH if base is bool else TEXT)
        empty = None if is_optional else (get_origin(base) or base)()
        metadata = {**entry.metadata, "group": group}
        settings.append(Setting(key=entry.name, format=format, empty=empty, **metadata))
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
        settings = table(**values)
        self.problems += settings.problems()
        return settings

    def text(self, *names: str) -> str:
        """Return the text of the first of these variables that is set; "" if none is."""
        return next((value for name in names if (value := self.values.get(name, "").strip())), "")

    def refuse(self, setting: str, message: str, hint: str) -> None:
        """Add a problem."""
        self.problems.append(Problem(setting, message, hint))

    def _text(self, entry: Setting) -> str:
        """Return the text of a setting; of a secret also the content of the file that `NAME_FILE` names."""
        path = self.text(*(f"{name}_FILE" for name in entry.names)) if entry.format.secret else ""
        if (given := self.text(*entry.names)) or not path:
            return given
        try:
            return Path(path).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = (error.strerror if isinstance(error, OSError) else "") or "it is not text"
            self.refuse(f"{entry.names[0]}_FILE", f"cannot read {path}: {reason}", "Name a readable file.")
            return ""

    def _value(self, entry: Setting, text: str, values: Values) -> Any:
        quote = "" if entry.format.secret else f"{text[:LONGEST_QUOTE]!r} "
        reason = ""
        try:
            if text:
                return entry.format.parse(text)
        except (msgspec.ValidationError, ClusterError):
            reason = f"not {entry.format.fix}"
        except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
            reason = "not JSON"
        except ValueError as error:
            reason = str(error).removeprefix("is ")
        if reason:
            self.refuse(entry.names[0], f"{quote}is {reason}", f"Use {entry.format.fix}.")
        default = entry.default(values) if callable(entry.default) else entry.default
        return entry.format.parse(default) if default else entry.empty
