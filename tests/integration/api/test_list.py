"""The list of nodes: order, filters, pages, counts, and what it costs (`contract/http-api.md` §2.1)."""

import contextlib
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from urllib.parse import quote

import orjson
import pytest
from django.db import connection, transaction
from django.test.utils import CaptureQueriesContext
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from localai_cluster.kit import clock, names
from nodes.models import BackendNode, NodeConflict, NodeLabel, NodeModel
from nodes.registry import node_rows
from tests.support import api
from tests.support.effort import EFFORT

pytestmark = pytest.mark.django_db


def fleet(count: int, *, start: int = 0) -> list[BackendNode]:
    """Nodes with three labels and two replicas each, a third of them with an open conflict."""
    now = clock.now()
    nodes = [
        BackendNode(
            name=f"n{number:04d}",
            name_key=names.key(f"n{number:04d}"),
            address="127.0.0.1:1",
            fingerprint=f"{number:064x}",
            approved_at=now,
            last_heartbeat=now,
        )
        for number in range(start, start + count)
    ]
    BackendNode.objects.bulk_create(nodes)
    keys = ("tier", "zone", "node.name")
    NodeLabel.objects.bulk_create(NodeLabel(node=node, key=key, value="x") for node in nodes for key in keys)
    NodeModel.objects.bulk_create(
        NodeModel(node=node, model_name="m", replica_index=index, phase="serving", address="x:1", in_flight=1)
        for node in nodes
        for index in range(2)
    )
    NodeConflict.objects.bulk_create(NodeConflict(node=node, kind="secret", claim="x") for node in nodes[::3])
    return nodes


def listed(query: str = "") -> list[str]:
    answer = api.admin().get(f"/api/nodes{query}")
    assert answer.status_code == 200, answer.content
    return [entry["name"] for entry in answer.json()]


@pytest.mark.rule("R1.107", "http-2.1")
@pytest.mark.parametrize("query", ["", "?limit=10", "?label=tier%3Dx&search=n&sort=-last_heartbeat"])
def test_the_number_of_queries_is_constant(query: str) -> None:
    """At 1, 20 and 200 nodes, with labels, counts and conflicts; one more reads nodes that were written."""
    counts, first_counts = set(), set()
    for size in (1, 20, 200):
        fleet(size - BackendNode.objects.count(), start=BackendNode.objects.count())
        BackendNode.objects.update(available_ram=size)
        with CaptureQueriesContext(connection) as queries:
            api.admin().get(f"/api/nodes{query}")
        first_counts.add(len(queries))
        with CaptureQueriesContext(connection) as queries:
            shown = api.admin().get(f"/api/nodes{query}").json()
        assert len(shown) == min(size, 10 if "limit" in query else size)
        assert all(
            (entry["model_count"], entry["in_flight_count"], len(entry["labels"])) == (2, 2, 3)
            for entry in shown
        )
        counts.add(len(queries))
    assert counts == {3 if "limit" in query else 2}
    assert first_counts == {number + 1 for number in counts}


@pytest.mark.rule("R1.107")
def test_counts_are_those_of_the_seed() -> None:
    """D4: `model_count` counts loaded replicas, `in_flight_count` sums loaded and unloading ones."""
    node = api.make_node()
    for index, (state, running) in enumerate(
        [("loaded", 3), ("loaded", 0), ("unloading", 4), ("loading", 5), ("staging", 6)]
    ):
        api.replica(node, replica_index=index, state=state, in_flight=running)
    (entry,) = api.admin().get("/api/nodes").json()
    detail = api.admin().get(f"/api/nodes/{node.id}").json()
    for model_count, in_flight in [
        (entry["model_count"], entry["in_flight_count"]),
        (detail["model_count"], detail["in_flight_count"]),
    ]:
        assert (model_count, in_flight) == (2, 7)


@pytest.mark.rule("R1.107", "http-2.1", "T-REG-141")
def test_without_parameters_the_list_is_whole_and_by_name() -> None:
    """An empty fleet is `[]`."""
    answer = api.admin().get("/api/nodes")
    assert (answer.json(), answer["X-Total-Count"]) == ([], "0")
    for name in ("c", "a", "b"):
        api.make_node(name)
    answer = api.admin().get("/api/nodes")
    assert [entry["name"] for entry in answer.json()] == ["a", "b", "c"]
    assert (answer["X-Total-Count"], "Link" in answer.headers) == ("3", False)
    assert answer["Content-Type"] == "application/json"


