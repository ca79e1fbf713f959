"""Which tests run in one process of xdist, and in which order.

A file's tests stay together. The files of the pages form two groups, each with one browser; those of the
first share one cluster, those of the second have their own. They come first, because they take longest. Other
files that share a cluster are one group.
"""

from collections import OrderedDict

from xdist.scheduler.loadscope import LoadScopeScheduling
from xdist.workermanage import WorkerController

BROWSER = "tests/browser/"
OWN_CLUSTER = frozenset(f"{BROWSER}test_{name}.py" for name in ("accessibility", "activity", "crowd"))
"""Files that need no real worker: they look at the cluster of five hundred nodes, or at simulated workers."""
SHARED = "tests/acceptance/shared"
LEAVES_AS_FOUND = frozenset(
    f"tests/acceptance/test_{name}.py" for name in ("cold_load", "joining", "metrics", "route_matrix")
)
"""Files that share one cluster of several processes, which ends with the last of them."""
LONGEST = (
    "integration/replicas/test_replica_histories",
    "acceptance/test_faults",
    "acceptance/test_kills",
    "acceptance/test_make_run",
    "conformance/test_worker_life",
    "acceptance/test_attack",
    "acceptance/test_deaf_worker",
    "acceptance/test_copied_folder",
    "conformance/test_worker_commands",
    "acceptance/test_deployments",
    "integration/embedded/test_servers",
    "conformance/test_bus_credentials",
    "integration/wiring/test_join_script",
    "integration/wiring/test_serve",
    "integration/live/test_serve",
    "acceptance/test_staging",
    "acceptance/test_unload",
    "integration/admin/test_admin",
    "integration/backends/test_worker_logs",
    "wire/test_limits",
    "acceptance/test_drain",
    "integration/api/test_list",
    "acceptance/test_kill_sweep",
    "acceptance/test_waves",
    "integration/api/test_catalogue",
    "integration/gateway/test_hot_wait",
    "integration/live/test_floods",
    "acceptance/test_operations",
    "acceptance/test_upgrade_delete",
    "acceptance/test_node_stop",
    "acceptance/test_stream_kills",
    "integration/wiring/test_pages",
    "acceptance/test_front_whole",
    "integration/api/test_upgrade_delete",
    "unit/worker/test_file_uploads",
    "integration/examples/test_llama_cpp",
    "integration/embedded/test_run",
    "integration/api/test_unload",
    "conformance/test_worker_identity",
    "unit/worker/test_archives",
    "integration/registry/test_lifecycle",
    "integration/registry/test_identity",
    "wire/test_cancel",
    "wire/test_stops",
    "integration/dialects/test_dialects_edge",
    "conformance/test_tls",
    "conformance/test_simulated_commands",
    "integration/api/test_worker_self",
)
"""Files that take ten seconds or more, the longest first, so that none of them runs alone at the end."""


def shared_by(node_id: str) -> str:
    """The group of a test: the process of a group starts what its files share once."""
    file = node_id.partition("::")[0]
    if file in LEAVES_AS_FOUND:
        return SHARED
    if not file.startswith(BROWSER):
        return file
    return f"{BROWSER}own-cluster" if file in OWN_CLUSTER else f"{BROWSER}fleet"


class Scheduling(LoadScopeScheduling):
    """Like `--dist loadfile`, with the groups of `shared_by`."""

    def _split_scope(self, nodeid: str) -> str:
        return shared_by(nodeid)

    def _assign_work_unit(self, node: WorkerController) -> None:
        waiting: OrderedDict[str, dict[str, bool]] = self.workqueue
        first = [name for name in waiting if name.startswith(BROWSER)]
        first += [SHARED, *(f"tests/{name}.py" for name in LONGEST)]
        for group in reversed(first):
            if group in waiting:
                waiting.move_to_end(group, last=False)
        super()._assign_work_unit(node)
