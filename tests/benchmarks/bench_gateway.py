"""The cost of the gateway for a call: latency, throughput, and statements per request.

`python -m tests.benchmarks.bench_gateway [--seconds N] [--soak N] [--engine echo|minilm]` starts parts of a
temporary cluster (servers, one web process by `manage.py serve`, one engine with a loaded replica) and prints
its figures together with the figures of a direct gRPC call. All processes, including the load generator,
share this machine, so compare figures of one run only.
"""

import argparse
import asyncio
import contextlib
import hashlib
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote
from uuid import uuid4

import httpx
import psycopg

from localai_cluster.kit import clock
from localai_cluster.rpc.client import BackendClient, options_from_mapping
from nodes.definitions.files import Definition, read_definition
from tests.benchmarks.bench_direct import measure as measure_direct
from tests.benchmarks.counting import StatementCounter
from tests.benchmarks.load import Figures
from tests.conftest import eventually
from tests.support import backends
from tests.support.cluster import ADMIN_KEY, ROOT, TOKEN, Cluster, Process, running_cluster
from tests.support.ports import free_port

CLIENTS = (1, 8, 32)
USER_KEY = "lac-" + "5" * 48


def load(web: Process, key: str, model: str, clients: int, seconds: float, said: str = "") -> Figures:
    """Run the load generator once against a web process."""
    order = {"host": "127.0.0.1", "port": web.port, "key": key, "model": model}
    order |= {"clients": clients, "seconds": seconds, "said": said}
    command = [sys.executable, "-m", "tests.benchmarks.load", json.dumps(order)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return Figures(**json.loads(done.stdout))


@contextmanager
def engine(name: str, folder: Path) -> Iterator[str]:
    """Run an engine process with its model loaded; yield its address."""
    running = backends.start(name, free_port(), folder / "engine.log", token=TOKEN)
    try:
        asyncio.run(_load(running, definition(name)))
        yield running.address
    finally:
        running.process.terminate()
        running.process.wait(timeout=10)


def definition(name: str) -> Definition:
    """Return the seeded definition that runs on the engine of this name."""
    return read_definition(ROOT / "examples" / "models" / f"{name}.yaml")


async def _load(running: backends.Backend, wanted: Definition) -> None:
    await backends.ready(running, token=TOKEN)
    client = BackendClient(running.address, TOKEN)
    result = await client.load_model(options_from_mapping(wanted.options), 60.0)
    await client.close()
    assert result.success, result.message


def insert_rows(
    cluster: Cluster, model: str, address: str, rows: Mapping[str, dict[str, str]] | None = None
) -> None:
    """Insert a healthy node with the loaded replica, and a user's API key, or just some of these `rows`."""
    now = clock.now()
    node, user = uuid4(), 1
    facts: dict[str, Any] = {"node": node, "now": now, "model": model, "address": address, "user": user}
    with psycopg.connect(cluster.postgres.url) as link:
        for table, given in (rows or ROWS).items():
            columns = given | _required(link, table, given)
            names, values = ", ".join(columns), ", ".join(columns.values())
            link.execute(
                f"INSERT INTO {table} ({names}) VALUES ({values})",
                facts | {"hash": hashlib.sha256(USER_KEY.encode()).hexdigest()},
            )


ROWS: dict[str, dict[str, str]] = {
    "backend_nodes": {
        "id": "%(node)s", "name": "'bench'", "node_type": "'backend'", "address": "%(address)s",
        "approved_at": "%(now)s", "last_heartbeat": "%(now)s", "max_replicas_per_model": "1",
        "engine_token": f"'{TOKEN}'",
    },
    "node_models": {
        "id": "gen_random_uuid()", "node_id": "%(node)s", "model_name": "%(model)s", "address": "%(address)s",
        "phase": "'serving'",
    },
    "auth_user": {"id": "%(user)s", "username": "'bench'", "is_active": "true"},
    "api_keys": {"user_id": "%(user)s", "name": "'bench'", "prefix": "'lac-5'", "key_hash": "%(hash)s"},
}  # fmt: skip
_ZEROES = {
    "uuid": "gen_random_uuid()", "integer": "0", "bigint": "0", "boolean": "false", "jsonb": "'{}'",
    "timestamp with time zone": "%(now)s",
}  # fmt: skip


def _required(link: psycopg.Connection[Any], table: str, given: dict[str, str]) -> dict[str, str]:
    """Return a neutral value for every other column that must have a value."""
    rows = link.execute(
        "SELECT column_name, data_type FROM information_schema.columns WHERE table_name = %s"
        " AND is_nullable = 'NO' AND column_default IS NULL"
        " AND is_identity = 'NO' AND is_generated = 'NEVER'",
        [table],
    ).fetchall()
    return {name: _ZEROES.get(kind, "''") for name, kind in rows if name not in given}


def serving(cluster: Cluster, model: str, **env: str) -> Process:
    """Start a web process that serves `model`; no other process of the cluster runs."""
    port = free_port()
    web = cluster.spawn("web", "manage.py", "serve", port=port, env={"PORT": str(port), **env})

    def answers() -> bool:
        assert web.alive, web.output()
        with contextlib.suppress(httpx.TransportError):
            return cluster.embed(web, model=model).status_code == 200
        return False

    eventually(answers, what=f"the gateway answers: {web.log}")
    return web


def compare(web: Process, address: str, model: str, seconds: float) -> None:
    """Print latency and throughput, direct and through the gateway in turn, so that noise affects both."""
    load(web, ADMIN_KEY, model, 8, 2.0)
    for clients in CLIENTS:
        direct = asyncio.run(_direct(address, clients, seconds, definition(model).model))
        ours = load(web, ADMIN_KEY, model, clients, seconds)
        print(
            f"{model}, {clients:>2} clients: {ours.per_second:6.0f} requests/s "
            f"(direct {direct.per_second:.0f}), "
            f"p50 {ours.p50:.2f} ms (added {ours.p50 - direct.p50:.2f}), "
            f"p99 {ours.p99:.2f} ms (added {ours.p99 - direct.p99:.2f}), errors {ours.errors}"
        )


async def _direct(address: str, clients: int, seconds: float, identity: str) -> Any:
    client = BackendClient(address, TOKEN)
    await measure_direct(client, clients, 0.3, identity)
    figures = await measure_direct(client, clients, seconds, identity)
    await client.close()
    return figures


def count_statements(cluster: Cluster, model: str, seconds: float) -> None:
    """Print the statements per request, counted between a web process and its database."""
    server, folder = cluster.postgres.sockets, cluster.home / "count"
    folder.mkdir()
    url = cluster.postgres.url.replace(quote(str(server), safe=""), quote(str(folder), safe=""))
    with StatementCounter(folder, server) as counter:
        web = serving(cluster, model, DATABASE_URL=url)
        load(web, ADMIN_KEY, model, 1, 1.0)
        for label, key in (("static key", ADMIN_KEY), ("database-held key", USER_KEY)):
            for clients in CLIENTS:
                before = counter.statements
                figures = load(web, key, model, clients, seconds)
                used = (counter.statements - before) / figures.requests
                print(
                    f"{model}, {clients:>2} clients, {label}: {used:.3f} statements a request "
                    f"({figures.requests} requests, {figures.errors} errors)"
                )


def main() -> None:
    """Run the whole comparison."""
    options = argparse.ArgumentParser(description="Measures the gateway.")
    options.add_argument("--seconds", type=float, default=5.0)
    options.add_argument("--soak", type=float, default=0.0, help="seconds at 32 clients, afterwards")
    options.add_argument("--engine", default="echo")
    chosen = options.parse_args()
    with running_cluster() as cluster, engine(chosen.engine, cluster.home) as address:
        insert_rows(cluster, chosen.engine, address)
        web = serving(cluster, chosen.engine)
        compare(web, address, chosen.engine, chosen.seconds)
        if chosen.soak:
            soak = load(web, ADMIN_KEY, chosen.engine, 32, chosen.soak)
            print(f"soak of {chosen.soak:.0f} s: {soak.per_second:.0f} requests/s, {soak.errors} errors")
        count_statements(cluster, chosen.engine, min(chosen.seconds, 3.0))


if __name__ == "__main__":
    main()
