"""Controllers that stop at every point, and workers whose engines the test plays, on one real database.

A controller is a thread with its own connection. It runs the product's code and stops before each database
call, before each message, and before and after each commit. The history resumes the thread or kills it there.
One thread runs at a time, with one exception: if a thread waits for a lock of a stopped thread, the stopped
thread continues until its transaction has ended. So the same numbers give the same history.
"""

import asyncio
import math
import os
import queue
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from random import Random
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest
from django.db import connection, connections

from localai_cluster.kit import clock, failpoints
from localai_cluster.messaging import messages
from localai_cluster.messaging import messages as m
from localai_cluster.messaging.bus import Handler, NoResponders, RequestTimeout, Subscription
from localai_cluster.messaging.messages import decode, encode
from localai_cluster.rpc.errors import Lost
from localai_cluster.rpc.messages import Sign
from nodes.backends import inventory
from nodes.commands import commands, shared_commands
from nodes.definitions.files import Definition
from nodes.loading import load, load_placement, load_request, staging
from nodes.models import NodeModel
from nodes.reconcilers import state_pass
from nodes.replicas import slots, stops, unload_requests
from operations.changes import events
from operations.executor import work as executor_work
from operations.executor.work import write_batch
from operations.ledger.progress import Recorder
from tests.support.loading import EngineClient

MAX_DELAYED = timedelta(seconds=57)
"""A start arrives within this time or never: `states.UNANSWERED_START_LIMIT` less two clocks' difference."""
SKEWS = (-0.5, 0.0, 0.5)
"""Errors in seconds of a controller's clock; the clock steps from one error to another."""
BLOCKERS = "SELECT unnest(pg_blocking_pids(%s))"
_MAX_WAIT = 600.0
_current = threading.local()


class Killed(BaseException):
    """The process is killed: none of its code runs after this exception."""


class Actor(threading.Thread):
    """A process: its thread and its connection."""

    def __init__(self, name: str) -> None:
        super().__init__(daemon=True, name=name)
        self._jobs: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        self._go = threading.Semaphore(0)
        self.back = threading.Event()
        self.back.set()
        self.pid, self.point, self.job = 0, "", ""
        self.sending: datetime | None = None
        """Time since which it is about to send a start message; None if it is not."""
        self.starting: UUID | None = None
        """The row of this start message."""
        self.skew = timedelta()
        """Error of its clock."""
        self.is_dead = self.stops_inside = self.is_in_transaction = False
        self.runs_through: Callable[[str], None] | None = None
        """Called at each point instead of a stop."""
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        """Run jobs until the end."""
        _current.actor, self._connection = self, connections["default"]
        while (job := self._jobs.get()) is not None:
            try:
                self._connection.ensure_connection()
                self.pid = self._connection.connection.info.backend_pid
                job()
            except Killed:
                pass
            except BaseException as error:
                self.error = error
            self.point, self.is_dead, self.stops_inside, self.sending = "", False, False, None
            self.back.set()
        self._connection.close()

    @property
    def is_idle(self) -> bool:
        """Return True if it has no job."""
        return self.back.is_set() and not self.point

    def begin(self, job: Callable[[], Any]) -> None:
        """Begin a job."""
        self.back.clear()
        self._jobs.put(job)

    def resume(self) -> None:
        """Continue to the next point."""
        self.back.clear()
        self._go.release()

    def end(self) -> None:
        """End the thread."""
        if self.point:
            self.is_dead = True
            self.resume()
        self._jobs.put(None)
        self.join(30)

    def pause(self, point: str) -> None:
        """Stop at this point; called in the actor's thread."""
        if self.runs_through is not None and not self.is_dead:
            self.runs_through(point)
        elif not self.is_dead and (self.stops_inside or not self._connection.in_atomic_block):
            self.point, self.is_in_transaction = point, self._connection.in_atomic_block
            self.back.set()
            self._go.acquire()
            self.point, self.is_in_transaction = "", False
        if self.is_dead:
            raise Killed


def pause(point: str) -> None:
    """Stop at this point, in the thread of an actor."""
    actor = getattr(_current, "actor", None)
    if actor is not None:
        actor.pause(point)


