"""`GET /api/models/capabilities`: what is defined and what nodes have, for the pages."""

import dataclasses
from pathlib import Path

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext
from pytest_django import Settings

from tests.support import api, fleet

pytestmark = pytest.mark.django_db
LISTED = "/api/models/capabilities"
TEXT = ["FLAG_CHAT", "FLAG_COMPLETION", "FLAG_TOKENIZE"]


@pytest.fixture(autouse=True)
def models(settings: Settings, tmp_path: Path) -> Path:
    """The models folder; a file that is no definition lies in it."""
    settings.CLUSTER = dataclasses.replace(settings.CLUSTER, models_path=tmp_path)
    (tmp_path / "broken.yaml").write_text("name: broken\n")
    return tmp_path


@pytest.mark.rule("E65")
def test_defined_models_and_those_that_only_nodes_have_are_listed_by_name(models: Path) -> None:
    for name, more in (("zeta", "embeddings: true\n"), ("org/alpha", "")):
        text = f"name: {name}\nbackend: echo\n{more}parameters:\n  model: x\n"
        (models / f"{name.replace('/', '-')}.yaml").write_text(text)
    node = fleet.approved("a")
    fleet.replica(node, "stray")
    place = {"node_id": str(node.id), "node_name": "a", "state": "loaded", "node_status": node.status}
    known = {"disabled": False, "pinned": False}
    alpha, stray, zeta = api.admin().get(LISTED).json()["data"]
    assert alpha == {"id": "org/alpha", "capabilities": TEXT, "backend": "echo"} | known
    assert zeta == {"id": "zeta", "capabilities": ["FLAG_EMBEDDINGS"], "backend": "echo"} | known
    assert (stray["source"], stray["loaded_on"]) == ("registry-only", [place])


def test_files_that_cannot_be_used_are_named_with_their_reason(models: Path) -> None:
    """Review R6: only the log knew."""
    (models / "date.yaml").write_text("name: date\nsince: 2026-13-45\n")
    (models / "good.yaml").write_text("name: good\nbackend: echo\nparameters:\n  model: x\n")
    answer = api.admin().get(LISTED).json()
    assert [one["id"] for one in answer["data"]] == ["good"]
    reason = "is not valid YAML: not a value of timestamp: month must be in 1..12 (line 2, column 8)"
    assert answer["definitionErrors"] == [
        {"file": "broken.yaml", "error": "has no `parameters` section"},
        {"file": "date.yaml", "error": reason},
    ]
    health = {one["id"]: one for one in api.admin().get("/api/system/health").json()["parts"]}
    assert health["models"]["state"] == "warning"
    assert f"date.yaml {reason}" in health["models"]["text"]


def test_the_list_costs_the_same_queries_for_any_number_of_replicas() -> None:
    client = api.admin()
    node, costs = fleet.approved(), list[int]()
    for index in range(3):
        fleet.replica(node, f"model-{index}", index)
        with CaptureQueriesContext(connection) as queries:
            assert len(client.get(LISTED).json()["data"]) == len(costs) + 1
        costs.append(len(queries))
    assert len(set(costs)) == 1
