"""Registration at the registry itself: R1.22 to R1.31, R1.41 to R1.44, R1.50, running processes, agents."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from django.contrib.auth import get_user_model

from localai_cluster.accounts.models import ApiKey
from localai_cluster.accounts.principals import classify_credential, owner_of
from localai_cluster.kit import errors
from nodes.backends import node_commands
from nodes.decisions.fleet_cache import read_fleet
from nodes.models import BackendNode, NodeLabel, NodeModel, PendingBackendOp
from nodes.placement.choose import Reason, find_refusal
from nodes.registry import claims, lifecycle, overrides
from nodes.registry.labels import auto_labels, edit_labels
from nodes.registry.registration import Running
from tests.support.fleet import (
    NOW,
    OTHER_SECRET,
    ROOT,
    approved,
    kinds,
    later,
    register,
    replica,
    replicas,
    row,
    status,
    told,
)
from tests.support.replicas import columns

pytestmark = pytest.mark.django_db
GIB = 1024**3


def labels(node: BackendNode) -> dict[str, str]:
    return dict(NodeLabel.objects.filter(node=node).values_list("key", "value"))


# --- names and identity of the row


@pytest.mark.rule("R1.22", "R1.23", "T-REG-146")
def test_one_name_is_one_record() -> None:
    """Same id, new address, heartbeat now, id and first time kept."""
    first = register(now=NOW).node
    again = register(address="10.0.0.9:1", now=later(5)).node
    assert (again.pk, again.created_at) == (first.pk, NOW)
    stored = row(first)
    assert (stored.address, stored.last_heartbeat) == ("10.0.0.9:1", later(5))
    assert BackendNode.objects.count() == 1


@pytest.mark.rule("R1.29")
@pytest.mark.parametrize("name", ["GPU-1", "gpu-1", "\uff47pu-1"])
def test_a_name_that_looks_like_another_is_a_conflict(name: str) -> None:
    register("gPU-1")
    with pytest.raises(errors.Conflict, match="too similar to"):
        register(name, secret=OTHER_SECRET)
    assert BackendNode.objects.count() == 1


@pytest.mark.parametrize("name", ["", " a", "a\u200bb", "a\u202eb", "a\x00b", "x" * 256])
def test_a_name_that_cannot_be_is_refused(name: str) -> None:
    with pytest.raises(errors.InvalidInput) as refused:
        register(name)
    assert refused.value.field == "name"
    assert not BackendNode.objects.exists()


def test_model_and_node_names_may_have_any_visible_character() -> None:
    name = "a/b:c@d#e ü 模型"
    assert register(name).node.name == name


# --- figures


@pytest.mark.rule("R1.33", "R1.51")
def test_a_restarted_worker_without_engines_has_nothing_reserved() -> None:
    """Its registration is a reading, and the only one of a worker whose driver reports no free memory."""
    node = approved(total_vram=16, available_vram=16, running_processes=())
    BackendNode.objects.update(reserved_vram=10)
    register(total_vram=16, available_vram=16, running_processes=(), now=later(1))
    assert (row(node).reserved_vram, read_fleet("m")[0].free_vram) == (0, 16)


@pytest.mark.rule("R1.23", "R1.24")
def test_zero_and_empty_keep_what_is_stored() -> None:
    """But for disks, and for what the worker's own budget decides."""
    node = approved(
        total_vram=100,
        available_vram=90,
        total_ram=50,
        available_ram=40,
        total_disk=9,
        available_disk=8,
        gpu_vendor="nvidia",
        gpu_compute_capability="8.9",
        capability="nvidia-cuda-12",
        http_address="10.0.0.1:2",
        vram_budget="50%",
    )
    assert (node.vram_budget_bytes, node.available_vram) == (50, 50)
    BackendNode.objects.update(reserved_vram=7)
    register(address="", now=later(1))
    stored = row(node)
    assert (stored.total_vram, stored.total_ram, stored.available_ram) == (100, 50, 40)
    assert (stored.gpu_vendor, stored.gpu_compute_capability, stored.capability) == (
        "nvidia",
        "8.9",
        "nvidia-cuda-12",
    )
    assert (stored.address, stored.http_address, stored.reserved_vram) == ("10.0.0.1:50051", "10.0.0.1:2", 7)
    assert (stored.total_disk, stored.available_disk) == (0, 0)
    assert (stored.vram_budget, stored.vram_budget_bytes, stored.available_vram) == ("", 0, 0)


