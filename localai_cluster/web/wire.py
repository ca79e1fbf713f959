"""Requests and responses of raw ASGI routes: bodies, headers, slow clients, inference's error envelope."""

import asyncio
import json
import math
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, NoReturn, Self, TypeVar

import msgspec
import orjson
from django.utils.functional import Promise
from msgspec import UNSET, UnsetType

from localai_cluster.kit import clock, conf, untrusted
from localai_cluster.kit.errors import ClusterError, InvalidInput, MethodNotAllowed

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Header = tuple[bytes, bytes]

MAX_BODY = 4 * 1024 * 1024
"""Default maximum bytes of a request body. The API document states it."""

Int64 = Annotated[int, msgspec.Meta(extra_json_schema={"format": "int64"})]
T = TypeVar("T", bound=msgspec.Struct)

_MAX_PROBLEM_LENGTH = 200


class Disconnected(Exception):
    """The client has closed the connection."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A complete HTTP response; `kind` is its content type."""

    body: bytes
    status: int = 200
    headers: tuple[Header, ...] = ()
    kind: bytes = b"application/json"


class ResponseBody(msgspec.Struct):
    """Base of JSON objects in responses of raw routes; optional fields have the type `UnsetType`."""

    has_other_fields: ClassVar[bool] = False
    """True if a response may have fields that the class does not name."""


class LoadProgress(ResponseBody):
    """The progress of a load that goes on after the wait for it has ended."""

    model: str | UnsetType = UNSET
    state: (
        Annotated[
            str,
            msgspec.Meta(
                extra_json_schema={"enum": ["pending", "installing", "staging", "loading", "failed"]}
            ),
        ]
        | UnsetType
    ) = UNSET
    progress: float | UnsetType = UNSET
    bytes_sent: Int64 | UnsetType = UNSET
    total_bytes: Int64 | UnsetType = UNSET
    file_index: int | UnsetType = UNSET
    total_files: int | UnsetType = UNSET
    node: str | UnsetType = UNSET
    eta_seconds: int | UnsetType = UNSET


class ErrorDetail(ResponseBody):
    """An error: a sentence for people, its type, the field it is about, and its code."""

    message: str
    type: str
    param: Annotated[str | None, msgspec.Meta(description="The field it is about.")]
    code: str


class ErrorBody(ResponseBody):
    """The body of a refusal; `loading`: the progress of a load that the request has waited for."""

    error: ErrorDetail
    loading: LoadProgress | UnsetType = UNSET


def _plain_text(value: Any) -> str:
    """Return a library's text, such as Django's lazy and safe ones, as plain `str`, as msgspec requires."""
    if isinstance(value, Promise):
        value = str(value)
    if isinstance(value, str):
        return str.__str__(value)
    raise NotImplementedError(f"{type(value).__name__} is not JSON")


encode = msgspec.json.Encoder(enc_hook=_plain_text).encode
"""Return the value as JSON."""


def json_answer(body: ResponseBody, status: int = 200, headers: Iterable[Header] = ()) -> Answer:
    """Return a response with this object as JSON."""
    return Answer(encode(body), status, tuple(headers))


def client_of(scope: Scope) -> str:
    """Return the address of the client's connection, "" if the socket has none."""
    return str((scope.get("client") or [""])[0])


async def _read_body(receive: Receive, limit: int, too_large: ClusterError) -> bytes:
    """Return the body of a request.

    Raise `too_large` above `limit` bytes, Disconnected if the client disconnects before the end.
    """
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Disconnected
        part: bytes = message.get("body", b"")
        size += len(part)
        if size > limit:
            raise too_large
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


