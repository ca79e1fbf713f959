"""Registration over HTTP: R1.10 to R1.30, R1.41, R1.42, R1.50, and the identity of workers."""

import re
from dataclasses import replace
from typing import Any
from uuid import UUID

import pytest
from django.conf import settings
from django.contrib.auth import get_user_model
from django.utils.dateparse import parse_datetime

from localai_cluster.accounts.actors import MAKE_RUN, Actor, ActorKind
from localai_cluster.accounts.principals import hash_secret
from localai_cluster.kit import clock, errors
from nodes.models import BackendNode, ModelSchedulingConfig, NodeLabel, NodeModel
from nodes.registry import claims, lifecycle
from tests.support import api
from tests.support.environment import REGISTRATION_TOKEN

pytestmark = pytest.mark.django_db

ENDPOINT = "/api/node/register"
ROOT = Actor(ActorKind.USER, "root")


def allow(monkeypatch: pytest.MonkeyPatch, **changed: Any) -> None:
    """Other cluster settings for one test."""
    monkeypatch.setattr(settings, "CLUSTER", replace(settings.CLUSTER, **changed))


def labels(node: Any) -> dict[str, str]:
    return {label.key: label.value for label in NodeLabel.objects.filter(node=node)}


@pytest.mark.rule("http-1.1", "R1.29", "worker-5.1")
@pytest.mark.rule("R1.11", "R1.13", "R1.22", "T-REG-1", "T-REG-3", "http-1.1")
@pytest.mark.rule("R1.10", "R1.12", "T-REG-2", "http-1.1")
@pytest.mark.rule("R1.14", "http-1.1", "worker-5.1")
@pytest.mark.rule("R1.23", "R1.24", "http-1.1")
@pytest.mark.parametrize("example", api.examples("register"), ids=lambda e: e["name"][:40])
def test_recorded_registrations_get_the_recorded_shape(example: dict[str, Any]) -> None:
    """§1.1: what the reference's worker sent is answered by the same status, keys and envelope."""
    body = example["request_body"]
    if isinstance(body, dict):
        body = {k: _unshortened(v) for k, v in body.items()}
        token = body.get("token")
        body |= {"token": REGISTRATION_TOKEN if token == "tok" else token} if token else {}
    has_token = "Authorization" in example["request_headers"]
    caller = api.bearer(REGISTRATION_TOKEN) if has_token else api.Caller()
    raw = body.encode() if isinstance(body, str) else body
    response = caller.post(example["path"].rstrip("/"), raw, **{"X-LocalAI-Node-Secret": api.SECRET})
    assert response.status_code == example["status"], response.content
    answer = response.json()
    if response.status_code == 201:
        assert answer.pop("fingerprint") == hash_secret(api.SECRET)  # D-MORE-FIELDS
    assert _shape(answer) == _shape(example["body"])


def _unshortened(value: Any) -> Any:
    repeated = re.fullmatch(r"(\w) repeated (\d+) times", value) if isinstance(value, str) else None
    return repeated[1] * int(repeated[2]) if repeated else value


def _shape(value: Any) -> Any:
    """Without the name of a refused field, which only ours has (D-MORE-FIELDS)."""
    return (
        {k: _shape(v) for k, v in value.items() if k != "field"} if isinstance(value, dict) else type(value)
    )


def test_new_name_waits_for_approval_and_keeps_its_id() -> None:
    """R1.11, R1.13, R1.22, R1.23."""
    first = api.register(api.registration()).json()
    again = api.register(api.registration()).json()
    assert first["status"] == again["status"] == "pending"
    assert first["id"] == again["id"]
    assert first["created_at"] == again["created_at"]


def test_auto_approval(monkeypatch: pytest.MonkeyPatch) -> None:
    """R1.10, R1.12: with auto-approval on, a new and a pending worker are healthy at once."""
    assert api.register(api.registration()).json()["status"] == "pending"
    allow(monkeypatch, auto_approve_nodes=True)
    assert api.register(api.registration()).json()["status"] == "healthy"
    assert api.register(api.registration("w2")).json()["status"] == "healthy"


