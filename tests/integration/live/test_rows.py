"""Nodes as pages see them, what a look costs, changes and how long they are kept, what operators are told."""

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.db import connection, transaction
from django.test.utils import CaptureQueriesContext
from hypothesis import given
from hypothesis import strategies as st

from localai_cluster import __version__
from localai_cluster.kit import conf, names
from localai_cluster.kit.settings_table import ClusterSettings
from nodes.live import notices, rows, watch
from nodes.live.watch import History
from nodes.models import BackendNode, NodeBackend, NodeConflict, NodeLabel, NodeModel
from nodes.registry import claims, lifecycle
from nodes.registry.mass_silence import CurrentHold
from operations.executor import controllers
from operations.models import ControllerBeat
from tests.support import fleet, live
from tests.support.fleet import ANNA, NOW, later
from tests.support.replicas import columns, forget_nodes

pytestmark = pytest.mark.django_db


def only() -> dict[str, Any]:
    """The one node."""
    (raw,) = rows.read_nodes().values()
    return rows.render(raw)


def conflict(node: BackendNode, claim: str = "x") -> NodeConflict:
    return NodeConflict.objects.create(node=node, kind="secret", claim=claim)


def test_engines_that_departed_are_counted_and_are_no_replicas() -> None:
    """With the time when the last of them counts as ended; every other phase shows its own deadline."""
    node = fleet.approved()
    phases = ("serving", "starting", "departed", "departed")
    for index, phase in enumerate(phases):
        values = columns(phase=phase)
        if phase != "serving":
            values["deadline"] = later(60 * index)
        NodeModel.engines.create(node=node, model_name="m", replica_index=index, **values)
    found = only()
    assert [(model["phase"], "deadline" in model) for model in found["models"]] == [
        ("serving", False),
        ("starting", True),
    ]
    until = datetime.fromisoformat(found["departed_until"])
    assert (found["departed_engines"], until) == (2, later(180))
    assert live.wrong_with({"type": "nodes.snapshot", "cursor": "x:1", "nodes": [found]}) == []


def test_every_key_is_there_for_a_node_of_which_nothing_is_known() -> None:
    """Empty rather than absent; it fits the document, and so does a patch of it."""
    fleet.register()
    BackendNode.objects.update(last_heartbeat=None, fingerprint="", source_address="")
    NodeLabel.objects.all().delete()
    node = only()
    assert live.wrong_with({"type": "nodes.snapshot", "cursor": "x:1", "nodes": [node]}) == []
    empty: dict[str, Any] = {
        "capability": "",
        "labels": {},
        "models": [],
        "backends": [],
        "last_heartbeat": None,
    }
    empty |= {
        "rejected": None,
        "revoked": None,
        "drain": None,
        "inventory_at": None,
        "open_conflicts": 0,
        "file_port": None,
    }
    assert node.items() >= empty.items()


@pytest.mark.rule("R1.107")
def test_replicas_of_all_states_come_and_counts_are_those_of_the_list() -> None:
    """D4: `model_count` counts loaded replicas, `in_flight_count` sums loaded and unloading ones."""
    node = fleet.approved()
    for index, (state, running) in enumerate(
        [("loaded", 3), ("unloading", 4), ("loading", 5), ("staging", 7)]
    ):
        fleet.replica(node, "b", index, state=state, in_flight=running)
    fleet.replica(node, "a", backend_type="mock")
    NodeBackend.objects.create(node=node, name="mock")
    NodeBackend.objects.create(node=node, name="echo")
    conflict(node)
    shown = only()
    assert (shown["model_count"], shown["in_flight_count"], shown["open_conflicts"]) == (2, 7, 1)
    assert [(one["model_name"], one["replica_index"], one["state"]) for one in shown["models"]] == [
        ("a", 0, "loaded"),
        ("b", 0, "loaded"),
        ("b", 1, "unloading"),
        ("b", 2, "loading"),
        ("b", 3, "staging"),
    ]
    assert shown["models"][0]["backend_type"] == "mock"
    assert shown["backends"] == ["echo", "mock"]
    assert live.wrong_with({"type": "nodes.delta", "cursor": "x:1", "changed": [shown], "removed": []}) == []


