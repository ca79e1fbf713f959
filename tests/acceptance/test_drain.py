"""A drained node runs no engine when it is called safe to power off, with real processes."""

from tests.acceptance.test_cold_load import write_model
from tests.conftest import eventually
from tests.support.cluster import engines_of, running_cluster

SAFE = "SELECT 1 FROM backend_nodes WHERE engines_gone_at IS NOT NULL"


def test_the_engines_of_a_drained_node_are_stopped() -> None:
    with running_cluster() as cluster:
        web = cluster.web()
        cluster.controller()
        cluster.tasks()
        cluster.worker("one", web)
        write_model(cluster, "cold")
        assert cluster.embed(web, model="cold").status_code == 200
        home = cluster.home / "worker-one"
        assert len(engines_of(home)) == 1
        node = cluster.node(web, "one")
        assert node is not None
        assert cluster.post(web, f"/api/nodes/{node['id']}/drain").is_success
        eventually(lambda: cluster.rows(SAFE), seconds=30, what="the node is safe to power off")
        assert engines_of(home) == []
