"""Registration over HTTP: R1.10 to R1.30, R1.41, R1.42, R1.50, and the identity of workers."""

import re
from dataclasses import replace
from typing import Any
from uuid import UUID

import pytest
from django.conf import settings
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from localai_cluster import clock, errors
from nodes import services
from nodes.actors import MAKE_RUN, Actor, ActorKind
from nodes.identity import hash_secret
from nodes.models import BackendNode, ModelSchedulingConfig, NodeLabel, NodeModel
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
    assert _shape(response.json()) == _shape(example["body"])


def _unshortened(value: Any) -> Any:
    repeated = re.fullmatch(r"(\w) repeated (\d+) times", value) if isinstance(value, str) else None
    return repeated[1] * int(repeated[2]) if repeated else value


def _shape(value: Any) -> Any:
    return {k: _shape(v) for k, v in value.items()} if isinstance(value, dict) else type(value)


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
    services.drain(node.id, actor=ROOT, reason="disk swap", now=clock.now())
    services.deactivate(node.id, now=clock.now())
    assert api.node(node.id).status == "offline"
    assert api.make_node().status == "draining"
    services.resume(node.id, actor=ROOT, now=clock.now())
    services.drain_itself(node.id, now=clock.now())
    assert api.node(node.id).status == "draining"
    assert api.make_node().status == "healthy"


def test_zero_and_empty_keep_the_stored_value_but_for_disk() -> None:
    """R1.23, R1.24."""
    api.make_node(
        total_ram=5, available_ram=4, total_disk=9, available_disk=8, gpu_vendor="nvidia", http_address="a:1"
    )
    node = api.make_node(address="127.0.0.1:7")
    assert (node.total_ram, node.available_ram, node.gpu_vendor, node.http_address) == (5, 4, "nvidia", "a:1")
    assert (node.total_disk, node.available_disk, node.address) == (0, 0, "127.0.0.1:7")


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
    NodeModel.objects.create(node=node, model_name="m", state="loaded", address="a:1")
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


@pytest.mark.parametrize("secret", ["A" * 64, "a" * 63, "a" * 65, "z" * 64])
def test_a_secret_is_64_hex_digits(secret: str) -> None:
    """400 naming the header."""
    refused = api.register(api.registration(), secret)
    assert refused.status_code == 400
    assert "X-LocalAI-Node-Secret" in api.message(refused)


def test_stock_workers_are_admitted_on_demand_and_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    """LOCALAI_ALLOW_SHARED_TOKEN_NODES: weak identity, seen in the list; the shared token proves it."""
    allow(monkeypatch, allow_shared_token_nodes=True)
    node_id = api.register(api.registration(), "").json()["id"]
    services.approve(UUID(node_id), actor=ROOT, now=clock.now())
    assert api.admin().get(f"/api/nodes/{node_id}").json()["weak_identity"] is True
    assert api.bearer(REGISTRATION_TOKEN).get(f"/api/node/{node_id}/models").status_code == 200
    assert api.register(api.registration(), "").json()["status"] == "healthy"
    # Whoever comes with a secret of its own may be somebody else: an admin decides.
    assert api.register(api.registration()).status_code == 409
    assert api.register(api.registration(), "").json()["status"] == "healthy"
    allow(monkeypatch, allow_shared_token_nodes=False)
    assert api.bearer(REGISTRATION_TOKEN).get(f"/api/node/{node_id}/models").status_code == 401


def test_enrolled_beforehand_is_healthy_at_once() -> None:
    """The local worker of `make run`."""
    node = services.enrol("local", hash_secret(api.SECRET), actor=MAKE_RUN, now=clock.now())
    assert api.node(node.id).status == "offline"
    answer = api.register(api.registration("local"), api.SECRET).json()
    assert (answer["id"], answer["status"]) == (str(node.id), "healthy")
    assert api.register(api.registration("local"), api.OTHER_SECRET).status_code == 409
    services.enrol("local", hash_secret(api.SECRET), actor=MAKE_RUN, now=clock.now())
    assert api.node(node.id).status == "healthy"


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"total_vram": 2**63}, "total_vram"),
        ({"total_ram": 1.5}, "total_ram"),
        ({"available_disk": "9"}, "available_disk"),
        ({"total_ram": True}, "total_ram"),
        ({"name": 5}, "name"),
        ({"name": "a\x00b"}, "name"),
        ({"name": "a\nb"}, "name"),
        ({"name": "   "}, "name"),
        ({"name": "\ud800"}, "name"),
        ({"address": ""}, "address"),
        ({"http_address": "x" * 513}, "http_address"),
        ({"labels": {"k": 1}}, "labels"),
        ({"labels": {"k" * 129: "v"}}, "labels"),
        ({"labels": {"k": "v" * 256}}, "labels"),
        ({"labels": {"": "v"}}, "labels"),
        ({"labels": {f"k{i}": "" for i in range(65)}}, "labels"),
        ({"labels": ["a"]}, "labels"),
        ({"max_replicas_per_model": 2**40}, "max_replicas_per_model"),
        ({"gpu_vendor": "x" * 33}, "gpu_vendor"),
        ({"node_type": "weird"}, "node_type"),
    ],
)
def test_hostile_values_are_400_and_name_the_field(body: dict[str, Any], field: str) -> None:
    """R1.29."""
    refused = api.register(api.registration() | body)
    assert refused.status_code == 400
    assert field in api.message(refused)


@pytest.mark.parametrize(
    "raw",
    [
        b"{bad",
        b"[1]",
        b'"x"',
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"total_ram":' + b"9" * 5000 + b"}",
        b'{"a":NaN}',
    ],
)
def test_malformed_bodies_are_400(raw: bytes) -> None:
    """§0.1, §1.1."""
    refused = api.register(raw)
    assert (refused.status_code, refused.json()["error"]["type"]) == (400, "node_error")


def test_a_body_is_bounded() -> None:
    """The limit of Django holds for streams too, which Django itself does not see to."""
    padding = "x" * settings.DATA_UPLOAD_MAX_MEMORY_SIZE
    refused = api.register(api.registration(unknown=padding))
    assert (refused.status_code, refused.json()["error"]["code"]) == (413, 413)
    assert api.register(api.registration(unknown=padding[:-1000])).status_code == 201


def test_other_content_types_are_400() -> None:
    """§0.1: a body that is not announced as JSON is a parse failure."""
    caller = api.bearer(REGISTRATION_TOKEN)
    refused = caller.client.post(ENDPOINT, b"a=b", content_type="text/plain", headers=caller.headers)
    assert refused.status_code == 400


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
FIELDS = st.sampled_from(
    ["name", "node_type", "address", "labels", "total_vram", "available_disk", "vram_budget", "gpu_vendor"]
)


@given(body=st.dictionaries(FIELDS, JSON, max_size=5))
@hypothesis_settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_any_json_ends_in_201_or_a_refusal(body: dict[str, Any]) -> None:
    """Never a 500, whatever a worker with the token sends."""
    answer = api.register(body | {"token": REGISTRATION_TOKEN})
    assert answer.status_code in (201, 400, 409), answer.content


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
        services.approve(UUID(int=5), actor=ROOT, now=clock.now())
