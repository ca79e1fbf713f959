"""Bodies of callers who are not known yet: little of them is read, and all together hold a bounded number of
bytes (review R7, X3)."""

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from pytest_django import Settings

from localai_cluster.accounts.models import ApiKey
from localai_cluster.accounts.principals import KEY_PREFIX, hash_secret
from localai_cluster.asgi import application
from localai_cluster.kit import clock
from localai_cluster.web import bodies
from localai_cluster.web.throttle import DEFAULT_LIMIT, WINDOW, Failures
from nodes.gateway import gateway
from tests.conftest import eventually
from tests.support import backends, hot
from tests.support.environment import API_KEY

pytestmark = pytest.mark.django_db(transaction=True)

HERE = "192.0.2.7"
RIGHT, WRONG = KEY_PREFIX + "a" * 48, KEY_PREFIX + "f" * 48
PIECE = 16 * 1024
CHAT, EMBEDDINGS = "/v1/chat/completions", "/v1/embeddings"


class Sender:
    """A client that sends a body piece by piece; notes how many pieces were read before the answer began."""

    def __init__(self, body: bytes) -> None:
        self._pieces = [body[start : start + PIECE] for start in range(0, len(body), PIECE)]
        self.read = 0
        self.read_before_answer = 0
        self.status = 0
        self.headers: Mapping[bytes, bytes] = {}
        self.body = b""

    async def post(self, path: str, key: str, **headers: str) -> "Sender":
        """Send the request to the edge and keep the answer."""
        given = {"authorization": f"Bearer {key}", "content-length": str(sum(map(len, self._pieces)))}
        scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": [
                (name.encode(), value.encode()) for name, value in (given | headers).items() if value
            ],
            "client": (HERE, 1234),
        }
        await application(scope, self._receive, self._send)
        return self

    async def _receive(self) -> dict[str, Any]:
        if self.read == len(self._pieces):
            await asyncio.Event().wait()
        self.read += 1
        more = self.read < len(self._pieces)
        return {"type": "http.request", "body": self._pieces[self.read - 1], "more_body": more}

    async def _send(self, message: Mapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.read_before_answer = self.read
            self.status, self.headers = message["status"], dict(message["headers"])
        else:
            self.body += message["body"]


def large(model: str = "echo", size: int = 1_000_000) -> bytes:
    return json.dumps({"model": model, "input": "x" * size}).encode()


@asynccontextmanager
async def serving(folder: Path, settings: Settings) -> AsyncIterator[hot.CountedPicker]:
    """A web process with one replica of `echo` and the key RIGHT."""
    (folder / "echo.yaml").write_text("name: echo\nbackend: echo\nparameters: {model: echo}\n")
    settings.CLUSTER = dataclasses.replace(settings.CLUSTER, models_path=folder)
    async with hot.serving() as picker, backends.running_backend("echo", model="echo") as engine:
        await hot.in_thread(lambda: hot.replica(hot.node(), address=engine.address))
        await hot.in_thread(lambda: hot.api_key(hash_secret(RIGHT)))
        yield picker


@pytest.mark.parametrize("declared", [True, False], ids=["declared", "chunked"])
async def test_a_wrong_key_is_refused_before_its_body_is_read(declared: bool) -> None:
    """One piece at most, where the size is not declared; then 401, and the connection closes."""
    sender = Sender(large(size=8_000_000))
    headers = {} if declared else {"content-length": "", "transfer-encoding": "chunked"}
    async with hot.serving():
        await sender.post(CHAT, WRONG, **headers)
    assert (sender.status, sender.headers[b"connection"]) == (401, b"close")
    assert sender.read_before_answer == (0 if declared else 1)
    assert json.loads(sender.body)["error"]
    assert bodies.shared_budget.held == 0


async def test_an_address_over_its_limit_has_nothing_read(failed_keys: Failures) -> None:
    """429 before a short body too, which is not waited for; the count is kept before any work on it."""
    now = clock.now()
    for moment in (now, now + timedelta(seconds=WINDOW)):
        for _ in range(DEFAULT_LIMIT):
            failed_keys.note(HERE, moment)
    async with hot.serving():
        assert (await Sender(large(size=10)).post(CHAT, WRONG)).status == 429
        short = await Sender(large(size=10)).post(CHAT, WRONG)
        long = await Sender(large()).post(
            CHAT, WRONG, **{"content-length": "", "transfer-encoding": "chunked"}
        )
    assert (short.status, short.read) == (429, 0)
    assert (long.status, long.read, long.headers[b"connection"]) == (429, 0, b"close")


async def test_a_right_key_costs_one_statement(tmp_path: Path, settings: Settings) -> None:
    """A short body always; a long one too, but for the first of a key that this process does not know."""
    async with serving(tmp_path, settings) as picker:
        costs = []
        for size in (100_000, 100_000, 10):
            await picker.wait_until_idle()
            before = picker.connection.executed
            assert (await Sender(large(size=size)).post(EMBEDDINGS, RIGHT)).status == 200
            costs.append(picker.connection.executed - before)
        await hot.in_thread(lambda: ApiKey.objects.update(revoked_at=clock.now()))
        await hot.in_thread(
            lambda: eventually(lambda: hash_secret(RIGHT) not in picker.confirmed_keys, what="the NOTIFY")
        )
        picker.confirmed_keys.add(hash_secret(RIGHT))  # as if the NOTIFY had been lost
        revoked = await Sender(large(size=100_000)).post(EMBEDDINGS, RIGHT)
        assert hash_secret(RIGHT) not in gateway.current().picker.confirmed_keys
    assert costs == [2, 1, 1]
    assert revoked.status == 401


async def test_bodies_hold_a_bounded_number_of_bytes(
    tmp_path: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond it a long body is 503 and a short one is served; strangers' bodies are not read at all."""
    monkeypatch.setattr(bodies.shared_budget, "limit", 100_000)
    async with serving(tmp_path, settings):
        refused = await Sender(large()).post(EMBEDDINGS, API_KEY)
        bodies.shared_budget.held += 60_000
        try:
            stranger = await Sender(large(size=10)).post(EMBEDDINGS, WRONG)
            short = await Sender(large(size=10)).post(EMBEDDINGS, RIGHT)
        finally:
            bodies.shared_budget.held -= 60_000
    assert (refused.status, refused.headers[b"retry-after"]) == (503, b"1")
    assert (stranger.status, stranger.read) == (401, 0)
    assert short.status == 200
    assert bodies.shared_budget.held == 0


async def test_bodies_for_django_are_bounded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Django reads a body before it knows the caller: what all larger ones hold is limited."""
    budget = application._django._application._budget
    monkeypatch.setattr(budget, "limit", 100_000)
    refused = await Sender(large()).post("/api/nodes/scheduling", WRONG)
    short = await Sender(large(size=10)).post("/api/nodes/scheduling", WRONG)
    assert (refused.status, short.status) == (503, 401)
    assert budget.held == 0
