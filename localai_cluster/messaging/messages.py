"""The payloads between controller and worker: one frozen dataclass each, named as on the wire.

A field created with `omitted` is left out of the JSON while it holds its zero value; every other field is
always present. Each class can be built without arguments, which gives the message of zero values that an
empty body stands for. Extensions of our own (a stock peer ignores unknown fields) are marked as such.

Decoding is strict about types and tolerant about everything else, as the peers on the other side of the wire:
unknown fields are ignored, names match case-insensitively, a missing field or `null` is the zero value, an
empty body or `null` is the message of zero values, and a wrong JSON type is an error that names the field.
"""

import dataclasses
import functools
import json
import re
import typing
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from localai_cluster.kit import untrusted
from localai_cluster.kit.errors import ClusterError

PREFIX_SUBJECTS = "prefixcache.*"
PREFIX_OBSERVED_SUBJECT = "prefixcache.observe"
"""Subject on which a web process publishes that it routed a prompt to a replica."""
PREFIX_INVALIDATED_SUBJECT = "prefixcache.invalidate"
"""Subject for the removal of a replica's row: receivers forget the prompts routed to it."""

_UNSAFE_TOKEN_CHARACTERS = str.maketrans(dict.fromkeys(".*> \t\n", "-"))


def token(value: str) -> str:
    """Convert `value` to one subject token: `.`, `*`, `>`, space, tab and newline become `-`."""
    return value.translate(_UNSAFE_TOKEN_CHARACTERS)


def node_prefix(node_id: str) -> str:
    """Return the prefix of all subjects of one node."""
    return f"nodes.{token(node_id)}"


def inbox(node_id: str) -> str:
    """Return the prefix of all replies of one node; its credentials allow no other (§9.2, *Build*)."""
    return f"_INBOX.{token(node_id)}"


def subject(command: str, node_id: str) -> str:
    """Return the subject of a command for one node.

    Requests: `backend.install`, `backend.upgrade`, `backend.delete`, `backend.list`, `models.running`,
    `model.unload` (free a model's memory; its process keeps running), `model.delete` (remove staged files),
    `model.stop` (stop exactly one process and confirm its end), and `backend.cancel`, an extension of ours
    (cancel the install or upgrade of one operation). Published: `backend.stop` (stop processes by backend,
    model or process key) and `stop` (the worker shuts down).
    """
    return f"{node_prefix(node_id)}.{command}"


def install_progress(node_id: str, op_id: str) -> str:
    """Return the subject of the worker's progress events for an operation's install or upgrade."""
    return subject(f"backend.install.{token(op_id)}.progress", node_id)


def install_progress_everywhere(op_id: str) -> str:
    """Return the wildcard subject of one operation's progress events on every node."""
    return f"nodes.*.backend.install.{token(op_id)}.progress"


def install_progress_of_all(node_id: str) -> str:
    """Return the wildcard subject of all operations' progress events on one node."""
    return subject("backend.install.*.progress", node_id)


OMIT_METADATA_KEY = "omit"


def omitted(default: Any) -> Any:
    """Create a dataclass field that the JSON omits while the field has its zero value `default`."""
    return field(default=default, metadata={OMIT_METADATA_KEY: True})


@dataclass(frozen=True)
class EmptyRequest:
    """The body of a request without parameters: `{}`."""


@dataclass(frozen=True)
class Verification:
    """The signature that a gallery requires of its images. It is false if the gallery requires none."""

    issuer: str = omitted("")
    issuer_regex: str = omitted("")
    identity: str = omitted("")
    identity_regex: str = omitted("")
    not_before: str = omitted("")

    def __bool__(self) -> bool:
        return self != Verification()


@dataclass(frozen=True)
class Gallery:
    """A gallery of installable backends: its address, name and mirrors."""

    url: str = ""
    name: str = ""
    mirrors: tuple[str, ...] = omitted(())
    verification: Verification = field(default_factory=Verification, metadata={OMIT_METADATA_KEY: True})