@pytest.mark.rule("R1.50", "R1.24", "T-REG-108")
def test_a_worker_that_drops_its_budget_lifts_the_cap() -> None:
    node = approved(total_vram=1000, available_vram=1000, vram_budget="50%")
    assert (node.vram_budget_bytes, node.available_vram) == (500, 500)
    register(total_vram=1000, available_vram=1000, now=later(1))
    stored = row(node)
    assert (stored.vram_budget_bytes, stored.available_vram) == (0, 1000)


@pytest.mark.rule("R1.49", "R1.50")
def test_an_unreadable_budget_of_a_worker_means_no_cap() -> None:
    node = approved(total_vram=1000, available_vram=900, vram_budget="lots")
    assert (node.vram_budget, node.vram_budget_bytes, node.available_vram) == ("lots", 0, 900)


@pytest.mark.rule("R1.25", "T-REG-85", "T-REG-86")
def test_an_admins_cap_survives_until_it_is_handed_back() -> None:
    node = approved(max_replicas_per_model=1)
    overrides.set_replica_cap(node.pk, 4, actor=ROOT, now=NOW)
    again = register(max_replicas_per_model=1, now=later(1)).node
    assert (again.max_replicas_per_model, labels(again)["node.replica-slots"]) == (4, "4")
    overrides.reset_replica_cap(node.pk, actor=ROOT, now=later(2))
    assert (row(node).max_replicas_per_model, labels(node)["node.replica-slots"]) == (4, "4")
    register(max_replicas_per_model=8, now=later(3))
    assert (row(node).max_replicas_per_model, labels(node)["node.replica-slots"]) == (8, "8")


@pytest.mark.rule("R1.50", "T-REG-106", "T-REG-109")
def test_an_admins_budget_survives_and_caps_again() -> None:
    node = approved(total_vram=1000, available_vram=1000)
    overrides.set_vram_budget(node.pk, "50%", actor=ROOT, now=NOW)
    reports: tuple[dict[str, Any], ...] = ({"vram_budget": "90%"}, {})
    for said in reports:
        register(total_vram=2000, available_vram=1800, now=later(1), **said)
        stored = row(node)
        assert (stored.vram_budget, stored.vram_budget_bytes, stored.available_vram) == ("50%", 1000, 1000)
        assert stored.vram_budget_manually_set


# --- running processes


@pytest.fixture
def running() -> BackendNode:
    """A node with three replicas, two of one model."""
    node = approved()
    replica(node, "m", 0)
    replica(node, "m", 1, address="10.0.0.1:50200")
    replica(node, "a/b:c@d#e", 0)
    return node


@pytest.mark.rule("R1.12", "R1.13", "R1.14", "T-REG-162")
def test_a_worker_that_says_nothing_loses_all_rows(running: BackendNode) -> None:
    register(now=later(1))
    assert replicas(running) == []


def test_listed_rows_stay_and_the_others_go_in_the_same_transaction(running: BackendNode) -> None:
    """Same key at the same address, or where either side does not know the address."""
    NodeModel.objects.filter(model_name="a/b:c@d#e").update(**columns("loading"))
    listed = [
        Running("m#0", "10.0.0.1:50100"),
        Running("m#1", "10.0.0.1:9999"),
        Running("a/b:c@d#e#0", "10.0.0.1:50300"),
        Running("unknown#0"),
    ]
    register(running_processes=listed, now=later(1))
    assert replicas(running) == ["a/b:c@d#e#0", "m#0"]
    register(running_processes=[Running("m#0")], now=later(2))
    assert replicas(running) == ["m#0"]


def test_an_empty_list_removes_all(running: BackendNode) -> None:
    register(running_processes=[], now=later(1))
    assert replicas(running) == []


def test_a_list_brings_nothing_back(running: BackendNode) -> None:
    register(running_processes=[], now=later(1))
    register(running_processes=[Running("m#0", "10.0.0.1:50100")], now=later(2))
    assert replicas(running) == []


def test_a_refused_registration_takes_nothing(running: BackendNode) -> None:
    with pytest.raises(errors.Conflict):
        register(secret=OTHER_SECRET, running_processes=[], now=later(1))
    assert len(replicas(running)) == 3


