"""Compare a worker's version with the server's. Pure."""

from localai_cluster import __version__

STOCK = "stock worker"


def skew(node_type: str, worker_version: str, *, weak: bool) -> str:
    """Return the version difference for the operator; "" if there is none or the version is unknown.

    A node without a secret of its own is a stock worker: ours always has one.
    """
    if node_type == "agent":
        return ""
    if worker_version:
        return "" if worker_version == __version__ else f"worker {worker_version}, server {__version__}"
    return STOCK if weak else ""
