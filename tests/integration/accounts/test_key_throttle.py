"""Wrong API keys: 429 after too many from one address, on every way in; right keys keep working."""

import asyncio
import dataclasses
import logging
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from channels.testing import WebsocketCommunicator
from django.test import Client
from pytest_django import Settings

from localai_cluster.accounts.principals import KEY_PREFIX, hash_secret
from localai_cluster.asgi import application
from localai_cluster.edge import websocket_application
from localai_cluster.kit import clock
from localai_cluster.web.throttle import DEFAULT_LIMIT, WINDOW, Failures
from tests.support import api, backends, hot
from tests.support.environment import API_KEY, REGISTRATION_TOKEN

HERE = "192.0.2.7"
"""Where the hot path's test client calls from."""
RIGHT, UNKNOWN = KEY_PREFIX + "a" * 48, KEY_PREFIX + "f" * 48
WRONG = ("nonsense", UNKNOWN)


def at(key: str, address: str = HERE) -> api.Caller:
    caller = api.bearer(key)
    caller.client = Client(REMOTE_ADDR=address)
    return caller


@pytest.fixture
def exhausted(failed_keys: Failures) -> None:
    """No further wrong key is allowed to this address, for this minute and the next."""
    now = clock.now()
    for moment in (now, now + timedelta(seconds=WINDOW)):
        for _ in range(DEFAULT_LIMIT):
            failed_keys.note(HERE, moment)


@pytest.mark.django_db
@pytest.mark.rule("http-0.2")
@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_keys_are_limited_and_right_ones_are_not(wrong: str) -> None:
    """D-FAILED-TOKENS: 401 until the limit, then 429 with Retry-After, for wrong keys from there alone."""
    hot.api_key(hash_secret(RIGHT))
    assert {at(wrong).get("/api/nodes").status_code for _ in range(DEFAULT_LIMIT)} == {401}
    # The minute may have ended meanwhile.
    while (refused := at(wrong).get("/api/nodes")).status_code == 401:
        pass
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, 429)
    assert "API keys" in api.message(refused)
    assert 1 <= int(refused["Retry-After"]) <= WINDOW
    assert at(API_KEY).get("/api/nodes").status_code == 200
    assert at(RIGHT).get("/version").status_code == 200
    assert at(wrong, "192.0.2.8").get("/api/nodes").status_code == 401


@pytest.mark.django_db
def test_what_is_no_guess_does_not_count(failed_keys: Failures) -> None:
    """No credential, an empty one, another scheme: 401 forever."""
    for header in ({}, {"Authorization": "Bearer"}, {"Authorization": "Basic abc"}):
        caller = api.Caller(**header)
        caller.client = Client(REMOTE_ADDR=HERE)
        assert {caller.get("/api/nodes").status_code for _ in range(DEFAULT_LIMIT + 1)} == {401}
    failed_keys.check(HERE, clock.now())


@pytest.mark.django_db
def test_wrong_keys_lock_no_worker_out(exhausted: None) -> None:
    """Keys and workers' tokens are counted apart."""
    caller = api.bearer(REGISTRATION_TOKEN)
    caller.client = Client(REMOTE_ADDR=HERE)
    answer = caller.post(
        api.REGISTER, api.registration(address="gpu-1:51100"), **{"X-LocalAI-Node-Secret": api.SECRET}
    )
    assert answer.status_code == 201


@pytest.mark.django_db
def test_guesses_over_the_limit_leave_one_line(exhausted: None, caplog: pytest.LogCaptureFixture) -> None:
    """The framework's line for every refusal would be one for every guess."""
    with caplog.at_level(logging.WARNING):
        caplog.clear()
        for _ in range(5):
            assert at("nonsense").get("/api/nodes").status_code == 429
    assert len(caplog.records) <= 1


@pytest.mark.django_db(transaction=True)
@pytest.mark.rule("http-0.2")
@pytest.mark.parametrize("wrong", WRONG)
def test_the_hot_path_limits_too_and_costs_nothing(
    exhausted: None, wrong: str, tmp_path: Path, settings: Settings
) -> None:
    """429 wherever the key is looked at; a right key costs one statement more, once."""
    (tmp_path / "echo.yaml").write_text("name: echo\nbackend: echo\nparameters: {model: echo}\n")
    settings.CLUSTER = dataclasses.replace(settings.CLUSTER, models_path=tmp_path)
    body = {"model": "echo", "input": "a"}

    async def scenario() -> tuple[list[hot.Reply | None], list[int]]:
        async with hot.serving() as picker, backends.running_backend("echo", model="echo") as engine:
            await hot.in_thread(lambda: hot.replica(hot.node(), address=engine.address))
            await hot.in_thread(lambda: hot.api_key(hash_secret(RIGHT)))
            stranger, user = hot.Client(application, key=wrong), hot.Client(application, key=RIGHT)
            asks: list[Any] = [
                stranger.post("/v1/embeddings", body),
                stranger.post("/v1/embeddings", b"{"),
                stranger.request("GET", "/v1/models"),
            ]
            replies, costs = [await ask for ask in asks], []
            for _ in range(3):
                await picker.wait_until_idle()
                before = picker.connection.executed
                replies.append(await user.post("/v1/embeddings", body))
                costs.append(picker.connection.executed - before)
            return replies, costs

    replies, costs = asyncio.run(scenario())
    assert [reply.status for reply in replies if reply] == [429] * 3 + [200] * 3
    refused = replies[0]
    assert refused is not None
    assert 1 <= int(refused.headers["retry-after"]) <= WINDOW
    assert refused.body["error"]["code"] == "too_many_failures"
    assert costs == [2, 1, 1]  # of an address over its limit no body is read before the key is confirmed


@pytest.mark.django_db(transaction=True)
async def test_websockets_count_too(failed_keys: Failures) -> None:
    """A wrong key on a handshake is one more; the static key opens the socket beside it."""

    async def opens(key: str) -> bool:
        headers = [(b"authorization", f"Bearer {key}".encode())]
        link = WebsocketCommunicator(websocket_application, "/ws/operations", headers)
        link.scope["client"] = (HERE, 1)
        opened, _ = await link.connect()
        await link.disconnect()
        return bool(opened)

    # Two minutes at most share them.
    for _ in range(2 * DEFAULT_LIMIT):
        assert not await opens("nonsense")
    minute = int(clock.now().timestamp()) // WINDOW
    assert sum(failed_keys._count(HERE, one) for one in (minute - 1, minute)) >= 2 * DEFAULT_LIMIT
    assert await opens(API_KEY)
