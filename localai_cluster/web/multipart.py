"""Forms with files, as raw routes read them: the body goes to a file while it arrives, Django takes it apart.

All files here have no name on disk, so nothing is left of them whatever ends the process.
"""

import asyncio
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import IO, Any, cast

from django.core.exceptions import SuspiciousOperation
from django.core.files.uploadedfile import UploadedFile
from django.core.files.uploadhandler import FileUploadHandler
from django.http.multipartparser import MultiPartParser, MultiPartParserError

from localai_cluster.errors import ClusterError, InvalidInput, Unavailable
from localai_cluster.web import wire
from localai_cluster.web.wire import Receive

KIND = "multipart/form-data"
PIECE = 1024 * 1024
"""Bytes that are written to the file at a time."""


@dataclass(frozen=True)
class Upload:
    """One file of a form. `name` is what the client calls it."""

    name: str
    size: int
    file: IO[bytes]


@dataclass(frozen=True)
class Form:
    """The fields of a form and its files, each by name; a field may have several values."""

    fields: Mapping[str, list[str]] = field(default_factory=dict)
    files: Mapping[str, Upload] = field(default_factory=dict)

    def close(self) -> None:
        """Forget the files."""
        for upload in self.files.values():
            upload.file.close()


async def read(receive: Receive, kind: str, limit: int, too_large: ClusterError) -> Form:
    """The form in a request's body; `kind` is its content type.

    Raises `too_large` above `limit` bytes, InvalidInput for anything that is no such form, Unavailable when
    the disk is full, Disconnected when the client left before its end.
    """
    if kind.partition(";")[0].strip().lower() != KIND:
        raise InvalidInput(f"the body must be {KIND}")
    try:
        with tempfile.TemporaryFile() as body:
            size = await _spool(receive, body, limit, too_large)
            return await asyncio.to_thread(_parsed, body, kind, size)
    except OSError as error:
        raise Unavailable(f"the form cannot be kept: {error.strerror}") from error


async def _spool(receive: Receive, body: IO[bytes], limit: int, too_large: ClusterError) -> int:
    waiting, size, more = bytearray(), 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise wire.Disconnected
        part: bytes = message.get("body", b"")
        size += len(part)
        if size > limit:
            raise too_large
        waiting += part
        more = message.get("more_body", False)
        if len(waiting) >= PIECE or not more:
            await asyncio.to_thread(body.write, bytes(waiting))
            waiting.clear()
    return size


class _Unnamed(FileUploadHandler):
    """Keeps files without a name on disk."""

    def new_file(self, *arguments: Any, **named: Any) -> None:
        """Begin one."""
        super().new_file(*arguments, **named)
        self.file: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 the form closes it

    def receive_data_chunk(self, raw_data: bytes, start: int) -> None:
        """A piece of it."""
        self.file.write(raw_data)

    def file_complete(self, file_size: int) -> "UploadedFile[Any]":
        """All of it."""
        self.file.seek(0)
        return UploadedFile(self.file, name=self.file_name, size=file_size)


def _parsed(body: IO[bytes], kind: str, size: int) -> Form:
    body.seek(0)
    # Latin-1 reads anything; `_text` says what is not UTF-8, which Django would replace.
    about = {"CONTENT_TYPE": kind, "CONTENT_LENGTH": str(size)}
    try:
        fields, files = MultiPartParser(about, cast(Any, body), [_Unnamed()], "latin-1").parse()
    except (MultiPartParserError, SuspiciousOperation, ValueError) as error:
        raise InvalidInput(f"the body is not a form that can be read: {error}") from error
    made = Form(files={_text(name, "name of a file"): _upload(cast(Any, files[name])) for name in files})
    try:
        texts = {
            _text(name, "name of a field"): [_text(value, name) for value in fields.getlist(name)]
            for name in fields
        }
    except InvalidInput:
        made.close()
        raise
    return Form(texts, made.files)


def _upload(told: "UploadedFile[Any]") -> Upload:
    assert told.file is not None
    return Upload(told.name or "", told.size or 0, told.file)


def _text(raw: str, field: str) -> str:
    try:
        return raw.encode("latin-1").decode()
    except UnicodeError:
        shown = field.encode("ascii", "replace").decode()[:100]
        raise InvalidInput(f"{shown}: this is not UTF-8", field=shown) from None
