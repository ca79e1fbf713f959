"""Forms with files on raw routes: the body is spooled to a file while it arrives; Django parses it.

All files here are unlinked, so none remains on the disk when the process ends for any reason.
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

from localai_cluster.kit.errors import ClusterError, InvalidInput, Unavailable
from localai_cluster.web import wire
from localai_cluster.web.wire import Receive

FORM_TYPE = "multipart/form-data"
WRITE_SIZE = 1024 * 1024
"""Bytes of one write to the file."""


@dataclass(frozen=True)
class Upload:
    """A file of a form. `name` is the client's file name."""

    name: str
    size: int
    file: IO[bytes]


@dataclass(frozen=True)
class Form:
    """The fields of a form and its files, each by name; a field may have several values."""

    fields: Mapping[str, list[str]] = field(default_factory=dict)
    files: Mapping[str, Upload] = field(default_factory=dict)

    def close(self) -> None:
        """Close the files."""
        for upload in self.files.values():
            upload.file.close()


async def read_form(receive: Receive, kind: str, limit: int, too_large: ClusterError) -> Form:
    """Return the form in a request's body; `kind` is its content type.

    Raises `too_large` above `limit` bytes, InvalidInput if the body is not such a form, Unavailable when the
    disk is full, Disconnected when the client disconnects before the end.
    """
    if kind.partition(";")[0].strip().lower() != FORM_TYPE:
        raise InvalidInput(f"the body must be {FORM_TYPE}")
    try:
        with tempfile.TemporaryFile() as body:
            size = await _spool(receive, body, limit, too_large)
            return await asyncio.to_thread(_parse, body, kind, size)
    except OSError as error:
        raise Unavailable(f"the form cannot be kept: {error.strerror}") from error


async def _spool(receive: Receive, body: IO[bytes], limit: int, too_large: ClusterError) -> int:
    buffer, size, has_more = bytearray(), 0, True
    while has_more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise wire.Disconnected
        part: bytes = message.get("body", b"")
        size += len(part)
        if size > limit:
            raise too_large
        buffer += part
        has_more = message.get("more_body", False)
        if len(buffer) >= WRITE_SIZE or not has_more:
            await asyncio.to_thread(body.write, bytes(buffer))
            buffer.clear()
    return size


class _Unnamed(FileUploadHandler):
    """Keeps files without a name on disk."""

    def new_file(self, *arguments: Any, **named: Any) -> None:
        """Open an unlinked file."""
        super().new_file(*arguments, **named)
        self.file: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 the form closes it

    def receive_data_chunk(self, raw_data: bytes, start: int) -> None:
        """Write a chunk to the file."""
        self.file.write(raw_data)

    def file_complete(self, file_size: int) -> "UploadedFile[Any]":
        """Return the complete file."""
        self.file.seek(0)
        return UploadedFile(self.file, name=self.file_name, size=file_size)


def _parse(body: IO[bytes], kind: str, size: int) -> Form:
    body.seek(0)
    # Latin-1 decodes any bytes; `_decode` then refuses invalid UTF-8, which Django would replace.
    meta = {"CONTENT_TYPE": kind, "CONTENT_LENGTH": str(size)}
    try:
        fields, files = MultiPartParser(meta, cast(Any, body), [_Unnamed()], "latin-1").parse()
    except (MultiPartParserError, SuspiciousOperation, ValueError) as error:
        raise InvalidInput(f"the body is not a form that can be read: {error}") from error
    form = Form(files={_decode(name, "name of a file"): _upload(cast(Any, files[name])) for name in files})
    try:
        texts = {
            _decode(name, "name of a field"): [_decode(value, name) for value in fields.getlist(name)]
            for name in fields
        }
    except InvalidInput:
        form.close()
        raise
    return Form(texts, form.files)


def _upload(uploaded: "UploadedFile[Any]") -> Upload:
    assert uploaded.file is not None
    return Upload(uploaded.name or "", uploaded.size or 0, uploaded.file)


def _decode(raw: str, field: str) -> str:
    try:
        return raw.encode("latin-1").decode()
    except UnicodeError:
        shown = field.encode("ascii", "replace").decode()[:100]
        raise InvalidInput(f"{shown}: this is not UTF-8", field=shown) from None