def test_reregistration_lifts_offline_but_keeps_an_admins_drain() -> None:
    """R1.14 with its "Port:" line: the drain of an admin survives, the worker's own ends with its restart."""
    node = api.make_node()
    lifecycle.drain(node.id, actor=ROOT, reason="disk swap", now=clock.now())
    lifecycle.deactivate(node.id, now=clock.now())
    assert api.node(node.id).status == "offline"
    assert api.make_node().status == "draining"
    lifecycle.resume(node.id, actor=ROOT, now=clock.now())
    lifecycle.drain_by_worker(node.id, now=clock.now())
    assert api.node(node.id).status == "draining"
    assert api.make_node().status == "healthy"


def test_zero_and_empty_keep_the_stored_value_but_for_disk() -> None:
    """R1.23, R1.24."""
    api.make_node(
        total_ram=5,
        available_ram=4,
        total_disk=9,
        available_disk=8,
        gpu_vendor="nvidia",
        http_address="127.0.0.1:1",
    )
    node = api.make_node(address="127.0.0.1:7")
    assert (node.total_ram, node.available_ram, node.gpu_vendor, node.http_address) == (
        5,
        4,
        "nvidia",
        "127.0.0.1:1",
    )
    assert (node.total_disk, node.available_disk, node.address) == (0, 0, "127.0.0.1:7")


@pytest.mark.rule("R1.29", "http-1.1")
@pytest.mark.rule("R1.25", "R1.50", "http-1.1")
@pytest.mark.rule("R1.24", "R1.50")
@pytest.mark.parametrize(("sent", "stored"), [(0, 1), (-3, 1), (1, 1), (7, 7)])
def test_replica_cap_is_at_least_one(sent: int, stored: int) -> None:
    """R1.29."""
    assert api.register(api.registration(max_replicas_per_model=sent)).status_code == 201
    assert BackendNode.objects.get().max_replicas_per_model == stored


def test_admin_set_cap_and_budget_survive() -> None:
    """R1.25, R1.50: what an admin set is not the worker's to change."""
    node = api.make_node(total_vram=1000, available_vram=1000)
    BackendNode.objects.filter(pk=node.id).update(
        max_replicas_per_model=4,
        max_replicas_per_model_manually_set=True,
        vram_budget="50%",
        vram_budget_manually_set=True,
    )
    node = api.make_node(total_vram=1000, available_vram=900, max_replicas_per_model=2, vram_budget="10%")
    assert (node.max_replicas_per_model, node.vram_budget) == (4, "50%")
    assert (node.vram_budget_bytes, node.available_vram) == (500, 500)
    assert labels(node)["node.replica-slots"] == "4"


def test_a_workers_budget_caps_and_goes_with_its_setting() -> None:
    """R1.24, R1.50."""
    node = api.make_node(total_vram=8_000_000_000, available_vram=8_000_000_000, vram_budget="50%")
    assert (node.available_vram, node.vram_budget_bytes) == (4_000_000_000, 4_000_000_000)
    node = api.make_node(total_vram=8_000_000_000, available_vram=8_000_000_000)
    assert (node.available_vram, node.vram_budget_bytes, node.vram_budget) == (8_000_000_000, 0, "")


@pytest.mark.rule("R1.30", "R1.41", "R1.42", "http-1.1")
@pytest.mark.rule("R1.27", "R1.28", "http-1.1")
@pytest.mark.rule("R1.22", "http-1.1")
@pytest.mark.rule("http-1.1")
def test_a_known_worker_goes_on_when_the_registration_token_is_replaced() -> None:
    """Its secret proves more than the token; a stranger with the old token is refused."""
    assert api.register(api.registration()).status_code == 201
    old = {"Authorization": "Bearer the-former-token-of-this-cluster", "X-LocalAI-Node-Secret": api.SECRET}
    body = api.registration() | {"token": "the-former-token-of-this-cluster"}
    assert api.Caller(**old).post(api.REGISTER, body).status_code == 201
    stranger = old | {"X-LocalAI-Node-Secret": api.OTHER_SECRET}
    assert api.Caller(**stranger).post(api.REGISTER, body).status_code == 401


@pytest.mark.rule("T-REG-4", "R1.14")
def test_an_unhealthy_node_that_registers_again_is_healthy() -> None:
    """Without auto-approval: the approval it has is enough."""
    node = api.make_node()
    lifecycle.mark_unhealthy(node.id, actor=ROOT, now=clock.now(), reason="no answer")
    assert api.node(node.id).status == "unhealthy"
    answer = api.register(api.registration()).json()
    assert (answer["id"], answer["status"]) == (str(node.id), "healthy")