@pytest.mark.parametrize("seed", range(8))
def test_what_stays_is_what_is_there_and_listed(seed: int) -> None:
    """With any replicas, and any list."""
    choose = random.Random(seed)
    places = [(model, index) for model in ("m", "n", "m#0") for index in range(3)]
    node = approved()
    there = choose.sample(places, choose.randint(0, 9))
    listed = choose.sample(places, choose.randint(0, 9))
    for model, index in there:
        replica(node, model, index)
    register(running_processes=[Running(f"{model}#{index}") for model, index in listed], now=later(1))
    assert set(replicas(node)) == {f"{model}#{index}" for model, index in set(there) & set(listed)}


# --- labels


@pytest.mark.rule("R1.41", "T-REG-77", "T-REG-78")
def test_the_registrys_own_labels() -> None:
    node = approved(gpu_vendor="nvidia", max_replicas_per_model=4, total_vram=24 * GIB)
    assert labels(node) == {
        "gpu.vendor": "nvidia",
        "gpu.vram": "24GB",
        "node.name": "w1",
        "node.replica-slots": "4",
    }
    bare = approved("w2", secret=OTHER_SECRET, max_replicas_per_model=0)
    assert labels(bare) == {"node.name": "w2", "node.replica-slots": "1"}


@pytest.mark.rule("R1.42")
@pytest.mark.parametrize(
    ("total", "bucket"),
    [
        (100 * GIB, "80GB+"),
        (80 * GIB, "80GB+"),
        (80 * GIB - 1, "48GB"),
        (47 * GIB, "24GB"),
        (24 * 10**9, "16GB"),
        (16 * GIB - 1, "8GB"),
        (8 * 10**9, "7GB"),
        (1, "0GB"),
    ],
)
def test_vram_buckets(total: int, bucket: str) -> None:
    assert auto_labels(BackendNode(name="n", total_vram=total))["gpu.vram"] == bucket


@pytest.mark.rule("R1.30")
def test_a_workers_labels_join_and_never_wipe_an_admins() -> None:
    node = approved(labels={"tier": "fast", "rack": "1"})
    edit_labels(node.pk, {"tier": "gold", "owner": "anna"}, actor=ROOT, now=NOW)
    register(labels={"tier": "slow", "zone": "b", "node.name": "liar"}, now=later(1))
    assert labels(node) == {
        "tier": "gold",
        "owner": "anna",
        "rack": "1",
        "zone": "b",
        "node.name": "w1",
        "node.replica-slots": "1",
    }


@pytest.mark.rule("R1.43")
def test_a_label_of_the_registrys_own_that_no_longer_holds_goes() -> None:
    """D-GPU-LABELS. What the worker itself says under that key is its own word."""
    node = approved(gpu_vendor="nvidia", total_vram=GIB)
    BackendNode.objects.update(gpu_vendor="", total_vram=0)
    register(labels={"gpu.vendor": "says the worker"}, now=later(1))
    assert labels(node) == {
        "gpu.vendor": "says the worker",
        "node.name": "w1",
        "node.replica-slots": "1",
    }


def test_a_worker_that_always_brings_new_labels_is_stopped() -> None:
    node = approved(labels={f"a{number}": "" for number in range(64)})
    register(labels={f"b{number}": "" for number in range(64)}, now=later(1))
    with pytest.raises(errors.InvalidInput) as refused:
        register(labels={"c": ""}, now=later(2))
    assert refused.value.field == "labels"
    assert len(labels(node)) == 130


# --- agents


@pytest.fixture
def agent() -> BackendNode:
    """A pending agent."""
    return register("agent-1", node_type="agent", address="").node


def tokens() -> list[str]:
    return list(ApiKey.objects.values_list("key_hash", flat=True))


@pytest.mark.rule("R1.31", "R1.1")
def test_a_pending_agent_has_nothing_until_it_is_approved(agent: BackendNode) -> None:
    """Its key is made by the approval and told once."""
    assert register("agent-1", node_type="agent", address="", now=later(1)).api_token == ""
    assert not ApiKey.objects.exists()
    token = lifecycle.approve(agent.pk, actor=ROOT, now=later(2)).api_token
    assert token.startswith("lai-")
    principal = owner_of(classify_credential(token))
    assert principal is not None
    assert (principal.kind, principal.name) == ("user", "agent-worker:agent-1")
    stored = row(agent)
    assert stored.auth_user is not None
    assert [group.name for group in stored.auth_user.groups.all()] == ["collections"]


