"""Upgrade and deletion of a backend with a real worker: what stops, what comes back, what is gone."""

import pytest

from tests.acceptance.test_cold_load import write_model
from tests.acceptance.test_inventory import backends
from tests.conftest import eventually
from tests.support.cluster import Cluster, Process, engines_of

REPLICAS = "SELECT id FROM node_models WHERE model_name = 'served'"


def done(cluster: Cluster, web: Process, node_id: str, verb: str) -> None:
    """Asks for it and waits until it has been done."""
    asked = cluster.post(web, f"/api/nodes/{node_id}/backends/{verb}", {"backend": "echo"})
    assert asked.status_code == 202, asked.text
    url = asked.json()["statusUrl"]
    eventually(lambda: cluster.get(web, url).json()["processed"], what=f"the {verb} has ended")
    job = cluster.get(web, url).json()
    assert job.get("completed"), job


@pytest.mark.rule("http-2.10", "nats-4.2", "nats-4.6", "nats-6.2", "A39", "O38")
def test_a_backend_is_upgraded_under_a_model_and_deleted(empty: Cluster) -> None:
    web = empty.web()
    empty.controller()
    empty.worker("w1", web)
    node = empty.node(web, "w1")
    assert node is not None
    at, home = node["id"], empty.home / "worker-w1"
    done(empty, web, at, "install")
    write_model(empty, "served")
    assert empty.embed(web, model="served").status_code == 200
    before, engines = empty.rows(REPLICAS), engines_of(home)
    assert (len(before), len(engines)) == (1, 1)
    installed_at = empty.get(web, f"/api/nodes/{at}/backends").json()[0]["installed_at"]
    started = (home / "backends" / "echo").stat().st_ino

    done(empty, web, at, "upgrade")
    assert empty.rows(REPLICAS) == [], "the row is gone before the upgrade says that it is done"
    assert not set(engines) & set(engines_of(home))
    assert (home / "backends" / "echo").stat().st_ino != started
    assert empty.get(web, f"/api/nodes/{at}/backends").json()[0]["installed_at"] >= installed_at
    assert empty.embed(web, model="served").status_code == 200
    after = empty.rows(REPLICAS)
    assert len(after) == 1
    assert after != before

    done(empty, web, at, "delete")
    assert empty.rows(REPLICAS) == []
    assert engines_of(home) == []
    assert not (home / "backends" / "echo").exists()
    assert backends(empty, web, at)[0] == []
    refused = empty.post(web, f"/api/nodes/{at}/backends/upgrade", {"backend": "echo"})
    assert (refused.status_code, "echo" in refused.text) == (409, True)
    done(empty, web, at, "delete")
