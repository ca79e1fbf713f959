"""A scripted worker file server and a scripted engine for sound and images, with a common disk."""

# mypy: disallow-subclassing-any=false

import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

import grpc

from localai_cluster.rpc.messages import (
    GenerateImageRequest,
    Reply,
    Result,
    TranscriptRequest,
    TranscriptResult,
    TranscriptSegment,
    TranscriptStreamResponse,
    TranscriptWord,
    TTSRequest,
)
from tests.support.backends import TOKEN
from tests.support.scripted import Refusal, Scripted

SECOND = 1_000_000_000
STAGING = "/worker/staging/"
WAV = b"RIFF\x24\x00\x00\x00WAVEfmt " + bytes(400)
TEXT = TranscriptResult(
    text="Hello there. Bye.",
    language="en",
    duration=2.5,
    segments=[
        TranscriptSegment(
            id=0,
            start=0,
            end=SECOND + SECOND // 2,
            text=" Hello there.",
            tokens=[1, 2],
            words=[TranscriptWord(start=0, end=SECOND, text="Hello")],
        ),
        TranscriptSegment(id=1, start=3661 * SECOND, end=3662 * SECOND, text=" Bye."),
    ],
)


class Disk:
    """A worker's HTTP server according to worker.md §12.3 to §12.5, as far as one request needs it."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        """Content by path on the worker."""
        self.seen: list[str] = []
        """Method and key of each request."""
        self.status = 0
        """Status of every answer, if not 0."""
        self.address = ""
        self._names = itertools.count(1)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator["Disk"]:
        """Listen on a free port."""
        server = await asyncio.start_server(self._connection, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield self
        finally:
            server.close()

    async def emptied(self) -> bool:
        """Return True if no file has content; a server that refuses uploads cannot be emptied."""
        return bool(self.status) or not any(self.files.values())

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                headers = head.decode().lower().split("\r\n")
                length = next((one for one in headers if one.startswith("content-length:")), ":0")
                body = await reader.readexactly(int(length.partition(":")[2]))
                allowed = f"authorization: bearer {TOKEN}".lower() in headers
                status, answer = self._answer(head.decode().split(" ")[:2], body) if allowed else (401, b"")
                writer.write(
                    f"HTTP/1.1 {status} X\r\nContent-Length: {len(answer)}\r\n\r\n".encode() + answer
                )
                await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            writer.close()

    def _answer(self, line: list[str], body: bytes) -> tuple[int, bytes]:
        method, key = line[0], unquote(line[1].removeprefix("/v1/files/"))
        self.seen.append(f"{method} {key}")
        if self.status:
            return self.status, b"refused by the script"
        if (method, key) == ("POST", "temp"):
            key = f"localai-output-{next(self._names)}.tmp"
        elif method == "GET":
            found = self.files.get(STAGING + key)
            return (404, b"missing") if found is None else (200, found)
        self.files[STAGING + key] = body
        return 200, json.dumps({"local_path": STAGING + key}).encode()


@dataclass
class Artist(Scripted):
    """An engine that transcribes, speaks and draws on this disk."""

    disk: Disk = field(default_factory=Disk)
    sound: bytes = WAV
    pieces: list[Any] = field(default_factory=list)
    """The stream content: replies, events to wait for, refusals."""
    heard: list[bytes] = field(default_factory=list)

    async def AudioTranscription(self, request: TranscriptRequest, context: Any) -> TranscriptResult:
        self.others.append(request)
        self.heard.append(self.disk.files[request.dst])
        async for _ in self._steps(context):
            pass
        return TEXT

    async def AudioTranscriptionStream(
        self, request: TranscriptRequest, context: Any
    ) -> AsyncIterator[TranscriptStreamResponse]:
        if not self.streams:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "no streams")
        self.others.append(request)
        self.heard.append(self.disk.files[request.dst])
        async for step in self._steps(context):
            yield step

    async def TTS(self, request: TTSRequest, context: Any) -> Result:
        self.others.append(request)
        async for _ in self._steps(context):
            pass
        self.disk.files[request.dst] = self.sound
        return Result(success=bool(self.sound), message="" if self.sound else "no voice")

    async def TTSStream(self, request: TTSRequest, context: Any) -> AsyncIterator[Reply]:
        self.others.append(request)
        async for step in self._steps(context):
            yield step

    async def GenerateImage(self, request: GenerateImageRequest, context: Any) -> Result:
        self.others.append(request)
        self.disk.files[request.dst] = f"{request.positive_prompt} {request.seed}".encode()
        return Result(success=True)

    async def _steps(self, context: Any) -> AsyncIterator[Any]:
        self.open += 1
        try:
            for step in self.pieces:
                if isinstance(step, asyncio.Event):
                    await step.wait()
                elif isinstance(step, Refusal):
                    await context.abort(step.status, step.text)
                else:
                    yield step
        finally:
            self.open -= 1


def form(fields: dict[str, Any], sound: bytes | None = b"sound", name: str = "a.WAV") -> tuple[bytes, str]:
    """Return a form with a file, and its content type; a list is sent as several values."""
    made = b""
    for key, values in fields.items():
        for value in values if isinstance(values, list) else [values]:
            raw = value if isinstance(value, bytes) else str(value).encode()
            made += b'--b\r\nContent-Disposition: form-data; name="%b"\r\n\r\n%b\r\n' % (key.encode(), raw)
    if sound is not None:
        head = f'--b\r\nContent-Disposition: form-data; name="file"; filename="{name}"\r\n'
        made += head.encode() + b"Content-Type: audio/wav\r\n\r\n" + sound + b"\r\n"
    return made + b"--b--\r\n", "multipart/form-data; boundary=b"
