"""A language model's file reaches two machines from the control plane's folder, and both serve it."""

import os
from typing import Any

import pytest

from localai_cluster.embedded.layout import MODEL_FILES_FOLDER, link_or_copy
from tests.conftest import eventually
from tests.support.cluster import Cluster, Process

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def sent(cluster: Cluster) -> list[tuple[Any, ...]]:
    """What the operations of loads say of their files."""
    return cluster.rows(
        "SELECT node_name, status, current_bytes, total_bytes, total_files FROM operations"
        " WHERE kind = 'model_load' ORDER BY created_at"
    )


def chat(cluster: Cluster, web: Process) -> None:
    body = {"model": "smollm2", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
    answer = cluster.post(web, "/v1/chat/completions", body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 4


@pytest.mark.rule("T-FLW-6", "T-FLW-17", "worker-14", "R2.58")
def test_a_second_worker_gets_the_file_and_serves_too(empty: Cluster) -> None:
    link_or_copy(MODEL_FILES_FOLDER / FILE, empty.models / FILE)
    web, _ = empty.web(), empty.controller()
    workers = [empty.worker(name, web) for name in ("one", "two")]
    assert all(worker.alive for worker in workers)
    chat(empty, web)
    rule = {"model_name": "smollm2", "min_replicas": 2}
    assert empty.post(web, "/api/nodes/scheduling", rule).status_code == 200
    empty.tasks()
    size = (empty.models / FILE).stat().st_size
    # A replica serves from its row on; its operation ends a moment later.
    ended = "SELECT count(*) FROM operations WHERE kind = 'model_load' AND status = 'completed'"
    eventually(lambda: empty.rows(ended) == [(2,)], seconds=120, what="two loads end")
    assert empty.rows("SELECT count(*) FROM node_models WHERE state = 'loaded'") == [(2,)]
    assert sorted(sent(empty)) == [(name, "completed", size, size, 1) for name in ("one", "two")]
    for name in ("one", "two"):
        there = empty.home / f"worker-{name}" / "models" / "smollm2" / FILE
        assert there.read_bytes() == (empty.models / FILE).read_bytes()
        assert not os.path.samefile(there, empty.models / FILE)
    for _ in range(4):
        chat(empty, web)
