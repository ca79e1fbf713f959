"""The supervisor with tiny real processes and shortened limits: what the process tests would wait too long
for."""

import asyncio
import errno
import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from localai_cluster.kit import clock, processes
from localai_cluster.kit.cancellation import cancel_and_wait
from localai_cluster.messaging.messages import InstallRequest, split_process_key
from localai_cluster.worker import engines
from localai_cluster.worker.backend_store import BackendStore
from localai_cluster.worker.engine_exits import Exits
from localai_cluster.worker.engines import Engine, EngineSupervisor, StartFailed
from localai_cluster.worker.install_commands import InstallCommands
from localai_cluster.worker.log_rings import LogRings
from localai_cluster.worker.ports import NoFreePort, PortAllocator
from tests.conftest import until
from tests.support.ports import free_port

TOKEN = "token-of-the-registration"


@pytest.fixture
async def supervisor() -> AsyncIterator[EngineSupervisor]:
    with processes.ProcessReaper() as reaper:
        supervisor = EngineSupervisor(PortAllocator(42000, 42999), TOKEN, reaper, LogRings(), Exits("h"))
        yield supervisor
        supervisor.hurry()
        await supervisor.close()


def script(folder: Path, text: str) -> Path:
    start = folder / "run.sh"
    start.write_text(f"#!/bin/sh\n{text}\n")
    start.chmod(0o644)
    return start


