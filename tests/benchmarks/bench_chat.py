"""What the edge adds to streams of text, beside the same gRPC calls made directly.

`python -m tests.benchmarks.bench_chat [--seconds N] [--soak N]` starts servers, one web
process and one scripted engine, and prints three things: 32 streams with a token every 20 ms, 32 streams
without a pause, and whole answers beside embeddings. Direct calls and ours take turns. Everything shares this
machine, so the load and the processor time of each part stand beside the figures.
"""

import argparse
import json
import os
import subprocess
import sys
from dataclasses import asdict

import httpx
import psutil

from localai_cluster.kit import clock
from tests.benchmarks.bench_gateway import insert_rows, load, serving
from tests.benchmarks.engine import build, running
from tests.benchmarks.load import Figures
from tests.benchmarks.streaming import Order, Streams
from tests.support.cluster import ADMIN_KEY, ROOT, Process, running_cluster

CLIENTS = 32
MODEL = "echo"
PAUSE = 20
"""Milliseconds between two tokens."""
LENGTHS = (1, 16)
"""Tokens of whole answers."""


class Bench:
    """One web process and one engine under load."""

    def __init__(self, web: Process, address: str, engine: int) -> None:
        self._web = web
        self._address = address
        self._parts = {"web": psutil.Process(web.child.pid), "engine": psutil.Process(engine)}

    def streams(self, pause: int, tokens: int, seconds: float, *, direct: bool = False) -> Streams:
        """One run of the generator; prints its figures."""
        to = self._address if direct else ""
        order = Order(self._web.port, ADMIN_KEY, MODEL, CLIENTS, seconds, pause, tokens, to)
        command = [sys.executable, "-m", "tests.benchmarks.streaming", json.dumps(asdict(order))]
        began, before = clock.monotonic(), self._used()
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        found = Streams(**json.loads(done.stdout))
        took, after = clock.monotonic() - began, self._used()
        shares = ", ".join(f"{name} {100 * (after[name] - before[name]) / took:.0f} %" for name in after)
        print(
            f"{'direct' if direct else 'ours  '} {found.per_second:7.0f} tokens/s,"
            f" first p50 {found.first_p50:.1f} p99 {found.first_p99:.1f} ms,"
            f" gap p99 {found.gap_p99:.0f} longest {found.gap_longest:.0f} ms,"
            f" {found.streams} streams, {found.errors} errors; of a core: {shares},"
            f" generator {100 * found.processor:.0f} %; load {os.getloadavg()[0]:.1f}",
            flush=True,
        )
        return found

    def _used(self) -> dict[str, float]:
        times = {name: part.cpu_times() for name, part in self._parts.items()}
        return {name: used.user + used.system for name, used in times.items()}

    def compare(self, pause: int, tokens: int, seconds: float, rounds: int = 2) -> None:
        """Direct and ours in turn."""
        found = [
            (self.streams(pause, tokens, seconds, direct=True), self.streams(pause, tokens, seconds))
            for _ in range(rounds)
        ]
        added = sorted(ours.first_p50 - direct.first_p50 for direct, ours in found)
        shares = sorted(100 * ours.per_second / direct.per_second for direct, ours in found)
        print(
            f"=> added to the first token, p50 of each round: {', '.join(f'{one:.1f}' for one in added)} ms;"
            f" share of direct tokens/s: {', '.join(f'{one:.0f}' for one in shares)} %"
        )

    def whole(self, seconds: float) -> None:
        """Whole answers beside embeddings, in turn."""
        for length in LENGTHS:
            for _ in range(2):
                vectors, each = self._load(seconds, "")
                chats, costs = self._load(seconds, f"0 {length}")
                print(
                    f"whole answers of {length} tokens: {chats.per_second:.0f}/s, p50 {chats.p50:.1f} ms,"
                    f" {chats.errors} errors, {costs:.2f} ms of the web process each; embeddings"
                    f" {vectors.per_second:.0f}/s, {vectors.errors} errors, {each:.2f} ms;"
                    f" ratio {chats.per_second / vectors.per_second:.2f}, of processor time"
                    f" {each / costs:.2f}; load {os.getloadavg()[0]:.1f}",
                    flush=True,
                )

    def _load(self, seconds: float, said: str) -> tuple[Figures, float]:
        """Figures of the load, and processor time of the web process for a request, in milliseconds."""
        before = self._used()["web"]
        figures = load(self._web, ADMIN_KEY, MODEL, CLIENTS, seconds, said)
        return figures, 1000 * (self._used()["web"] - before) / figures.requests


def main() -> None:
    """Runs all of it."""
    options = argparse.ArgumentParser(description="Measures streams of text.")
    options.add_argument("--seconds", type=float, default=8.0)
    options.add_argument("--soak", type=float, default=0.0, help="seconds of paced streams, afterwards")
    chosen = options.parse_args()
    with running_cluster() as cluster, running(cluster.reaper, go=not build()) as engine:
        insert_rows(cluster, MODEL, engine.address)
        web = serving(cluster, MODEL)
        bench = Bench(web, engine.address, engine.process.pid)
        bench.streams(0, 50, 1.0)
        print(f"--- a token every {PAUSE} ms, {CLIENTS} streams")
        bench.compare(PAUSE, 100, chosen.seconds)
        print(f"--- without a pause, {CLIENTS} streams")
        bench.compare(0, 200, chosen.seconds)
        print(f"--- whole, {CLIENTS} clients")
        bench.whole(chosen.seconds / 2)
        if chosen.soak:
            print(f"--- {chosen.soak:.0f} s without an end")
            bench.streams(PAUSE, 50, chosen.soak)
        health = httpx.get(f"{web.url}/healthz")
        print(f"the web process still answers: {health.status_code}")


if __name__ == "__main__":
    main()
