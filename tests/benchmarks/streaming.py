"""The load generator of streams, in a process of its own: many at a time, directly or through a web process.

`python -m tests.benchmarks.streaming '<json of an Order>'` prints one JSON line, the `Streams`.
"""

import asyncio
import json
import sys
import time
from dataclasses import asdict, dataclass, field

import uvloop

from localai_cluster.kit import clock
from localai_cluster.rpc.client import BackendClient
from localai_cluster.rpc.messages import Message, PredictOptions
from tests.benchmarks.raw import percentile

_END = b"data: [DONE]"
_TOKEN = b'"content":" word"'


@dataclass(frozen=True)
class Order:
    """What is to be measured; `direct` is the engine's address, or empty for the web process."""

    port: int
    key: str
    model: str
    clients: int
    seconds: float
    pause: int
    tokens: int
    direct: str = ""

    @property
    def asked(self) -> str:
        """What the engine reads of it."""
        return f"{self.pause} {self.tokens}"

    def begins(self, number: int) -> float:
        """Seconds after which this client begins: spread over the length of a stream, as streams of different
        people are. Without a pause all begin at once.
        """
        return self.pause * self.tokens * number / self.clients / 1000


@dataclass
class Streams:
    """One measurement; times in milliseconds."""

    streams: int
    tokens: int
    errors: int
    seconds: float
    first_p50: float
    first_p99: float
    gap_p99: float
    gap_longest: float
    processor: float
    """Seconds that this generator took of one."""

    @property
    def per_second(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds


@dataclass
class _Seen:
    firsts: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    tokens: int = 0
    errors: int = 0

    async def one(self, pieces: "asyncio.Queue[int]", began: float) -> None:
        """Notes the pieces of one stream; 0 is its good end, -1 a bad one."""
        before = 0.0
        while (count := await pieces.get()) > 0:
            now = clock.monotonic()
            (self.gaps if before else self.firsts).append(now - (before or began))
            before = now
            self.tokens += count
        self.errors += count < 0


class _Http(asyncio.Protocol):
    """One connection: sends a request whenever told to, and counts tokens in what comes."""

    def __init__(self, pieces: "asyncio.Queue[int]") -> None:
        self.pieces = pieces
        self._rest = b""

    def data_received(self, data: bytes) -> None:
        """A piece may be cut anywhere between two events."""
        self._rest += data
        events, _, self._rest = self._rest.rpartition(b"\n\n")
        if found := events.count(_TOKEN):
            self.pieces.put_nowait(found)
        if events.startswith(b"HTTP/1.1 ") and not events.startswith(b"HTTP/1.1 200"):
            self.pieces.put_nowait(-1)
        if _END in events:
            self.pieces.put_nowait(-1 if b'"error"' in events else 0)

    def connection_lost(self, error: Exception | None) -> None:
        """An end that nobody expected, while a stream runs."""
        self.pieces.put_nowait(-1)


def _request(order: Order) -> bytes:
    messages = [{"role": "user", "content": order.asked}]
    body = json.dumps({"model": order.model, "messages": messages, "stream": True}).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: bench\r\nAuthorization: Bearer {order.key}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def _through(order: Order, seen: _Seen, until: float, number: int) -> None:
    pieces: asyncio.Queue[int] = asyncio.Queue()
    request = _request(order)
    transport, _ = await asyncio.get_running_loop().create_connection(
        lambda: _Http(pieces), "127.0.0.1", order.port
    )
    await asyncio.sleep(order.begins(number))
    while (began := clock.monotonic()) < until:
        transport.write(request)
        await seen.one(pieces, began)
    transport.close()


async def _direct(order: Order, seen: _Seen, until: float, number: int, client: BackendClient) -> None:
    options = PredictOptions(Messages=[Message(role="user", content=order.asked)])
    await asyncio.sleep(order.begins(number))
    while (began := clock.monotonic()) < until:
        before = 0.0
        async for _ in client.predict_stream(options):
            now = clock.monotonic()
            (seen.gaps if before else seen.firsts).append(now - (before or began))
            before = now
            seen.tokens += 1


async def measure(order: Order) -> Streams:
    """So many streams at a time, one after the other, for so many seconds."""
    seen, begin, used = _Seen(), clock.monotonic(), time.process_time()
    until = begin + order.seconds
    if order.direct:
        client = BackendClient(order.direct, counted=True)
        await asyncio.gather(*(_direct(order, seen, until, n, client) for n in range(order.clients)))
        await client.close()
    else:
        await asyncio.gather(*(_through(order, seen, until, number) for number in range(order.clients)))
    took = clock.monotonic() - begin
    return Streams(
        len(seen.firsts),
        seen.tokens,
        seen.errors,
        took,
        percentile(seen.firsts, 0.5),
        percentile(seen.firsts, 0.99),
        percentile(seen.gaps or [0.0], 0.99),
        1000 * max(seen.gaps or [0.0]),
        (time.process_time() - used) / took,
    )


if __name__ == "__main__":
    print(json.dumps(asdict(uvloop.run(measure(Order(**json.loads(sys.argv[1])))))))