@pytest.mark.rule("worker-10", "worker-10.3", "W17")
async def test_never_healthy_is_given_up_and_killed(
    supervisor: EngineSupervisor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """W17, with the limit shortened: failure with the last words, the process and its children dead."""
    monkeypatch.setattr(engines, "START_TIMEOUT", 0.5)
    start = script(tmp_path, f"echo waiting >&2; sleep 1000 & echo $! > {tmp_path}/child; wait")
    with pytest.raises(StartFailed, match=r"not ready within 0.5 s.*\n.*waiting"):
        await supervisor.start("m#0", "b", start)
    assert supervisor.engines() == []
    child = int((tmp_path / "child").read_text())
    found = processes.stat(child)
    assert found is None or not found.running


@pytest.mark.parametrize("ends", ["exit 3", "kill -9 $$"])
async def test_a_child_that_has_left_the_group_ends_with_its_engine(
    supervisor: EngineSupervisor, tmp_path: Path, ends: str
) -> None:
    """It would keep the engine's port, and its memory."""
    child = tmp_path / "child"
    away = f"setsid sh -c 'echo $$ > {child}.new && mv {child}.new {child}; exec sleep 1000' &"
    start = script(tmp_path, f"{away}\nwhile [ ! -e {child} ]; do sleep 0.01; done\n{ends}")
    with pytest.raises(StartFailed, match="died during startup"):
        await supervisor.start("m#0", "b", start)
    found = processes.stat(int(child.read_text()))
    assert found is None or not found.running


@pytest.mark.rule("worker-9")
async def test_a_port_that_another_program_has_is_given_to_no_engine(tmp_path: Path) -> None:
    """D-WORKER-START: the next one is tried, and the refusal comes when there is none."""
    base = free_port(2)
    start = script(tmp_path, 'echo "$@" >&2; exit 3')
    with processes.ProcessReaper() as reaper, socket.create_server(("127.0.0.1", base)):
        supervisor = EngineSupervisor(
            PortAllocator(base, base + 1), TOKEN, reaper, LogRings(), Exits("h"), bind_host="127.0.0.1"
        )
        with pytest.raises(StartFailed, match=f"--addr 127.0.0.1:{base + 1}"):
            await supervisor.start("m#0", "b", start)
        with pytest.raises(NoFreePort, match="0 in use, 2 in quarantine"):
            await supervisor.start("m#0", "b", start)
        await supervisor.close()


@pytest.mark.rule("worker-10.2", "W26")
@pytest.mark.parametrize(
    ("advertised", "bound"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("localhost", "127.0.0.1"),
        ("192.0.2.7", "0.0.0.0"),
        ("[::1]", "0.0.0.0"),
        ("127.0.0.2", "0.0.0.0"),
    ],
)
async def test_an_engine_listens_where_it_is_reached(tmp_path: Path, advertised: str, bound: str) -> None:
    """D-ENGINE-LOOPBACK (review P13): an engine of this machine only is no open port."""
    with processes.ProcessReaper() as reaper:
        supervisor = EngineSupervisor(
            PortAllocator(46000, 46999), TOKEN, reaper, LogRings(), Exits("h"),
            bind_host=engines.bind_host_for(advertised),
        )  # fmt: skip
        with pytest.raises(StartFailed, match=rf"--addr {bound}:46\d\d\d"):
            await supervisor.start("m#0", "b", script(tmp_path, 'echo "$@" >&2; exit 3'))
        await supervisor.close()


async def test_last_words_do_not_tell_the_token(supervisor: EngineSupervisor, tmp_path: Path) -> None:
    """What an engine prints of its environment ends in operations and answers; the token must not."""
    start = script(tmp_path, "env >&2; exit 3")
    with pytest.raises(StartFailed, match="LOCALAI_GRPC_AUTH_TOKEN") as caught:
        await supervisor.start("m#0", "b", start)
    assert TOKEN not in caught.value.message


async def test_a_stop_waits_for_a_process_that_is_being_started(
    supervisor: EngineSupervisor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the stop would find nothing, and the engine would run after it."""
    begun, go_on, start_process = asyncio.Event(), asyncio.Event(), asyncio.create_subprocess_exec

    async def slowly(*arguments: Any, **options: Any) -> Any:
        begun.set()
        await go_on.wait()
        return await start_process(*arguments, **options)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", slowly)
    starting = asyncio.create_task(supervisor.start("m#0", "b", script(tmp_path, "sleep 60")))
    await begun.wait()
    stopping = asyncio.create_task(supervisor.stop("m#0", force=True))
    await asyncio.wait({stopping}, timeout=0)
    go_on.set()
    outcome = await stopping
    assert (outcome.matched, outcome.terminated) == (True, True)
    with pytest.raises(StartFailed, match="stopped while it started"):
        await starting


@pytest.mark.rule("worker-8.5", "W20")
async def test_a_stubborn_engine_is_killed_after_the_grace(
    supervisor: EngineSupervisor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """W20, with the grace shortened: SIGTERM to the group, then SIGKILL."""
    monkeypatch.setattr(engines, "SIGTERM_GRACE_SECONDS", 0.3)
    start = script(tmp_path, f"trap '' TERM; touch {tmp_path}/up; while :; do sleep 1; done")
    starting = asyncio.create_task(supervisor.start("m#0", "b", start))

    await until((tmp_path / "up").exists)
    begin = clock.monotonic()
    outcome = await supervisor.stop("m#0", force=True)
    assert outcome.terminated
    assert clock.monotonic() - begin > 0.2
    with pytest.raises(StartFailed, match="stopped while it started"):
        await starting
    assert (await supervisor.stop("m#0", force=True)).matched is False


async def start_ready(supervisor: EngineSupervisor, folder: Path) -> Engine:
    """Start an engine `m#0` that counts as ready once its process runs."""
    start = script(folder, f"touch {folder}/up; exec sleep 1000")
    starting = asyncio.create_task(supervisor.start("m#0", "b", start))
    starting.add_done_callback(lambda task: task.exception())
    await until(lambda: (folder / "up").exists() and supervisor.engines())
    (engine,) = supervisor.engines()
    engine.ready.set()
    return engine


def fail_to_list_processes(*_: Any) -> None:
    raise OSError(errno.EMFILE, "Too many open files", "/proc")


@pytest.mark.rule("worker-8.5")
async def test_a_stop_that_failed_can_be_repeated(
    supervisor: EngineSupervisor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "FREE_TIMEOUT", 0.3)
    engine = await start_ready(supervisor, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(engines, "_end_processes", fail_to_list_processes)
        outcome = await supervisor.stop("m#0", force=True)
    assert (outcome.terminated, outcome.error) == (False, f"process {engine.process.pid} cannot be killed")
    assert engine.alive
    await until(lambda: not engine.stopping)  # the start, which the stop has interrupted, ends it too
    assert (await supervisor.stop("m#0", force=True)).terminated


@pytest.mark.rule("worker-8.5")
async def test_a_stop_that_was_cancelled_can_be_repeated(
    supervisor: EngineSupervisor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = await start_ready(supervisor, tmp_path)
    waits = asyncio.Event()

    async def free(_: float) -> Any:
        waits.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(engine.client, "free", free)
    stopping = asyncio.create_task(supervisor.stop("m#0", force=False))
    await waits.wait()
    await cancel_and_wait(stopping)
    assert (await supervisor.stop("m#0", force=True)).terminated


@pytest.mark.rule("worker-8.5")
async def test_an_engine_counts_as_stopping_until_the_last_of_two_stops_ends(
    supervisor: EngineSupervisor, tmp_path: Path
) -> None:
    """The end of a start that failed, and a stop."""
    engine = await start_ready(supervisor, tmp_path)
    with engine.being_stopped():
        with engine.being_stopped():
            pass
        assert engine.stopping
    assert not engine.stopping


@pytest.mark.rule("worker-8.5")
async def test_an_engine_that_has_ended_leaves_the_table_without_file_descriptors(
    supervisor: EngineSupervisor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise its key and its port would stay in use until the worker restarts."""
    engine = await start_ready(supervisor, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(engines, "_end_processes", fail_to_list_processes)
        engine.process.kill()
        await until(engine.ended.is_set)
    assert supervisor.engines() == []


async def test_an_engine_may_end_by_a_signal_without_a_name(
    supervisor: EngineSupervisor, tmp_path: Path
) -> None:
    with pytest.raises(StartFailed, match=r"died during startup \(signal 40\)"):
        await supervisor.start("m#0", "b", script(tmp_path, "kill -40 $$"))
    assert supervisor.engines() == []


@pytest.fixture
async def unkillable(
    supervisor: EngineSupervisor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[InstallCommands]:
    """The commands of a worker whose engines of the backend `b` never become ready and survive SIGKILL, as
    a process does that hangs in a driver."""
    store = BackendStore(tmp_path / "backends", tmp_path / "system", "default")
    (store.backends / "b").mkdir(parents=True)
    script(store.backends / "b", "exec sleep 1000")
    for name in ("START_TIMEOUT", "STOP_TIMEOUT", "FREE_TIMEOUT"):
        monkeypatch.setattr(engines, name, 0.3)
    nothing: Any = None
    with monkeypatch.context() as patch:
        patch.setattr(engines, "_end_processes", lambda *_: None)
        yield InstallCommands(nothing, store, nothing, supervisor, nothing, lambda _: True)


async def test_a_load_does_not_wait_for_a_process_that_cannot_be_killed(unkillable: InstallCommands) -> None:
    """It holds the backend's lock meanwhile, so no model of the backend would load there any more."""
    first = await unkillable.install(InstallRequest(backend="b", model_id="m"))
    assert "was not ready" in first.error
    async with asyncio.timeout(30):
        again = await unkillable.install(InstallRequest(backend="b", model_id="m"))
        other = await unkillable.install(InstallRequest(backend="b", model_id="n"))
    assert "cannot be killed" in again.error
    assert "was not ready" in other.error


async def test_a_worker_ends_in_spite_of_a_process_that_cannot_be_killed(
    unkillable: InstallCommands, supervisor: EngineSupervisor
) -> None:
    await unkillable.install(InstallRequest(backend="b", model_id="m"))
    engine = supervisor.engines()[0]
    async with asyncio.timeout(30):
        await supervisor.close()
    assert engine.alive
    processes.end(engine.group, lambda: True)
    await engine.ended.wait()


async def test_an_endless_line_and_a_failing_start_are_bounded(
    supervisor: EngineSupervisor, tmp_path: Path
) -> None:
    start = script(tmp_path, "head -c 300000 /dev/zero | tr '\\0' x >&2; exit 7")
    with pytest.raises(StartFailed, match="exit 7") as caught:
        await supervisor.start("m#0", "b", start)
    assert len(caught.value.message) < 21 * 9000
    with pytest.raises(StartFailed, match="cannot be started"):
        await supervisor.start("m#0", "b", script(tmp_path, "").with_name("none"))


@pytest.mark.parametrize("failing", ["second pipe", "read end"])
async def test_a_start_without_file_descriptors_keeps_none(
    supervisor: EngineSupervisor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    """Otherwise each load that fails for lack of them would leave fewer."""
    start, pipe, opened = script(tmp_path, "exit 0"), os.pipe, list[tuple[int, int]]()

    def open_first_pipe() -> tuple[int, int]:
        if opened:
            raise OSError(errno.EMFILE, "Too many open files")
        opened.append(pipe())
        return opened[-1]

    async def refuse(*_: Any) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    if failing == "second pipe":
        monkeypatch.setattr(os, "pipe", open_first_pipe)
    else:
        monkeypatch.setattr(asyncio.get_running_loop(), "connect_read_pipe", refuse)
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(StartFailed, match="Too many open files"):
        await supervisor.start("m#0", "b", start)
    await asyncio.sleep(0)  # a transport closes its pipe in the next turn of the loop
    assert set(os.listdir("/proc/self/fd")) == before


@pytest.mark.rule("worker-10.2", "W26")
def test_the_environment_of_an_engine_is_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """W26, worker.md §21: backends must not inherit the worker's secrets."""
    monkeypatch.setenv("LOCALAI_NATS_URL", "nats://u:p@h")
    told = engines.environment("tok")
    assert set(told) == {"PATH", "HOME", "LANG", "LOCALAI_GRPC_AUTH_TOKEN"}
    assert "LOCALAI_GRPC_AUTH_TOKEN" not in engines.environment("")


@pytest.mark.rule("worker-10", "worker-10.2")
def test_an_engine_finds_the_drivers_that_came_with_it(tmp_path: Path) -> None:
    assert engines.vulkan_driver_variables(tmp_path) == {}
    drivers = tmp_path / "vulkan" / "icd.d"
    drivers.mkdir(parents=True)
    for name in ("b.json", "a.json", "README"):
        (drivers / name).touch()
    found = f"{drivers}/a.json:{drivers}/b.json"
    assert engines.vulkan_driver_variables(tmp_path) == {"VK_DRIVER_FILES": found, "VK_ICD_FILENAMES": found}


@pytest.mark.rule("worker-6")
@pytest.mark.parametrize("asked", [True, False], ids=["stopped", "by itself"])
async def test_an_engine_that_ends_by_itself_is_noted(tmp_path: Path, asked: bool) -> None:
    """As soon as the process is gone, not once its children are; one that was stopped is no news."""
    exits = Exits("gpu-1")
    with processes.ProcessReaper() as reaper:
        supervisor = EngineSupervisor(PortAllocator(45000, 45999), TOKEN, reaper, LogRings(), exits)
        start = script(tmp_path, f"touch {tmp_path}/up; exec sleep 1000")
        starting = asyncio.create_task(supervisor.start("m#0", "b", start))

        await until(lambda: (tmp_path / "up").exists() and supervisor.engines())
        (engine,) = supervisor.engines()
        engine.ready.set()
        if asked:
            await supervisor.stop("m#0", force=True)
        else:
            engine.process.kill()
        with pytest.raises(StartFailed):
            await starting
        told = [one.report for one in exits.due()]
        assert told == ([] if asked else [{"process_key": "m#0", "address": f"gpu-1:{engine.port}"}])
        await supervisor.close()


@pytest.mark.rule("R4.36")
async def test_engines_that_end_are_not_listed(supervisor: EngineSupervisor, tmp_path: Path) -> None:
    """Neither one that is being stopped nor one that has ended and is not cleaned up yet."""
    start = script(tmp_path, "exec sleep 1000")
    for key in ("stopped#0", "dead#0", "a#b#1"):
        starting = asyncio.create_task(supervisor.start(key, "b", start))
        starting.add_done_callback(lambda task: task.exception())

    await until(lambda: len(supervisor.running()) == 3)
    (stopped, dead) = (supervisor.get(key) for key in ("stopped#0", "dead#0"))
    assert stopped is not None
    assert dead is not None
    stopped.stopping = True
    dead.process.kill()

    await until(lambda: not dead.alive)
    assert [engine.key for engine in supervisor.running()] == ["a#b#1"]
    assert split_process_key("a#b#1") == ("a#b", 1)
    stopped.stopping = False
