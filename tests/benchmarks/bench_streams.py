"""Processor time of requests, with both stream clients in turn, or with one and two web processes.

`python -m tests.benchmarks.bench_streams [--seconds N] [--rounds N] [--processes]` needs Go for its engine
and its load generator. By default two web processes with different stream clients (`CLUSTER_STREAM_CLIENT`)
share one engine; at each number of clients and each pace they take turns. With `--processes`, one web process
and two on one address (`CLUSTER_WEB_PROCESSES`) take turns at embeddings, chats and streams. The benchmark
prints the median of the rounds: processor time of a request by process, and the rates, which other work on
the machine lowers.
"""

import argparse
import os
import statistics
from collections.abc import Iterable
from typing import Any, NamedTuple

import psutil

from tests.benchmarks.bench_gateway import insert_rows, serving
from tests.benchmarks.engine import Load, build, generate, running
from tests.conftest import eventually
from tests.support.cluster import ADMIN_KEY, Cluster, Process, running_cluster

MODEL, TOKENS = "echo", 36
CLIENTS, PACES = (1, 8, 32), (0, 20)
PROCESSES, CLIENTS_OF_PROCESSES = (1, 2), 64


class Request(NamedTuple):
    """A request of the clients: name, path, body, the text that ends the answer, and its seconds."""

    name: str
    path: str
    body: dict[str, Any]
    end: str = ""
    took: float = 0.0


def chat(pace: int, *, stream: bool) -> Request:
    """Return a chat of 36 tokens, which the engine sends at once or with `pace` ms for each."""
    messages = [{"role": "user", "content": f"{pace} {TOKENS} 1"}]
    body = {"model": MODEL, "messages": messages, "stream": stream}
    name = f"{'streams' if stream else 'chats'}, {f'{pace} ms' if pace else 'instant'}"
    end = "data: [DONE]" if stream else ""
    return Request(name, "/v1/chat/completions", body, end, pace * TOKENS / 1000)


EMBEDDING = Request("embeddings", "/v1/embeddings", {"model": MODEL, "input": "a"})


class Run(NamedTuple):
    """One run: milliseconds of processor time of a request by process, and the fraction of idle time."""

    load: Load
    costs: dict[str, float]
    idle: float


def _used(processes: Iterable[psutil.Process]) -> float:
    times = [process.cpu_times() for process in processes if process.is_running()]
    return sum(used.user + used.system for used in times)


class Bench:
    """Web processes, the engine and PostgreSQL under load."""

    def __init__(self, cluster: Cluster, engine: int, webs: dict[str, Process]) -> None:
        self._webs = webs
        self._parts = {"engine": [psutil.Process(engine)], "postgres": _postgres(cluster)}

    def run(self, name: str, request: Request, clients: int, seconds: float) -> Run:
        """Run the generator once against the web process, or processes, of this name."""
        web = self._webs[name]
        first = psutil.Process(web.child.pid)
        parts = {"web": [first, *first.children()], **self._parts}
        before, idle = {name: _used(processes) for name, processes in parts.items()}, psutil.cpu_times()
        load = generate(
            web.url + request.path, ADMIN_KEY, request.body,
            clients=clients, seconds=seconds, spread=request.took, end=request.end,
        )  # fmt: skip
        costs = {name: 1000 * (_used(parts[name]) - before[name]) / load.requests for name in parts}
        passed = [after - earlier for earlier, after in zip(idle, psutil.cpu_times(), strict=True)]
        share = passed[idle._fields.index("idle")] / sum(passed)
        return Run(load, costs | {"generator": 1000 * load.processor / load.requests}, share)

    def compare(self, request: Request, clients: int, seconds: float, rounds: int) -> None:
        """Measure all web processes in turn; print a line for each."""
        runs: dict[str, list[Run]] = {name: [] for name in self._webs}
        for _ in range(rounds):
            for name, done in runs.items():
                done.append(self.run(name, request, clients, seconds))
        for name, done in runs.items():
            costs = {part: statistics.median(run.costs[part] for run in done) for part in done[0].costs}
            rate, first, p99, idle = (
                statistics.median(values)
                for values in zip(
                    *(
                        (run.load.requests / run.load.seconds, run.load.first_p50, run.load.p99, run.idle)
                        for run in done
                    ),
                    strict=True,
                )
            )
            print(
                f"{request.name}, {clients:>2} clients, {name:>5}:"
                f" ms of CPU a request: {', '.join(f'{part} {cost:.2f}' for part, cost in costs.items())};"
                f" {rate:.0f} requests/s, first byte p50 {first:.1f} ms, whole p99 {p99:.0f} ms,"
                f" {sum(run.load.errors for run in done)} errors; {idle:.0%} idle,"
                f" load {os.getloadavg()[0]:.1f}",
                flush=True,
            )


def _postgres(cluster: Cluster) -> list[psutil.Process]:
    """Return the server's processes; the connections must be open before the measurement."""
    server = next(
        process
        for process in psutil.process_iter()
        if process.name() == "postgres" and str(cluster.home) in " ".join(process.cmdline())
    )
    return [server, *server.children(recursive=True)]


def serving_with(cluster: Cluster, number: int) -> Process:
    """Start `number` web processes on one address and wait until all of them serve."""
    web = serving(cluster, MODEL, CLUSTER_WEB_PROCESSES=str(number))
    eventually(lambda: web.output().count("Listening on") == number, seconds=60, what="all serve")
    return web


def main() -> None:
    """Run all benchmarks."""
    options = argparse.ArgumentParser(description="Measures both stream clients, or several web processes.")
    options.add_argument("--seconds", type=float, default=4.0)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--processes", action="store_true")
    chosen = options.parse_args()
    if reason := build():
        raise SystemExit(f"not measured: {reason}")
    with running_cluster() as cluster, running(cluster.reaper, go=True) as engine:
        insert_rows(cluster, MODEL, engine.address)
        if chosen.processes:
            webs = {f"{number} process": serving_with(cluster, number) for number in PROCESSES}
        else:
            webs = {name: serving(cluster, MODEL, CLUSTER_STREAM_CLIENT=name) for name in ("grpc", "http2")}
        bench = Bench(cluster, engine.process.pid, webs)
        for name in webs:
            bench.run(name, chat(0, stream=True), 32, 1.0)
        if chosen.processes:
            for request in (EMBEDDING, chat(0, stream=False), chat(0, stream=True)):
                bench.compare(request, CLIENTS_OF_PROCESSES, chosen.seconds, chosen.rounds)
            return
        for pace in PACES:
            for clients in CLIENTS:
                bench.compare(chat(pace, stream=True), clients, chosen.seconds, chosen.rounds)


if __name__ == "__main__":
    main()