@pytest.mark.rule("R1.107", "http-2.1")
def test_a_node_without_labels_omits_them_in_the_list_only() -> None:
    """The detail has an empty object."""
    node = api.make_node()
    NodeLabel.objects.all().delete()
    (entry,) = api.admin().get("/api/nodes").json()
    assert "labels" not in entry
    assert api.admin().get(f"/api/nodes/{node.id}").json()["labels"] == {}


@pytest.mark.rule("http-2.1")
def test_flags_are_there_only_when_they_hold() -> None:
    """`weak_identity`, `rejected` and `open_conflicts` are omitted when empty; others' do not count."""
    plain, marked = api.make_node("a"), api.make_node("b", approved=False)
    BackendNode.objects.filter(pk=marked.pk).update(
        fingerprint="", weak_identity=True, rejected_at=clock.now(), rejected_by="ann", reject_reason="no"
    )
    for number in range(2):
        NodeConflict.objects.create(node=marked, kind="weak", claim=f"{number}")
    NodeConflict.objects.create(node=plain, kind="secret", claim="x", state="refused")
    first, second = api.admin().get("/api/nodes").json()
    assert not {"weak_identity", "rejected", "open_conflicts"} & set(first)
    assert (second["weak_identity"], second["open_conflicts"]) == (True, 2)
    assert (second["rejected"]["by"], second["rejected"]["reason"]) == ("ann", "no")


@pytest.mark.rule("http-2.1", "http-0.5")
def test_times_and_absent_values() -> None:
    """RFC 3339 with sub-second digits in UTC; the year-1 stamp for a node that was never heard."""
    node = api.make_node()
    BackendNode.objects.filter(pk=node.pk).update(last_heartbeat=None)
    (entry,) = api.admin().get("/api/nodes").json()
    assert entry["last_heartbeat"] == "0001-01-01T00:00:00Z"
    assert entry["created_at"] == api.node(node.id).created_at.strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    assert not {"capability", "vram_budget", "vram_budget_bytes"} & set(entry)
    assert None not in entry.values()


SECRETS = ("token", "hash", "api_key", "auth_user", "user_id", "fingerprint")


@pytest.mark.rule("R1.3", "http-2.1")
def test_credentials_are_never_shown() -> None:
    """Neither token hash nor key or user id; the fingerprint stands in the detail alone."""
    node = api.make_node("agent-1", node_type="agent", address="")
    row = api.node(node.id)
    assert row.auth_user_id is not None
    (entry,) = api.admin().get("/api/nodes").json()
    detail = api.admin().get(f"/api/nodes/{node.id}").json()
    assert detail["identity"].pop("fingerprint") == row.fingerprint
    for shown in (entry, detail, detail["identity"]):
        assert not [name for name in shown if any(word in name for word in SECRETS)]
    assert row.fingerprint not in f"{entry}{detail}"


def zoo() -> None:
    """Four nodes that differ in everything the list can be asked for."""
    api.make_node("alpha", address="10.0.0.1:1", gpu_vendor="nvidia", total_vram=4, available_vram=4)
    api.make_node("beta", address="10.0.0.2:1", labels={"tier": "fast", "zone": "a"}, approved=False)
    api.make_node("gamma", node_type="agent", address="", labels={"tier": "fast"})
    api.make_node("Delta", address="192.168.0.7:1", gpu_vendor="amd", total_vram=9, available_vram=9)
    now = clock.now()
    for age, name in enumerate(("gamma", "alpha", "Delta")):
        BackendNode.objects.filter(name=name).update(last_heartbeat=now - timedelta(seconds=age))
    BackendNode.objects.filter(name="beta").update(last_heartbeat=None)
    h100 = {"index": 0, "uuid": "", "name": "NVIDIA H100 80GB HBM3", "total_vram": 4, "free_vram": 4}
    BackendNode.objects.filter(name="alpha").update(gpus=[h100, h100 | {"index": 1}])


