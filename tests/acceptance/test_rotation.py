"""Many workers whose credentials expire all the time: nothing that a controller asks is lost (nats.md §9.3).

The workers are simulated, each with a connection and credentials of its own. `make sweep` plays 200 of them
for three minutes.
"""

import asyncio
from dataclasses import replace

import pytest

from localai_cluster.kit import clock
from localai_cluster.messaging import messages
from localai_cluster.messaging import messages as m
from localai_cluster.messaging.bus import BusError
from localai_cluster.messaging.nats import NatsBus
from localai_cluster.messaging.servers import mint_service, parse_url
from tests.support.bus import ask
from tests.support.cluster import TOKEN, Cluster, running_cluster
from tests.support.effort import EFFORT, swept
from tests.support.simulator import SimulatedWorker, fleet

WORKERS = 20 * EFFORT
SECONDS = 18 * EFFORT
LIFETIME = 10 if EFFORT == 1 else 20


async def ask_all(controller: NatsBus, workers: list[SimulatedWorker], until: float) -> tuple[int, list[str]]:
    """Asks one after the other, many at once, for as long as told; how many questions, and what failed."""
    asked, failures = 0, []

    async def keep_asking(mine: list[SimulatedWorker]) -> None:
        nonlocal asked
        while clock.monotonic() < until:
            for worker in mine:
                subject = messages.subject("backend.list", worker.node_id)
                inbox = messages.inbox(worker.node_id)
                try:
                    await ask(controller, subject, m.EmptyRequest(), m.ListReply, 30, inbox=inbox)
                except BusError as error:
                    failures.append(f"{worker.name}: {error}")
                asked += 1
            await asyncio.sleep(0.1)

    await asyncio.gather(*(keep_asking(workers[start::4]) for start in range(4)))
    return asked, failures


@swept
@pytest.mark.rule("nats-9.3", "nats-9.2")
async def test_nothing_is_lost_while_credentials_rotate() -> None:
    with running_cluster(LOCALAI_NATS_WORKER_JWT_TTL=f"{LIFETIME}s") as cluster:
        web = await asyncio.to_thread(cluster.web)
        await asyncio.to_thread(cluster.controller)
        await asyncio.to_thread(cluster.tasks)
        await rotate(cluster, web.url)


async def rotate(cluster: Cluster, url: str) -> None:
    """Three quarters of the lifetime after each registration there is another one, of every worker."""
    credentials = mint_service(cluster.nats.keys.account, "test", now=clock.now().timestamp())
    controller = NatsBus(replace(parse_url(cluster.nats.url), credentials=credentials), name="test")
    controller.start()
    await asyncio.wait_for(controller.wait_connected(), 60)
    async with fleet(url, TOKEN, WORKERS, beat_every=5) as simulated:
        workers = simulated.workers
        for worker in workers:
            worker.machine.engines["m#0"] = ("echo", f"127.0.0.1:{worker.machine.port}")
        replicas = await asyncio.to_thread(give_replicas, cluster)
        asked, failures = await ask_all(controller, workers, clock.monotonic() + SECONDS)
        assert failures == []
        assert asked > WORKERS * SECONDS / 10
        refreshes = sum(worker.registrations - 1 for worker in workers)
        assert refreshes >= WORKERS * (SECONDS // LIFETIME)
        assert {worker.bus.generation for worker in workers} == {1}, "no connection was ever lost"
        assert sum(worker.missed_beats for worker in workers) == 0
        kept = await asyncio.to_thread(cluster.rows, "SELECT id FROM node_models ORDER BY id")
        assert kept == replicas
        told = "SELECT kind, count(*)::int FROM node_events GROUP BY kind ORDER BY kind"
        kinds = dict(await asyncio.to_thread(cluster.rows, told))
        assert kinds == {"approved": WORKERS, "registered": WORKERS} | (
            {"labels": kinds["labels"]} if "labels" in kinds else {}
        ), "refreshes are no news, and no node was ever unhealthy or offline"
        print(f"{WORKERS} workers, {refreshes} refreshes, {asked} questions in {SECONDS} s: none lost")
    await controller.close()


def give_replicas(cluster: Cluster) -> list[tuple[object, ...]]:
    """One replica for each node, as a load would have published it."""
    cluster.rows(
        "INSERT INTO node_models (id, node_id, model_name, replica_index, address, phase, in_flight,"
        " last_used, backend_type, model_options, config_revision, effective_options_hash,"
        " created_at, updated_at)"
        " SELECT gen_random_uuid(), id, 'm', 0, address, 'serving', 0,"
        " created_at, 'echo', '{}', '', '', created_at, created_at FROM backend_nodes RETURNING id"
    )
    return cluster.rows("SELECT id FROM node_models ORDER BY id")