@dataclass(frozen=True)
class InstallRequest:
    """The request of `backend.install`. `backend_galleries` (a JSON list as text) replaces the worker's own.

    Extensions: with `install_only` the worker installs the files and starts no process; `gpus` are the only
    GPUs that the process may see, in their order, each by its UUID or else its index.
    """

    backend: str = ""
    model_id: str = omitted("")
    backend_galleries: str = omitted("")
    uri: str = omitted("")
    name: str = omitted("")
    alias: str = omitted("")
    replica_index: int = omitted(0)
    force: bool = omitted(False)
    op_id: str = omitted("")
    install_only: bool = omitted(False)
    gpus: tuple[str, ...] = omitted(())


@dataclass(frozen=True)
class InstallReply:
    """The reply to `backend.install`. `address` is the engine's `host:port`; empty with `install_only`.

    Extensions: `interrupted` means that a retry can succeed: a stop arrived while the process started, or the
    worker was paused when the request arrived and has not begun it; `gpus` are those assigned to the process.
    """

    success: bool = False
    address: str = omitted("")
    error: str = omitted("")
    interrupted: bool = omitted(False)
    gpus: tuple[str, ...] = omitted(())


@dataclass(frozen=True)
class UpgradeRequest:
    """`backend.upgrade`."""

    backend: str = ""
    backend_galleries: str = omitted("")
    uri: str = omitted("")
    name: str = omitted("")
    alias: str = omitted("")
    replica_index: int = omitted(0)
    op_id: str = omitted("")


@dataclass(frozen=True)
class UpgradeReply:
    """The reply to `backend.upgrade`. Extension: `interrupted` as in `InstallReply`.

    `stopped_process_keys` is valid only if `reports_stopped_processes` is true.
    """

    success: bool = False
    error: str = omitted("")
    stopped_process_keys: tuple[str, ...] = omitted(())
    reports_stopped_processes: bool = omitted(False)
    interrupted: bool = omitted(False)


@dataclass(frozen=True)
class DeleteRequest:
    """The request of `backend.delete`."""

    backend: str = ""


@dataclass(frozen=True)
class DeleteReply(UpgradeReply):
    """The reply to `backend.delete`, with the fields of the reply to an upgrade."""


@dataclass(frozen=True)
class CancelRequest:
    """The request of `backend.cancel`, an extension: end the install or upgrade with this operation id."""

    op_id: str = ""


@dataclass(frozen=True)
class CancelReply:
    """The reply to `backend.cancel`, when all work has ended. `found` is True if a command was running."""

    success: bool = False
    error: str = omitted("")
    found: bool = False


@dataclass(frozen=True)
class StopBackend:
    """The message `backend.stop`: stop a backend, a model or a process key; empty means all processes."""

    backend: str = ""
    force: bool = omitted(False)


@dataclass(frozen=True)
class InstalledBackend:
    """One element of the reply to `backend.list`.

    Extensions: `alias`, a second name that starts the backend, and `size`, the bytes of its files.
    """

    name: str = ""
    is_system: bool = False
    is_meta: bool = False
    installed_at: str = omitted("")
    gallery_url: str = omitted("")
    version: str = omitted("")
    uri: str = omitted("")
    digest: str = omitted("")
    alias: str = omitted("")
    size: int = omitted(0)


@dataclass(frozen=True)
class ListReply:
    """The reply to `backend.list`.

    Extension: `instance` identifies the worker process; every start has a new one.
    """

    backends: tuple[InstalledBackend, ...] = ()
    error: str = omitted("")
    instance: str = omitted("")


@dataclass(frozen=True)
class RunningRequest:
    """The request of `models.running`. Extension: `measure` is the key of the process to measure."""

    measure: str = omitted("")


@dataclass(frozen=True)
class RunningModel:
    """One running engine process; `address` is local to the worker (`127.0.0.1:<port>`).

    `ram` and `vram` extend the reference's message: bytes that the engine's process and its descendants take.
    """

    model_id: str = ""
    replica_index: int = 0
    address: str = omitted("")
    ram: int = omitted(0)
    vram: int = omitted(0)


