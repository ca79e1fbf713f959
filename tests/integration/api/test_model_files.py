"""`/api/models/files`: unused files by place, and what a removal answers."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from localai_cluster.kit import clock, conf
from nodes.models import BroughtModel
from operations.models import Operation
from tests.support import api

pytestmark = pytest.mark.django_db(transaction=True)
LIST, REMOVE = "/api/models/files", "/api/models/files/remove"


@pytest.fixture(autouse=True)
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "models"
    path.mkdir()
    cluster = replace(conf.cluster(), models_path=path)
    monkeypatch.setattr(conf, "cluster", lambda: cluster)
    (path / "old.gguf").write_bytes(b"12345")
    return path


def call(method: str, path: str, body: Any = None, *, status: int) -> Any:
    answer = api.admin().send(method, path, body)
    assert answer.status_code == status, answer.content
    return answer.json()


def test_the_list_and_a_removal_on_the_control_plane() -> None:
    (place,) = call("GET", LIST, status=200)["places"]
    assert (place["node_id"], place["node_name"], place["total"]) == (None, "control plane", 5)
    assert [(file["path"], file["size"]) for file in place["files"]] == [("old.gguf", 5)]
    removal = call("POST", REMOVE, {"older_than_days": 0}, status=202)
    operation = Operation.objects.get()
    assert removal == {
        "message": "1 file is being removed",
        "paths": ["old.gguf"],
        "bytes": 5,
        "jobs": [{"jobID": str(operation.id), "statusUrl": f"/api/backends/job/{operation.id}"}],
        "jobID": str(operation.id),
        "statusUrl": f"/api/backends/job/{operation.id}",
    }
    assert (operation.kind, operation.element) == ("model_files_remove", "1 file")


def test_a_removal_on_a_node_deletes_its_models() -> None:
    node = api.make_node("n1")
    BroughtModel.objects.create(node_id=node.id, model_name="gone", size=7, seen_at=clock.now())
    places = call("GET", LIST, status=200)["places"]
    assert [(place["node_name"], place["total"]) for place in places] == [("control plane", 5), ("n1", 7)]
    removal = call("POST", REMOVE, {"node_id": str(node.id), "paths": ["gone"]}, status=202)
    operation = Operation.objects.get()
    assert (operation.kind, operation.node_id, operation.element) == ("model_delete", node.id, "gone")
    assert removal["jobs"][0]["jobID"] == str(operation.id)


@pytest.mark.parametrize(
    ("body", "status", "field"),
    [
        ({}, 400, "paths"),
        ({"paths": []}, 400, "paths"),
        ({"paths": ["../x"]}, 404, "paths"),
        ({"paths": "old.gguf"}, 400, "paths"),
        ({"older_than_days": -1}, 400, "older_than_days"),
        ({"bytes_needed": 0}, 400, "bytes_needed"),
        ({"bytes_needed": 2**70}, 400, "bytes_needed"),
        ({"node_id": "x", "bytes_needed": 1}, 400, "node_id"),
        ({"node_id": "00000000-0000-4000-8000-00000000dead", "bytes_needed": 1}, 404, None),
    ],
)
def test_what_is_refused(body: Any, status: int, field: str | None) -> None:
    error = call("POST", REMOVE, body, status=status)["error"]
    assert error.get("field") == field
    assert not Operation.objects.exists()


def test_there_may_be_nothing_to_remove() -> None:
    removal = call("POST", REMOVE, {"older_than_days": 5}, status=200)
    assert removal["message"] == "there is no such unused file"
    assert removal["jobs"] == []


def test_a_broken_definition_is_named(models: Path) -> None:
    (models / "b.yaml").write_text("name: [")
    (place,) = call("GET", LIST, status=200)["places"]
    assert "b.yaml cannot be used" in place["problem"]
    assert "b.yaml" in call("POST", REMOVE, {"older_than_days": 0}, status=409)["error"]["message"]


def test_one_removal_at_a_time(models: Path) -> None:
    call("POST", REMOVE, {"older_than_days": 0}, status=202)
    call("POST", REMOVE, {"older_than_days": 0}, status=202)
    (models / "other.gguf").write_bytes(b"1")
    answer = call("POST", REMOVE, {"paths": ["other.gguf"]}, status=409)
    assert "a removal of 1 file is running" in answer["error"]["message"]
    assert Operation.objects.count() == 1
