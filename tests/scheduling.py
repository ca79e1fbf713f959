"""Which tests run in one process of xdist, and in which order.

A file's tests stay together. The files of the pages form two groups, each with one browser and one cluster
for all its tests; they come first, because they take longest.
"""

from collections import OrderedDict

from xdist.scheduler.loadscope import LoadScopeScheduling
from xdist.workermanage import WorkerController

BROWSER = "tests/browser/"
CROWDED = frozenset(
    f"{BROWSER}test_{name}.py" for name in ("accessibility", "nodes", "quiet", "shell", "sign_in")
)
"""Files that look at the cluster of five hundred nodes, among others."""


def shared_by(node_id: str) -> str:
    """The group of a test: the process of a group starts what its files share once."""
    file = node_id.partition("::")[0]
    if not file.startswith(BROWSER):
        return file
    return f"{BROWSER}crowded" if file in CROWDED else f"{BROWSER}others"


class Scheduling(LoadScopeScheduling):
    """Like `--dist loadfile`, with the groups of `shared_by`."""

    def _split_scope(self, nodeid: str) -> str:
        return shared_by(nodeid)

    def _assign_work_unit(self, node: WorkerController) -> None:
        waiting: OrderedDict[str, dict[str, bool]] = self.workqueue
        for group in [name for name in waiting if name.startswith(BROWSER)]:
            waiting.move_to_end(group, last=False)
        super()._assign_work_unit(node)
