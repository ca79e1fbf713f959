"""What a worker's version says beside the server's."""

import pytest

from localai_cluster import __version__
from nodes.registry.node_rows import STOCK_WORKER_SKEW, version_skew


@pytest.mark.parametrize(
    ("node_type", "version", "weak", "said"),
    [
        ("backend", __version__, False, ""),
        ("backend", "0.0.9", False, f"worker 0.0.9, server {__version__}"),
        ("backend", "", True, STOCK_WORKER_SKEW),
        ("backend", "", False, ""),  # enrolled and not seen yet
        ("agent", "", True, ""),
        ("backend", "0.0.9", True, f"worker 0.0.9, server {__version__}"),
    ],
)
def test_what_is_odd_about_a_version(node_type: str, version: str, weak: bool, said: str) -> None:
    assert version_skew(node_type, version, weak=weak) == said