@dataclass(frozen=True)
class RunningReply:
    """The reply to `models.running`. Extension: `instance` as in `ListReply`."""

    models: tuple[RunningModel, ...] = ()
    error: str = omitted("")
    instance: str = omitted("")


@dataclass(frozen=True)
class StopModelRequest:
    """The request of `model.stop`: stop exactly the process `process_key` at `expected_address`."""

    model_name: str = ""
    process_key: str = ""
    expected_address: str = ""
    force: bool = omitted(False)
    config_revision: str = omitted("")


@dataclass(frozen=True)
class StopModelReply:
    """The reply to `model.stop`. Only a true `terminated` proves that no process runs under the key."""

    matched: bool = False
    freed: bool = False
    terminated: bool = False
    process_key: str = ""
    address: str = omitted("")
    error: str = omitted("")


@dataclass(frozen=True)
class UnloadRequest:
    """The request of `model.unload`. Without `address` the worker frees all processes of the model."""

    model_name: str = ""
    address: str = omitted("")


@dataclass(frozen=True)
class UnloadReply:
    """The reply to `model.unload`; `success` is true for unknown models too."""

    success: bool = False
    error: str = omitted("")


@dataclass(frozen=True)
class DeleteModelRequest:
    """The request of `model.delete`."""

    model_name: str = ""


@dataclass(frozen=True)
class DeleteModelReply:
    """The reply to `model.delete`; `success` is true if there was nothing to remove."""

    success: bool = False
    error: str = omitted("")


@dataclass(frozen=True)
class ProgressEvent:
    """The message `backend.install.<op>.progress`: a progress report. Only the reply has the outcome.

    Extensions: bytes as numbers beside the human-readable texts, and `seq`, which rises from 1 within one
    operation.
    """

    op_id: str = ""
    node_id: str = ""
    backend: str = ""
    file_name: str = omitted("")
    current: str = omitted("")
    total: str = omitted("")
    percentage: float = 0.0
    phase: str = omitted("")
    current_bytes: int = omitted(0)
    total_bytes: int = omitted(0)
    seq: int = omitted(0)


COMMANDS: dict[str, tuple[type[Any], type[Any] | None]] = {
    "backend.install": (InstallRequest, InstallReply),
    "backend.upgrade": (UpgradeRequest, UpgradeReply),
    "backend.cancel": (CancelRequest, CancelReply),
    "backend.stop": (StopBackend, None),
    "backend.delete": (DeleteRequest, DeleteReply),
    "backend.list": (EmptyRequest, ListReply),
    "models.running": (RunningRequest, RunningReply),
    "model.unload": (UnloadRequest, UnloadReply),
    "model.stop": (StopModelRequest, StopModelReply),
    "model.delete": (DeleteModelRequest, DeleteModelReply),
    "stop": (EmptyRequest, None),
}
"""Types of request and reply (None = no reply) of every command to a worker, by subject (nats.md §4)."""


def process_key(name: str, replica_index: int) -> str:
    """Return the process key `<model id>#<replica>`, or `<backend>#<replica>` without a model."""
    return f"{name}#{replica_index}"


def split_process_key(key: str) -> tuple[str, int] | None:
    """Split a key at its last `#` into name and replica index; return None for an invalid key."""
    name, separator, index = key.rpartition("#")
    if not separator or not name or not index.isascii() or not index.isdigit() or len(index) > 9:
        return None
    return name, int(index)


MAX_MESSAGE_BYTES = 1024 * 1024
MAX_LIST_LENGTH = 4096
"""Maximum number of entries of a list in a message."""
_INT64_LIMIT = 2**63
_LONE_SURROGATES_PATTERN = re.compile("[\ud800-\udfff]")

MessageT = TypeVar("MessageT")


class DecodeError(ClusterError):
    """The message is not valid."""

    status = 502
    code = "malformed_message"


