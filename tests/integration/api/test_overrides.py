"""Replica cap, VRAM budget (`contract/http-api.md` §2.8, §2.9) and disk quota by REST."""

from typing import Any

import pytest

from localai_cluster.kit import clock
from nodes.models import BackendNode, BroughtModel, ModelSchedulingConfig, NodeEvent
from tests.support import api

pytestmark = pytest.mark.django_db

CAP, BUDGET, QUOTA = "max-replicas-per-model", "vram-budget", "disk-quota"
GIB = 1024**3


def put(node: BackendNode, what: str, body: Any) -> Any:
    return api.admin().put(f"/api/nodes/{node.id}/{what}", body)


def reset(node: BackendNode, what: str) -> Any:
    return api.admin().delete(f"/api/nodes/{node.id}/{what}")


def shown(node: BackendNode) -> dict[str, Any]:
    found: dict[str, Any] = api.admin().get(f"/api/nodes/{node.id}").json()
    return found


def cooling() -> ModelSchedulingConfig:
    return ModelSchedulingConfig.objects.create(
        model_name="m", unsatisfiable_until=clock.now(), unsatisfiable_ticks=1
    )


@pytest.mark.rule("R1.45", "http-2.8")
def test_a_cap_is_stored_marked_and_labelled() -> None:
    """And ends cooldowns; it survives the worker's restart (T-REG-85)."""
    node, rule = api.make_node(), cooling()
    answer = put(node, CAP, {"value": 4})
    assert (answer.status_code, answer.json()) == (200, {"max_replicas_per_model": 4})
    rule.refresh_from_db()
    assert (rule.unsatisfiable_until, rule.unsatisfiable_ticks) == (None, 0)
    for _ in range(2):
        now = shown(node)
        assert (now["max_replicas_per_model"], now["max_replicas_per_model_manually_set"]) == (4, True)
        assert now["labels"]["node.replica-slots"] == "4"
        api.make_node(max_replicas_per_model=1)


@pytest.mark.rule("R1.45", "http-2.8")
def test_a_cap_touches_no_other_label() -> None:
    """R1.45 speaks of `node.replica-slots` alone: what an admin removed stays removed."""
    node = api.make_node(gpu_vendor="nvidia", total_vram=8 * GIB)
    api.admin().put(f"/api/nodes/{node.id}/labels", {"x": "1"})
    put(node, CAP, {"value": 2})
    assert shown(node)["labels"] == {"x": "1", "node.replica-slots": "2"}


@pytest.mark.rule("R1.46", "http-2.8", "T-REG-86")
def test_a_cap_that_is_handed_back_stays_until_the_worker_registers() -> None:
    """Only the flag goes at once; cooldowns stay."""
    node = api.make_node()
    put(node, CAP, {"value": 4})
    rule = cooling()
    answer = reset(node, CAP)
    assert (answer.status_code, answer.json()) == (200, {"reset": True})
    now = shown(node)
    assert (now["max_replicas_per_model"], now["max_replicas_per_model_manually_set"]) == (4, False)
    assert now["labels"]["node.replica-slots"] == "4"
    rule.refresh_from_db()
    assert rule.unsatisfiable_ticks == 1
    api.make_node(max_replicas_per_model=8)
    assert shown(node)["max_replicas_per_model"] == 8


@pytest.mark.rule("R1.45", "http-2.8")
@pytest.mark.parametrize(
    "body",
    [
        {},
        {"max_replicas_per_model": 3},
        {"value": 0},
        {"value": -1},
        {"value": 10_001},
        {"value": 2**64},
        {"value": "x"},
        {"value": "3"},
        {"value": 1.5},
        {"value": True},
        {"value": None},
        {"value": [1]},
    ],
    ids=repr,
)
def test_caps_that_are_none_are_400(body: Any) -> None:
    """Missing counts as 0; the message names the field."""
    node = api.make_node()
    refused = put(node, CAP, body)
    assert (refused.status_code, "value" in api.message(refused)) == (400, True)
    assert not api.node(node.id).max_replicas_per_model_manually_set