@pytest.mark.rule("R1.27", "R1.12", "R1.13", "R1.14", "http-1.1")
@pytest.mark.parametrize(
    ("listed", "kept"),
    [
        ([], set()),
        (None, set()),
        ([{"process_key": "a/b:c@d#0#0", "address": "127.0.0.1:1"}], {"a/b:c@d#0"}),
        ([{"process_key": "a/b:c@d#0#0"}], {"a/b:c@d#0"}),
        ([{"process_key": "a/b:c@d#0#0", "address": None, "more": 1}], {"a/b:c@d#0"}),
        ([{"process_key": "a/b:c@d#0#0", "address": "127.0.0.1:9"}], set()),
        ([{"process_key": "a/b:c@d#0#1", "address": "127.0.0.1:1"}], set()),
        (
            [{"process_key": "a/b:c@d#0#0"}, {"process_key": "m#0"}, {"process_key": "\u200b#7"}],
            {"a/b:c@d#0", "m"},
        ),
    ],
)
def test_rows_of_processes_that_do_not_run_go(listed: Any, kept: set[str]) -> None:
    """D-REREGISTER-ROWS: a worker that lists its processes keeps their rows, one that does not loses all."""
    node = api.make_node()
    for model, address in {"a/b:c@d#0": "127.0.0.1:1", "m": "127.0.0.1:2"}.items():
        NodeModel.objects.create(node=node, model_name=model, phase="serving", address=address)
    assert api.register(api.registration(running_processes=listed)).status_code == 201
    assert set(NodeModel.objects.values_list("model_name", flat=True)) == kept


@pytest.mark.rule("R1.31", "http-1.1", "worker-20")
def test_an_approved_agent_gets_a_new_key_at_every_registration() -> None:
    """Pending: none. Approved: a user and a key, replaced each time, told this once and never again."""
    body = {"name": "agent-1", "node_type": "agent", "token": REGISTRATION_TOKEN}
    pending = api.register(body).json()
    assert (pending["status"], "api_token" in pending) == ("pending", False)
    lifecycle.approve(UUID(pending["id"]), actor=ROOT, now=clock.now())
    first, second = (api.register(body).json()["api_token"] for _ in range(2))
    assert re.fullmatch("lai-[0-9a-f]{64}", second)
    assert first != second
    assert api.bearer(second).get("/api/schema").status_code == 200
    assert api.bearer(first).get("/api/schema").status_code == 401
    user = get_user_model().objects.get(username="agent-worker:agent-1")
    assert [group.name for group in user.groups.all()] == ["collections"]
    lifecycle.deregister(UUID(pending["id"]), actor=ROOT, now=clock.now())
    assert not get_user_model().objects.filter(pk=user.pk).exists()
    assert api.bearer(second).get("/api/schema").status_code == 401


@pytest.mark.rule("worker-20", "R1.1", "http-1.1")
def test_a_data_parallel_follower_registers() -> None:
    """`local-ai p2p-worker vllm`: an agent without an address, with GPUs and a label of its own."""
    body = {
        "name": "vllm-gpu-7",
        "node_type": "agent",
        "token": REGISTRATION_TOKEN,
        "total_vram": 24 << 30,
        "available_vram": 24 << 30,
        "gpu_vendor": "nvidia",
        "labels": {"node.role": "vllm-follower"},
    }
    answer = api.register(body)
    assert (answer.status_code, answer.json()["node_type"]) == (201, "agent")
    node = api.node(answer.json()["id"])
    assert (node.address, node.total_vram, node.gpu_vendor) == ("", 24 << 30, "nvidia")
    assert labels(node)["node.role"] == "vllm-follower"


@pytest.mark.rule("http-1.1")
def test_the_answer_tells_when_the_node_was_made() -> None:
    """D-CREATED-AT: the reference answers the year 1 to a worker that comes back."""
    made = api.make_node().created_at
    answer = api.register(api.registration()).json()
    told = {"id", "name", "node_type", "status", "created_at"}
    assert set(answer) == told | {"fingerprint", "nats_jwt", "nats_user_seed", "nats_url"}
    assert answer["fingerprint"] == hash_secret(api.SECRET)
    assert parse_datetime(answer["created_at"]) == made


