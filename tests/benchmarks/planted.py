"""Nodes that exist only as rows, with simulated workers that never registered; ready in a second.

The workers send no heartbeats, and no process requests their lists before the benchmark begins, so that only
the measured work is counted.
"""

import os
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import timedelta

import httpx

from localai_cluster.kit import clock
from localai_cluster.messaging import messages
from localai_cluster.messaging.bus import Message
from localai_cluster.messaging.nats import NatsBus
from localai_cluster.messaging.servers import mint_service, parse_url
from tests.support.cluster import Cluster
from tests.support.simulator import Fleet, Script, SimulatedWorker
from tests.support.simulator.worker import AT_ONCE, Home


def set_up(cluster: Cluster) -> None:
    """Set up Django in this process, on the cluster's database."""
    os.environ.update({**cluster.environment, "DJANGO_SETTINGS_MODULE": "localai_cluster.settings"})
    import django

    django.setup()


def plant(instances: list[str]) -> list[str]:
    """Insert a healthy node for each worker process; return the ids."""
    from localai_cluster.kit import names
    from nodes.models import BackendNode

    now = clock.now()
    rows = [
        BackendNode(
            name=f"planted-{number}",
            name_key=names.key(f"planted-{number}"),
            address=f"127.0.0.1:{20000 + number}",
            source_address="127.0.0.1",
            fingerprint=f"{number:064x}",
            instance=instance,
            approved_at=now,
            last_heartbeat=now,
            inventory_at=now,
            inventory_due_at=now + timedelta(hours=1),
        )
        for number, instance in enumerate(instances)
    ]
    return [str(node.id) for node in BackendNode.objects.bulk_create(rows)]


@asynccontextmanager
async def listening(
    cluster: Cluster, ids: list[str], instances: list[str], script: Script
) -> AsyncIterator[Fleet]:
    """Run workers for the planted nodes, all on one connection."""
    credentials = mint_service(cluster.nats.keys.account, "simulator", now=clock.now().timestamp())
    bus = NatsBus(replace(parse_url(cluster.nats.url), credentials=credentials), name="planted")
    async with httpx.AsyncClient() as client:
        home, workers = Home("", "", client, 1e9, bus), {}
        for number, (id, instance) in enumerate(zip(ids, instances, strict=True)):
            worker = SimulatedWorker(f"planted-{number}", number, home, Script(script.acts))
            worker.bus, worker.machine.node_id, worker.machine.instance = bus, id, instance
            workers[messages.node_prefix(id)] = worker

        async def receive(message: Message) -> bytes | None:
            worker = workers.get(".".join(message.subject.split(".")[:2]))
            return await worker._receive(message) if worker else None

        bus.start()
        await bus.wait_connected()
        for tail in ("backend.*", "models.running"):
            await bus.subscribe(f"nodes.*.{tail}", receive, limit=AT_ONCE)
        try:
            yield Fleet(list(workers.values()))
        finally:
            for worker in workers.values():
                worker.machine.end()
            await bus.close()


def processes(count: int) -> list[str]:
    """Return the names of `count` worker processes."""
    return [secrets.token_hex(16) for _ in range(count)]