@pytest.mark.rule("http-2.1", "http-2.2")
@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("?status=pending", {"beta"}),
        ("?status=healthy", {"alpha", "gamma", "Delta"}),
        ("?status=offline", set()),
        ("?type=agent", {"gamma"}),
        ("?type=backend&status=healthy", {"alpha", "Delta"}),
        ("?vendor=nvidia", {"alpha"}),
        ("?vendor=NVIDIA", {"alpha"}),
        ("?vendor=nvi", set()),
        ("?search=ALPH", {"alpha"}),
        ("?search=10.0.0.", {"alpha", "beta"}),
        ("?search=h100", {"alpha"}),
        ("?search=Nvidia", {"alpha"}),
        ("?search=%5B", set()),
        ("?search=%25", set()),
        ("?search=_", set()),
        ("?label=tier%3Dfast", {"beta", "gamma"}),
        ("?label=tier=fast&label=zone=a", {"beta"}),
        ("?label=tier=fast&label=tier=slow", set()),
        ("?label=tier=", set()),
        ("?label=gpu.vendor=amd", {"Delta"}),
    ],
)
def test_filters(query: str, expected: set[str]) -> None:
    """Several together must all hold; `X-Total-Count` counts what they leave."""
    zoo()
    answer = api.admin().get(f"/api/nodes{query}")
    assert {entry["name"] for entry in answer.json()} == expected
    assert answer["X-Total-Count"] == str(len(expected))


@pytest.mark.rule("http-2.1")
@pytest.mark.parametrize(
    ("sort", "first", "last"),
    [
        ("available_vram", "beta", "Delta"),
        ("-available_vram", "Delta", "gamma"),
        ("last_heartbeat", "beta", "gamma"),
        ("-last_heartbeat", "gamma", "beta"),
        ("created_at", "alpha", "Delta"),
        ("-created_at", "Delta", "alpha"),
        ("-status", "beta", "gamma"),
    ],
)
def test_orders(sort: str, first: str, last: str) -> None:
    """A node that was never heard is the longest silent; equals stand by name."""
    zoo()
    order = listed(f"?sort={sort}")
    assert (order[0], order[-1], len(order)) == (first, last, 4)


def test_by_name_backwards() -> None:
    """`-name` turns the default round."""
    zoo()
    assert listed("?sort=-name") == listed()[::-1]


def links(answer: Any) -> dict[str, str]:
    found = {}
    for part in answer.headers.get("Link", "").split(", "):
        if part:
            address, _, name = part.partition("; rel=")
            found[name.strip('"')] = address.strip("<>")
    return found


def test_pages_lead_through_the_whole_list() -> None:
    """Following `next` shows every node once; filters stay in the links."""
    fleet(7)
    api.make_node("other")
    seen, where = [], "/api/nodes?limit=3&search=n0&sort=-name"
    while where:
        answer = api.admin().get(where)
        assert answer["X-Total-Count"] == "7"
        seen += [entry["name"] for entry in answer.json()]
        where = links(answer).get("next", "")
    assert seen == [f"n{number:04d}" for number in range(6, -1, -1)]


@pytest.mark.parametrize(
    ("query", "names"),
    [
        ("limit=3", {"first", "next", "last"}),
        ("limit=3&offset=3", {"first", "prev", "next", "last"}),
        ("limit=3&offset=6", {"first", "prev", "last"}),
        ("limit=3&offset=100", {"first", "prev", "last"}),
        ("limit=7", {"first", "last"}),
        ("offset=2", set()),
    ],
)
def test_neighbouring_pages(query: str, names: set[str]) -> None:
    """Only those that there are."""
    fleet(7)
    answer = api.admin().get(f"/api/nodes?{query}")
    assert set(links(answer)) == names
    if "last" in names:
        assert api.admin().get(links(answer)["last"]).json()[-1]["name"] == "n0006"


BAD = [
    ("status=registering", "status"),
    ("status=", "status"),
    ("status=healthy&status=pending", "status"),
    ("type=both", "type"),
    ("vendor=" + "x" * 33, "vendor"),
    ("search=" + "x" * 256, "search"),
    ("search=%00", "search"),
    ("search=%E2%80%8B", "search"),
    ("label=tier", "label"),
    ("label==x", "label"),
    ("label=", "label"),
    ("label=" + "k" * 129 + "=x", "label"),
    ("label=k=" + "v" * 256, "label"),
    ("label=k%00=v", "label"),
    ("&".join(["label=a=b"] * 17), "label"),
    ("sort=password", "sort"),
    ("sort=--name", "sort"),
    ("sort=name,status", "sort"),
    ("limit=0", "limit"),
    ("limit=-1", "limit"),
    ("limit=1001", "limit"),
    ("limit=x", "limit"),
    ("limit=1.0", "limit"),
    ("limit=%D9%A3", "limit"),
    ("limit=1&limit=2", "limit"),
    ("offset=-1", "offset"),
    ("offset=1000001", "offset"),
    ("offset=99999999999999999999", "offset"),
    ("page=2", "page"),
    ("Status=healthy", "Status"),
    ("a%00%22=1", "a"),
]