@pytest.mark.rule("R1.26", "R1.31")
def test_every_approved_registration_of_an_agent_replaces_user_and_key(agent: BackendNode) -> None:
    first = lifecycle.approve(agent.pk, actor=ROOT, now=NOW).api_token
    second = register("agent-1", node_type="agent", address="", now=later(1)).api_token
    assert second not in ("", first)
    assert not owner_of(classify_credential(first)).is_authenticated
    assert owner_of(classify_credential(second)).is_authenticated
    assert get_user_model().objects.count() == ApiKey.objects.count() == 1


@pytest.mark.rule("R1.31")
def test_auto_approval_gives_an_agent_its_key_at_once() -> None:
    registered = register("agent-1", node_type="agent", address="", auto_approve=True)
    assert owner_of(classify_credential(registered.api_token)).is_authenticated


def test_a_bulk_approval_tells_the_token_too(agent: BackendNode) -> None:
    (outcome,) = lifecycle.approve_many([agent.pk], actor=ROOT, now=NOW)
    assert owner_of(classify_credential(outcome.api_token)).is_authenticated


@pytest.mark.rule("R1.38")
@pytest.mark.parametrize("end", [lifecycle.deregister, claims.revoke])
def test_an_agents_user_and_key_go_with_it(agent: BackendNode, end: Callable[..., object]) -> None:
    """With the record, or with its secret."""
    token = lifecycle.approve(agent.pk, actor=ROOT, now=NOW).api_token
    end(agent.pk, actor=ROOT, now=later(1))
    assert not owner_of(classify_credential(token)).is_authenticated
    assert not get_user_model().objects.exists()
    assert not ApiKey.objects.exists()


@pytest.mark.parametrize(
    "name", ["a" * 255, "\ufdfa" * 10, "ﬁsh"], ids=["long", "long once normalised", "ligature"]
)
def test_an_agent_of_any_name_gets_a_user(name: str) -> None:
    registered = register(name, node_type="agent", address="", auto_approve=True)
    assert owner_of(classify_credential(registered.api_token)).is_authenticated
    register(name, node_type="agent", address="", auto_approve=True, now=later(1))
    assert get_user_model().objects.count() == 1


def test_somebody_elses_user_of_that_name_is_left_alone(agent: BackendNode) -> None:
    person = get_user_model().objects.create_user("agent-worker:agent-1")
    lifecycle.approve(agent.pk, actor=ROOT, now=NOW)
    lifecycle.deregister(agent.pk, actor=ROOT, now=NOW)
    assert list(get_user_model().objects.all()) == [person]


@pytest.mark.rule("R1.1", "worker-20")
@pytest.mark.parametrize(
    "fields",
    [{}, {"total_vram": 80 * GIB, "available_vram": 80 * GIB, "labels": {"node.role": "vllm-follower"}}],
    ids=["agent", "vLLM follower"],
)
def test_agents_are_never_a_target(fields: dict[str, Any]) -> None:
    """Neither of placement nor of selectors nor of backend commands; registered all the same."""
    node = register("a1", node_type="agent", address="", auto_approve=True, **fields).node
    assert status(node) == "healthy"
    (view,) = read_fleet("m")
    assert find_refusal(view) == Reason.AGENT
    assert list(BackendNode.objects.matching({})) == []
    assert "does not run backends" in node_commands.refusal(node)
    assert not PendingBackendOp.objects.exists()


def test_a_backend_does_not_become_an_agent_by_itself() -> None:
    """An agent gets a user's key, for which no one has approved a backend."""
    node = approved()
    with pytest.raises(errors.Conflict, match="registered as backend") as refused:
        register(node_type="agent", now=later(1))
    assert refused.value.field == "node_type"
    assert (row(node).node_type, row(node).auth_user_id, status(node)) == ("backend", None, "healthy")


# --- without a secret


def test_without_a_secret_no_one_registers(settings: Any) -> None:
    """Unless stock workers are admitted; then the node is marked weak."""
    with pytest.raises(errors.Forbidden) as refused:
        register(secret="")
    assert refused.value.field == "X-LocalAI-Node-Secret"
    settings.CLUSTER = replace(settings.CLUSTER, allow_shared_token_nodes=True)
    node = register(secret="").node
    assert row(node).weak_identity
    assert kinds(node) == ["registered", "labels"]
    assert told(node, "registered")[0].actor == "worker"
