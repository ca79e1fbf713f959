"""An administrator's settings of a node: replica cap and VRAM budget (R1.45 to R1.50), disk quota for models.

All settings survive the worker's restarts until they are reset. `revision` is the revision that the
administrator has seen; each function raises Conflict (field `revision`) if the node has changed since.
"""

from datetime import datetime
from typing import Any
from uuid import UUID

from localai_cluster.accounts.actors import Actor
from localai_cluster.kit import errors
from nodes.models import BackendNode, NodeEvent
from nodes.registry import resources
from nodes.registry.change import Change, node_change
from nodes.registry.labels import refresh_slots_label
from nodes.scheduling.passes import clear_cooldowns

MAX_REPLICA_CAP = 10_000
MAX_BUDGET_LENGTH = 32


def set_replica_cap(
    node_id: UUID, value: int, *, actor: Actor, now: datetime, revision: int | None = None
) -> BackendNode:
    """Limit the replicas of one model on the node to `value` (R1.45).

    Raises InvalidInput outside 1 to 10,000.
    """
    if not 1 <= value <= MAX_REPLICA_CAP:
        raise errors.InvalidInput(f"value must be between 1 and {MAX_REPLICA_CAP}", field="value")
    with node_change(node_id, now, revision) as change:
        _write_override(
            change, actor, "set", max_replicas_per_model=value, max_replicas_per_model_manually_set=True
        )
        refresh_slots_label(change.node)
        change.save()
        clear_cooldowns(now)
    return change.node


def reset_replica_cap(
    node_id: UUID, *, actor: Actor, now: datetime, revision: int | None = None
) -> BackendNode:
    """Remove the cap: the worker's own value applies from its next registration on (R1.46)."""
    with node_change(node_id, now, revision) as change:
        _write_override(change, actor, "reset to worker default", max_replicas_per_model_manually_set=False)
    return change.node


def set_vram_budget(
    node_id: UUID, text: str, *, actor: Actor, now: datetime, revision: int | None = None
) -> BackendNode:
    """Limit the VRAM of the node that replicas may use; "" removes the limit (R1.47).

    Raises InvalidInput if `text` is not a budget (R1.49).
    """
    text = text.strip()
    if len(text) > MAX_BUDGET_LENGTH:
        raise errors.InvalidInput(f"value exceeds {MAX_BUDGET_LENGTH} characters", field="value")
    with node_change(node_id, now, revision) as change:
        node = change.node
        try:
            limit = resources.budget_ceiling(text, node.total_vram)
        except ValueError as error:
            raise errors.InvalidInput(f"value: {error}", field="value") from None
        _write_override(
            change,
            actor,
            "set",
            vram_budget=text,
            vram_budget_bytes=limit,
            vram_budget_manually_set=True,
            available_vram=resources.cap_to_ceiling(node.available_vram, limit),
        )
        change.save()
        clear_cooldowns(now)
    return change.node


def reset_vram_budget(
    node_id: UUID, *, actor: Actor, now: datetime, revision: int | None = None
) -> BackendNode:
    """Remove the budget until the worker registers with one.

    The next heartbeat stores the free VRAM without the limit (R1.48).
    """
    with node_change(node_id, now, revision) as change:
        _write_override(
            change,
            actor,
            "reset to worker default",
            vram_budget="",
            vram_budget_bytes=0,
            vram_budget_manually_set=False,
        )
    return change.node


def set_disk_quota(
    node_id: UUID, text: str, *, actor: Actor, now: datetime, revision: int | None = None
) -> BackendNode:
    """Limit the disk space that the files of models take on the node; "" removes the limit.

    Existing files stay. Raises InvalidInput if `text` is not a budget, as for VRAM.
    """
    text = text.strip()
    if len(text) > MAX_BUDGET_LENGTH:
        raise errors.InvalidInput(f"value exceeds {MAX_BUDGET_LENGTH} characters", field="value")
    try:
        size, share = resources.parse_disk_quota(text)
    except ValueError as error:
        raise errors.InvalidInput(f"value: {error}", field="value") from None
    with node_change(node_id, now, revision) as change:
        if text != change.node.disk_quota:
            change.set(disk_quota_size=size, disk_quota_share=share)
        _write_override(change, actor, "set" if text else "removed", disk_quota=text)
        change.save()
        clear_cooldowns(now)
    return change.node


def _write_override(change: Change, actor: Actor, cause: str, **values: Any) -> None:
    """Set the columns and record the event; do nothing if the columns have these values."""
    before = {name: getattr(change.node, name) for name in values}
    if before == values:
        return
    change.set(**values)
    detail = {name: {"from": before[name], "to": value} for name, value in values.items()}
    change.record_event(NodeEvent.Kind.OVERRIDE, actor, cause, detail)
