"""Encode messages to bytes and decode them: pure, strict about types, tolerant about everything else.

Decoding follows the peers on the other side of the wire: unknown fields are ignored, names match
case-insensitively, a missing field or `null` is the zero value, an empty body or `null` is the message of
zero values, and a wrong JSON type is an error that names the field. Encoding omits the fields that the
message marks with `OMIT` while they hold their zero value.
"""

import dataclasses
import functools
import json
import re
import typing
from collections.abc import Sequence
from typing import Any, TypeVar

from localai_cluster.kit import untrusted
from localai_cluster.kit.errors import ClusterError
from localai_cluster.messaging.messages import OMIT, Gallery

MAX_BYTES = 1024 * 1024
_INT_LIMIT = 2**63
_LONE_SURROGATES = re.compile("[\ud800-\udfff]")

M = TypeVar("M")


class DecodeError(ClusterError):
    """The message cannot be understood."""

    status = 502
    code = "malformed_message"


def encode(message: Any) -> bytes:
    """Encode `message`, a dataclass, as compact UTF-8 JSON."""
    text = json.dumps(_plain(message), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", "replace")


def decode(payload: bytes, kind: type[M]) -> M:
    """Decode `payload` as a message of type `kind`. Raise DecodeError for anything else."""
    if len(payload) > MAX_BYTES:
        raise DecodeError(f"message of {len(payload)} bytes; at most {MAX_BYTES} are read")
    if not payload.strip():
        return kind()
    message: M = _build(_parse(payload), kind, "")
    return message


def encode_galleries(galleries: Sequence[Gallery]) -> str:
    """Encode the value of `backend_galleries`: a JSON list inside a string."""
    return json.dumps(_plain(tuple(galleries)), separators=(",", ":"))


def decode_galleries(text: str) -> tuple[Gallery, ...]:
    """Decode the value of `backend_galleries`; `null` is an empty list.

    Raise DecodeError naming the wrong field.
    """
    value = _parse(text.encode("utf-8", "replace"))
    return tuple(_list(value, Gallery, "backend_galleries"))


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return list(map(_plain, value))
    if not dataclasses.is_dataclass(value):
        return value
    values: dict[str, Any] = {}
    for field in dataclasses.fields(value):
        item = getattr(value, field.name)
        if item or not field.metadata.get(OMIT):
            values[field.name] = _plain(item)
    return values


def _parse(text: bytes) -> Any:
    if problem := untrusted.json_problem(text):
        raise DecodeError(f"the message is {problem}")
    try:
        return json.loads(text.decode("utf-8", "replace"), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise DecodeError(f"not JSON: {error}") from error


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


_types = functools.cache(typing.get_type_hints)


def _build(value: Any, kind: Any, path: str) -> Any:
    if value is None:
        return kind()
    if not isinstance(value, dict):
        raise _wrong(path or "the message", "an object", value)
    folded = {name.lower(): item for name, item in value.items()}
    values = {}
    for name, expected in _types(kind).items():
        item = value.get(name, folded.get(name))
        if item is not None:
            values[name] = _value(item, expected, f"{path}.{name}" if path else name)
    return kind(**values)


def _value(value: Any, expected: Any, path: str) -> Any:
    if expected is str:
        if not isinstance(value, str):
            raise _wrong(path, "a string", value)
        return _LONE_SURROGATES.sub("\ufffd", value)
    if expected is bool:
        if not isinstance(value, bool):
            raise _wrong(path, "true or false", value)
        return value
    if expected is int:
        return _integer(value, path)
    if expected is float:
        return float(_number(value, path))
    if typing.get_origin(expected) is tuple:
        return tuple(_list(value, typing.get_args(expected)[0], path))
    return _build(value, expected, path)


def _integer(value: Any, path: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not -_INT_LIMIT <= value < _INT_LIMIT:
        raise _wrong(path, "a whole number of 64 bits", value)
    return value


def _number(value: Any, path: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > 1e300:
        raise _wrong(path, "a number", value)
    return value


def _list(value: Any, item_type: Any, path: str) -> list[Any]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise _wrong(path, "a list", value)
    zero = item_type()
    return [
        zero if item is None else _value(item, item_type, f"{path}[{index}]")
        for index, item in enumerate(value)
    ]


def _wrong(path: str, expected: str, value: Any) -> DecodeError:
    return DecodeError(f"{path}: expected {expected}, got {_kind(value)}", field=path)


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean"}
    return names.get(type(value), "this number")
