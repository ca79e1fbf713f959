"""Two clusters of `make run`, the second on a copy of the live data folder of the first (review X1)."""

import json
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import httpx
import psycopg
import pytest

from localai_cluster.embedded.bundled_servers import EmbeddedPostgres
from localai_cluster.embedded.layout import Layout
from localai_cluster.embedded.run import find_node
from localai_cluster.kit import processes
from tests.conftest import eventually
from tests.support.ports import free_port
from tests.support.postgres import copy_migrated_data
from tests.support.run import CHILDREN, Run


@pytest.fixture
def folders(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    both = tmp_path / "original", tmp_path / "copy"
    both[0].mkdir()
    yield both
    for folder in both:
        lock = folder / "run.lock"
        if lock.exists() and (text := lock.read_text()):
            processes.sweep(json.loads(text)["mark"])


def checkpoint_and_copy(run: Run, copy: Path) -> None:
    """Copies the folder of a running cluster as an operator does, right after a checkpoint."""
    sockets = Layout.of({"CLUSTER_DATA_DIR": str(run.data)}).sockets
    with psycopg.connect(EmbeddedPostgres(run.data / "postgres", sockets).url, autocommit=True) as link:
        link.execute("CHECKPOINT")
    # Files that the cluster removes meanwhile are missed; that is no concern here.
    subprocess.run(["cp", "-a", str(run.data), str(copy)], check=False, capture_output=True)


def is_there(folder: Path, wanted: bool) -> bool:
    """Whether the folder exists, if that is wanted, or does not."""
    return folder.exists() is wanted


def accepts(url: str, headers: dict[str, str], backend: str) -> bool:
    """Asks for it; not before what is in progress there has ended (409)."""
    answer = httpx.post(url, headers=headers, json={"backend": backend}, timeout=30, trust_env=False)
    assert answer.status_code in (200, 202, 409), answer.text
    return answer.status_code != 409


def install_and_delete(run: Run, backend: str) -> None:
    """Installs `backend` on every node of the cluster, then deletes it from there."""
    url, headers = run.target.url, run.target.headers
    node = find_node(url, run.target.key, "local")["id"]
    folder = run.data / "worker" / "backends" / backend
    for verb, present in (("install", True), ("delete", False)):
        path = f"{url}/api/nodes/{node}/backends/{verb}"
        eventually(partial(accepts, path, headers, backend), seconds=30, what=f"{verb} is accepted")
        eventually(partial(is_there, folder, present), seconds=30, what=f"{verb} at {run.data}")


def test_a_copy_of_a_live_folder_is_another_cluster(folders: tuple[Path, Path]) -> None:
    """The original loses no process; the copy has a bus, keys and nodes of its own, and says so."""
    copy_migrated_data(folders[0] / "postgres")
    original = Run(folders[0], free_port())
    runs = [original]
    try:
        original.wait_ready()
        before = original.leaders()
        assert set(before) == set(CHILDREN)
        checkpoint_and_copy(original, folders[1])
        copy = Run(folders[1], free_port())
        runs.append(copy)
        copy.wait_ready()
        assert original.leaders() == before, original.output
        assert "this data folder is a copy" in copy.output
        assert "cleaning up" not in copy.output
        urls = [json.loads((one.data / "secrets" / "server_urls").read_text()) for one in runs]
        assert urls[0]["LOCALAI_NATS_URL"] != urls[1]["LOCALAI_NATS_URL"]
        for name in ("nats_operator", "nats_system", "nats_account"):
            kept, new = ((one.data / "secrets" / name).read_text() for one in runs)
            assert kept != new, name
        eventually(lambda: original.works() and copy.works(), seconds=60, what=copy.output)
        install_and_delete(original, "echo")
        install_and_delete(copy, "minilm")
        assert not (copy.data / "worker" / "backends" / "echo").exists()
        assert not (original.data / "worker" / "backends" / "minilm").exists()
        assert original.leaders() == before, original.output
    finally:
        for run in runs:
            run.process.terminate()
        codes = [run.process.wait(360) for run in runs]
    assert codes == [0] * len(runs)

    again = Run(folders[1], free_port())
    try:
        again.wait_ready()
        assert "this data folder is a copy" not in again.output, "said once"
    finally:
        again.process.terminate()
        assert again.process.wait(360) == 0
