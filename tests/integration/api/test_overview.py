"""The overview: cells, requests, what needs attention by cause, what runs, and the first steps."""

from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from localai_cluster import __version__
from localai_cluster.kit import clock
from nodes.definitions import folder
from nodes.figures import partitions, series, store
from nodes.models import BusCredential, JoinToken, ModelLoadInfo
from operations.models import Operation, OperationTarget, Status, TargetStatus
from tests.support import api, hot

pytestmark = pytest.mark.django_db(transaction=True)
GIB = 2**30


def overview() -> Any:
    answer = api.admin().get("/api/overview")
    assert answer.status_code == 200, answer.content
    return answer.json()


def fail(element: str, error: str, **fields: Any) -> Operation:
    """An operation that has failed."""
    values = {"kind": "model_load", "status": Status.FAILED, "finished_at": clock.now(), **fields}
    return Operation.objects.create(key=element, element=element, error=error, **values)


def test_what_needs_attention_is_grouped_by_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken.yaml").write_text("name: [")
    broken = folder.Folder(tmp_path)
    monkeypatch.setattr(folder, "folder", lambda: broken)
    now = clock.now()
    for number in range(7):
        hot.node(f"away-{number}", offline_at=now, offline_recovers=True, worker_version=__version__)
    hot.node("left", offline_at=now, worker_version=__version__)
    full = hot.node("full", total_disk=100, available_disk=4, worker_version="0.0.1")
    hot.node("worn", gpus=[{"index": 0, "ecc_errors": 3}], worker_version=__version__)
    for number in range(3):
        fail(f"m{number}", "no node has room")
    fail("m9", "the file is missing")
    fail("old", "seen", dismissed_at=now)
    JoinToken.objects.create(
        token_hash="t",
        created_by="ann",
        note="rack 4",
        created_at=now - timedelta(days=2),
        expires_at=now + timedelta(hours=1),
    )
    JoinToken.objects.create(token_hash="u", created_by="ann", expires_at=now + timedelta(days=5))
    # Made for an hour, as usual: its end is no surprise.
    JoinToken.objects.create(token_hash="v", created_by="ann", expires_at=now + timedelta(hours=1))
    BusCredential.objects.create(public_key="U", node_id=full.pk, salt="", issued_at=now, expires_at=now)
    found = [(one["cause"], one["level"], one["count"], one["names"]) for one in overview()["attention"]]
    assert found == [
        ("failures", "error", 3, ["m0", "m1", "m2"]),
        ("failures", "error", 1, ["m9"]),
        ("silent_nodes", "error", 7, [f"away-{number}" for number in range(5)]),
        ("full_disks", "error", 1, ["full"]),
        ("gpu_errors", "error", 1, ["worn"]),
        ("versions", "warning", 1, ["full"]),
        ("definitions", "warning", 1, ["broken.yaml"]),
        ("join_tokens", "warning", 1, ["rack 4"]),
        ("bus_credentials", "warning", 1, ["full"]),
    ]


def test_failures_are_grouped_by_what_their_errors_have_in_common_and_nodes_count() -> None:
    """Several nodes of one operation, and two loads of one node; what was dismissed on a node is left out."""
    bulk = fail("4 nodes", "gpu-0: …; gpu-1: …", kind="backend_install")
    for number in range(5):
        OperationTarget.objects.create(
            operation=bulk,
            node_id=uuid4(),
            node_name=f"gpu-{number}",
            status=TargetStatus.ERROR,
            error=f"{number} MiB free on gpu-{number}, request {uuid4()}",
            dismissed_at=clock.now() if number == 4 else None,
        )
    for name in ("a-1", "b-2"):
        fail(name, f"no room for {name} at 10.0.0.{name[-1]}:99", node_name="gpu-9")
    found = [(one["text"], one["count"], one["names"]) for one in overview()["attention"]]
    assert found == [
        ("… free on …, request …", 4, ["gpu-0", "gpu-1", "gpu-2", "gpu-3"]),
        ("no room for … at …", 1, ["gpu-9"]),
    ]


def test_failures_are_in_one_order_and_the_newest_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest groups first, of equal ones the newest, of equally new ones by their kind and cause."""
    now = clock.now()
    monkeypatch.setattr("nodes.api.overview.MAX_FAILURES", 6)
    for age, error in enumerate(("latest", "twice", "twice", "zeta", "alpha", "one more", "too old")):
        fail(f"m{age}", error, finished_at=now - timedelta(minutes=3 if error in ("zeta", "alpha") else age))
    expected = ["twice", "latest", "alpha", "zeta", "one more"]
    assert [group["text"] for group in overview()["attention"]] == expected
    bulk = fail("8 nodes", "gpu-0: …", kind="backend_install", finished_at=now - timedelta(hours=1))
    for number, error in enumerate(("first", "second") * 4):
        node = {"node_id": UUID(int=number), "node_name": f"gpu-{number}"}
        OperationTarget.objects.create(operation=bulk, **node, status=TargetStatus.ERROR, error=error)
    found = [(group["text"], group["count"], group["names"]) for group in overview()["attention"]]
    of_nodes = ["gpu-0", "gpu-2", "gpu-4"], ["gpu-1", "gpu-3", "gpu-5"]
    assert found[:3] == [("first", 3, of_nodes[0]), ("second", 3, of_nodes[1]), ("twice", 2, ["m1", "m2"])]


def test_cells_of_the_strip_and_what_runs() -> None:
    gpus = [{"index": number, "utilization": busy} for number, busy in enumerate((50, 100, None))]
    hot.node("gpu", total_vram=8 * GIB, available_vram=GIB, vram_budget_bytes=4 * GIB, gpus=gpus)
    hot.node("plain", total_ram=4 * GIB, available_ram=GIB)
    hot.node("pending", approved_at=None)
    for number in range(12):
        Operation.objects.create(kind="model_load", key=str(number), element=f"m{number}")
    body = overview()
    (gpu, plain) = body["nodes"]
    assert (gpu["gpus"], gpu["busy"], gpu["vram_used"], gpu["vram_total"]) == (3, 75.0, 3 * GIB, 4 * GIB)
    assert (plain["gpus"], plain["busy"], plain["ram_used"], plain["ram_total"]) == (
        0,
        None,
        3 * GIB,
        4 * GIB,
    )
    assert (body["node_count"], body["running_count"], len(body["running"])) == (2, 12, 10)
    assert body["running"][0]["element"] == "m11"
    assert body["first_steps"] == []


def test_the_traffic_is_of_the_minute_that_all_processes_have_reported() -> None:
    now = clock.now()
    partitions.create_missing((store.SAMPLES_TABLE, now - timedelta(seconds=ago)) for ago in (0, 60))
    rows = [
        ("model/", now - timedelta(seconds=30), "{60,6,0,1200,4,800}"),
        ("model/", now - timedelta(hours=2), "{9}"),
    ]
    partitions.create_missing([(store.SAMPLES_TABLE, rows[1][1])])
    with connection.cursor() as cursor:
        cursor.executemany("INSERT INTO figure_samples VALUES (%s, %s, %s)", rows)
    assert overview()["traffic"] == {
        "requests_per_second": 1.0,
        "errors_per_second": 0.1,
        "tokens_per_second": 20.0,
        "first_token_seconds": 0.2,
    }
    store.SAMPLES_TABLE.drop(before=now + 2 * series.HOUR)


def test_the_rates_of_models_are_of_the_same_minute_in_a_constant_number_of_queries() -> None:
    now = clock.now()
    partitions.create_missing((store.SAMPLES_TABLE, now - timedelta(seconds=ago)) for ago in (0, 60))
    node, client, costs = hot.node(), api.admin(), list[int]()
    hot.replica(node, model="silent")
    with connection.cursor() as cursor:
        row = ("model/busy", now - timedelta(seconds=30), "{60,6,0,1200,4,800}")
        cursor.execute("INSERT INTO figure_samples VALUES (%s, %s, %s)", row)
    for name in ("busy", "other"):
        hot.replica(node, model=name)
        with CaptureQueriesContext(connection) as queries:
            models = client.get("/api/figures/models").json()["models"]
        costs.append(len(queries))
    silent = {
        "requests_per_second": 0,
        "errors_per_second": 0,
        "tokens_per_second": 0,
        "first_token_seconds": None,
    }
    busy = {
        "requests_per_second": 1,
        "errors_per_second": 0.1,
        "tokens_per_second": 20,
        "first_token_seconds": 0.2,
    }
    assert models == [{"name": "busy", **busy}, {"name": "other", **silent}, {"name": "silent", **silent}]
    assert len(set(costs)) == 1
    store.SAMPLES_TABLE.drop(before=now + 2 * series.HOUR)


def test_first_steps_are_done_once_somebody_has_taken_them() -> None:
    def done() -> list[bool]:
        return [step["done"] for step in overview()["first_steps"]]

    assert done() == [False, False, False]
    hot.node("one")
    ModelLoadInfo.objects.create(model_name="m", backend_type="b")
    assert done() == [False, True, False]


def test_chatting_is_done_by_a_request_to_a_model_not_by_listing_the_models() -> None:
    def has_chatted() -> bool:
        return any(step["done"] for step in overview()["first_steps"] if step["id"] == "chat")

    now = clock.now()
    partitions.create_missing([(store.SAMPLES_TABLE, now)])
    insert = "INSERT INTO figure_samples VALUES (%s, %s, %s)"
    with connection.cursor() as cursor:
        cursor.execute(insert, ("model/", now, "{1,0,0,0,0,0}"))
        assert not has_chatted()
        cursor.execute(insert, ("model/m", now, "{1,0,3,3,1,9}"))
    assert has_chatted()
    store.SAMPLES_TABLE.drop(before=now + 2 * series.HOUR)
