"""Where a model fits: every node with a reason or none, by the questions that placement asks."""

import dataclasses
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from localai_cluster.kit import clock
from nodes.loading import load_request
from nodes.models import ModelSchedulingConfig, NodeLabel
from nodes.placement.choose import Need
from tests.support import api, hot

pytestmark = pytest.mark.django_db(transaction=True)

FIT = "/api/placement/fit/"
GIB = 2**30


@pytest.fixture(autouse=True)
def models(tmp_path: Path, settings: Any) -> Path:
    """A models folder with the definition `org/m`."""
    settings.CLUSTER = dataclasses.replace(settings.CLUSTER, models_path=tmp_path)
    (tmp_path / "m.yaml").write_text("name: org/m\nbackend: echo\nparameters:\n  model: m\n")
    return tmp_path


def fit(model: str = "org/m") -> Any:
    answer = api.admin().get(FIT + model)
    assert answer.status_code == 200, answer.content
    return answer.json()


@pytest.mark.rule("UW8", "UW9", "UI-7.3")
def test_every_node_has_its_reason_or_none() -> None:
    """And lack of VRAM that only ranks a node lower is told beside it."""
    ModelSchedulingConfig.objects.create(model_name="org/m", node_selector={"tier": "fast"})
    fits, small, full, other = (hot.node(name, available_vram=8 * GIB) for name in ("a", "b", "c", "d"))
    type(small).objects.filter(pk=small.pk).update(available_vram=GIB)
    for node in (fits, small, full):
        NodeLabel.objects.create(node=node, key="tier", value="fast")
    hot.replica(full, "org/m")
    with patch.object(load_request, "estimate_need", return_value=Need(vram=4 * GIB)):
        told = fit()
    found = {one["node_id"]: (one["reason"], one["enough_vram"]) for one in told["nodes"]}
    assert found == {
        str(fits.id): ("", True),
        str(small.id): ("", False),
        str(full.id): ("no free slot for this model", True),
        str(other.id): ("not matching the rule's selector", True),
    }
    assert (told["placement"]["node"], told["placement"]["nodes"]) == (
        "a",
        {"considered": 4, "feasible": 2},
    )


def test_a_model_that_is_not_defined_is_not_found() -> None:
    assert api.admin().get(FIT + "nothing").status_code == 404
    assert api.admin().get(FIT + "x%00y").status_code == 404


def test_the_number_of_queries_is_the_same_for_any_fleet() -> None:
    counts = []
    for size in (1, 6):
        for number in range(size):
            hot.replica(hot.node(f"{size}-{number}"), "other")
        with CaptureQueriesContext(connection) as queries:
            fit()
        counts.append(len(queries))
    assert counts[0] == counts[1]


DEFINED = "backend: echo\nconcurrency_groups: [big]\nvram_needed: {}GiB\nparameters: {{model: m}}\n"


def fits(*names: str) -> Any:
    answer = api.admin().post("/api/placement/fit", {"models": names})
    assert answer.status_code == 200, answer.content
    return answer.json()["models"]


@pytest.mark.rule("UW8", "UW9")
def test_many_models_have_the_fit_of_each(models: Path) -> None:
    """With rules, groups, busy slots and replicas that could be unloaded, each is as if asked for alone."""
    for number, size in enumerate((2, 6, 20)):
        (models / f"{number}.yaml").write_text(f"name: m{number}\n" + DEFINED.format(size))
    ModelSchedulingConfig.objects.create(model_name="m1", node_selector={"tier": "fast"})
    large, small = hot.node("a", available_vram=8 * GIB), hot.node("b", available_vram=4 * GIB)
    NodeLabel.objects.create(node=large, key="tier", value="fast")
    hot.node("c", available_vram=8 * GIB, status="unhealthy")
    hot.replica(small, "m0", vram_needed=3 * GIB)
    hot.replica(large, "other", vram_needed=5 * GIB, last_used=clock.now() - timedelta(days=1))
    names = ["m2", "org/m", "m0", "m1"]
    for row, name in zip(fits(*names, "m2"), names, strict=True):
        alone = fit(name)
        possible = [node for node in alone["nodes"] if not node["reason"]]
        assert row == {
            "model": name,
            "defined": True,
            "fitting": sum(node["enough_vram"] for node in possible),
            "possible": len(possible),
            "says": alone["memory"]["says"],
        }
    assert "unload other#0" in fits("m1")[0]["says"]


def test_a_model_of_the_list_that_is_not_defined_fits_nowhere() -> None:
    hot.node("a")
    assert [row["defined"] for row in fits("nothing", "org/m")] == [False, True]
    assert fits("nothing") == [
        {"model": "nothing", "defined": False, "fitting": 0, "possible": 0, "says": ""}
    ]


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"models": []},
        {"models": "m"},
        {"models": [1]},
        {"models": ["x\0y"]},
        {"models": [" "]},
        {"models": ["m"] * 101},
    ],
)
def test_a_wrong_list_of_models_is_refused(body: Any) -> None:
    answer = api.admin().post("/api/placement/fit", body)
    assert (answer.status_code, answer.json()["error"]["field"]) == (400, "models")


def test_queries_do_not_grow_with_models_and_nodes(models: Path) -> None:
    counts = []
    for size in (1, 6):
        for number in range(size):
            (models / f"{size}-{number}.yaml").write_text(f"name: {size}-{number}\n" + DEFINED.format(9))
            hot.replica(hot.node(f"{size}-{number}", available_vram=GIB), "other")
        names = [f"{size}-{number}" for number in range(size)]
        with CaptureQueriesContext(connection) as queries:
            rows = fits(*names)
        assert all("missing" in row["says"] for row in rows)
        counts.append(len(queries))
    assert counts[0] == counts[1]