Story = Callable[[BackendNode], Any]


def revoked(node: BackendNode) -> None:
    claims.revoke(node.id, actor=ANNA, now=NOW, reason="stolen")


def silent(node: BackendNode) -> None:
    lifecycle.mark_silent([node.id], limit=60, actor=ANNA, now=later(100))


STORIES: dict[str, tuple[bool, Story, str, str, float | None]] = {
    "healthy": (True, lambda node: None, "healthy", "", None),
    "pending": (False, lambda node: None, "pending", "awaiting approval", 0),
    "claimed": (
        False,
        lambda node: [conflict(node, "x"), conflict(node, "y")],
        "pending",
        "awaiting approval; 2 other machines claim to be this node",
        0,
    ),
    "rejected": (
        False,
        lambda node: lifecycle.reject(node.id, actor=ANNA, now=later(5), reason="unknown machine"),
        "pending",
        "rejected by anna: unknown machine",
        5,
    ),
    "revoked": (True, revoked, "pending", "secret revoked by anna: stolen", 0),
    "drained": (
        True,
        lambda node: lifecycle.drain(node.id, actor=ANNA, now=later(7), reason="disk"),
        "draining",
        "drained by anna: disk",
        7,
    ),
    "draining itself": (
        True,
        lambda node: lifecycle.drain_by_worker(node.id, now=later(7)),
        "draining",
        "drained by the worker: its worker is stopping",
        7,
    ),
    "unhealthy": (
        True,
        lambda node: lifecycle.mark_unhealthy(node.id, actor=ANNA, now=later(8), reason="no answer"),
        "unhealthy",
        "no answer",
        8,
    ),
}


@pytest.mark.rule("R1.2")
@pytest.mark.parametrize("name", STORIES)
def test_each_status_says_why_and_since_when(name: str) -> None:
    """From the facts behind it, in words."""
    approved, happen, status, reason, seconds = STORIES[name]
    node = fleet.approved() if approved else fleet.register().node
    BackendNode.objects.update(created_at=NOW)
    happen(fleet.row(node))
    shown = only()
    assert (shown["status"], shown["reason"]) == (status, reason)
    since = None if shown["since"] is None else datetime.fromisoformat(shown["since"])
    assert since == (None if seconds is None else later(seconds))


def test_a_silent_node_says_since_when_and_why() -> None:
    """The reason is the pass' own."""
    node = fleet.approved()
    silent(node)
    shown = only()
    assert shown["status"] == "offline"
    assert shown["reason"] == fleet.row(node).offline_reason != ""
    assert datetime.fromisoformat(shown["since"]) == later(100)


def grow(size: int) -> None:
    """As many nodes as that, with labels, replicas, backends and some conflicts."""
    first = BackendNode.objects.count()
    nodes = [
        BackendNode(name=f"n{number}", name_key=names.key(f"n{number}"), address="127.0.0.1:1")
        for number in range(first, size)
    ]
    BackendNode.objects.bulk_create(nodes)
    NodeLabel.objects.bulk_create(NodeLabel(node=node, key=key, value="x") for node in nodes for key in "abc")
    NodeModel.objects.bulk_create(
        NodeModel(node=node, model_name="m", replica_index=index, **columns())
        for node in nodes
        for index in range(2)
    )
    NodeBackend.objects.bulk_create(NodeBackend(node=node, name="mock") for node in nodes)
    NodeConflict.objects.bulk_create(NodeConflict(node=node, kind="secret", claim="x") for node in nodes[::3])


