"""A plain HTTP/1.1 client for load: keep-alive connections; only status and body are parsed."""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from localai_cluster.kit import clock


@dataclass(frozen=True)
class Answer:
    """One answer: status (0 = none within the limit), body, and duration in seconds."""

    status: int
    body: bytes
    seconds: float

    def json(self) -> Any:
        """Return the parsed body."""
        return json.loads(self.body)


class Connection:
    """One keep-alive connection, opened at the first request and reopened after a failure."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def request(
        self,
        method: str,
        path: str,
        headers: Mapping[str, str],
        body: Any = None,
        *,
        limit: float = 10.0,
    ) -> Answer:
        """Send one request and read its answer; never raise for a failed connection."""
        payload = b"" if body is None else json.dumps(body).encode()
        lines = {"Host": f"{self._host}:{self._port}", "Content-Length": str(len(payload)), **headers}
        if payload:
            lines["Content-Type"] = "application/json"
        head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        began = clock.monotonic()
        try:
            async with asyncio.timeout(limit):
                status, answer = await self._exchange(
                    f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + payload
                )
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            self.close()
            status, answer = 0, b""
        return Answer(status, answer, clock.monotonic() - began)

    def close(self) -> None:
        """Close the connection."""
        if self._streams is not None:
            self._streams[1].close()
        self._streams = None

    async def _exchange(self, request: bytes) -> tuple[int, bytes]:
        if self._streams is None:
            self._streams = await asyncio.open_connection(self._host, self._port)
        reader, writer = self._streams
        writer.write(request)
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        size = int(head.partition(b"content-length:")[2].partition(b"\r\n")[0] or 0)
        return int(head[9:12]), await reader.readexactly(size)


def percentile(seconds: list[float], share: float) -> float:
    """Return the milliseconds that the fraction `share` of the values does not exceed."""
    ordered = sorted(seconds)
    return 1000 * ordered[min(int(len(ordered) * share), len(ordered) - 1)]