@pytest.mark.rule("R1.47", "http-2.9", "T-REG-104")
def test_a_budget_caps_at_once() -> None:
    """Total stays, the ceiling is shown, free VRAM is lowered now, cooldowns end."""
    node, rule = api.make_node(total_vram=16 * GIB, available_vram=15 * GIB), cooling()
    answer = put(node, BUDGET, {"value": "50%"})
    assert (answer.status_code, answer.json()) == (200, {"vram_budget": "50%"})
    now = shown(node)
    assert (now["total_vram"], now["available_vram"]) == (16 * GIB, 8 * GIB)
    assert (now["vram_budget"], now["vram_budget_bytes"], now["vram_budget_manually_set"]) == (
        "50%",
        8 * GIB,
        True,
    )
    rule.refresh_from_db()
    assert rule.unsatisfiable_ticks == 0


@pytest.mark.rule("R1.47", "http-2.9")
def test_raising_a_budget_does_not_raise_free_vram() -> None:
    """That shows at the next heartbeat."""
    node = api.make_node(total_vram=16 * GIB, available_vram=15 * GIB)
    put(node, BUDGET, {"value": "4GiB"})
    put(node, BUDGET, {"value": "12GiB"})
    assert (shown(node)["available_vram"], shown(node)["vram_budget_bytes"]) == (4 * GIB, 12 * GIB)


@pytest.mark.rule("R1.47", "http-2.9")
def test_the_empty_budget_is_sticky() -> None:
    """An explicit "no cap": the worker's own budget does not come back with its registration."""
    node = api.make_node(total_vram=16 * GIB, available_vram=15 * GIB, vram_budget="25%")
    answer = put(node, BUDGET, {"value": ""})
    assert (answer.status_code, answer.json()) == (200, {"vram_budget": ""})
    for _ in range(2):
        now = shown(node)
        assert now["vram_budget_manually_set"]
        assert not {"vram_budget", "vram_budget_bytes"} & set(now)
        api.make_node(total_vram=16 * GIB, available_vram=15 * GIB, vram_budget="25%")


@pytest.mark.rule("R1.48", "http-2.9", "T-REG-107")
def test_a_budget_that_is_handed_back_is_gone() -> None:
    """Value, bytes and flag; free VRAM stays until the next heartbeat, cooldowns stay."""
    node = api.make_node(total_vram=16 * GIB, available_vram=15 * GIB)
    put(node, BUDGET, {"value": "50%"})
    rule = cooling()
    assert reset(node, BUDGET).json() == {"reset": True}
    now = shown(node)
    assert not {"vram_budget", "vram_budget_bytes"} & set(now)
    assert (now["vram_budget_manually_set"], now["available_vram"]) == (False, 8 * GIB)
    rule.refresh_from_db()
    assert rule.unsatisfiable_ticks == 1


@pytest.mark.rule("R1.49", "http-2.9")
@pytest.mark.parametrize(
    ("text", "ceiling"),
    [
        ("80%", 8_000_000_000),
        (" 80 % ", 8_000_000_000),
        ("0.25", 2_500_000_000),
        ("1", 10_000_000_000),
        ("4GB", 4_000_000_000),
        ("4gib", 4 * GIB),
        ("1.5 GB", 1_500_000_000),
        ("123456789", 123_456_789),
        ("12GB", 10_000_000_000),
        ("0%", 0),
        ("0", 0),
    ],
)
def test_budgets_that_can_be_written(text: str, ceiling: int) -> None:
    """The grammar, against 10 GB; the answer is as sent."""
    node = api.make_node(total_vram=10_000_000_000)
    assert put(node, BUDGET, {"value": text}).json() == {"vram_budget": text}
    assert shown(node).get("vram_budget_bytes", 0) == ceiling


@pytest.mark.rule("R1.49", "http-2.9")
@pytest.mark.parametrize(
    "body",
    [
        {},
        {"vram_budget": "4GB"},
        {"value": None},
        {"value": 5},
        {"value": ["50%"]},
        {"value": "zzz"},
        {"value": "101%"},
        {"value": "-1"},
        {"value": "-5GiB"},
        {"value": "1.5"},
        {"value": "5 apples"},
        {"value": "1\x00"},
        {"value": "٣GB"},
        {"value": "1" * 33},
    ],
    ids=repr,
)
def test_budgets_that_are_none_are_400(body: Any) -> None:
    """The field is required: the reference silently stores "no cap" for another name."""
    node = api.make_node(total_vram=16 * GIB)
    refused = put(node, BUDGET, body)
    assert (refused.status_code, "value" in api.message(refused)) == (400, True)
    assert not api.node(node.id).vram_budget_manually_set


