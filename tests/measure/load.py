"""Turns of embeddings, whole chats and streams of 36 tokens, with the engine and the load generator in Go."""

from collections.abc import Iterator
from functools import partial

import psutil

from tests.benchmarks.engine import Load, generate
from tests.benchmarks.processor import spent
from tests.measure.sides import MODEL, Side, costs
from tests.measure.table import Goal, Rows, Turn
from tests.support.cluster import ADMIN_KEY

TOKENS, CLIENTS, PACES = 36, (1, 8, 32), (0, 20)
KINDS = ("embeddings", "chat", "stream")
STREAMS = 32
"""Concurrent streams whose first token is measured."""
PROCESSES_CLIENTS = 64
SECONDS = 1.0
GOALS = (
    Goal("embeddings, 32 clients, instant", "server side ms", 0.30),
    Goal("chat, 32 clients, instant", "web ms", 0.25),
    Goal("stream, 32 clients, instant", "web ms", 0.6),
    Goal("stream, 32 clients, instant", "requests/s", 1700, at_least=True),
    Goal(f"first token of {STREAMS} streams, 20 ms, together", "added ms", 5),
)
PROCESSES_GOALS = tuple(
    goal
    for kind in KINDS
    for goal in (
        Goal(f"{kind}, 2 processes", "idle CPU %", 5),
        Goal(f"{kind}, 2 processes beside 1", "times the CPU", 1.1),
        Goal(f"{kind}, 2 processes beside 1", "times the rate", 1.4, at_least=True),
    )
)


def send(url: str, kind: str, clients: int, pace: int, *, together: bool = False) -> Load:
    """Run the load generator against a web process for a moment."""
    body: dict[str, object] = {"model": MODEL}
    if kind == "embeddings":
        path, end = "embeddings", ""
        body["input"] = str(pace) if pace else "a cat"
    else:
        path, end = "chat/completions", "data: [DONE]" if kind == "stream" else '"finish_reason"'
        body["messages"] = [{"role": "user", "content": f"{pace} {TOKENS} 1"}]
        body["stream"] = kind == "stream"
    spread = 0.0 if together else pace * (1 if kind == "embeddings" else TOKENS) / 1000
    return generate(
        f"{url}/v1/{path}", ADMIN_KEY, body,
        clients=clients, seconds=SECONDS, spread=spread, end=end,
    )  # fmt: skip


def figures(load: Load) -> dict[str, float]:
    """Return what a client sees of one run."""
    seen = {"requests/s": load.requests / load.seconds, "p50 ms": load.p50, "p99 ms": load.p99}
    return seen | {"errors": load.errors}


def one(kind: str, clients: int, pace: int, side: Side) -> Rows:
    """Measure one cell: rates, latency, and CPU a request of each process."""
    side.insert_node()
    before = side.spent()
    load = send(side.web.url, kind, clients, pace)
    found = figures(load) | costs(before, side.spent(), load.requests)
    generator = {"generator ms": 1000 * load.processor / max(load.requests, 1)}
    return {_name(kind, clients, pace): found | generator}


def first_token(together: bool, side: Side) -> Rows:
    """Measure the first token of paced streams, called directly and through the web process."""
    script, spread = f"20 {TOKENS} 1", 0.0 if together else 0.02 * TOKENS
    direct = generate(
        "", "", script, clients=STREAMS, seconds=SECONDS, spread=spread, direct=side.engine.address
    )
    ours = send(side.web.url, "stream", STREAMS, 20, together=together)
    row = f"first token of {STREAMS} streams, 20 ms, {'together' if together else 'spread'}"
    found = {"direct p50 ms": direct.first_p50, "p50 ms": ours.first_p50, "p99 ms": ours.first_p99}
    return {row: {"added ms": ours.first_p50 - direct.first_p50} | found}


def turns() -> Iterator[Turn]:
    """Yield a turn for each cell; with a pace last, since their cost is mostly waiting."""
    for pace in PACES:
        for kind in KINDS:
            for clients in CLIENTS:
                yield partial(one, kind, clients, pace)
    for together in (True, False):
        yield partial(first_token, together)


def _name(kind: str, clients: int, pace: int) -> str:
    return f"{kind}, {clients} client{'s' if clients > 1 else ''}, {f'{pace} ms' if pace else 'instant'}"


def has_processes(side: Side) -> bool:
    """Return True if `manage.py serve` knows `--processes`."""
    return "--processes" in side.cluster.manage("serve", "--help")


def processes(side: Side) -> Rows:
    """Measure one web process and two on one address in turn, at 64 clients."""
    cluster, rows = side.cluster, Rows()
    side.insert_node()
    served = {count: cluster.web(CLUSTER_WEB_PROCESSES=str(count)) for count in (1, 2)}
    for web in served.values():
        send(web.url, "embeddings", PROCESSES_CLIENTS, 0)  # a new process is slower
    for kind in KINDS:
        for count, web in served.items():
            before, idle = side.spent() | {"web": spent(web.child.pid)}, psutil.cpu_times()
            load = send(web.url, kind, PROCESSES_CLIENTS, 0)
            after, rested = side.spent() | {"web": spent(web.child.pid)}, psutil.cpu_times()
            share = 100 * (rested.idle - idle.idle) / max(sum(rested) - sum(idle), 0.01)
            name = f"{kind}, {count} process{'es' if count > 1 else ''}"
            rows[name] = figures(load) | {"idle CPU %": share} | costs(before, after, load.requests)
        alone, both = rows[f"{kind}, 1 process"], rows[f"{kind}, 2 processes"]
        rows[f"{kind}, 2 processes beside 1"] = {
            "times the rate": both["requests/s"] / alone["requests/s"],
            "times the CPU": both["server side ms"] / alone["server side ms"],
        }
    for web in served.values():
        cluster.end(web)
    return rows
