"""What the rows of the registry can and cannot say, held by the database itself (R1.4 to R1.8)."""

from typing import Any
from uuid import uuid4

import pytest
from django.db import IntegrityError, transaction
from django.db.models import Model

from localai_cluster.accounts.actors import STATIC_KEY
from localai_cluster.kit import clock
from nodes.decisions import fleet_cache
from nodes.models import (
    BackendNode,
    ModelLoadInfo,
    ModelSchedulingConfig,
    NodeModel,
    PendingBackendOp,
)
from nodes.models.replica import STATE_BY_PHASE, Phase
from nodes.registry.lifecycle import deregister, drain
from nodes.replicas import slots
from tests.support import api
from tests.support.replicas import attempt, columns

pytestmark = pytest.mark.django_db


def refused(model: type[Model], **fields: Any) -> bool:
    """Whether the database refuses such a row."""
    try:
        with transaction.atomic():
            model._default_manager.create(**fields)
    except IntegrityError:
        return True
    return False


def replica(node: BackendNode, **fields: Any) -> NodeModel:
    """A loaded replica."""
    given: dict[str, Any] = {"address": "127.0.0.1:9", "model_name": "m"} | fields
    return NodeModel.engines.create(node=node, **columns(**given))


@pytest.mark.rule("R1.4", "T-REG-61")
def test_only_loaded_replicas_with_an_address_serve() -> None:
    """R1.4: every phase is storable, one of them gets traffic; index and count default to 0."""
    node = api.make_node()
    for index, phase in enumerate(Phase.values):
        replica(node, phase=phase, replica_index=index)
    assert {row.phase: row.state for row in NodeModel.engines.all()} == STATE_BY_PHASE
    serving = NodeModel.objects.serving()
    assert [row.state for row in serving] == ["loaded"]
    assert refused(NodeModel, node=node, model_name="n", phase="serving", address="")
    assert refused(NodeModel, node=node, model_name="n", **columns(phase="serving") | {"phase": "resting"})
    assert refused(NodeModel, node=node, model_name="n", **columns(in_flight=-1))
    fresh = NodeModel.objects.create(node=node, model_name="n", **columns())
    assert (fresh.replica_index, fresh.in_flight, fresh.owner_kind) == (0, 0, "")


@pytest.mark.rule("R1.5")
def test_a_slot_is_taken_once() -> None:
    """R1.5, "Port:": node, model and index are unique; a full node gives none and says so."""
    node = api.make_node()
    replica(node)
    assert refused(NodeModel, node=node, model_name="m", replica_index=0, **columns())
    (view,) = fleet_cache.read_fleet("m")
    refusal = slots.reserve(view, "m", attempt=attempt("x:1"), backend="echo", now=clock.now())
    assert refusal == slots.NoSlot("no free slot for this model")
    assert NodeModel.objects.get(node=node, model_name="m").state == "loaded"


@pytest.mark.rule("R1.19")
def test_a_node_that_was_drained_meanwhile_gives_no_slot() -> None:
    """I10: between the choice and the slot an admin may have spoken."""
    node = api.make_node()
    (view,) = fleet_cache.read_fleet("m")
    drain(node.id, actor=STATIC_KEY, now=clock.now())
    refusal = slots.reserve(view, "m", attempt=attempt("x:1"), backend="echo", now=clock.now())
    assert refusal == slots.NoSlot("gone or not healthy any more")
    assert not NodeModel.objects.exists()


@pytest.mark.rule("R1.6")
def test_load_info_outlives_replicas_and_nodes() -> None:
    """R1.6: one row a model, of no node."""
    node = api.make_node()
    replica(node)
    ModelLoadInfo.objects.create(model_name="m", backend_type="echo", model_options={"Model": "m"})
    deregister(node.id, actor=STATIC_KEY, now=clock.now())
    assert not NodeModel.objects.exists()
    assert ModelLoadInfo.objects.get(model_name="m").model_options == {"Model": "m"}
    assert refused(ModelLoadInfo, model_name="m", backend_type="echo")
    assert refused(ModelLoadInfo, model_name="", backend_type="echo")


@pytest.mark.rule("R1.7", "R1.114", "R1.115", "A11", "O23", "O72", "O79", "T-REC-27")
def test_an_intent_is_unique_for_node_backend_and_op() -> None:
    """Different ops stand side by side (review R10); a worker does one thing with a backend at a time."""
    node = api.make_node()
    asked = {"node": node, "operation_id": uuid4()}
    intent = PendingBackendOp.objects.create(backend="echo", op="install", galleries="[]", **asked)
    assert (intent.attempts, intent.last_error) == (0, "")
    assert intent.next_retry_at <= clock.now()
    assert refused(PendingBackendOp, backend="echo", op="install", **asked)
    assert not refused(PendingBackendOp, backend="echo", op="delete", **asked)
    assert not refused(PendingBackendOp, backend="other", op="delete", **asked)
    assert refused(PendingBackendOp, backend="third", op="polish", **asked)
    assert refused(PendingBackendOp, backend="", op="install", **asked)
    leased = {"lease_until": clock.now(), "fence": 1}
    assert refused(PendingBackendOp, backend="third", op="install", **asked, **leased)
    PendingBackendOp.objects.filter(op="install").update(lease_owner="c", lease_until=clock.now())
    assert refused(PendingBackendOp, backend="echo", op="upgrade", **asked, **leased, lease_owner="c")


@pytest.mark.rule("R1.8", "T-REG-62")
def test_one_rule_a_model() -> None:
    """R1.8: a rule starts without cooldown; counts are whole, and the minimum fits under the maximum."""
    rule = ModelSchedulingConfig.objects.create(
        model_name="m", node_selector={"tier": "fast"}, min_replicas=1
    )
    assert (rule.unsatisfiable_until, rule.unsatisfiable_ticks, rule.spread_all) == (None, 0, False)
    assert refused(ModelSchedulingConfig, model_name="m")
    assert refused(ModelSchedulingConfig, model_name="n", min_replicas=-1)
    assert refused(ModelSchedulingConfig, model_name="n", min_replicas=3, max_replicas=2)
