"""Simulated workers for browser tests, in a thread: the test's own belongs to Playwright's loop.

with crew(fleet, ["fine", "slow"]) as workers:
    workers["slow"].machine.script = Script({"backend.install": Act(seconds=5, ticks=20)})
"""

import asyncio
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from localai_cluster.kit import clock
from localai_cluster.messaging.servers import mint_service, parse_url
from tests.browser.fleet import Fleet
from tests.conftest import eventually
from tests.support.cluster import TOKEN
from tests.support.simulator import SimulatedWorker, fleet

_PATIENCE = 120.0


@contextmanager
def crew(cluster: Fleet, names: Sequence[str]) -> Iterator[dict[str, SimulatedWorker]]:
    """Approved, healthy simulated workers by these names; each node is called by its name."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="crew", daemon=True)
    thread.start()
    nats = cluster.cluster.nats
    credentials = mint_service(nats.keys.account, "simulator", now=clock.now().timestamp())
    bus = replace(parse_url(nats.url), credentials=credentials)
    running = fleet(cluster.webs[0].url, TOKEN, len(names), bus=bus, beat_every=2.0, names=names)
    simulated = asyncio.run_coroutine_threadsafe(running.__aenter__(), loop).result(_PATIENCE)
    try:
        ids = [worker.node_id for worker in simulated.workers]
        assert cluster.post("/api/nodes/approve", {"ids": ids}).is_success
        eventually(lambda: all(cluster.node(name)["status"] == "healthy" for name in names), what="healthy")
        yield dict(zip(names, simulated.workers, strict=True))
    finally:
        asyncio.run_coroutine_threadsafe(running.__aexit__(None, None, None), loop).result(_PATIENCE)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()
