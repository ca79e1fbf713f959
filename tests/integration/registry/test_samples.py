"""The memory of nodes over the last hour: what is kept, once a minute, and what is forgotten."""

from datetime import UTC, datetime, timedelta

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from nodes.models import NodeSample
from nodes.reconcilers import tasks
from nodes.registry import resources
from tests.support import api, hot

pytestmark = pytest.mark.django_db(transaction=True)

GIB = 2**30
AT = datetime(2026, 8, 22, 10, 0, 30, tzinfo=UTC)
MINUTE = AT.replace(second=0)


@pytest.mark.rule("UW13", "UI-4.16")
def test_a_minute_has_one_sample_of_each_node_that_is_heard() -> None:
    """Under a budget what counts is what may be used; what is not reported is not known."""
    plain = hot.node(
        "plain", total_vram=24 * GIB, available_vram=20 * GIB, total_ram=64 * GIB, available_ram=60 * GIB
    )
    tight = hot.node("tight", total_vram=24 * GIB, available_vram=5 * GIB, vram_budget_bytes=12 * GIB)
    hot.node("silent")
    api.make_node("pending", approved=False, total_vram=GIB)
    assert resources.store_samples(now=AT) == 2
    assert resources.store_samples(now=AT + timedelta(seconds=20)) == 0
    assert resources.samples_of_node(plain.id, now=AT) == [(MINUTE, 4 * GIB, 4 * GIB)]
    assert resources.samples_of_node(tight.id, now=AT) == [(MINUTE, 7 * GIB, None)]


def test_what_is_older_than_an_hour_is_forgotten() -> None:
    node = hot.node("one", total_ram=2, available_ram=1)
    for minutes in (0, 1, 61):
        resources.store_samples(now=AT + timedelta(minutes=minutes))
    later = AT + timedelta(minutes=61)
    assert [at for at, *_ in resources.samples_of_node(node.id, now=later)] == [
        MINUTE + timedelta(minutes=n) for n in (1, 61)
    ]
    assert NodeSample.objects.count() == 2


def test_the_number_of_statements_does_not_grow_with_the_fleet() -> None:
    counts = []
    for size in (1, 6):
        for number in range(size):
            hot.node(f"{size}-{number}", total_ram=2, available_ram=1)
        with CaptureQueriesContext(connection) as queries:
            resources.store_samples(now=AT + timedelta(minutes=size))
        counts.append(len(queries))
    assert counts[0] == counts[1]


def test_the_route_answers_what_the_task_has_kept() -> None:
    node = hot.node("one", total_ram=2, available_ram=1)
    tasks.keep_samples()
    told = api.admin().get(f"/api/nodes/{node.id}/memory").json()["samples"]
    assert [(one["vram_used"], one["ram_used"]) for one in told] == [(None, 1)]
