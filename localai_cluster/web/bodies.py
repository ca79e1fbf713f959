"""Request bodies: read in two steps on raw routes, spooled as forms, bounded in front of Django.

Of an unauthenticated caller's body only `FIRST_PART_BYTES` are read. A `Budget` limits the memory of all
bodies of a process while they arrive; the first part of a body is always admitted, so that callers without a
key cannot exhaust the budget of others.

A form with files is spooled to a file while it arrives, and Django parses it. All files here are unlinked, so
none remains on the disk when the process ends for any reason.
"""

import asyncio
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import IO, Any, cast

from django.core.exceptions import SuspiciousOperation
from django.core.files.uploadedfile import UploadedFile
from django.core.files.uploadhandler import FileUploadHandler
from django.http.multipartparser import MultiPartParser, MultiPartParserError

from localai_cluster.kit.errors import ClusterError, InvalidInput, Unavailable
from localai_cluster.web import wire

FIRST_PART_BYTES = 16 * 1024
"""Maximum bytes of a body that are read before its sender is authenticated."""
MAX_HELD_BYTES = 256 * 1024 * 1024
"""Maximum bytes of all bodies that one process holds in memory while they arrive."""
_DISCARD_SECONDS = 5.0
"""Seconds for which the rest of a body is read and dropped after an early response."""
_MAX_DISCARDED_BYTES = 16 * 1024 * 1024
"""Maximum bytes of the rest of a body that are read and dropped."""
SPOOL_WRITE_BYTES = 1024 * 1024
"""Minimum bytes of a write of `Body.spool`, except for the last write."""


def too_many_bodies() -> Unavailable:
    """Return the error for a body that exceeds the budget of the process."""
    return Unavailable("too many request bodies are arriving at once; try again", retry_after=1)


@dataclass(eq=False)
class Budget:
    """The bytes of bodies that a process holds, and their limit. For one event loop."""

    limit: int
    held: int = 0

    @property
    def is_half_used(self) -> bool:
        """True if the bodies of callers that are not authenticated must wait for their authentication."""
        return self.held * 2 >= self.limit

    @property
    def is_exceeded(self) -> bool:
        """True if more bytes are held than the limit."""
        return self.held > self.limit


shared_budget = Budget(MAX_HELD_BYTES)
"""The budget for bodies of raw routes in this process."""