@pytest.mark.rule("http-2.8", "http-2.9")
@pytest.mark.parametrize("what", [CAP, BUDGET, QUOTA])
@pytest.mark.parametrize("node_id", ["nope", "00000000-0000-4000-8000-00000000dead", "%00"])
def test_first_the_node_then_the_body(what: str, node_id: str) -> None:
    """404 comes before 400."""
    path = f"/api/nodes/{node_id}/{what}"
    for answer in (api.admin().put(path, b"{"), api.admin().put(path, {}), api.admin().delete(path)):
        assert (answer.status_code, answer.json()["error"]["type"]) == (404, "node_error")


@pytest.mark.rule("http-2.8", "http-2.9")
@pytest.mark.parametrize("what", [CAP, BUDGET, QUOTA])
@pytest.mark.parametrize("body", [b"{", b"[1]", b"null", b'"x"'])
def test_then_the_body(what: str, body: bytes) -> None:
    """What is no object is no override."""
    refused = put(api.make_node(), what, body)
    assert (refused.status_code, api.message(refused)) == (400, "invalid request body")


@pytest.mark.parametrize("what", [CAP, BUDGET])
def test_every_override_is_an_event(what: str) -> None:
    """Set and handed back, with what was there before."""
    node = api.make_node(total_vram=GIB)
    NodeEvent.objects.all().delete()
    put(node, what, {"value": 3 if what == CAP else "50%"})
    reset(node, what)
    events = list(NodeEvent.objects.filter(kind="override").order_by("id"))
    assert [(event.cause, event.actor) for event in events] == [
        ("set", "static-key"),
        ("reset to worker default", "static-key"),
    ]
    name = {CAP: "max_replicas_per_model", BUDGET: "vram_budget"}[what]
    assert events[0].detail[name]["from"] in (1, "")


@pytest.mark.parametrize(
    ("text", "size"),
    [("200GB", 200 * 10**9), ("80%", 800 * 10**9), ("0.5", 500 * 10**9), ("2TB", 2 * 10**12), ("", None)],
)
def test_a_disk_quota_is_set_survives_the_worker_and_is_removed(text: str, size: int | None) -> None:
    """D-DISK-QUOTA: it ends cooldowns, and is an event with its author; an empty one is none."""
    node, rule = api.make_node(total_disk=10**12), cooling()
    put(node, QUOTA, {"value": "1GB"})
    NodeEvent.objects.all().delete()
    answer = put(node, QUOTA, {"value": text})
    assert (answer.status_code, answer.json()) == (200, {"disk_quota": text})
    rule.refresh_from_db()
    assert (rule.unsatisfiable_until, rule.unsatisfiable_ticks) == (None, 0)
    for _ in range(2):
        now = shown(node)
        assert (now.get("disk_quota", ""), now.get("disk_quota_bytes")) == (text, size)
        assert now["overrides"].get("disk_quota", {}).get("by") == ("static-key" if text else None)
        api.make_node(total_disk=10**12)
    revision = api.node(node.id).revision
    put(node, QUOTA, {"value": text})
    assert api.node(node.id).revision == revision, "nothing has changed"
    assert reset(node, QUOTA).json() == {"reset": True}
    assert not {"disk_quota", "disk_quota_bytes"} & set(shown(node))
    events = NodeEvent.objects.filter(kind="override").order_by("id")
    assert [event.detail["disk_quota"]["to"] for event in events] == ([text, ""] if text else [""])


@pytest.mark.parametrize(
    "value",
    [None, 5, "zzz", "101%", "-1", "1.5", "1\x00", "٣GB", "1" * 33, "0", "0%", "0GB", "0.0000000000001"],
    ids=repr,
)
def test_disk_quotas_that_are_none_are_400(value: Any) -> None:
    """D-DISK-QUOTA: a quota of 0 is refused too: it would read as none."""
    node = api.make_node(total_disk=10**12)
    refused = put(node, QUOTA, {"value": value})
    assert (refused.status_code, "value" in api.message(refused)) == (400, True)
    assert api.node(node.id).disk_quota == ""


def test_the_bytes_of_models_on_a_node_are_shown() -> None:
    node = api.make_node()
    assert shown(node)["model_bytes"] == 0
    for name in ("a", "b"):
        BroughtModel.objects.create(node=node, model_name=name, size=2**40, seen_at=clock.now())
    assert shown(node)["model_bytes"] == 2**41
