"""Settings from the environment: the annotated fields of a table declare them, and one reader reads them.

`settings_table.py` has the tables, frozen dataclasses. The annotation of a field is its type for msgspec and
its format (`Seconds`, `Annotated[int, Meta(ge=1, le=9)]`, `Literal["a", "b"]`), its docstring the text in
`--help` and in `docs/configuration.md`. A wrong value never raises. It becomes a `Problem`, the default takes
its place, and all problems are reported together. A secret may be given as `NAME` or as `NAME_FILE`, the path
of a file that holds it; no problem and no `repr` shows it.
"""

import ast
import inspect
import itertools
import os
import re
import ssl
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from ipaddress import IPv4Network, IPv6Network, ip_network
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, Required, TypedDict, TypeVar, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from localai_cluster.kit import addresses, nkeys
from localai_cluster.kit.errors import ClusterError
from localai_cluster.kit.tls import context_with_ca

T = TypeVar("T", bound="Table")
Values = dict[str, Any]
"""Values of the settings that were read before this one, by field name."""
Default = str | Callable[[Values], str]
"""Default of a setting: a text, or a function of the settings read before; "" for no default.

In the text, names in braces stand for the values of settings that were read before.
"""
_SECONDS_BY_GO_UNIT = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_GO_DURATION_PART_PATTERN = re.compile(r"(\d+(?:\.\d+)?)(ns|us|µs|ms|s|m|h)")
_ORIGIN_PATTERN = re.compile(
    r"https?://[a-z0-9.-]+(?::[0-9]{1,5})?|https?://\[[0-9a-f:]+\](?::[0-9]{1,5})?|\*"
)
MIN_SECRET_LENGTH = 16
WELL_KNOWN_SECRETS = frozenset(
    {"changeme", "change-me", "default", "insecure", "localai", "localai-cluster", "password", "secret"}
)
MAX_QUOTE_LENGTH = 200
MAX_DURATION_HOURS = 100 * 365 * 24
"""Longest duration: a hundred years. The calendar ends before `now` and a million years."""
_TRUE_WORDS, _FALSE_WORDS = {"1", "true", "yes", "on", "t"}, {"0", "false", "no", "off", "f", ""}


@dataclass(frozen=True)
class Problem:
    """A wrong setting: its name, the error, and a hint that states the fix."""

    setting: str
    message: str
    hint: str


def is_weak_secret(value: str) -> bool:
    """Return True if a secret is too short or too well known to protect the cluster."""
    remainder = value.lower()
    for word in WELL_KNOWN_SECRETS:
        remainder = remainder.replace(word, "")
    return len(value) < MIN_SECRET_LENGTH or len(remainder) < MIN_SECRET_LENGTH // 2 or len(set(value)) < 5


def parse_duration(text: str) -> float:
    """Return the seconds of a Go duration such as `90s`, `1m30s`, `500ms` or `0`.

    Raise ValueError for another text, and for more than `MAX_DURATION_HOURS`.
    """
    text = text.strip()
    parts = _GO_DURATION_PART_PATTERN.findall("0s" if text == "0" else text)
    if not parts or text not in ("0", "".join(number + unit for number, unit in parts)):
        raise ValueError("not a duration such as 60s, 1m30s or 500ms")
    seconds = float(sum(float(number) * _SECONDS_BY_GO_UNIT[unit] for number, unit in parts))
    if seconds > MAX_DURATION_HOURS * 3600:
        raise ValueError(f"longer than {MAX_DURATION_HOURS}h, a hundred years")
    return seconds


@dataclass(frozen=True)
class Format:
    """The format of a setting's text, and its conversion to a value of the field's type."""

    fix: str
    """Noun phrase that describes valid values. The hint of a problem is "Use" and this text."""
    parse: Callable[[str], Any] = str
    """Convert the text. The message of a ValueError completes the sentence "NAME is …"."""
    secret: bool = False


class GallerySetting(TypedDict, total=False):
    """A gallery of LOCALAI_BACKEND_GALLERIES (`contract/nats.md` §4.1)."""

    url: Required[Annotated[str, Meta(min_length=1)]]
    name: str
    mirrors: list[str]
    verification: dict[str, str]