@pytest.mark.django_db(transaction=True)
def test_a_look_costs_the_same_few_queries_for_any_number_of_nodes() -> None:
    """At 1, 20 and 200 nodes: six for nodes, and one each for the six other parts."""
    seen = set()
    for size in (1, 20, 200):
        grow(size)
        with CaptureQueriesContext(connection) as queries:
            assert len(watch.read_snapshot().nodes) == size
        seen.add(tuple(query["sql"].split(" ", 1)[0] for query in queries))
    assert seen == {("BEGIN", "SET", *["SELECT"] * 12, "COMMIT")}


@pytest.mark.django_db(transaction=True)
def test_a_look_sees_one_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica that goes while the look is at it is there with its node, or not at all."""
    node = fleet.approved()
    fleet.replica(node)
    seen: list[bool] = []
    labels = rows._read_labels

    def meanwhile() -> dict[str, str]:
        found = labels()
        seen.append(fleet.at_once(forget_nodes)[0] is None)
        return found

    monkeypatch.setattr(rows, "_read_labels", meanwhile)
    (raw,) = watch.read_snapshot().nodes.values()
    assert rows.render(raw)["model_count"] == 1
    assert seen == [True]
    assert watch.read_snapshot().nodes == {}


# Changes and how long they are kept: no database below.


def raws(**nodes: int) -> dict[str, rows.RawNode]:
    """Nodes by name, each with something that changes."""
    return {name: rows.RawNode((name, value), "", "", "", 0) for name, value in nodes.items()}


def take(kept: History, state: dict[str, rows.RawNode], at: float) -> bool:
    """Have the history compare and accept what is there."""
    return kept.accept(kept.compare(state), at)


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> History:
    """A history of two-key nodes."""
    monkeypatch.setattr(watch, "render", _shown)
    return History("e")


def _shown(raw: rows.RawNode) -> dict[str, Any]:
    return {"id": raw.columns[0], "value": raw.columns[1], "kept": True}


def test_a_patch_names_what_changed_and_several_are_one(plain: History) -> None:
    """From one look to the next; merged for a tab that missed some."""
    assert take(plain, raws(a=1, b=1), 0)
    assert not take(plain, raws(a=1, b=1), 1)
    assert take(plain, raws(a=2, b=1), 2)
    assert take(plain, raws(a=3, c=1), 3)
    assert plain.cursor == "e:3"
    assert plain.since(2) == ([{"id": "a", "value": 3}, {"id": "c", "value": 1, "kept": True}], ["b"])
    assert plain.since(1) == ([{"id": "a", "value": 3}, {"id": "c", "value": 1, "kept": True}], ["b"])
    assert plain.since(3) == ([], [])


def test_what_only_reads_differently_is_no_change(plain: History, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wire's object decides, not the row."""
    take(plain, raws(a=1), 0)
    assert not take(plain, {"a": rows.RawNode(("a", 1), "{}", "", "", 0)}, 1)


