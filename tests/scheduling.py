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
    "integration/examples/test_llama_cpp",
    "acceptance/test_deployments",
    "acceptance/test_faults",
    "integration/operations/test_admitting_many",
    "integration/models/test_migrated_rows",
    "conformance/test_worker_commands",
    "integration/wiring/test_web_processes",
    "acceptance/test_kills",
    "acceptance/test_copied_folder",
    "acceptance/test_files_at_source",
    "integration/admin/test_admin",
    "integration/wiring/test_join_script",
    "integration/gateway/test_hot_wait",
    "acceptance/test_kill_sweep",
    "conformance/test_bus_credentials",
    "wire/test_faults",
    "acceptance/test_deaf_worker",
    "integration/gateway/test_hot_gateway",
    "integration/loading/test_evicting",
    "conformance/test_simulated_commands",
    "integration/downloads/test_source_downloads",
    "acceptance/test_front_whole",
    "acceptance/test_staging",
    "conformance/test_worker_life",
    "acceptance/test_imports",
    "integration/wiring/test_headers",
    "integration/embedded/test_servers",
    "integration/wiring/test_pages",
    "unit/wiring/test_background",
    "integration/rpc/test_stream_clients",
    "wire/test_limits",
    "integration/embedded/test_run",
    "wire/test_cancel",
    "unit/wiring/test_around_the_seeds",
    "acceptance/test_waves",
    "integration/downloads/test_imports",
    "integration/examples/test_memory_fit",
    "acceptance/test_unload",
    "integration/loading/test_delivery",
    "integration/api/test_unload",
    "integration/registry/test_node_concurrency",
    "integration/reconcilers/test_liveness",
    "integration/loading/test_load_info",
    "integration/dialects/test_dialects_edge",
    "wire/test_images",
    "integration/wiring/test_package",
    "integration/loading/test_staging",
    "integration/downloads/test_downloader",
    "wire/test_stops",
    "unit/placement/test_ranking",
    "integration/backends/test_intents",
    "acceptance/test_attack",
    "integration/api/test_catalogue",
    "integration/loading/test_load_waits_or_moves",
    "integration/wiring/test_task_cluster",
    "integration/examples/test_echo",
    "integration/live/test_serve",
    "integration/backends/test_worker_logs",
    "integration/dialects/test_ollama_models",
    "integration/api/test_list",
    "integration/loading/test_node_gpus",
    "acceptance/test_upgrade_delete",
    "integration/wiring/test_serve",
    "wire/test_stock_frontend",
    "acceptance/test_stream_kills",
    "acceptance/test_drain",
    "integration/live/test_floods",
    "integration/registry/test_lifecycle",
    "conformance/test_tls",
    "conformance/test_worker_identity",
    "unit/worker/test_archives",
)
"""Files that take ten seconds or more on a quiet machine.

The longest first, so that none of them runs alone at the end.
"""


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
