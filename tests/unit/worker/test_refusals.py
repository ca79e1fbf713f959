"""What a worker does and says when the control plane refuses its registration or its heartbeats."""

import asyncio
import contextlib
import logging
from typing import Any

import httpx
import pytest

from localai_cluster.kit import clock
from localai_cluster.worker import registration
from localai_cluster.worker.control_plane import CallFailed, ControlPlane, ServerKind
from localai_cluster.worker.engine_exits import MAX_REPORTS_PER_HEARTBEAT, REPORT_MAX_AGE_SECONDS, Exits
from localai_cluster.worker.heartbeats import FIGURES_AFTER_EXIT_SECONDS, HeartbeatLoop
from tests.conftest import until


async def refusals(*statuses: tuple[int, dict[str, str]]) -> tuple[list[float], list[str]]:
    """What a worker waits for and says while its registration meets these, before it works."""
    left, slept, said = list(statuses), [], []

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    def answer(request: httpx.Request) -> httpx.Response:
        if left:
            status, headers = left.pop(0)
            return httpx.Response(status, headers=headers, json={"error": {"message": f"no {status}"}})
        return httpx.Response(201, json={"id": "n", "status": "pending"})

    async def told() -> dict[str, Any]:
        return {}

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    class Known:
        secret, successor, fingerprint = "a" * 64, "", "f" * 64

        def is_accepted_by(self, url: str) -> bool:
            return False

    client = httpx.AsyncClient(transport=httpx.MockTransport(answer))
    calls = ControlPlane("http://c", "tok", Known(), "1f" * 16, client)  # type: ignore[arg-type]
    lines = Lines()
    registration.log.addHandler(lines)
    try:
        await registration.register(calls, told, sleep)
    finally:
        registration.log.removeHandler(lines)
    return slept, said


@pytest.mark.rule("W3", "worker-5.2")
@pytest.mark.parametrize(
    ("status", "words"),
    [
        (401, "Check LOCALAI_REGISTRATION_TOKEN"),
        (403, "delete the file node-secret"),
        (409, "An administrator must resolve this conflict"),
        (500, "no 500"),
    ],
)
async def test_a_refused_registration_goes_on_and_says_what_to_do(status: int, words: str) -> None:
    """worker.md §5.2: every refusal is tried again alike."""
    slept, said = await refusals((status, {}), (status, {}), (status, {}))
    assert slept == [2, 4, 8]
    assert all(words in line for line in said[:3])


@pytest.mark.parametrize(
    ("header", "waits"), [("7", [7, 7]), ("3600", [30, 30]), ("1", [2, 4]), ("soon", [2, 4]), ("-1", [2, 4])]
)
async def test_too_many_attempts_are_waited_out_within_the_back_off(header: str, waits: list[float]) -> None:
    slept, said = await refusals((429, {"Retry-After": header}), (429, {"Retry-After": header}))
    assert slept == waits
    assert "too many failed attempts" in said[0]


