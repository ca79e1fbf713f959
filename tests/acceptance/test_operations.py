"""Operations on many nodes with real servers and simulated workers: one slow, one refuses, one is silent."""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from localai_cluster.kit import clock
from localai_cluster.messaging.servers import Servers, mint_service, parse_url
from tests.conftest import eventually
from tests.support.cluster import TOKEN, Cluster, Process, running_cluster
from tests.support.simulator import Act, Fleet, Script, fleet


def bus_of(cluster: Cluster) -> Servers:
    """One connection for all simulated workers."""
    credentials = mint_service(cluster.nats.keys.account, "simulator", now=clock.now().timestamp())
    return replace(parse_url(cluster.nats.url), credentials=credentials)


def job(cluster: Cluster, web: Process, id: str) -> dict[str, Any]:
    """How the operation stands."""
    answer: dict[str, Any] = cluster.get(web, f"/api/backends/job/{id}").json()
    return answer


def ended(cluster: Cluster, web: Process, id: str) -> dict[str, Any]:
    """The operation, once it has ended."""
    eventually(lambda: job(cluster, web, id)["processed"], what="the operation has ended")
    return job(cluster, web, id)


def parts(said: Mapping[str, Any]) -> dict[str, str]:
    """The status of each part, by node."""
    return {part["node_name"]: part["status"] for part in said.get("nodes", ())}


SCRIPTS = {
    "slow": Script({"backend.install": Act(seconds=2, ticks=8)}),
    "refuses": Script({"backend.install": Act(refuse="no such image")}),
}


@pytest.mark.rule("O16", "O22", "O28", "O70", "A23", "A24", "A28", "A33")
async def test_an_install_on_all_nodes_is_one_operation_with_a_part_a_node() -> None:
    names = ["fine", "slow", "refuses"]
    with running_cluster() as cluster:
        web = await asyncio.to_thread(cluster.web)
        await asyncio.to_thread(cluster.controller)
        nodes = fleet(
            web.url,
            TOKEN,
            len(names),
            bus=bus_of(cluster),
            script=lambda number: SCRIPTS.get(names[number], Script()),
        )
        async with nodes as simulated:
            await asyncio.to_thread(everywhere, cluster, web, simulated)


def everywhere(cluster: Cluster, web: Process, simulated: Fleet) -> None:
    started = cluster.post(web, "/api/backends/install/llama-cpp", {})
    assert started.status_code == 200, started.text
    said = ended(cluster, web, started.json()["jobID"])
    assert parts(said) == {"simulated-0": "success", "simulated-1": "success", "simulated-2": "error"}
    assert said["error"] == "simulated-2: no such image"
    assert len(simulated.received("backend.install")) == 3
    again = cluster.post(web, f"/api/operations/{started.json()['jobID']}/retry", {})
    assert again.status_code == 200, again.text
    said = ended(cluster, web, again.json()["jobID"])
    assert parts(said) == {"simulated-2": "error"}
    assert len(simulated.received("backend.install")) == 4
    gone = cluster.post(web, "/api/backends/delete/llama-cpp", {})
    said = ended(cluster, web, gone.json()["jobID"])
    assert said["completed"]
    assert parts(said) == {"simulated-0": "success", "simulated-1": "success"}
