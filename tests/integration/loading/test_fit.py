"""Where a model fits: every node with a reason or none, by the questions that placement asks."""

import dataclasses
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

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
