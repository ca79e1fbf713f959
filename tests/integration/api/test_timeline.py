"""A node's timeline by REST: newest first, in pages, also of a node that is gone."""

from typing import Any
from uuid import UUID, uuid4

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from localai_cluster.accounts import actors
from localai_cluster.kit import clock
from nodes.models import BackendNode, NodeEvent
from nodes.registry import timeline
from tests.support import api

pytestmark = pytest.mark.django_db


def events(node: UUID | str, query: str = "") -> Any:
    return api.admin().get(f"/api/nodes/{node}/events{query}")


def written(count: int, node_id: UUID | None = None) -> UUID:
    """So many events of a node that need not exist."""
    node_id, now = node_id or uuid4(), clock.now()
    entry = timeline.Entry(node_id, "w1", NodeEvent.Kind.LABELS, actors.STATIC_KEY)
    timeline.record(*[entry] * count, at=now)
    return node_id


def test_an_event_says_what_who_why_and_from_where_to_where() -> None:
    """With the request that caused it, so that the logs can be found."""
    node = api.make_node()
    api.admin().post(f"/api/nodes/{node.id}/drain", {"reason": "new disk", "deadline_seconds": 5})
    first = events(node.id).json()["events"][0]
    row = NodeEvent.objects.get(kind="drained")
    assert first == {
        "id": row.pk,
        "node_id": str(node.id),
        "node_name": "w1",
        "kind": "drained",
        "at": row.at.isoformat().replace("+00:00", "Z"),
        "last_at": row.at.isoformat().replace("+00:00", "Z"),
        "count": 1,
        "actor_kind": "static_key",
        "actor": "static-key",
        "cause": "new disk",
        "status_before": "healthy",
        "status_after": "draining",
        "detail": {"deadline_seconds": 5},
    } | ({"request_id": row.request_id} if row.request_id else {})


def test_newest_first_and_every_event_once() -> None:
    """Following the cursor, also while new events are written."""
    node = written(7)
    seen, query = [], "?limit=3"
    while query:
        page = events(node, query).json()
        seen += [event["id"] for event in page["events"]]
        query = f"?limit=3&cursor={page['next_cursor']}" if "next_cursor" in page else ""
        written(1, node)
    assert seen == sorted(seen, reverse=True)
    assert seen == list(NodeEvent.objects.order_by("-id").values_list("id", flat=True))[-7:]


@pytest.mark.parametrize(
    ("count", "query", "shown", "more"),
    [
        (0, "", 0, False),
        (50, "", 50, False),
        (51, "", 50, True),
        (3, "?limit=3", 3, False),
        (4, "?limit=3", 3, True),
    ],
)
def test_pages(count: int, query: str, shown: int, more: bool) -> None:
    """50 unless asked otherwise; a cursor only if there is something behind it."""
    node = api.make_node()
    NodeEvent.objects.all().delete()
    written(count, node.id)
    page = events(node.id, query).json()
    assert (len(page["events"]), "next_cursor" in page) == (shown, more)


def test_one_kind_only() -> None:
    """And an empty page for a kind that has not happened."""
    node = api.make_node()
    api.admin().post(f"/api/nodes/{node.id}/drain")
    assert [event["kind"] for event in events(node.id, "?kind=drained").json()["events"]] == ["drained"]
    assert events(node.id, "?kind=revoked").json() == {"events": []}


def test_the_timeline_outlives_the_node() -> None:
    """404 only when there is neither."""
    node = api.make_node()
    assert api.admin().delete(f"/api/nodes/{node.id}").status_code == 200
    assert not BackendNode.objects.exists()
    assert events(node.id).json()["events"][0]["kind"] == "deregistered"
    NodeEvent.objects.all().delete()
    assert events(node.id).status_code == 404


@pytest.mark.parametrize("node_id", ["nope", "00000000-0000-4000-8000-00000000dead", "%00"])
def test_unknown_nodes_are_404(node_id: str) -> None:
    """Before the parameters are looked at."""
    assert events(node_id).status_code == 404
    assert events(node_id, "?limit=0").status_code == 404


@pytest.mark.parametrize(
    ("query", "says"),
    [
        ("limit=0", "limit"),
        ("limit=501", "limit"),
        ("limit=x", "limit"),
        ("cursor=0", "cursor"),
        ("cursor=-1", "cursor"),
        ("cursor=9223372036854775808", "cursor"),
        ("kind=nothing", "kind"),
        ("kind=", "kind"),
        ("since=1", "since"),
    ],
)
def test_bad_parameters_are_400_and_named(query: str, says: str) -> None:
    """As with every list."""
    refused = events(written(1), f"?{query}")
    assert (refused.status_code, api.message(refused).startswith(says)) == (400, True)


def test_a_page_costs_the_same_however_long_the_timeline() -> None:
    """The index answers."""
    counts = set()
    node = api.make_node()
    for more in (1, 300):
        written(more, node.id)
        with CaptureQueriesContext(connection) as queries:
            assert events(node.id, "?limit=100").status_code == 200
        counts.add(len(queries))
    assert counts == {2}


@pytest.mark.parametrize("kind", [NodeEvent.Kind.CONFLICT, NodeEvent.Kind.REGISTERED])
def test_repeated_events_of_a_worker_are_one_event_with_a_count(kind: NodeEvent.Kind) -> None:
    """A minute each; the time of the first and of the last."""
    node = api.make_node()
    now = clock.now().replace(second=0, microsecond=0)
    entry = timeline.Entry(node.id, "w1", kind, actors.WORKER, "another secret", "healthy", "healthy")
    other = timeline.Entry(node.id, "w1", kind, actors.WORKER, "another secret", "offline", "healthy")
    for second in (1, 2, 3):
        timeline.record(entry, at=now.replace(second=second))
    timeline.record(entry, other, entry, at=now.replace(second=4))
    told = events(node.id, f"?kind={kind}").json()["events"]
    other_event, event = (event for event in told if event["cause"] == "another secret")
    assert (event["count"], event["at"][17:19], event["last_at"][17:19]) == (5, "01", "04")
    assert other_event["count"] == 1


def test_each_event_of_a_person_has_its_own_row() -> None:
    node = api.make_node()
    entry = timeline.Entry(node.id, "w1", NodeEvent.Kind.DRAINED, actors.command("ann"), "power")
    timeline.record(entry, entry, at=clock.now())
    assert [event["count"] for event in events(node.id, "?kind=drained").json()["events"]] == [1, 1]