async def wait_until_disconnected(receive: Receive) -> None:
    """Wait until the client disconnects."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def send_answer(send: Send, answer: Answer, *, more: bool = False) -> None:
    """Send a response. With `more` the caller sends the end of the body."""
    length = (b"content-length", str(len(answer.body)).encode())
    headers = [(b"content-type", answer.kind), length, *answer.headers]
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    await send({"type": "http.response.body", "body": answer.body, "more_body": more})


MALFORMED_MESSAGE = "invalid request body"


class CancelScope:
    """A context manager whose block `cancel` ends with an error.

    `cancel` cancels the block's task, and the block raises the error instead of CancelledError.
    """

    _error: Exception | None = None
    _has_ended = False

    def __enter__(self) -> Self:
        task = asyncio.current_task()
        assert task is not None
        self._task, self._cancelling = task, task.cancelling()
        return self

    def cancel(self, error: Exception) -> None:
        """End the block with this error. Do nothing if it has already ended."""
        if self._error is None and not self._has_ended:
            self._error = error
            self._task.cancel()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._has_ended = True
        if self._error is not None:
            # A cancellation by other code takes precedence.
            is_ours = self._task.uncancel() <= self._cancelling
            if is_ours and kind is asyncio.CancelledError:
                raise self._error from None


class Outgoing(CancelScope):
    """Sends one response to a client.

    Raise Disconnected if the client reads nothing for the silence limit.
    """

    def __init__(self, send: Send) -> None:
        self._send = send

    def __enter__(self) -> Self:
        stall = conf.cluster().stream_stall
        self._limit = clock.SilenceTimer(stall, math.inf, lambda: self.cancel(Disconnected()))
        return super().__enter__()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._limit.close()
        super().__exit__(kind)

    async def head(self, headers: list[Header]) -> None:
        """Send the status 200 and the headers."""
        await self._send_message({"type": "http.response.start", "status": 200, "headers": headers})

    async def body(self, events: bytes) -> None:
        """Send a piece of the body."""
        await self._send_message({"type": "http.response.body", "body": events, "more_body": True})

    async def end(self, last: bytes) -> None:
        """Send the last piece of the body and end the response."""
        await self._send_message({"type": "http.response.body", "body": last, "more_body": False})

    async def _send_message(self, message: Message) -> None:
        self._limit.begin()
        await self._send(message)
        self._limit.pause()


def is_json(content_type: str) -> bool:
    """Return True if the Content-Type header declares JSON or is missing."""
    return content_type.split(";", 1)[0].strip().lower() in ("", "application/json")


def parse_json(raw: bytes) -> Any:
    """Return the JSON value of a body; an empty body counts as `{}` (§0.1). Raise InvalidInput."""
    if not raw.strip():
        return {}
    if problem := untrusted.json_problem(raw):
        raise InvalidInput(f"the request body is {problem}")
    try:
        return json.loads(raw.decode("utf-8"), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise InvalidInput(MALFORMED_MESSAGE) from error


def _refuse_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


async def read_json_object(receive: Receive, content_type: str, limit: int) -> dict[str, Any]:
    """Read the body as a JSON object; an empty body counts as `{}`.

    Raise InvalidInput, with status 413 above `limit` bytes.
    """
    too_large = InvalidInput(f"the request body is over {limit // 1024} kB")
    too_large.status = 413
    raw = await _read_body(receive, limit, too_large)
    value = parse_json(raw) if not raw or is_json(content_type) else None
    if not isinstance(value, dict):
        raise InvalidInput(MALFORMED_MESSAGE)
    return value


def parse_json_object(body: bytes) -> Mapping[str, Any]:
    """Return a body as a JSON object; an empty body counts as `{}` (§0.1). Raise InvalidInput."""
    if problem := untrusted.json_problem(body):
        raise InvalidInput(f"the request body is {problem}")
    try:
        value = orjson.loads(body) if body.strip() else {}
    except orjson.JSONDecodeError as error:
        raise InvalidInput(f"the request body is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise InvalidInput("the request body is not a JSON object")
    return value


def parse_struct(fields: Mapping[str, Any], kind: type[T], *, texts: bool = False) -> T:
    """Convert the fields of a body to `kind`. An absent field is null, unknown fields are ignored.

    With `texts`, numbers and booleans may be texts, because a form has only texts. Raise InvalidInput for the
    first wrong field, in the order of the fields of `kind`.
    """
    try:
        values = {name: fields.get(name) for name in kind.__struct_encode_fields__}
        return msgspec.convert(values, kind, strict=not texts)
    except msgspec.ValidationError as error:
        # The problem may quote the request.
        problem, _, path = str(error).removesuffix("`").rpartition(" - at `$.")
        raise field_error(path, problem[:_MAX_PROBLEM_LENGTH], _problem_code(problem)) from error


def parse_part(fields: Mapping[str, Any], kind: type[T], path: str) -> T:
    """Convert a part of a body to `kind`. An InvalidInput has the path of the wrong field in the body."""
    try:
        return parse_struct(fields, kind)
    except InvalidInput as error:
        name, _, problem = error.message.partition(": ")
        raise field_error(f"{path}.{name}", problem, error.code) from error


def field_error(path: str, problem: str, code: str = "invalid_value") -> InvalidInput:
    """Return the error about the part of a body at `path`, such as `messages[0].content`.

    The error's field is the first name of the path. `code` is OpenAI's code for the problem.
    """
    error = InvalidInput(f"{path}: {problem}", field=path.partition("[")[0].partition(".")[0])
    error.code = code
    return error


_CODE_BY_PROBLEM_PATTERN = (
    (re.compile("got `null`|missing required field"), "missing_required_parameter"),
    (re.compile("`int` >"), "integer_below_min_value"),
    (re.compile("`int` <"), "integer_above_max_value"),
    (re.compile("`float` >"), "decimal_below_min_value"),
    (re.compile("`float` <"), "decimal_above_max_value"),
    (re.compile("`array` of length >"), "empty_array"),
    (re.compile("`array` of length <"), "array_above_max_length"),
    (re.compile("`str` of length <"), "string_above_max_length"),
    (re.compile("^Expected .*, got "), "invalid_type"),
)
"""OpenAI's error codes by patterns of msgspec's messages; the default is `invalid_value`."""


def _problem_code(problem: str) -> str:
    return next(
        (code for pattern, code in _CODE_BY_PROBLEM_PATTERN if pattern.search(problem)), "invalid_value"
    )


def message_with_field(error: ClusterError) -> str:
    """Return the error's message for an envelope that has no key for the wrong field.

    The name of the field precedes the message, unless the message already contains it.
    """
    named = not error.field or error.field in error.message
    return error.message if named else f"{error.field}: {error.message}"


def error_body(error: ClusterError) -> ErrorBody:
    """Return the error envelope in OpenAI's form (§0.4)."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    loading = error.data.get("loading")
    return ErrorBody(
        error=ErrorDetail(
            message=error.message,
            type=error.code if loading else kind,
            param=error.field,
            code="invalid_value" if error.field and error.code == InvalidInput.code else error.code,
        ),
        loading=msgspec.convert(loading, LoadProgress) if loading else UNSET,
    )


def error_answer(error: ClusterError) -> Answer:
    """Return an error response in OpenAI's form."""
    return json_answer(error_body(error), error.status, error_headers(error))


def error_headers(error: ClusterError) -> list[Header]:
    return [(name.lower().encode(), value.encode()) for name, value in refusal_headers(error).items()]


def refusal_headers(error: ClusterError) -> dict[str, str]:
    """Return the headers of an error response: a challenge for 401, the methods for 405, or Retry-After."""
    if error.status == 401:
        return {"WWW-Authenticate": "Bearer"}
    if isinstance(error, MethodNotAllowed):
        return {"Allow": error.allowed}
    if (seconds := getattr(error, "retry_after", None)) is not None:
        return {"Retry-After": str(max(math.ceil(seconds), 1))}
    return {}
