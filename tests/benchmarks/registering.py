"""Workers that register and send heartbeats over raw HTTP, by the stock worker's rules."""

import asyncio
import hashlib
import itertools
from collections.abc import Iterator

from localai_cluster.kit import clock
from tests.benchmarks.raw import Answer, Connection
from tests.support.cluster import TOKEN, Process

AT_ONCE = 16
BEAT_EVERY = 10.0


def secret(number: int) -> str:
    """Return the secret of the worker with this number."""
    return hashlib.sha256(f"worker {number}".encode()).hexdigest()


def registration(number: int) -> dict[str, object]:
    """Return the registration of a worker with one GPU."""
    return {
        "name": f"gpu-{number:05d}",
        "address": f"10.0.{number // 250}.{number % 250}:50051",
        "http_address": f"10.0.{number // 250}.{number % 250}:50050",
        "token": TOKEN,
        "total_vram": 24 * 1024**3,
        "available_vram": 24 * 1024**3,
        "total_ram": 64 * 1024**3,
        "available_ram": 48 * 1024**3,
        "total_disk": 500 * 1024**3,
        "available_disk": 200 * 1024**3,
        "gpu_vendor": "nvidia",
        "gpu_compute_capability": "8.9",
        "capability": "nvidia-cuda-12",
        "max_replicas_per_model": 2,
        "labels": {"tier": "fast", "zone": f"z{number % 8}", "node.replica-slots": "2"},
    }


class Fleet:
    """Workers that register and send heartbeats to one web process."""

    def __init__(self, web: Process) -> None:
        self._port = web.port
        self.ids: dict[int, str] = {}
        self.answers: list[Answer] = []

    async def register(self, numbers: range) -> float:
        """Register these workers, 16 at a time, each with retries from 2 s on; return the seconds."""
        began, todo = clock.monotonic(), iter(numbers)
        await asyncio.gather(*(self._registrar(todo) for _ in range(AT_ONCE)))
        return clock.monotonic() - began

    async def _registrar(self, numbers: Iterator[int]) -> None:
        connection = Connection("127.0.0.1", self._port)
        for number in numbers:
            pause = 2.0
            while not await self._register_one(connection, number):
                await asyncio.sleep(pause)
                pause = min(pause * 2, 30.0)
        connection.close()

    async def _register_one(self, connection: Connection, number: int) -> bool:
        headers = {"Authorization": f"Bearer {TOKEN}", "X-LocalAI-Node-Secret": secret(number)}
        answer = await connection.request("POST", "/api/node/register", headers, registration(number))
        self.answers.append(answer)
        if answer.status != 201:
            return False
        self.ids[number] = str(answer.json()["id"])
        return True

    async def beat(self, seconds: float) -> list[Answer]:
        """Send a heartbeat of every worker every 10 s, evenly spread, for `seconds`; return all answers."""
        answers: list[Answer] = []
        until = clock.monotonic() + seconds
        step = BEAT_EVERY / len(self.ids)
        await asyncio.gather(
            *(self._heart(number, place * step, until, answers) for place, number in enumerate(self.ids))
        )
        return answers

    async def _heart(self, number: int, offset: float, until: float, answers: list[Answer]) -> None:
        connection = Connection("127.0.0.1", self._port)
        headers = {"Authorization": f"Bearer {secret(number)}"}
        path = f"/api/node/{self.ids[number]}/heartbeat"
        due = clock.monotonic() + offset
        for count in itertools.count():
            if due >= until:
                break
            await asyncio.sleep(max(due - clock.monotonic(), 0))
            figures = {"available_vram": 20 * 1024**3 - count, "available_ram": 40 * 1024**3}
            answers.append(await connection.request("POST", path, headers, figures))
            due += BEAT_EVERY
        connection.close()