class RegistrySetting(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One registry of LOCALAI_REGISTRIES; `host` has no path, as in `registry.example:5000`."""

    host: Annotated[str, Meta(pattern="^[^/]+$")]
    username: str = ""
    password: str = ""
    realm: Annotated[str, Meta(pattern="^(https?://.*)?$")] = ""
    """URL of the token service that may get the credential, if it is on another host."""
    plain_http: bool | None = None

    def __repr__(self) -> str:
        return f"RegistrySetting({self.host!r})"


def _parse_bool(text: str) -> bool:
    if (lowered := text.strip().lower()) not in _TRUE_WORDS | _FALSE_WORDS:
        raise ValueError("neither true nor false")
    return lowered in _TRUE_WORDS


def split_list(text: str) -> tuple[str, ...]:
    """Return the parts of a text that commas separate; skip empty parts."""
    return tuple(item for part in text.split(",") if (item := part.strip()))


def _parse_json(text: str) -> Any:
    return msgspec.json.decode(text.encode())


def _node_hosts(text: str) -> dict[str, frozenset[str]]:
    """Parse a JSON object of lists: additional hosts by node name."""
    hosts = msgspec.convert(_parse_json(text), dict[str, list[Any]])
    return {name: frozenset(_parse_host(host, name) for host in names) for name, names in hosts.items()}


def _parse_host(value: Any, node: str) -> str:
    try:
        return addresses.host(value if isinstance(value, str) else "")
    except ValueError:
        raise ValueError(f"wrong at {node!r}: {value!r} is neither a host name nor an IP address") from None


def _parse_networks(text: str) -> tuple[IPv4Network | IPv6Network, ...]:
    return tuple(map(ip_network, split_list(text)))


def _parse_origins(text: str) -> tuple[str, ...]:
    """Parse web origins. Return them in the form in which browsers send them."""
    origins = split_list(text.lower())
    if wrong := next((origin for origin in origins if not _ORIGIN_PATTERN.fullmatch(origin)), None):
        raise ValueError(f"wrong at {wrong!r}: an origin has a scheme and a host, and no path")
    return origins


def _check_host_port(text: str) -> str:
    addresses.split_host_port(text)
    return text


def _check_printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError("not printable")
    return text


def _parse_labels(text: str) -> dict[str, str]:
    """Parse `k=v,k=v`; skip parts without `=`, as a stock worker does."""
    pairs = (part.partition("=") for part in text.split(",") if "=" in part)
    return {key.strip(): value.strip() for key, _, value in pairs if key.strip()}


def _parse_folder(text: str) -> Path:
    return Path(text.strip()).expanduser().absolute()


def _parse_folders(text: str) -> tuple[Path, ...]:
    return tuple(_parse_folder(part) for part in text.split(os.pathsep) if part.strip())


def _parse_slots(text: str) -> int:
    return max(1, msgspec.convert(text, int, strict=False))


def _parse_mirror(text: str) -> str:
    return (text if "://" in text else f"https://{text}").rstrip("/")


def duration(least: float) -> Format:
    """Return the format of a Go duration in seconds, at least `least`."""
    bounded: Any = Annotated[float, Meta(ge=least)]
    fix = f"a duration of at least {least:g} s, such as 60s or 2h"
    return Format(fix, lambda text: msgspec.convert(parse_duration(text), bounded))


def _size_format(unit: int, least: float, most: float) -> Format:
    """Return the format of a size given in units of `unit` bytes; the value is in bytes."""
    bounded: Any = Annotated[float, Meta(ge=least, le=most)]
    fix = f"a number from {least:,} to {most:,}"
    return Format(fix, lambda text: int(msgspec.convert(text, bounded, strict=False) * unit))


def seed(role: nkeys.Role) -> Format:
    """Return the format of an NKey seed for this NATS role."""
    return Format(f"the NKEY seed of the {role}", lambda text: nkeys.from_seed(text, role).seed, secret=True)


BOOL_FORMAT, TEXT_FORMAT, _PEM_FORMAT_TEXT = (
    Format("true or false", _parse_bool),
    Format("a text"),
    "the name of a readable PEM file",
)
_REGISTRIES_FORMAT_TEXT = (
    'a JSON list such as [{"host": "registry.example:5000", "username": "reader", "password": "…"}]'
)
_NODE_HOSTS_FORMAT_TEXT = 'a JSON object of hosts without ports: {"gpu-1": ["10.0.0.5"]}'
_GALLERIES_FORMAT_TEXT = 'a JSON list of {"name": …, "url": …}'
_ORIGINS_FORMAT_TEXT = "origins separated by commas, such as https://app.example, or *"
SERVER_URL_FORMAT_TEXT = "the URL of the control plane, such as http://cluster.example:8080"
_MAX_INT64 = 2**63 - 1
Secret = Annotated[str, Format("a text", secret=True)]
PemFile = Annotated[str, Format(_PEM_FORMAT_TEXT)]
AdditionalCAs = Annotated[ssl.SSLContext, Format(_PEM_FORMAT_TEXT, context_with_ca)]
Folder = Annotated[Path, Format("a path", _parse_folder)]
Folders = Annotated[tuple[Path, ...], Format("paths", _parse_folders)]
BaseUrl = Annotated[str, Format("a URL such as http://192.0.2.10:8080", addresses.parse_base_url)]
ServerUrl = Annotated[str, Format(SERVER_URL_FORMAT_TEXT, addresses.parse_base_url)]
MirrorUrl = Annotated[str, Format("the URL of a mirror", _parse_mirror)]
Seconds = Annotated[float, duration(1)]
Duration = Annotated[float, duration(0)]
"""A duration in seconds. The docstring of each setting states the meaning of 0."""
Retention = Annotated[float, duration(3600)]
IntervalSeconds = Annotated[
    float, Format("a duration such as 10s", lambda text: parse_duration(text) or 10.0)
]
Port = Annotated[int, Meta(ge=1, le=65535, description="a port between 1 and 65535")]
PositiveCount = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Ratio = Annotated[float, Meta(ge=1, le=1_000_000)]
Fraction = Annotated[float, Meta(ge=0, le=1)]
WholeNumber = Annotated[int, Meta(ge=-_MAX_INT64, le=_MAX_INT64, description="a whole number")]
ReplicaSlots = Annotated[int, Meta(le=_MAX_INT64), Format("a whole number", _parse_slots)]
BytesPerSecond = Annotated[int, Meta(ge=0, le=_MAX_INT64, description="bytes per second. 0 = unlimited")]
Mebibytes = Annotated[int, _size_format(2**20, 0.1, 100_000)]
Gibibytes = Annotated[int, _size_format(2**30, 0.01, 10_000)]
LogLevel = Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"]
ListenAddress = Annotated[addresses.Address, Format("host:port, such as 127.0.0.1:9101", addresses.parse)]
_Address = Annotated[str, Meta(max_length=512)]
HostPort = Annotated[_Address, Format("host:port, such as gpu-1.example:50051", _check_host_port)]
FreePort = Annotated[_Address, Format("a free host:port, such as 0.0.0.0:50050", _check_host_port)]
NodeName = Annotated[str, Meta(max_length=255), Format("1 to 255 printable characters", _check_printable)]
Labels = Annotated[dict[str, str], Format("k=v,k=v", _parse_labels)]
NameList = Annotated[tuple[str, ...], Format("names separated by commas", split_list)]
SecretKeys = Annotated[tuple[str, ...], Format("keys", split_list, secret=True)]
Networks = Annotated[
    tuple[Any, ...], Format("networks separated by commas, such as 10.0.0.0/24", _parse_networks)
]
Origins = Annotated[tuple[str, ...], Format(_ORIGINS_FORMAT_TEXT, _parse_origins)]
NodeHosts = Annotated[dict[str, frozenset[str]], Format(_NODE_HOSTS_FORMAT_TEXT, _node_hosts)]
Galleries = Annotated[list[GallerySetting], Format(_GALLERIES_FORMAT_TEXT, _parse_json)]
Registries = Annotated[tuple[RegistrySetting, ...], Format(_REGISTRIES_FORMAT_TEXT, _parse_json, secret=True)]


@dataclass(frozen=True)
class Setting:
    """The declaration of a setting: a field of a table."""

    key: str
    """Name of the field."""
    names: tuple[str, ...]
    """Environment variables of the setting; the first one that is set applies."""
    default: Default
    shown: str
    """The default as the documentation prints it; "" if there is no default."""
    group: str
    format: Format
    type: Any
    empty: Any
    """Value of the field if the setting has neither a text nor a default."""

    def parse(self, text: str) -> Any:
        """Return the value of the text. Raise the errors of `Format.parse`."""
        return msgspec.convert(self.format.parse(text), self.type, strict=self.format.parse is not str)


def setting(
    name: str,
    default: Default = "",
    shown: str = "",
    *,
    group: str = "",
    short: bool = False,
    others: tuple[str, ...] = (),
) -> Any:
    """Declare a field of a table of settings.

    `group` is the heading of this field and of the following fields, up to the next heading. With `short` the
    variable without `LOCALAI_` is read too. `others` are further variables.
    """
    names = (name, *((name.removeprefix("LOCALAI_"),) if short else ()), *others)
    shown = shown or (default if isinstance(default, str) else "")
    return field(metadata={"names": names, "default": default, "shown": shown, "group": group}, repr=False)


class Table:
    """Base class of the tables of settings."""

    def problems(self) -> Iterable[Problem]:
        """Return the problems of settings that contradict each other."""
        return ()


def declared_settings(table: type[Table]) -> tuple[Setting, ...]:
    """Return the settings of a table in the order of its fields."""
    settings: list[Setting] = []
    hints, group = get_type_hints(table, include_extras=True), ""
    for entry in fields(table):  # type: ignore[arg-type]
        hint, group = hints[entry.name], entry.metadata["group"] or group
        if is_optional := NoneType in get_args(hint):
            hint = get_args(hint)[0]
        base, *extras = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        format = next((extra for extra in extras if isinstance(extra, Format)), None)
        kind = get_origin(base) or base
        empty = None if is_optional else "" if kind is Literal else kind()
        metadata = {**entry.metadata, "group": group}
        own_format = format or _format_of(base, extras)
        settings.append(Setting(key=entry.name, format=own_format, type=hint, empty=empty, **metadata))
    return tuple(settings)


def _format_of(base: Any, extras: Iterable[Any]) -> Format:
    """Return the format of a type that msgspec parses by itself."""
    if base is bool:
        return BOOL_FORMAT
    if get_origin(base) is Literal:
        choices = {choice.lower(): choice for choice in get_args(base)}
        return Format(" or ".join(choices.values()), lambda text: choices.get(text.lower(), text))
    kind = "a whole number" if base is int else "a number"
    texts = (bounds.description or f"{kind} from {bounds.ge:,} to {bounds.le:,}" for bounds in extras)
    return next((Format(text) for text in texts), TEXT_FORMAT)


def read_field_docstrings(table: type[Table]) -> dict[str, str]:
    """Return the docstrings of a table's fields by field name.

    They come from the source, because Python does not store docstrings of fields.
    """
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
    """The environment variables, and the problems that reading them has found."""

    values: Mapping[str, str]
    problems: list[Problem] = field(default_factory=list)

    def read(self, table: type[T], flags: Mapping[str, str | None] | None = None) -> T:
        """Read all settings of a table; a flag (by field name) takes precedence over a variable."""
        values: Values = {}
        for entry in declared_settings(table):
            given = ((flags or {}).get(entry.key) or "").strip()
            values[entry.key] = self._convert_text(entry, given or self._read_text(entry), values)
        settings = table(**values)
        self.problems += settings.problems()
        return settings

    def text(self, *names: str) -> str:
        """Return the value of the first of these variables that is set, "" if none is set."""
        return next((value for name in names if (value := self.values.get(name, "").strip())), "")

    def refuse(self, setting: str, message: str, hint: str) -> None:
        """Add a problem."""
        self.problems.append(Problem(setting, message, hint))

    def _read_text(self, entry: Setting) -> str:
        """Return the text of a setting. A secret may also be in the file that `NAME_FILE` names."""
        path = self.text(*(f"{name}_FILE" for name in entry.names)) if entry.format.secret else ""
        if (given := self.text(*entry.names)) or not path:
            return given
        try:
            return Path(path).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = (error.strerror if isinstance(error, OSError) else "") or "it is not text"
            self.refuse(f"{entry.names[0]}_FILE", f"cannot read {path}: {reason}", "Name a readable file.")
            return ""

    def _convert_text(self, entry: Setting, text: str, values: Values) -> Any:
        quote = "" if entry.format.secret else f"{text[:MAX_QUOTE_LENGTH]!r} "
        reason = ""
        try:
            if text:
                return entry.parse(text)
        except (msgspec.ValidationError, ClusterError):
            reason = f"not {entry.format.fix}"
        except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
            reason = "not JSON"
        except ValueError as error:
            reason = str(error).removeprefix("is ")
        if reason:
            self.refuse(entry.names[0], f"{quote}is {reason}", f"Use {entry.format.fix}.")
        default = entry.default(values) if callable(entry.default) else entry.default.format_map(values)
        return entry.parse(default) if default else entry.empty