def test_a_look_that_fails_half_way_loses_nothing(plain: History, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that cannot be shown does not take along what was found before it: the next look has it."""
    take(plain, raws(a=1, b=1), 0)

    def broken(raw: rows.RawNode) -> dict[str, Any]:
        if raw.columns == ("b", 2):
            raise KeyError("x")
        return _shown(raw)

    monkeypatch.setattr(watch, "render", broken)
    with pytest.raises(KeyError):
        take(plain, raws(a=2, b=2), 1)
    assert (plain.cursor, plain.nodes["a"]["value"]) == ("e:1", 1)
    monkeypatch.setattr(watch, "render", _shown)
    assert take(plain, raws(a=2, b=2), 2)
    assert plain.since(1) == ([{"id": "a", "value": 2}, {"id": "b", "value": 2}], [])


def test_changes_are_kept_for_a_while_and_in_bounds(plain: History, monkeypatch: pytest.MonkeyPatch) -> None:
    """By age, by number, and by what they hold together; who stands before that starts again."""
    monkeypatch.setattr(watch, "MAX_HISTORY_CHANGES", 3)
    monkeypatch.setattr(watch, "MAX_HISTORY_PATCHES", 5)
    for turn in range(6):
        take(plain, raws(a=turn), turn)
    assert [plain.has_changes_after(number) for number in (-1, 2, 3, 6, 7)] == [
        False,
        False,
        True,
        True,
        False,
    ]
    take(plain, raws(a=9, b=1, c=1, d=1, e=1), 7)
    assert (plain.has_changes_after(6), plain.has_changes_after(5)) == (True, False)
    take(plain, raws(a=9, b=1, c=1, d=1, e=1), 7 + watch.HISTORY_SECONDS + 1)
    assert (plain.parse_cursor("e:7"), plain.parse_cursor("e:6")) == (7, None)
    for stranger in ("", "e", "e:", "e:x", "e:-1", "f:7", "e:8", "e:" + "9" * 30):
        assert plain.parse_cursor(stranger) is None


STATES = st.dictionaries(st.sampled_from("abcd"), st.integers(0, 3))


@given(states=st.lists(STATES, min_size=1, max_size=12), from_number=st.integers(0, 12))
def test_a_reader_ends_where_the_nodes_are(states: list[dict[str, int]], from_number: int) -> None:
    """After any gap: what a tab had, with the change since then, is what there is."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(watch, "render", _shown)
        kept = History("e")
        known: dict[int, dict[str, Any]] = {0: {}}
        for turn, state in enumerate(states):
            take(kept, raws(**state), turn)
            known[kept.number] = {name: dict(node) for name, node in kept.nodes.items()}
        number = min(from_number, kept.number)
        reader: dict[str, Any] = known[number]
        changed, removed = kept.since(number)
        for patch in changed:
            reader[patch["id"]] = {**reader.get(patch["id"], {}), **patch}
        for name in removed:
            reader.pop(name, None)
    assert reader == {name: _shown(raw) for name, raw in raws(**states[-1]).items()}


# What operators are told: pure.

SOUND = controllers.LastHeartbeats(NOW, NOW)
STRONG = replace(
    conf.cluster(),
    registration_token="9f31c6c2d7a84e55b1",
    api_keys=("a8c2f09be4417d6c33",),
    allow_shared_token_nodes=False,
)
AT = datetime(2026, 8, 22, 10, 0, 20, tzinfo=UTC)


def told(
    facts: notices.ClusterFacts | None = None, settings: ClusterSettings = STRONG, now: datetime = NOW
) -> list[str]:
    """The ids, after each notice was found to fit the document."""
    found = notices.active_notices(facts or notices.ClusterFacts(SOUND, 0, 0), settings, now)
    assert live.wrong_with({"type": "notices", "notices": found}) == []
    return [one["id"] for one in found]


@pytest.mark.parametrize(
    ("seen", "readable_since", "expected"),
    [
        (SOUND, None, []),
        (controllers.LastHeartbeats(), None, ["no-controller"]),
        (
            controllers.LastHeartbeats(NOW - timedelta(seconds=20), NOW - timedelta(seconds=20)),
            None,
            ["no-controller"],
        ),
        (controllers.LastHeartbeats(NOW - timedelta(seconds=20)), NOW - timedelta(seconds=2), []),
        (controllers.LastHeartbeats(NOW), None, ["nats-unreachable"]),
        (controllers.LastHeartbeats(NOW, NOW - timedelta(seconds=20)), None, ["nats-unreachable"]),
    ],
)
def test_who_carries_operations_out(
    seen: controllers.LastHeartbeats, readable_since: datetime | None, expected: list[str]
) -> None:
    """A controller that wrote nothing while the database was away is not silent."""
    assert told(notices.ClusterFacts(seen, 0, 0, readable_since)) == expected


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (notices.ClusterFacts(SOUND, 0, 0, tasks_wait_since=NOW - timedelta(seconds=20)), []),
        (notices.ClusterFacts(SOUND, 0, 0, tasks_wait_since=NOW - timedelta(seconds=40)), ["no-tasks"]),
        (
            notices.ClusterFacts(
                SOUND, 0, 0, NOW - timedelta(seconds=5), tasks_wait_since=NOW - timedelta(seconds=40)
            ),
            [],
        ),
        (notices.ClusterFacts(SOUND, 0, 0, redis_away=True), ["redis-unreachable"]),
    ],
)
def test_who_carries_schedules_out_and_brings_news(facts: notices.ClusterFacts, expected: list[str]) -> None:
    """Tasks that waited for the database are not late."""
    assert told(facts) == expected


