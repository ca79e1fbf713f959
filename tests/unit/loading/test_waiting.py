"""What a request that waited for a load is told (R2.22, R2.23, `contract/http-api.md` §6.1)."""

from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest

from localai_cluster.web import wire
from nodes.loading.load_request import KIND
from nodes.loading.wait import eta_seconds, load_failure, loading_body, still_loading_error
from operations.models import Operation

NOW = datetime(2026, 5, 1, tzinfo=UTC)


def look(**fields: Any) -> Operation:
    return Operation(**{"id": UUID(int=1), "kind": KIND, "status": "processing"} | fields)


INSTALLING = look(
    phase="installing",
    node_name="w2",
    progress=41.0,
    current_bytes=41,
    total_bytes=100,
    started_at=NOW - timedelta(seconds=10),
)


@pytest.mark.rule("R2.23", "T-JOB-11", "T-JOB-12")
def test_eta_needs_bytes_and_time() -> None:
    """R2.23: only with bytes on their way and at least a second behind it."""
    assert eta_seconds(INSTALLING, NOW) == 59 * 10 / 41
    assert eta_seconds(look(current_bytes=1, total_bytes=2), NOW) is None
    assert eta_seconds(look(current_bytes=1, total_bytes=2, started_at=NOW), NOW) is None
    assert eta_seconds(look(current_bytes=2, total_bytes=2, started_at=NOW - timedelta(1)), NOW) is None


def test_the_loading_object() -> None:
    """§6.1: every counter is there; node and ETA only when known."""
    assert loading_body("m", INSTALLING, NOW, shows_node=True) == {
        "model": "m", "state": "installing", "node": "w2", "progress": 41.0, "bytes_sent": 41,
        "total_bytes": 100, "file_index": 0, "total_files": 0, "eta_seconds": 15,
    }  # fmt: skip
    assert "node" not in loading_body("m", INSTALLING, NOW)
    assert loading_body("m", look(status="waiting_for_nodes", phase="loading"), NOW) == {
        "model": "m", "state": "pending", "progress": 0.0, "bytes_sent": 0, "total_bytes": 0,
        "file_index": 0, "total_files": 0,
    }  # fmt: skip


@pytest.mark.rule("I6", "http-6.1")
def test_progress_is_of_the_whole_load() -> None:
    """That of the row, which never falls within an attempt; the files are counted beside it."""
    for phase, progress in (("staging", 45.0), ("staging", 90.0), ("loading", 90.0)):
        sending = look(phase=phase, progress=progress, current_bytes=1, total_bytes=4)
        assert loading_body("m", sending, NOW)["progress"] == progress


@pytest.mark.rule("R2.22", "C35", "http-6.1")
def test_the_answer_while_loading() -> None:
    """R2.22: 503, code and type model_loading, Retry-After = ETA or budget between 5 and 300 s, rounded
    up."""
    answer = wire.error_answer(still_loading_error("m", INSTALLING, "", 60, NOW))
    assert answer.status == 503
    assert dict(answer.headers)[b"retry-after"] == b"15"
    assert b'"type":"model_loading"' in answer.body
    assert b'"code":"model_loading"' in answer.body
    assert b'"loading":{' in answer.body
    waiting = look(status="waiting_for_nodes", message="no node is approved; 2 are pending")
    for budget, seconds in ((1, b"5"), (60, b"60"), (1000, b"300")):
        error = still_loading_error("m", waiting, waiting.message, budget, NOW, shows_node=True)
        assert dict(wire.error_answer(error).headers)[b"retry-after"] == seconds
    assert error.message == "model m is pending: no node is approved; 2 are pending"
    message = still_loading_error("m", INSTALLING, "", 60, NOW, shows_node=True).message
    assert message == "model m is installing on node w2 (41%, ETA ~15s)"
    hidden = still_loading_error("m", look(phase="staging", node_name="w2", message="to w2"), "", 60, NOW)
    assert hidden.message == "model m is staging"
    assert "w2" not in str(hidden.data)


def test_a_failed_load_says_why_and_when_to_come_back() -> None:
    """§6.1: plain nested envelope without `loading`, cause included, Retry-After at least a second."""
    failed = look(status="failed", error="exit 3:\nboom", finished_at=NOW - timedelta(seconds=4))
    error = load_failure("m", failed, NOW, grace=15)
    answer = wire.error_answer(error)
    assert (answer.status, dict(answer.headers)[b"retry-after"]) == (503, b"11")
    assert b"loading model m failed: exit 3:\\nboom" in answer.body
    assert b'"loading"' not in answer.body
    assert load_failure("m", failed, NOW + timedelta(hours=1), grace=15).retry_after == 1
