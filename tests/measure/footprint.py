"""Memory of the server processes after a start and after load, and the processor time of an idle cluster."""

import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import httpx
import psutil

from examples.demo.client import Target, ask
from localai_cluster.embedded.resources import SetupError
from localai_cluster.kit import clock, processes
from tests.measure.table import Measured

SETTLED, LOADED = 15.0, 20.0
"""Seconds from "ready" to the first measurement, and seconds of load before the second one."""
MEMORY_IDLE, MEMORY_LOADED = 220.0, 300.0
"""Limits on the MB of web, controller and tasks together, with one web process."""
_PROGRAMS = ("web", "controller", "tasks")
_CLIENTS = 16
_PATHS = ("/app", "/api/nodes", "/api/operations", "/api/system/health", "/api/schema", "/v1/models")


def footprint(mark: str, target: Target, request: Mapping[str, Any]) -> Iterator[Measured]:
    """Measure a cluster that has just become ready."""
    threading.Event().wait(SETTLED)
    yield from _memory(mark, f"{SETTLED:.0f} s after the start", MEMORY_IDLE)
    before, begun = _processor_time(mark), clock.monotonic()
    threading.Event().wait(SETTLED)
    percent = 100 * (_processor_time(mark) - before) / (clock.monotonic() - begun)
    yield Measured("idle server processes, processor time", percent, unit="% of a core")
    _load(target, request)
    yield from _memory(mark, f"after {LOADED:.0f} s of load", MEMORY_LOADED)


def _family(mark: str, program: str) -> list[psutil.Process]:
    return [psutil.Process(process.pid) for process in processes.marked(f"{mark}/{program}")]


def _memory(mark: str, moment: str, limit: float) -> Iterator[Measured]:
    total = 0.0
    for program in _PROGRAMS:
        if family := _family(mark, program):
            megabytes = sum(member.memory_full_info().pss for member in family) / 10**6
            total += megabytes
            yield Measured(f"{program}, memory (PSS) {moment}", megabytes, unit="MB")
    yield Measured(f"server processes, memory (PSS) {moment}", total, limit, unit="MB")


def _processor_time(mark: str) -> float:
    return sum(sum(member.cpu_times()[:2]) for name in _PROGRAMS for member in _family(mark, name))


def _load(target: Target, request: Mapping[str, Any]) -> None:
    """Have clients use pages, lists, the API document and embeddings at once."""
    until = clock.monotonic() + LOADED

    def use(number: int) -> None:
        with httpx.Client(base_url=target.url, headers=target.headers, timeout=60, trust_env=False) as client:
            while clock.monotonic() < until:
                with suppress(httpx.HTTPError, SetupError):
                    client.get(_PATHS[number % len(_PATHS)])
                    ask(target, request)
                number += 1

    with ThreadPoolExecutor(_CLIENTS) as pool:
        list(pool.map(use, range(_CLIENTS)))
