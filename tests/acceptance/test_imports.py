"""Imports with real processes: killed controllers, a source that ends and returns, two at the same file."""

import random
from functools import partial
from pathlib import Path
from typing import Any

from nodes.sources.plans import ImportPlan, SourceFile
from tests.conftest import eventually
from tests.support.cluster import Cluster, running_cluster
from tests.support.sources import Source, sha256_of, started

SIZE = 80 * 2**20
RATE = 12 * 2**20


def request(cluster: Cluster, source: Source, name: str, data: bytes, path: str) -> None:
    """Ask for a model with this file."""
    file = SourceFile(path, source.url("/m.gguf"), len(data), sha256_of(data))
    text = f"name: {name}\nbackend: echo\nparameters:\n  model: {path}\n"
    request_import(cluster, ImportPlan(name, text, (file,), "import", "a source"))


def request_import(cluster: Cluster, plan: ImportPlan) -> None:
    """Ask a running cluster for the import that the plan describes."""
    cluster.manage(
        "shell",
        "--no-imports",
        "-c",
        "from localai_cluster.kit import clock\n"
        "from nodes.downloads.imports import request_import\n"
        "from nodes.sources.plans import from_payload\n"
        "from operations.ledger.admission import Requester\n"
        f"request_import(from_payload({plan.as_payload()!r}), by=Requester('test'), now=clock.now())",
    )


def has_bytes(models: Path, size: int) -> bool:
    """Whether partial files have so many bytes on disk."""
    folder = models / ".downloads"
    files = [path for path in folder.iterdir() if path.suffix != ".json"] if folder.is_dir() else []
    return sum(path.stat().st_blocks * 512 for path in files) > size


def until_ended(cluster: Cluster, name: str, status: str = "completed") -> tuple[Any, ...]:
    query = "SELECT status, error FROM operations WHERE element = %s AND kind = 'model_import'"

    def ended() -> tuple[Any, ...] | None:
        (row,) = cluster.rows(query, name)
        return row if row[0] in ("completed", "failed", "cancelled") else None

    row: tuple[Any, ...] = eventually(ended, seconds=60, what=f"the import of {name} has ended")
    assert row[0] == status, row
    return row


def test_kills_of_controllers_and_of_the_source_are_resumed() -> None:
    """Three controllers are killed one after the other, then the source; then it is whole."""
    data = random.Random(1).randbytes(SIZE)
    with (
        started(redirects=False, files={"/m.gguf": data}, rate=RATE // 4) as source,
        running_cluster(CLUSTER_OPERATION_LEASE="2s", HF_MIRROR=source.url("")) as cluster,
    ):
        request(cluster, source, "tiny", data, "tiny/m.gguf")
        for part in (1, 2, 3):
            controller = cluster.controller()
            eventually(
                partial(has_bytes, cluster.models, part * SIZE // 10),
                seconds=30,
                what="a part is here",
            )
            controller.kill()
        cluster.controller()
        eventually(lambda: has_bytes(cluster.models, SIZE // 2), seconds=30, what="half of it is here")
        port = int(source.host.rpartition(":")[2])
        source.stop()
        source.rate = 0
        source.start(port)
        until_ended(cluster, "tiny")
        assert source.sent < 1.5 * SIZE
        assert (cluster.models / "tiny/m.gguf").read_bytes() == data
        assert list((cluster.models / ".downloads").iterdir()) == []
        assert list((cluster.models / "tiny").iterdir()) == [cluster.models / "tiny/m.gguf"]
        assert cluster.rows("SELECT revision FROM model_definitions WHERE name = 'tiny'") == [(1,)]


def test_two_controllers_share_a_file() -> None:
    """Two imports of the same file, in two processes: every byte comes once, and both models are there."""
    data = random.Random(2).randbytes(SIZE // 4)
    with (
        started(redirects=False, files={"/m.gguf": data}, rate=RATE) as source,
        running_cluster(HF_MIRROR=source.url("")) as cluster,
    ):
        for name in ("one", "two"):
            request(cluster, source, name, data, "shared/m.gguf")
        controllers = [cluster.controller(), cluster.controller()]
        for name in ("one", "two"):
            until_ended(cluster, name)
        assert all(controller.alive for controller in controllers)
        assert (cluster.models / "shared/m.gguf").read_bytes() == data
        assert source.sent == len(data)
        names = cluster.rows("SELECT name FROM model_definitions ORDER BY name")
        assert names == [("one",), ("two",)]
