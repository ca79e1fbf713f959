"""Which tests run in one process of xdist, and in which order.

A file's tests stay together, except in the longest file, whose tests share nothing. The files of the pages
form four groups, each with one browser and one cluster. They come first, because they take longest. Other
files that share a cluster are one group.
"""

from collections import OrderedDict

from xdist.scheduler.loadscope import LoadScopeScheduling
from xdist.workermanage import WorkerController

BROWSER = "tests/browser/"
BROWSER_GROUPS = {
    "own-cluster": ("activity", "add_model", "pictures"),
    "crowd": ("accessibility", "crowd"),
    "first-fleet": ("around", "installed", "logs", "node", "resilience", "shell"),
}
"""Files by the cluster that they look at; all others look at the second fleet."""
GROUP_OF = {f"{BROWSER}test_{name}.py": group for group, names in BROWSER_GROUPS.items() for name in names}
SHARED = "tests/acceptance/shared"
LEAVES_AS_FOUND = frozenset(
    f"tests/acceptance/test_{name}.py" for name in ("cold_load", "joining", "metrics")
)
"""Files that share one cluster of several processes, which ends with the last of them."""
HISTORIES = "tests/integration/replicas/test_replica_histories.py"
LONGEST = (
    "acceptance/test_route_matrix",
    "acceptance/test_make_run",
    "acceptance/test_faults",
    "acceptance/test_kills",
    "conformance/test_worker_life",
    "acceptance/test_deployments",
    "conformance/test_worker_commands",
    "integration/wiring/test_web_processes",
    "integration/examples/test_llama_cpp",
    "acceptance/test_deaf_worker",
    "acceptance/test_copied_folder",
    "integration/gateway/test_hot_wait",
    "acceptance/test_attack",
    "conformance/test_bus_credentials",
    "conformance/test_worker_identity",
    "integration/gateway/test_hot_gateway",
    "integration/embedded/test_servers",
    "integration/wiring/test_serve",
    "wire/test_limits",
    "acceptance/test_unload",
    "integration/live/test_serve",
    "integration/rpc/test_stream_clients",
    "integration/wiring/test_join_script",
    "integration/embedded/test_run",
    "integration/live/test_floods",
    "integration/wiring/test_task_cluster",
    "wire/test_cancel",
    "conformance/test_simulated_commands",
    "acceptance/test_waves",
    "wire/test_faults",
    "acceptance/test_kill_sweep",
    "wire/test_stops",
    "acceptance/test_staging",
    "integration/backends/test_worker_logs",
    "acceptance/test_front_whole",
    "integration/admin/test_admin",
    "integration/api/test_unload",
    "wire/test_stock_frontend",
    "integration/api/test_catalogue",
    "integration/dialects/test_dialects_edge",
    "conformance/test_tls",
    "acceptance/test_stream_kills",
    "integration/loading/test_evicting",
    "integration/loading/test_staging",
    "integration/wiring/test_pages",
    "unit/worker/test_archives",
    "integration/wiring/test_headers",
    "acceptance/test_drain",
    "acceptance/test_upgrade_delete",
    "integration/registry/test_lifecycle",
    "integration/loading/test_delivery",
    "integration/backends/test_intents",
)
"""Files that take ten seconds or more, the longest first, so that none of them runs alone at the end."""


def shared_by(node_id: str) -> str:
    """The group of a test: the process of a group starts what its files share once."""
    file = node_id.partition("::")[0]
    if file in LEAVES_AS_FOUND:
        return SHARED
    if file == HISTORIES:
        return node_id.partition("[")[0]
    return BROWSER + GROUP_OF.get(file, "second-fleet") if file.startswith(BROWSER) else file


class Scheduling(LoadScopeScheduling):
    """Like `--dist loadfile`, with the groups of `shared_by`."""

    def _split_scope(self, nodeid: str) -> str:
        return shared_by(nodeid)

    def _assign_work_unit(self, node: WorkerController) -> None:
        waiting: OrderedDict[str, dict[str, bool]] = self.workqueue
        first = [name for name in waiting if name.startswith((BROWSER, HISTORIES))]
        first += [SHARED, *(f"tests/{name}.py" for name in LONGEST)]
        for group in reversed(first):
            if group in waiting:
                waiting.move_to_end(group, last=False)
        super()._assign_work_unit(node)
