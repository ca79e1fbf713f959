"""The worker's identity against the real product: a rotation, a copied data folder, a revoked secret.

What an admin does here is done at the command line, `manage.py nodes`.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import eventually
from tests.support.cluster import Cluster, Process, running_cluster
from tests.support.ports import free_port


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with running_cluster() as started:
        yield started


def shown(cluster: Cluster) -> dict[str, Any]:
    """The node as the command line shows it."""
    row: dict[str, Any] = json.loads(cluster.manage("nodes", "show", "one", "--json"))
    return row


def events(cluster: Cluster) -> list[str]:
    return [kind for (kind,) in cluster.rows("SELECT kind FROM node_events ORDER BY id")]


def copy_of(cluster: Cluster, web: Process) -> Process:
    """A worker with a copy of the first one's data folder, under the same name."""
    home = cluster.home / "copy"
    home.mkdir()
    for folder in ("backends", "models"):
        (home / folder).mkdir()
    shutil.copy(secret_file(cluster), home / "node-secret")
    paths = {"LOCALAI_BACKENDS_PATH": str(home / "backends"), "LOCALAI_MODELS_PATH": str(home / "models")}
    return cluster.worker("one", web, wait=False, **paths, LOCALAI_HTTP_ADDR=f"127.0.0.1:{free_port()}")


def secret_file(cluster: Cluster) -> Path:
    return cluster.home / "worker-one" / "node-secret"


def test_rotation_copy_and_revocation(cluster: Cluster) -> None:
    """D-IDENTITY, D-INSTANCE, D-REREGISTER-ROWS."""
    web = cluster.web()
    worker = cluster.worker("one", web)
    first, former = shown(cluster), secret_file(cluster).read_text()

    cluster.manage("nodes", "rotate", "one")
    eventually(lambda: secret_file(cluster).read_text() != former, what="the secret is replaced")
    eventually(lambda: "rotation_requested_at" not in shown(cluster)["identity"])
    second = shown(cluster)
    assert second["id"] == first["id"]
    assert second["status"] == "healthy"
    assert second["identity"]["fingerprint"] != first["identity"]["fingerprint"]
    assert second["identity"]["instance"] == first["identity"]["instance"]
    assert events(cluster).count("registered") == 1, "a rotation is no registration"

    copy = copy_of(cluster, web)
    eventually(lambda: "registered id=" in copy.output(), what="the copy")
    eventually(lambda: "data folder has been copied" in worker.output(), what="the first one notices")
    eventually(lambda: "conflict" in events(cluster))
    assert events(cluster).count("registered") == 2, "the first one does not register against the copy"
    open_ones = json.loads(cluster.manage("nodes", "conflicts", "--json"))
    assert [one["kind"] for one in open_ones] == ["instance"]
    assert open_ones[0]["instance"] == first["identity"]["instance"]

    cluster.manage("nodes", "revoke", "one", "--reason", "copied")
    eventually(lambda: "delete the file node-secret" in copy.output(), what="the copy")
    assert shown(cluster)["status"] == "pending"
    assert worker.alive
    assert copy.alive
