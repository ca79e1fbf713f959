"""Processor time of streams of text, with both stream clients in turn (`CLUSTER_STREAM_CLIENT`).

`python -m tests.benchmarks.bench_streams [--seconds N] [--rounds N]` needs Go for its engine and its load
generator. Two web processes share one engine; at each number of clients and each pace they take turns. It
prints the median of the rounds: processor time of a stream by process, and beside it the rates, which other
work on the machine lowers.
"""

import argparse
import os
import statistics
from collections.abc import Iterable
from typing import NamedTuple

import psutil

from tests.benchmarks.bench_gateway import insert_rows, serving
from tests.benchmarks.engine import Load, build, generate, running
from tests.support.cluster import ADMIN_KEY, Cluster, Process, running_cluster

MODEL, TOKENS = "echo", 36
CLIENTS, PACES = (1, 8, 32), (0, 20)


class Run(NamedTuple):
    """One run, and milliseconds of processor time of a stream by process."""

    load: Load
    costs: dict[str, float]


def _used(processes: Iterable[psutil.Process]) -> float:
    times = [process.cpu_times() for process in processes if process.is_running()]
    return sum(used.user + used.system for used in times)


class Bench:
    """Web processes, the engine and PostgreSQL under load."""

    def __init__(self, cluster: Cluster, engine: int, webs: dict[str, Process]) -> None:
        self._webs = webs
        self._parts = {"engine": [psutil.Process(engine)], "postgres": _postgres(cluster)}

    def run(self, client: str, clients: int, pace: int, seconds: float) -> Run:
        """One run of the generator against the web process with this stream client."""
        web = self._webs[client]
        parts = {"web": [psutil.Process(web.child.pid)], **self._parts}
        before = {name: _used(processes) for name, processes in parts.items()}
        messages = [{"role": "user", "content": f"{pace} {TOKENS} 1"}]
        body = {"model": MODEL, "messages": messages, "stream": True}
        url, spread = f"{web.url}/v1/chat/completions", pace * TOKENS / 1000
        load = generate(
            url, ADMIN_KEY, body, clients=clients, seconds=seconds, spread=spread, end="data: [DONE]"
        )
        costs = {name: 1000 * (_used(parts[name]) - before[name]) / load.requests for name in parts}
        return Run(load, costs | {"generator": 1000 * load.processor / load.requests})

    def compare(self, clients: int, pace: int, seconds: float, rounds: int) -> None:
        """Both clients in turn; prints a line for each."""
        runs: dict[str, list[Run]] = {client: [] for client in self._webs}
        for _ in range(rounds):
            for client, done in runs.items():
                done.append(self.run(client, clients, pace, seconds))
        for client, done in runs.items():
            costs = {name: statistics.median(run.costs[name] for run in done) for name in done[0].costs}
            rate, first, p99 = (
                statistics.median(values)
                for values in zip(
                    *(
                        (run.load.requests / run.load.seconds, run.load.first_p50, run.load.p99)
                        for run in done
                    ),
                    strict=True,
                )
            )
            print(
                f"{clients:>2} clients, {f'{pace} ms' if pace else 'instant'}, {client:>5}:"
                f" ms of CPU a stream: {', '.join(f'{name} {cost:.2f}' for name, cost in costs.items())};"
                f" {rate:.0f} streams/s, first token p50 {first:.1f} ms, whole p99 {p99:.0f} ms,"
                f" {sum(run.load.errors for run in done)} errors; load {os.getloadavg()[0]:.1f}",
                flush=True,
            )


def _postgres(cluster: Cluster) -> list[psutil.Process]:
    """The server's processes: cluster's connections are open before it is measured."""
    server = next(
        process
        for process in psutil.process_iter()
        if process.name() == "postgres" and str(cluster.home) in " ".join(process.cmdline())
    )
    return [server, *server.children(recursive=True)]


def main() -> None:
    """Runs all of it."""
    options = argparse.ArgumentParser(description="Measures both stream clients.")
    options.add_argument("--seconds", type=float, default=4.0)
    options.add_argument("--rounds", type=int, default=3)
    chosen = options.parse_args()
    if reason := build():
        raise SystemExit(f"not measured: {reason}")
    with running_cluster() as cluster, running(cluster.reaper, go=True) as engine:
        insert_rows(cluster, MODEL, engine.address)
        webs = {name: serving(cluster, MODEL, CLUSTER_STREAM_CLIENT=name) for name in ("grpc", "http2")}
        bench = Bench(cluster, engine.process.pid, webs)
        for client in webs:
            bench.run(client, 32, 0, 1.0)
        for pace in PACES:
            for clients in CLIENTS:
                bench.compare(clients, pace, chosen.seconds, chosen.rounds)


if __name__ == "__main__":
    main()