@pytest.mark.rule("R1.15", "http-2.6")
@pytest.mark.parametrize(
    ("total", "bucket"),
    [(8_000_000_000, "7GB"), (22 << 30, "16GB"), (80 << 30, "80GB+"), (48 << 30, "48GB"), (24 << 30, "24GB")],
)
def test_labels_merge_and_automatic_ones_win(total: int, bucket: str) -> None:
    """R1.30, R1.41, R1.42."""
    node = api.make_node(labels={"tier": "t1", "node.name": "liar"}, total_vram=total, gpu_vendor="nvidia")
    NodeLabel.objects.create(node=node, key="room", value="b2")
    api.make_node(labels={"tier": "t2", "room": "mine"}, total_vram=total, gpu_vendor="nvidia")
    assert labels(node) == {
        "tier": "t2",
        "room": "b2",
        "node.name": "w1",
        "node.replica-slots": "1",
        "gpu.vendor": "nvidia",
        "gpu.vram": bucket,
    }


def test_reregistration_drops_replicas_and_cooldowns() -> None:
    """R1.27, R1.28: the worker has restarted, nothing that ran there runs any more."""
    node = api.make_node()
    NodeModel.objects.create(node=node, model_name="m", phase="serving", address="a:1")
    ModelSchedulingConfig.objects.create(
        model_name="m", unsatisfiable_ticks=3, unsatisfiable_until=clock.now()
    )
    api.make_node()
    assert not NodeModel.objects.exists()
    assert ModelSchedulingConfig.objects.get().unsatisfiable_ticks == 0


def test_a_name_belongs_to_the_first_secret() -> None:
    """Another worker cannot take a name over."""
    api.make_node()
    refused = api.register(api.registration(), api.OTHER_SECRET)
    assert refused.status_code == 409
    assert refused.json()["error"]["type"] == "node_error"
    assert api.register(api.registration(), "").status_code == 403


def test_stock_workers_are_admitted_on_demand_and_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    """LOCALAI_ALLOW_SHARED_TOKEN_NODES: weak identity, seen in the list; the shared token proves it."""
    allow(monkeypatch, allow_shared_token_nodes=True)
    node_id = api.register(api.registration(), "").json()["id"]
    lifecycle.approve(UUID(node_id), actor=ROOT, now=clock.now())
    assert api.admin().get(f"/api/nodes/{node_id}").json()["weak_identity"] is True
    assert api.bearer(REGISTRATION_TOKEN).get(f"/api/node/{node_id}/models").status_code == 200
    assert api.register(api.registration(), "").json()["status"] == "healthy"
    # Anyone who comes with a secret of its own may be somebody else: an admin decides.
    assert api.register(api.registration()).status_code == 409
    assert api.register(api.registration(), "").json()["status"] == "healthy"
    allow(monkeypatch, allow_shared_token_nodes=False)
    assert api.bearer(REGISTRATION_TOKEN).get(f"/api/node/{node_id}/models").status_code == 401


def test_enrolled_beforehand_is_healthy_at_once() -> None:
    """The local worker of `make run`."""
    node = claims.enrol("local", hash_secret(api.SECRET), actor=MAKE_RUN, now=clock.now())
    assert api.node(node.id).status == "offline"
    answer = api.register(api.registration("local"), api.SECRET).json()
    assert (answer["id"], answer["status"]) == (str(node.id), "healthy")
    assert api.register(api.registration("local"), api.OTHER_SECRET).status_code == 409
    claims.enrol("local", hash_secret(api.SECRET), actor=MAKE_RUN, now=clock.now())
    assert api.node(node.id).status == "healthy"


def test_approve_is_a_compare_and_set() -> None:
    """R1.15 and §2.6: once; then 400 naming the state; 404 for an unknown id."""
    node = api.make_node(approved=False)
    approved = api.admin().post(f"/api/nodes/{node.id}/approve")
    assert (approved.status_code, approved.json()["status"]) == (200, "healthy")
    assert api.node(node.id).approved_by == "static-key"
    again = api.admin().post(f"/api/nodes/{node.id}/approve", {})
    assert again.status_code == 400
    assert "healthy" in api.message(again)
    with pytest.raises(errors.NotFound):
        lifecycle.approve(UUID(int=5), actor=ROOT, now=clock.now())
