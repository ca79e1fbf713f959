"""The load generator: raw keep-alive HTTP clients in a separate process.

`python -m tests.benchmarks.load '<json>'` with `host`, `port`, `key`, `model`, `clients`, `seconds` and, for
chats instead of embeddings, `said`, prints one JSON line: requests, errors, seconds, p50 and p99 of the
latencies in milliseconds.
"""

import asyncio
import json
import sys
from collections import Counter
from dataclasses import asdict, dataclass
from typing import cast

import uvloop

from localai_cluster.kit import clock


@dataclass(frozen=True)
class Figures:
    """One measurement; times in milliseconds."""

    clients: int
    requests: int
    errors: int
    seconds: float
    p50: float
    p99: float

    @property
    def per_second(self) -> float:
        """Requests per second."""
        return self.requests / self.seconds


def request_bytes(host: str, key: str, model: str, said: str) -> bytes:
    """Return the bytes of one request: for embeddings, or for a chat with the message `said`."""
    path = "/v1/embeddings"
    asked: dict[str, object] = {"model": model, "input": "a cat"}
    if said:
        path = "/v1/chat/completions"
        asked = {"model": model, "messages": [{"role": "user", "content": said}]}
    body = json.dumps(asked).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {key}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


class Client(asyncio.Protocol):
    """One connection that sends the same request again as soon as its answer is complete."""

    def __init__(self, request: bytes, until: float, times: list[float], statuses: Counter[int]) -> None:
        self.ended = asyncio.get_running_loop().create_future()
        self._request, self._until, self._times, self._statuses = request, until, times, statuses
        self._buffer = bytearray()
        self._expected = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the first request."""
        self._transport = cast(asyncio.WriteTransport, transport)
        self._send()

    def _send(self) -> None:
        self._started = clock.monotonic()
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """Collect an answer; when it is complete, count it and send the next request."""
        self._buffer += data
        if not self._expected and (head := self._buffer.find(b"\r\n\r\n")) >= 0:
            fields = bytes(self._buffer[:head]).lower()
            length = fields.partition(b"content-length:")[2].partition(b"\r\n")[0]
            self._expected = head + 4 + int(length)
        if self._expected and len(self._buffer) >= self._expected:
            self._answered(int(self._buffer[9:12]))

    def _answered(self, status: int) -> None:
        now = clock.monotonic()
        self._times.append(now - self._started)
        self._statuses[status] += 1
        self._buffer.clear()
        self._expected = 0
        if now < self._until:
            self._send()
        else:
            self._until = 0.0
            self._transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        """Count a connection that breaks before the end as an error."""
        if self._until:
            self._statuses[0] += 1
        self.ended.set_result(None)


async def measure(
    host: str, port: int, key: str, model: str, clients: int, seconds: float, said: str = ""
) -> Figures:
    """Return the figures of `clients` clients after so many seconds."""
    request = request_bytes(host, key, model, said)
    times: list[float] = []
    statuses: Counter[int] = Counter()
    begin = clock.monotonic()
    loop = asyncio.get_running_loop()
    connections = [
        await loop.create_connection(lambda: Client(request, begin + seconds, times, statuses), host, port)
        for _ in range(clients)
    ]
    await asyncio.gather(*(client.ended for _, client in connections))
    took = clock.monotonic() - begin
    times.sort()
    p50, p99 = 1000 * times[len(times) // 2], 1000 * times[len(times) * 99 // 100]
    return Figures(clients, len(times), statuses.total() - statuses[200], took, p50, p99)


if __name__ == "__main__":
    print(json.dumps(asdict(uvloop.run(measure(**json.loads(sys.argv[1]))))))
