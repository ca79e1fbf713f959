"""The policy `worker`: an import leaves the weights at their source, also across kills of every process."""

import contextlib
import hashlib
import random
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from nodes.sources.plans import ImportPlan, SourceFile
from tests.acceptance.test_imports import request_import, until_ended
from tests.conftest import eventually
from tests.support.cluster import Cluster, Process, running_cluster
from tests.support.hub import COMMIT, HUB, add_repository, gguf
from tests.support.sources import Source, sha256_of, started

SIZE = 40 * 2**20
PATH = f"hf/o/tiny@{COMMIT}/m.gguf"
CONFIG = b'{"model_type": "tiny"}'
TOKEN = "token-of-the-control-plane"


@pytest.fixture
def data() -> bytes:
    """A model's file with a real header."""
    header = gguf(0)
    return header + random.Random(1).randbytes(SIZE - len(header))


@pytest.fixture
def source(data: bytes) -> Iterator[Source]:
    with started(redirects=False) as source:
        add_repository(source, "o/tiny", {"m.gguf": data, "config.json": CONFIG})
        yield source


@contextlib.contextmanager
def at_work(source: Source, **env: str) -> Iterator[tuple[Cluster, Process]]:
    """A cluster whose workers download, with its web process."""
    settings = {
        "HF_MIRROR": source.url(HUB),
        "CLUSTER_DOWNLOAD_ON": "worker",
        "CLUSTER_OPERATION_LEASE": "2s",
        **env,
    }
    with running_cluster(**settings) as cluster:
        yield cluster, cluster.web()


def import_model(cluster: Cluster, data: bytes) -> None:
    """Ask for the model of the repository and wait for the end of its import."""
    files = (
        SourceFile(PATH, f"hf://o/tiny@{COMMIT}/m.gguf", len(data), sha256_of(data)),
        SourceFile(f"hf/o/tiny@{COMMIT}/config.json", f"hf://o/tiny@{COMMIT}/config.json", len(CONFIG)),
    )
    text = f"name: tiny\nbackend: echo\nembeddings: true\nparameters:\n  model: {PATH}\n"
    request_import(cluster, ImportPlan("tiny", text, files, "import", "the hub"))
    until_ended(cluster, "tiny")


def bytes_below(folder: Path) -> int:
    """Return the bytes that the files below the folder have on disk; one may vanish meanwhile."""
    size = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            size += path.stat().st_blocks * 512 if path.is_file() else 0
    return size


def weights(models: Path) -> list[Path]:
    """Return the files of the models folder that are as large as weights, complete or not."""
    return [path for path in models.rglob("*") if path.is_file() and path.stat().st_size > 2**20]


def asking(cluster: Cluster, web: Process) -> None:
    """Send requests for the model until one is answered, so that its load stays needed."""

    def ask() -> None:
        for _ in range(20):
            with contextlib.suppress(httpx.HTTPError):
                if cluster.embed(web, model="tiny", timeout=60).status_code == 200:
                    return

    threading.Thread(target=ask, daemon=True).start()


def until_loaded(cluster: Cluster) -> None:
    query = "SELECT status FROM operations WHERE kind = 'model_load' AND status = 'completed'"
    eventually(lambda: cluster.rows(query), seconds=90, what="the model is loaded")


def on_worker(cluster: Cluster) -> Path:
    return cluster.home / "worker-one" / "models" / "tiny" / PATH


def files_of(cluster: Cluster, web: Process) -> list[dict[str, Any]]:
    files: list[dict[str, Any]] = cluster.get(web, "/api/definitions/tiny").json()["files"]
    return files


def test_no_weights_come_to_the_control_plane_through_kills_of_controller_and_worker(
    source: Source, data: bytes
) -> None:
    """The worker's file is whole, its hash is right, and what a killed process had received counts."""
    with at_work(source) as (cluster, web):
        controller = cluster.controller()
        worker = cluster.worker("one", web)
        import_model(cluster, data)
        assert source.sent < 2 * 2**20
        assert (cluster.models / f"hf/o/tiny@{COMMIT}/config.json").read_bytes() == CONFIG
        assert weights(cluster.models) == []
        address = f"hf://o/tiny@{COMMIT}/m.gguf"
        assert files_of(cluster, web) == [{"path": PATH, "size": SIZE, "present": False, "source": address}]

        source.rate = SIZE // 12
        source.requests.clear()
        asking(cluster, web)
        folder = cluster.home / "worker-one" / "models"
        eventually(lambda: bytes_below(folder) > SIZE // 8, seconds=60, what="a part is on the worker")
        controller.kill()
        cluster.controller()
        eventually(lambda: bytes_below(folder) > SIZE // 3, seconds=60, what="a third is on the worker")
        worker.kill()
        cluster.worker("one", web)
        until_loaded(cluster)
        assert hashlib.sha256(on_worker(cluster).read_bytes()).hexdigest() == sha256_of(data)
        ranges = source.sent_to(f"{HUB}/o/tiny/resolve/{COMMIT}/m.gguf")
        begins = [int(text.removeprefix("bytes=").partition("-")[0] or 0) for text in ranges]
        assert begins == sorted(set(begins)), "each process goes on where the last one was killed"
        assert begins[-1] > SIZE // 5, begins
        assert weights(cluster.models) == []
        assert cluster.rows("SELECT count(*) FROM operations WHERE kind = 'model_import'") == [(1,)]


def test_the_control_plane_downloads_what_a_worker_may_not_and_sends_it(source: Source, data: bytes) -> None:
    """A gated repository: the token is the control plane's alone; its controller is killed meanwhile."""
    source.tokens = {f"{HUB}/o/tiny/resolve/": f"Bearer {TOKEN}"}
    with at_work(source) as (cluster, web):
        controller = cluster.controller(HF_TOKEN=TOKEN)
        cluster.worker("one", web)
        import_model(cluster, data)
        assert weights(cluster.models) == []
        source.rate = SIZE // 16
        source.requests.clear()
        asking(cluster, web)
        downloads = cluster.models / ".downloads"
        for part in (8, 3):
            eventually(partial(has_part, downloads, SIZE // part), seconds=60, what="a part is here")
            controller.kill()
            controller = cluster.controller(HF_TOKEN=TOKEN)
        until_loaded(cluster)
        assert (cluster.models / PATH).read_bytes() == data
        assert on_worker(cluster).read_bytes() == data
        assert list(downloads.iterdir()) == []
        (file,) = files_of(cluster, web)
        assert (file["present"], file["source"]) == (True, "")
        credentials = {request.authorization for request in source.requests}
        assert credentials == {"", f"Bearer {TOKEN}"}, "the worker has asked without a token"
        query = (
            "SELECT status, payload->>'files_only' FROM operations WHERE kind = 'model_import' AND seq > 1"
        )
        rows = cluster.rows(f"{query} ORDER BY created_at")
        assert rows[-1] == ("completed", "true")
        (sentence,) = cluster.rows("SELECT result->>'warnings' FROM operations WHERE kind = 'model_load'")[0]
        assert "did not download" in sentence
        assert TOKEN not in sentence


def has_part(folder: Path, size: int) -> bool:
    return folder.is_dir() and bytes_below(folder) > size