def encode(message: Any) -> bytes:
    """Encode `message`, a dataclass, as compact UTF-8 JSON."""
    text = json.dumps(_to_json_value(message), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", "replace")


def decode(payload: bytes, kind: type[MessageT]) -> MessageT:
    """Decode `payload` as a message of type `kind`. Raise DecodeError for an invalid payload."""
    if len(payload) > MAX_MESSAGE_BYTES:
        raise DecodeError(f"message of {len(payload)} bytes; at most {MAX_MESSAGE_BYTES} are read")
    if not payload.strip():
        return kind()
    message: MessageT = _build_message(_parse_json(payload), kind, "")
    return message


def encode_galleries(galleries: Sequence[Gallery]) -> str:
    """Encode the value of `backend_galleries`: a JSON list inside a string."""
    return json.dumps(_to_json_value(tuple(galleries)), separators=(",", ":"))


def decode_galleries(text: str) -> tuple[Gallery, ...]:
    """Decode the value of `backend_galleries`; `null` is an empty list. Raise DecodeError with the field."""
    return _convert_list(_parse_json(text.encode("utf-8", "replace")), Gallery, "backend_galleries")


def _to_json_value(value: Any) -> Any:
    if isinstance(value, tuple):
        return list(map(_to_json_value, value))
    if not dataclasses.is_dataclass(value):
        return value
    values: dict[str, Any] = {}
    for column in dataclasses.fields(value):
        item = getattr(value, column.name)
        if item or not column.metadata.get(OMIT_METADATA_KEY):
            values[column.name] = _to_json_value(item)
    return values


def _parse_json(text: bytes) -> Any:
    if problem := untrusted.json_problem(text):
        raise DecodeError(f"the message is {problem}")
    try:
        return json.loads(text.decode("utf-8", "replace"), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise DecodeError(f"not JSON: {error}") from error


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


_field_types = functools.cache(typing.get_type_hints)


def _build_message(value: Any, kind: Any, path: str) -> Any:
    if value is None:
        return kind()
    if not isinstance(value, dict):
        raise _wrong_type_error(path or "the message", "an object", value)
    folded = {name.lower(): item for name, item in value.items()}
    values = {}
    for name, expected in _field_types(kind).items():
        item = value.get(name, folded.get(name))
        if item is not None:
            values[name] = _convert_value(item, expected, f"{path}.{name}" if path else name)
    return kind(**values)


def _convert_value(value: Any, expected: Any, path: str) -> Any:
    if expected is str:
        if not isinstance(value, str):
            raise _wrong_type_error(path, "a string", value)
        return _LONE_SURROGATES_PATTERN.sub("\ufffd", value)
    if expected is bool:
        if not isinstance(value, bool):
            raise _wrong_type_error(path, "true or false", value)
        return value
    if expected is int:
        if not isinstance(value, int) or isinstance(value, bool) or not -_INT64_LIMIT <= value < _INT64_LIMIT:
            raise _wrong_type_error(path, "a whole number of 64 bits", value)
        return value
    if expected is float:
        if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > 1e300:
            raise _wrong_type_error(path, "a number", value)
        return float(value)
    if typing.get_origin(expected) is tuple:
        return _convert_list(value, typing.get_args(expected)[0], path)
    return _build_message(value, expected, path)


def _convert_list(value: Any, item_type: Any, path: str) -> tuple[Any, ...]:
    if value is None:
        return ()
    if not isinstance(value, list):
        raise _wrong_type_error(path, "a list", value)
    if len(value) > MAX_LIST_LENGTH:  # a hostile worker's list would take seconds of the event loop
        raise DecodeError(f"{path}: more than {MAX_LIST_LENGTH} entries", field=path)
    zero, items = item_type(), enumerate(value)
    return tuple(
        zero if item is None else _convert_value(item, item_type, f"{path}[{index}]") for index, item in items
    )


def _wrong_type_error(path: str, expected: str, value: Any) -> DecodeError:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean"}
    given = names.get(type(value), "this number")
    return DecodeError(f"{path}: expected {expected}, got {given}", field=path)