class Body:
    """The body of one request. Call `release` after its bytes were passed on or dropped.

    Reading raises the error of `too_large` above `limit` bytes, Unavailable if the budget of the process is
    exceeded, and wire.Disconnected if the client disconnects before the end.
    """

    __slots__ = ("_limit", "_parts", "_receive", "_scope", "_size", "_too_large", "is_complete")

    def __init__(
        self, scope: wire.Scope, receive: wire.Receive, limit: int, too_large: Callable[[int], ClusterError]
    ) -> None:
        self._scope = scope
        self._receive = receive
        self._limit = limit
        self._too_large = too_large
        self._parts: list[bytes] = []
        self._size = 0
        self.is_complete = False

    async def _receive_part(self) -> bytes:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self.is_complete = True
            raise wire.Disconnected
        self.is_complete = not message.get("more_body", False)
        part: bytes = message.get("body", b"")
        return part

    def declared_size(self) -> int | None:
        """The size that the headers declare: 0 for no body, None if it is unknown."""
        size: int | None = 0
        for name, value in self._scope["headers"]:
            if name == b"transfer-encoding":
                return None
            if name == b"content-length":
                size = int(value) if value.isdigit() and len(value) < 20 else None
        return size

    async def read_first_part(self) -> None:
        """Read up to `FIRST_PART_BYTES` bytes. Read nothing if the declared size is larger."""
        declared = self.declared_size()
        if declared is not None and declared > FIRST_PART_BYTES:
            return
        while not self.is_complete and self._size < FIRST_PART_BYTES:
            await self._read_part()

    async def read_all(self) -> bytes:
        """Read the rest of the body and return the whole body."""
        while not self.is_complete:
            await self._read_part()
        return b"".join(self._parts)

    async def _read_part(self) -> None:
        part = await self._receive_part()
        self._size += len(part)
        shared_budget.held += len(part)
        if self._size > self._limit:
            raise self._too_large(self._limit)
        if self._size > FIRST_PART_BYTES and shared_budget.is_exceeded:
            raise too_many_bodies()
        self._parts.append(part)

    def release(self) -> None:
        """Give the bytes of this body back to the budget."""
        shared_budget.held -= self._size
        self._parts, self._size = [], 0

    async def spool(self, file: IO[bytes]) -> int:
        """Write the body to a file; return its size. It does not count for the budget."""
        buffer, size = bytearray(), 0
        while not self.is_complete:
            part = await self._receive_part()
            size += len(part)
            if size > self._limit:
                raise self._too_large(self._limit)
            buffer += part
            if len(buffer) >= SPOOL_WRITE_BYTES or self.is_complete:
                await asyncio.to_thread(file.write, bytes(buffer))
                buffer.clear()
        return size

    async def answer(self, send: wire.Send, answer: wire.Answer) -> None:
        """Send a response. Close the connection if a long part of the body is unread.

        Many clients read the response only after they have sent the complete body, so the rest of the body is
        read and dropped for a few seconds. A client over its limit of failures (429) is disconnected at once.
        """
        declared = 0 if self.is_complete else self.declared_size()
        if declared is not None and declared <= FIRST_PART_BYTES:
            await wire.send_answer(send, answer)
            return
        headers = (*answer.headers, (b"connection", b"close"))
        closing_answer = wire.Answer(answer.body, answer.status, headers, answer.kind)
        await wire.send_answer(send, closing_answer, more=answer.status != 429)
        if answer.status != 429:
            with suppress(TimeoutError, wire.Disconnected):
                async with asyncio.timeout(_DISCARD_SECONDS):
                    await self._discard()
            await send({"type": "http.response.body", "body": b""})

    async def _discard(self) -> None:
        discarded = 0
        while not self.is_complete and discarded < _MAX_DISCARDED_BYTES:
            discarded += len(await self._receive_part())


MAX_DJANGO_BODY_BYTES = 1024 * 1024
"""Maximum bytes of a body on most of Django's routes.

A body far above the limit of its route is read and dropped.
"""
_BYTES_ABOVE_LIMIT = 64 * 1024
"""Bytes above a route's limit that are passed on, so that the route itself refuses the body."""
ADMITTED_BYTES = 64 * 1024
"""Size up to which a body is always admitted, because Django reads it before it knows the caller."""
MAX_HELD_BYTES_BY_DJANGO = 64 * 1024 * 1024
"""Maximum bytes of all bodies above `ADMITTED_BYTES` that one process holds for Django."""


class BoundedBody:
    """ASGI middleware that limits the size of each body, and of all larger bodies together.

    `larger` has the paths that accept more than `MAX_DJANGO_BODY_BYTES`, with their limits. Raise Unavailable
    if the larger bodies together exceed their limit.
    """

    def __init__(self, application: Any, larger: Mapping[str, int]) -> None:
        self._application, self._larger = application, larger
        self._budget = Budget(MAX_HELD_BYTES_BY_DJANGO)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Process the request with a bounded body."""
        passed, counted, refused = 0, 0, False
        most = self._larger.get(scope.get("path", ""), MAX_DJANGO_BODY_BYTES) + _BYTES_ABOVE_LIMIT

        async def bounded() -> Any:
            nonlocal passed, counted, refused
            message = await receive()
            while passed > most and message["type"] == "http.request" and message.get("more_body"):
                message = await receive()
            if message["type"] == "http.request" and passed > most:
                return {**message, "body": b""}
            passed += len(message.get("body", b""))
            if passed > ADMITTED_BYTES:
                self._budget.held += passed - counted
                counted = passed
                refused = self._budget.is_exceeded
                if refused:
                    return {"type": "http.disconnect"}  # Django then closes the received part of the body
            return message

        try:
            await self._application(scope, bounded, send)
            if refused:
                raise too_many_bodies()
        finally:
            self._budget.held -= counted


class Utf8Only:
    """ASGI middleware that removes the character set from the content type.

    Django decodes query and form with the client's character set, and a name such as `hex` makes Django fail
    before any of our code runs. We accept only UTF-8.
    """

    def __init__(self, application: Any) -> None:
        self._application = application

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Process the request without the character set of its content type."""
        headers = [(name, _without_charset(name, value)) for name, value in scope["headers"]]
        await self._application({**scope, "headers": headers}, receive, send)