def call(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Call the database from a process that may be killed before the call."""
    pause(function.__name__)
    return function(*arguments, **named)


async def _in_thread(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    return _outside_of_loop(call, function, *arguments, **named)


def _outside_of_loop(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Call the database in this thread, which has no event loop, so that Django permits it."""
    loop = asyncio.get_running_loop()
    asyncio._set_running_loop(None)
    try:
        return function(*arguments, **named)
    finally:
        asyncio._set_running_loop(loop)


def _phase_of(row: UUID) -> str | None:
    phase: str | None = NodeModel.engines.filter(pk=row).values_list("phase", flat=True).first()
    return phase


def wait(actor: Actor, everybody: list[Actor]) -> bool:
    """Wait until the actor has reached a point; actors whose locks it waits for continue.

    Return True if any of them continued.
    """
    waited, was_blocked = 0.0, False
    # Each look costs a statement, so it is rare while no transaction is stopped that could hold a lock.
    others = [other for other in everybody if other is not actor]
    while not actor.back.wait(interval := 0.05 if any(other.is_in_transaction for other in others) else 1.0):
        waited += interval
        assert waited < _MAX_WAIT, f"{actor.name} does not come back from {actor.job}"
        with connection.cursor() as cursor:
            cursor.execute(BLOCKERS, [actor.pid])
            blockers = {pid for (pid,) in cursor.fetchall()}
        for other in others:
            if other.pid in blockers and other.back.is_set() and other.point:
                other.stops_inside = False
                other.resume()
                wait(other, everybody)
                was_blocked = True
    return was_blocked


@dataclass
class Process:
    """An engine process on a worker, and the row for which it was started."""

    row: UUID
    key: str
    address: str
    has_loaded: bool = False


@dataclass
class Delayed:
    """A message that was sent and has not arrived."""

    what: str
    row: UUID | None
    key: str
    address: str
    until: datetime


@dataclass
class Worker:
    """The worker of one node."""

    number: int
    name: str
    id: UUID
    instance: str
    processes: dict[str, Process] = field(default_factory=dict)
    delayed: list[Delayed] = field(default_factory=list)
    is_reachable: bool = True
    is_registered: bool = True
    """False from a restart until it registers."""
    ports: Iterator[int] = field(default_factory=lambda: iter(range(1000)))
    exited: list[tuple[str, str]] = field(default_factory=list)
    """Key and address of the engines that ended by themselves."""

    def running(self) -> list[tuple[str, str]]:
        """Return key and address of each process."""
        return [(one.key, one.address) for one in self.processes.values()]

    def free_memory(self, total: int, each: int) -> int:
        """Return the memory that its engines leave free."""
        return max(total - each * len(self.processes), 0)

    def start(self, row: UUID, key: str) -> str:
        """Start an engine, or return the address of the running engine with this key."""
        self.arrive(lambda one: one.what == "start" and one.key == key)
        return self._start(row, key)

    def ends_by_itself(self, key: str) -> None:
        """End an engine without a stop."""
        self.exited.append((key, self.processes.pop(key).address))

    def _start(self, row: UUID, key: str) -> str:
        running = self.processes.get(key)
        if running is not None:
            assert running.row == row, f"{key} on {self.name} is started for {row} and runs for {running.row}"
            return running.address
        port = 50100 + 1000 * self.number + next(self.ports)
        self.processes[key] = Process(row, key, f"10.0.0.1:{port}")
        return self.processes[key].address

    def arrive(self, which: Callable[[Delayed], bool] = lambda one: True) -> None:
        """Deliver the delayed messages in their order."""
        ready = [one for one in self.delayed if which(one)]
        self.delayed = [one for one in self.delayed if one not in ready]
        for one in ready:
            if one.what == "start" and one.row is not None:
                self._start(one.row, one.key)
            elif one.what == "stop":
                self.stop(one.key, one.address)

    def stop(self, key: str, address: str) -> m.StopModelReply:
        """Stop exactly this process, as a worker does."""
        running = self.processes.get(key)
        if running is None:
            return m.StopModelReply(process_key=key, terminated=True)
        if running.address != address:
            return m.StopModelReply(
                matched=True, process_key=key, address=running.address, error="another address"
            )
        del self.processes[key]
        return m.StopModelReply(matched=True, freed=True, terminated=True, process_key=key, address=address)

    def crash(self) -> None:
        """Restart without engines; ports are reused."""
        self.processes.clear()
        self.delayed.clear()
        self.exited.clear()
        self.ports = iter(range(1000))
        self.instance = f"{int(self.instance or '0', 16) + 1:032x}"
        self.is_registered = False


class World:
    """Time, random decisions, workers, and the outcomes of messages."""

    def __init__(self) -> None:
        self.time = clock.now() + timedelta(hours=1)
        self.began = self.time
        self.dice = Random(0)
        self.are_faults_on = True
        self.faults = 0.4
        """Probability that a message meets a fault."""
        self.workers: dict[UUID, Worker] = {}
        self.trace: list[str] = []
        self.stopped: set[UUID] = set()
        """The rows whose engines were stopped."""

    def now(self) -> datetime:
        """Return the time of the history according to the clock of the process."""
        actor = getattr(_current, "actor", None)
        return self.time if actor is None else self.time + actor.skew

    def monotonic(self) -> float:
        """Return the seconds since the beginning of the history."""
        return (self.time - self.began).total_seconds()

    def passes(self, seconds: float) -> None:
        """Let time pass; delayed messages arrive at the last moment."""
        until = self.time + timedelta(seconds=seconds)
        for worker in self.workers.values():
            worker.arrive(lambda one: one.until <= until)
        self.time = until

    def note(self, text: str) -> None:
        """Write a line of the history."""
        self.trace.append(f"{self.monotonic():7.0f} {text}")

    def fate(self, *bad: str) -> str:
        """Return the outcome of a message; most messages are answered."""
        if not self.are_faults_on or self.dice.random() >= self.faults:
            return "answered"
        return self.dice.choice(bad)

    def _install(self, worker: Worker, asked: m.InstallRequest) -> m.InstallReply:
        """Start an engine; raise the load's exception if no reply arrives."""
        actor, key = _current.actor, m.process_key(asked.model_id, asked.replica_index)
        began, row, actor.sending = actor.sending, actor.starting, None
        fate = self.fate("refused", "lost", "reply lost", "late", "double")
        self.note(f"  start {key} on {worker.name} for {str(row)[:4]}: {fate}")
        if fate == "refused":
            # Messages of one sender arrive in their order.
            worker.arrive(lambda one: one.what == "start" and one.key == key)
            if key not in worker.processes:
                return m.InstallReply(error="refused")
        if fate == "late":
            worker.delayed.append(Delayed("start", row, key, "", began + MAX_DELAYED))
        elif fate != "lost":
            address = worker.start(row, key)
            if fate == "double":
                worker.start(row, key)
            if fate != "reply lost":
                return m.InstallReply(True, address)
        raise RequestTimeout("start")

    def load(self, address: str) -> SimpleNamespace:
        """Load the model into the engine at this address."""
        pause("load the model")
        engines = [one for worker in self.workers.values() for one in worker.processes.values()]
        engine = next((one for one in engines if one.address == address), None)
        if engine is None:
            raise Lost("the engine is gone")
        if self.fate("refused", "") == "refused":
            return SimpleNamespace(success=False, message="its engine refuses the model")
        engine.has_loaded = True
        return SimpleNamespace(success=True, message="")

    def upgrade(self, node_id: UUID) -> list[str]:
        """Upgrade the backend of a node's engines; return the keys of the engines that the worker stopped."""
        pause("send upgrade")
        worker = self.workers.get(node_id)
        if worker is None or not worker.is_reachable:
            raise NoResponders("upgrade")
        fate = self.fate("lost", "reply lost")
        self.note(f"  upgrade on {worker.name}: {fate}")
        if fate != "lost":
            keys = sorted(worker.processes)
            worker.processes.clear()
            if fate != "reply lost":
                pause("reply to upgrade")
                return keys
        raise RequestTimeout("upgrade")

    # --- the bus, as the product sees it

    connected, generation, connected_since = True, 1, -math.inf

    async def wait_connected(self, *, after: int = 0) -> int:
        """Return at once: the bus is always connected."""
        return 1

    async def publish(self, subject: str, payload: bytes) -> None:
        """Lose the message: messages without an answer are only wake-ups."""

    async def subscribe(self, subject: str, handler: Handler, *, limit: int = 64) -> Subscription:
        """Return a subscription that receives nothing."""
        raise NotImplementedError

    async def close(self) -> None:
        """Do nothing."""

    async def request(self, subject: str, payload: bytes, timeout: float, *, inbox: str) -> bytes:
        """Return the worker's answer if the request and its reply arrive."""
        pause(f"send {subject.split('.', 2)[2]}")
        await asyncio.sleep(0)
        node_id = next((id for id in self.workers if f".{id}." in subject), None)
        worker = self.workers.get(node_id) if node_id else None
        if worker is None or not worker.is_reachable:
            raise NoResponders(subject)
        reply = self._reply(worker, subject, payload)
        pause(f"reply to {subject.split('.', 2)[2]}")
        return reply

    def _reply(self, worker: Worker, subject: str, payload: bytes) -> bytes:
        if subject == messages.subject("model.stop", str(worker.id)):
            return encode(self._stop(worker, decode(payload, m.StopModelRequest)))
        if subject == messages.subject("backend.install", str(worker.id)):
            return encode(self._install(worker, decode(payload, m.InstallRequest)))
        if subject == messages.subject("model.delete", str(worker.id)):
            return encode(m.DeleteModelReply(success=True))
        if subject == messages.subject("models.running", str(worker.id)):
            if self.fate("lost") == "lost":
                raise RequestTimeout("list")
            listed = [(m.split_process_key(key), address) for key, address in worker.running()]
            running = tuple(m.RunningModel(*key, address) for key, address in listed if key)
            return encode(m.RunningReply(running, instance=worker.instance))
        if subject == messages.subject("backend.list", str(worker.id)):
            return encode(m.ListReply((), instance=worker.instance))
        raise NoResponders(subject)

    def _stop(self, worker: Worker, asked: m.StopModelRequest) -> m.StopModelReply:
        fate = self.fate("refused", "lost", "reply lost", "late", "double")
        self.note(f"  stop {asked.process_key} at {asked.expected_address} on {worker.name}: {fate}")
        if fate == "refused":
            return m.StopModelReply(matched=True, process_key=asked.process_key, error="still running")
        if fate == "late":
            until = self.time + timedelta(hours=1)
            worker.delayed.append(Delayed("stop", None, asked.process_key, asked.expected_address, until))
        if fate in ("late", "lost"):
            raise RequestTimeout("stop")
        running = worker.processes.get(asked.process_key)
        if running is not None and running.address == asked.expected_address:
            phase = _outside_of_loop(_phase_of, running.row)
            assert phase in ("stopping", "departed"), f"{running.key} is stopped while it is {phase}"
            self.stopped.add(running.row)
        reply = worker.stop(asked.process_key, asked.expected_address)
        if fate == "double":
            reply = worker.stop(asked.process_key, asked.expected_address)
        if fate == "reply lost":
            raise RequestTimeout("stop")
        return reply

    async def probe(self, address: str, token: str, timeout: float) -> Sign:
        """Return the answer of an engine at this address."""
        pause("probe")
        alive = any(
            worker.is_reachable and address in dict(worker.running()).values()
            for worker in self.workers.values()
        )
        return Sign.ALIVE if alive else Sign.UNREACHABLE


class SilentRecorder(Recorder):
    """A recorder that discards progress."""

    def __init__(self) -> None:
        super().__init__(write_batch)

    def add(self, key: Any, value: Any) -> None:
        """Discard the report."""


class _Asyncio:
    """The module `asyncio`, with a pause instead of each sleep."""

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    async def sleep(self, seconds: float) -> None:
        """Let the other tasks run, pause, and let them run again."""
        await asyncio.sleep(0)
        pause("sleep")
        await asyncio.sleep(0)


class _Turns(_Asyncio):
    """The module `asyncio`; a sleep only lets the other tasks run."""

    async def sleep(self, seconds: float) -> None:
        """Let the other tasks run."""
        await asyncio.sleep(0)


def _client_of(world: World) -> Any:
    class Client(EngineClient):
        async def load_model(self, options: Any, timeout: float) -> SimpleNamespace:
            return world.load(self.address)

    return Client


async def _no_watch(worker: Any, generation: int, instance: str) -> None:
    """Wait until the command has ended; the outcome of a message is enough to judge the worker."""
    await asyncio.Event().wait()


async def _not_joined(bus: Any, key: Any, send: Callable[[None], Any], on_progress: None) -> Any:
    """Do not join commands: controllers are threads, and none may wait in another's event loop."""
    return await send(on_progress)


async def _files_of(definition: Definition, options: Any) -> SimpleNamespace:
    files = {definition.model: SimpleNamespace(size=0)} if definition.model else {}
    return SimpleNamespace(files=files, engine_options=lambda root, failed: ({}, []))


async def _send_files(*arguments: Any) -> staging.StagingResult:
    pause("send the files")
    return staging.StagingResult("", {})


@contextmanager
def played(world: World) -> Iterator[None]:
    """Let the product run in this world."""
    patches = {**_patches(world), **_log_patches()}
    with pytest.MonkeyPatch.context() as patch:
        for (owner, name), value in patches.items():
            patch.setattr(owner, name, value)
        yield


def _log_patches() -> dict[tuple[Any, str], Any]:
    """Return the patches that fail a history when a pass reports an error of its own."""

    def warning(text: str, *arguments: Any) -> None:
        assert "not stopped" not in text, text % arguments
        assert "not looked at" not in text, text % arguments

    return {(stops.log, "warning"): warning, (state_pass.log, "warning"): warning}


def _patches(world: World) -> dict[tuple[Any, str], Any]:
    """Return the attributes that connect the product to this world: time, threads, workers and engines."""

    def passed(point: str) -> None:
        if point.endswith((":before", ":committed")):
            pause(point)

    begin = slots.start

    def start(slot: slots.Slot, *, attempt: Any, now: datetime) -> bool:
        """Set the time of the start when the start is committed."""
        _current.actor.sending, _current.actor.starting = clock.now(), slot.id
        return begin(slot, attempt=attempt, now=clock.now())

    chance = Random(0)

    def random_bytes(size: int) -> bytes:
        """The first half of an id decides in which order rows are locked; the second makes it unique."""
        return chance.randbytes(size // 2) + os.urandom(size - size // 2)

    return {
        **{(module, "in_thread"): _in_thread for module in (load, load_placement, load_request, staging)},
        (slots, "start"): start,
        (load, "asyncio"): _Turns(),
        (load, "BackendClient"): _client_of(world),
        (load_placement, "asyncio"): _Asyncio(),
        (staging, "asyncio"): _Asyncio(),
        (staging, "_plan_files"): _files_of,
        (staging, "_send_in_time"): _send_files,
        (commands, "asyncio"): _Asyncio(),
        (commands.Worker, "_watch"): _no_watch,
        (shared_commands, "join_or_send"): _not_joined,
        (clock, "now"): world.now,
        (clock, "monotonic"): world.monotonic,
        (failpoints, "armed"): lambda: True,
        (failpoints, "passed"): passed,
        (events._bridge, "submit"): lambda message: None,
        (stops, "in_thread"): _in_thread,
        (stops, "probe"): world.probe,
        (state_pass, "probe"): world.probe,
        (state_pass, "in_thread"): _in_thread,
        (state_pass, "CHECK_LIMIT"): _MAX_WAIT,
        (inventory, "in_thread"): _in_thread,
        (unload_requests, "in_thread"): _in_thread,
        (unload_requests, "asyncio"): _Asyncio(),
        (executor_work, "in_thread"): _in_thread,
        (uuid, "os"): SimpleNamespace(urandom=random_bytes),
    }