class Beating:
    """A heart whose control plane answers what the test says, on a clock of the test's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        self.kind = ServerKind.CLUSTER
        self.error: CallFailed | None = None
        self.refusal: CallFailed | None = None
        self.beats = self.knocks = self.rejoins = 0
        self.registered_at = 0.0
        self.registers_meanwhile = False
        self.gave_way = False
        monkeypatch.setattr(clock, "monotonic", lambda: self.now)
        heart: Any = HeartbeatLoop
        self.exits = Exits("gpu-1")
        self.bodies: list[dict[str, Any]] = []
        callbacks = (self.measure, self.rejoin, self.knock, self.give_way, self.exits)
        self.heart: HeartbeatLoop = heart(self, lambda: "", 10.0, lambda: "n", *callbacks)

    async def measure(self) -> dict[str, int]:
        return {}

    async def heartbeat(self, node_id: str, body: Any) -> None:
        self.beats += 1
        self.bodies.append(dict(body))
        if self.registers_meanwhile:
            self.registered_at = self.now = self.now + 1
        if self.error:
            raise self.error

    async def rejoin(self) -> None:
        self.rejoins += 1

    async def give_way(self) -> None:
        self.gave_way = True

    async def knock(self) -> None:
        self.knocks += 1
        if self.refusal:
            raise self.refusal

    async def live(self, seconds: int) -> None:
        """Beats every 10 s."""
        for _ in range(seconds // 10):
            self.now += 10
            await self.heart.send()


@pytest.fixture
def beating(monkeypatch: pytest.MonkeyPatch) -> Beating:
    return Beating(monkeypatch)


def said(caplog: pytest.LogCaptureFixture, words: str) -> list[int]:
    return [record.levelno for record in caplog.records if words in record.getMessage()]


async def test_a_copied_folder_is_told_once_a_minute_and_no_one_fights(
    beating: Beating, caplog: pytest.LogCaptureFixture
) -> None:
    beating.error = CallFailed("another process", 409)
    await beating.live(60)
    assert said(caplog, "data folder has been copied") == [logging.ERROR]
    assert (beating.beats, beating.knocks, beating.rejoins) == (6, 0, 0)
    assert beating.gave_way, "only one process answers a node's commands"
    assert beating.heart.problem == "another process has registered with this node's secret"
    await beating.live(10)
    assert len(said(caplog, "delete the file node-secret")) == 2
    beating.error = None
    await beating.live(10)
    assert beating.heart.problem == ""


async def test_a_late_conflict_does_not_end_a_newer_registration(beating: Beating) -> None:
    """The response to a heartbeat from before the registration says nothing about this process now."""
    beating.error, beating.registers_meanwhile = CallFailed("another process", 409), True
    await beating.live(10)
    assert (beating.gave_way, beating.heart.problem) == (False, "")


@pytest.mark.parametrize("status", [401, 403])
async def test_a_revoked_secret_is_tried_once_a_minute(
    beating: Beating, caplog: pytest.LogCaptureFixture, status: int
) -> None:
    """Neither spins nor gives up: the engines of this machine go on."""
    beating.error = CallFailed("invalid node credential", status)
    beating.refusal = CallFailed("this secret was revoked", 403)
    await beating.live(120)
    assert (beating.beats, beating.knocks) == (2, 2)
    assert said(caplog, "delete the file node-secret in its data folder") == [logging.ERROR] * 2
    assert beating.heart.problem == "the control plane refuses this node's secret"


async def test_a_removed_node_registers_again(beating: Beating) -> None:
    """Its secret is unknown, so it is told 401 and not 404; at most once a minute."""
    beating.error = CallFailed("invalid node credential", 401)
    await beating.live(50)
    assert (beating.beats, beating.knocks) == (5, 1)
    beating.error = None
    await beating.live(10)
    assert beating.heart.problem == ""


@pytest.mark.rule("worker-5.2")
async def test_an_unknown_node_registers_again(beating: Beating) -> None:
    """D-AGAIN-ON-404."""
    beating.error = CallFailed("node not found", 404)
    await beating.live(10)
    assert (beating.rejoins, beating.knocks) == (1, 0)


async def test_a_heart_stays_away_as_long_as_it_is_told(beating: Beating) -> None:
    beating.error = CallFailed("too many", 429, wait=25.0)
    await beating.live(30)
    assert beating.beats == 1
    await beating.live(10)
    assert beating.beats == 2


REPORT = {"process_key": "m#0", "address": "gpu-1:7001"}


def reported(beating: Beating) -> list[list[dict[str, str]]]:
    return [body.get("ended_processes", []) for body in beating.bodies]


@pytest.mark.rule("worker-6")
async def test_an_engine_that_ended_is_told_at_once_and_without_figures(beating: Beating) -> None:
    """Not at the next interval, and not after the seconds that it takes to read the GPUs' memory."""
    beating.heart.measure = None  # type: ignore[assignment]
    life = asyncio.create_task(beating.heart.run())
    await asyncio.sleep(0)
    beating.exits.add("m#0", 7001)

    await until(lambda: bool(beating.bodies))
    life.cancel()
    assert beating.bodies == [{"ended_processes": [REPORT]}]


@pytest.mark.rule("worker-6")
async def test_figures_follow_soon_after_an_end(beating: Beating, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it has given back would count as taken for an interval: its successor would wait as long."""
    waits, news = [], [True, False, False]

    async def wait_for_exit(seconds: float) -> bool:
        waits.append(seconds)
        if not news:
            raise asyncio.CancelledError
        return news.pop(0)

    monkeypatch.setattr(beating.exits, "wait_for_exit", wait_for_exit)
    with contextlib.suppress(asyncio.CancelledError):
        await beating.heart.run()
    assert waits == [10, FIGURES_AFTER_EXIT_SECONDS, 10, 10]


@pytest.mark.rule("worker-6")
async def test_an_end_is_told_until_that_was_answered_and_for_some_seconds(beating: Beating) -> None:
    """A lost answer costs one beat; a load may have made a replica of the engine just after its end."""
    beating.error = CallFailed("no answer")
    beating.exits.add("m#0", 7001)
    await beating.heart.send(hurried=True)
    await beating.live(20)
    beating.error = None
    await beating.live(20)
    assert reported(beating) == [[REPORT]] * 4 + [[]]


@pytest.mark.rule("worker-6")
async def test_an_early_answer_does_not_end_the_reports(beating: Beating) -> None:
    beating.exits.add("m#0", 7001)
    await beating.heart.send(hurried=True)
    await beating.live(30)
    assert reported(beating) == [[REPORT]] * 3 + [[]]


async def test_what_no_one_takes_is_given_up(beating: Beating) -> None:
    """A control plane that refuses the field must not get it for ever: the figures of such beats are lost."""
    beating.error = CallFailed("ended_processes", 400)
    beating.exits.add("m#0", 7001)
    await beating.live(int(REPORT_MAX_AGE_SECONDS) + 10)
    assert reported(beating)[-3:] == [[REPORT], [], []]


async def test_of_many_ends_every_beat_tells_some_that_were_not_told(beating: Beating) -> None:
    for number in range(MAX_REPORTS_PER_HEARTBEAT + 3):
        beating.exits.add(f"m#{number}", 7000 + number)
    assert await beating.exits.wait_for_exit(0)
    await beating.heart.send(hurried=True)
    assert await beating.exits.wait_for_exit(0)
    await beating.heart.send(hurried=True)
    assert not await beating.exits.wait_for_exit(0)
    first, second = reported(beating)
    assert (len(first), len(second)) == (MAX_REPORTS_PER_HEARTBEAT, MAX_REPORTS_PER_HEARTBEAT)
    assert len({one["process_key"] for one in first + second}) == MAX_REPORTS_PER_HEARTBEAT + 3