def _without_charset(name: bytes, value: bytes) -> bytes:
    if name.lower() != b"content-type":
        return value
    kind, *parameters = value.split(b";")
    other_parameters = [part for part in parameters if not part.strip().lower().startswith(b"charset")]
    return b";".join([kind, *other_parameters])


FORM_TYPE = "multipart/form-data"


@dataclass(frozen=True)
class Upload:
    """An uploaded file of a form; `name` is the file name that the client sent."""

    name: str
    size: int
    file: IO[bytes]


@dataclass(frozen=True)
class Form:
    """The fields and files of a form by name. A field may have several values."""

    fields: Mapping[str, list[str]] = field(default_factory=dict)
    files: Mapping[str, Upload] = field(default_factory=dict)

    def close(self) -> None:
        """Close the form's files."""
        for upload in self.files.values():
            upload.file.close()


async def read_form(body: Body, kind: str) -> Form:
    """Return the form in a request's body; `kind` is its content type.

    Raise InvalidInput if the body is not a form, Unavailable if the disk is full.
    """
    if kind.partition(";")[0].strip().lower() != FORM_TYPE:
        raise InvalidInput(f"the body must be {FORM_TYPE}")
    try:
        with tempfile.TemporaryFile() as file:
            size = await body.spool(file)
            return await asyncio.to_thread(_parse_form, file, kind, size)
    except OSError as error:
        raise Unavailable(f"the form cannot be kept: {error.strerror}") from error


class _UnnamedFileHandler(FileUploadHandler):
    """Django upload handler that stores a file on disk without a name."""

    def new_file(self, *arguments: Any, **named: Any) -> None:
        """Open an unlinked file for the next upload."""
        super().new_file(*arguments, **named)
        self.file: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 the form closes it

    def receive_data_chunk(self, raw_data: bytes, start: int) -> None:
        """Write a chunk to the file."""
        self.file.write(raw_data)

    def file_complete(self, file_size: int) -> "UploadedFile[Any]":
        """Return the uploaded file after its last chunk."""
        self.file.seek(0)
        return UploadedFile(self.file, name=self.file_name, size=file_size)


def _parse_form(body: IO[bytes], kind: str, size: int) -> Form:
    body.seek(0)
    # Latin-1 decodes any bytes; `_decode_utf8` then refuses invalid UTF-8, which Django would replace.
    meta = {"CONTENT_TYPE": kind, "CONTENT_LENGTH": str(size)}
    try:
        fields, files = MultiPartParser(meta, cast(Any, body), [_UnnamedFileHandler()], "latin-1").parse()
    except (MultiPartParserError, SuspiciousOperation, ValueError) as error:
        raise InvalidInput(f"the body is not a form that can be read: {error}") from error
    form = Form(
        files={_decode_utf8(name, "name of a file"): _to_upload(cast(Any, files[name])) for name in files}
    )
    try:
        texts = {
            _decode_utf8(name, "name of a field"): [
                _decode_utf8(value, name) for value in fields.getlist(name)
            ]
            for name in fields
        }
    except InvalidInput:
        form.close()
        raise
    return Form(texts, form.files)


def _to_upload(uploaded: "UploadedFile[Any]") -> Upload:
    assert uploaded.file is not None
    return Upload(uploaded.name or "", uploaded.size or 0, uploaded.file)


def _decode_utf8(raw: str, field: str) -> str:
    try:
        return raw.encode("latin-1").decode()
    except UnicodeError:
        shown = field.encode("ascii", "replace").decode()[:100]
        raise InvalidInput(f"{shown}: this is not UTF-8", field=shown) from None
