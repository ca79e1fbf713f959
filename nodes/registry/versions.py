"""Whether a worker fits the server: what its version says. Pure."""

from localai_cluster import __version__

STOCK = "stock worker"


def skew(node_type: str, worker_version: str, *, weak: bool) -> str:
    """What an operator should know of a node's version; "" if it is the server's, or nothing is known.

    A node without a secret of its own is a stock worker: ours always has one.
    """
    if node_type == "agent":
        return ""
    if worker_version:
        return "" if worker_version == __version__ else f"worker {worker_version}, server {__version__}"
    return STOCK if weak else ""