@pytest.mark.rule("http-2.1")
@pytest.mark.parametrize(("query", "says"), BAD, ids=[str(number) for number in range(len(BAD))])
def test_bad_parameters_are_400_and_named(query: str, says: str) -> None:
    """Unknown ones too: a filter that is not applied shows too much."""
    refused = api.admin().get(f"/api/nodes?{query}")
    assert (refused.status_code, refused.json()["error"]["type"]) == (400, "node_error")
    assert api.message(refused).startswith(says)


@given(
    name=st.sampled_from(["status", "type", "label", "vendor", "search", "sort", "limit", "offset", "x"]),
    value=st.text(max_size=20) | st.integers().map(str),
)
@settings(max_examples=80 * EFFORT, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_query_ends_in_200_or_400(name: str, value: str) -> None:
    """Never a 500."""
    sent = quote(value.encode("utf-8", "replace"))
    assert api.admin().get(f"/api/nodes?{name}={sent}").status_code in (200, 400)


def test_a_part_of_the_list_shows_what_the_whole_shows() -> None:
    """Filters and pages fetch labels and counts another way; the elements are the same."""
    fleet(5)
    nodes = BackendNode.objects.order_by("name")
    whole = decoded(nodes, whole=True)
    assert decoded(nodes) == whole == node_rows.list_rows(nodes)
    assert decoded(nodes[1:3]) == whole[1:3]


def decoded(nodes: Any, *, whole: bool = False) -> Any:
    """The list as a client reads it."""
    return orjson.loads(orjson.dumps(node_rows.list_json(nodes, whole=whole)))


def first(nodes: list[BackendNode]) -> Any:
    """The first node, to be written without its model."""
    return BackendNode.objects.filter(pk=nodes[0].pk)


def remove(nodes: list[BackendNode]) -> None:
    """Remove the first node with its replicas."""
    NodeModel.objects.filter(node=nodes[0]).delete()
    first(nodes).delete()


CHANGES: dict[str, Callable[[Any], object]] = {
    "a heartbeat": lambda nodes: first(nodes).update(last_heartbeat=clock.now(), available_vram=5),
    "twice in a transaction": lambda nodes: [first(nodes).update(available_ram=size) for size in (6, 7)],
    "a new name changes the order": lambda nodes: first(nodes).update(name="z"),
    "a fact": lambda nodes: first(nodes).update(rejected_at=clock.now(), rejected_by="ann"),
    "an address of signs": lambda nodes: first(nodes).update(gpu_vendor='a"\\\n\u2028}'),
    "a label": lambda nodes: NodeLabel.objects.filter(key="tier").update(value='x"\\}é'),
    "a lost label": lambda nodes: NodeLabel.objects.filter(node=nodes[0], key="tier").delete(),
    "no labels": lambda nodes: NodeLabel.objects.all().delete(),
    "a count": lambda nodes: NodeModel.objects.filter(node=nodes[0]).update(in_flight=9),
    "no replicas": lambda nodes: NodeModel.objects.all().delete(),
    "a decision": lambda nodes: NodeConflict.objects.update(state="rejected"),
    "removed": remove,
    "added": lambda nodes: fleet(2, start=9),
}


@pytest.mark.rule("http-2.1")
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_the_list_is_that_of_a_fresh_read_after_any_change(change: Callable[[Any], object]) -> None:
    """Rows that nobody has written since the last list are not read again; rolled back ones are."""
    nodes, query = fleet(4), BackendNode.objects.order_by("name")
    before = decoded(query, whole=True)
    with contextlib.suppress(InterruptedError), transaction.atomic():
        change(nodes)
        changed = node_rows.list_rows(query)
        assert decoded(query, whole=True) == changed != before
        assert decoded(query[:2]) == changed[:2]
        raise InterruptedError
    assert decoded(query, whole=True) == before
    change(nodes)
    assert decoded(query, whole=True) == node_rows.list_rows(query) != before