def test_nodes_that_fell_silent_together_are_an_alarm() -> None:
    mass_hold = CurrentHold(NOW, datetime(2026, 8, 22, 10, 5, tzinfo=UTC), 6, 9)
    facts = notices.ClusterFacts(SOUND, 0, 0, mass_hold=mass_hold)
    assert told(facts) == ["mass-silence"]
    (found,) = notices.active_notices(facts, STRONG, NOW)
    assert found["text"] == "6 of 9 nodes fell silent at once; kept until 10:05 UTC."
    assert found["level"] == "error"


def test_workers_of_another_version_are_counted() -> None:
    facts = notices.ClusterFacts(SOUND, 0, 0, skewed_nodes=2)
    assert told(facts) == ["worker-versions"]
    (found,) = notices.active_notices(facts, STRONG, NOW)
    assert found["text"].startswith(f"2 nodes run another version than this server ({__version__})")


def test_weak_secrets_and_weak_identities_are_named() -> None:
    """With the setting that fixes it."""
    weak = replace(
        STRONG,
        registration_token="changeme",
        api_keys=("a8c2f09be4417d6c33", "password"),
        allow_shared_token_nodes=True,
    )
    facts = notices.ClusterFacts(SOUND, open_conflicts=2, weak_nodes=1)
    assert told(facts, weak) == ["identity-conflicts", "shared-token-nodes", "weak-token", "weak-key"]
    hints = [one["hint"] for one in notices.active_notices(facts, weak, NOW)]
    assert "LOCALAI_REGISTRATION_TOKEN" in hints[2]
    texts = [one["text"] for one in notices.active_notices(facts, weak, NOW)]
    assert texts[0].startswith("2 identity conflicts:")
    assert "1 node has no identity of its own" in texts[1]
    none = notices.ClusterFacts(SOUND, open_conflicts=0, weak_nodes=0)
    assert "identity" not in notices.active_notices(none, weak, NOW)[0]["text"], "review P9"


@pytest.mark.django_db
def test_controllers_leave_a_sign_of_life_and_take_it_back(django_assert_num_queries: Any) -> None:
    """The newest counts; what went without a word is forgotten after some minutes."""
    controllers.write_heartbeat("a", bus_connected=True, now=NOW)
    controllers.write_heartbeat("b", bus_connected=False, now=later(3))
    assert controllers.last_heartbeats() == controllers.LastHeartbeats(later(3), NOW)
    begun = ControllerBeat.objects.get(owner="b").started_at
    with django_assert_num_queries(4):  # two of them are the savepoint's
        controllers.write_heartbeat("b", bus_connected=True, now=later(1000))
    assert controllers.last_heartbeats() == controllers.LastHeartbeats(later(1000), later(1000))
    assert ControllerBeat.objects.get().started_at == begun
    controllers.delete_heartbeat("b")
    assert controllers.last_heartbeats() == controllers.LastHeartbeats()


def test_a_look_inside_a_transaction_is_part_of_it() -> None:
    """It sees what that has written."""
    with transaction.atomic():
        fleet.approved()
        assert len(watch.read_snapshot().nodes) == 1
