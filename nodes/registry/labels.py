"""Labels: a worker's, an admin's and the registry's own (R1.40 to R1.44).

Who set a label decides who may replace it: a worker's never touch an admin's, the registry's own win over
both, and an own one that no longer holds goes. An admin's change with the `revision` that he looked at raises
Conflict (field `revision`) if the node has changed since.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from uuid import UUID

from django.db import transaction

from localai_cluster import errors, names
from localai_cluster.accounts.actors import Actor
from nodes.models import BackendNode, NodeEvent, NodeLabel
from nodes.registry.change import Change, locked
from nodes.scheduling.cooldowns import clear_cooldowns

MOST_LABELS = 64
LONGEST_KEY, LONGEST_VALUE = 128, 255
SLOTS = "node.replica-slots"
_GIB = 1024**3
_BUCKETS = (80, 48, 24, 16, 8)

Source = NodeLabel.Source


def check_labels(labels: Mapping[str, str]) -> None:
    """Raises InvalidInput naming the key: at most 64, keys of 1 to 128, values up to 255 characters."""
    if len(labels) > MOST_LABELS:
        raise errors.InvalidInput(f"labels: at most {MOST_LABELS} are allowed", field="labels")
    for key, value in labels.items():
        _check(key, value)


def _check(key: str, value: str) -> None:
    field = f"labels.{key[:LONGEST_KEY]}"
    if found := names.unprintable(key):
        raise errors.InvalidInput(f"labels: a key must not contain the character {found}", field="labels")
    if not key.strip() or len(key) > LONGEST_KEY:
        raise errors.InvalidInput(f"labels: a key must have 1 to {LONGEST_KEY} characters", field="labels")
    # Clients resolve such a path before they send it: DELETE …/labels/../../<id> would be another route.
    if {".", ".."} & set(key.split("/")):
        raise errors.InvalidInput("labels: a key must not contain . or .. as a path segment", field="labels")
    if len(value) > LONGEST_VALUE:
        raise errors.InvalidInput(f"{field} exceeds {LONGEST_VALUE} characters", field=field)
    names.check_text(value, field)


def set_labels(
    node_id: UUID, labels: Mapping[str, str], *, actor: Actor, now: datetime, revision: int | None = None
) -> dict[str, str]:
    """R1.40: these and no others; answers the set. The registry's own come back at the next registration."""
    check_labels(labels)
    return _edit(node_id, labels, None, actor, now, revision)


def merge_labels(
    node_id: UUID, labels: Mapping[str, str], *, actor: Actor, now: datetime, revision: int | None = None
) -> dict[str, str]:
    """Sets these and leaves the others alone; answers the set."""
    check_labels(labels)
    return _edit(node_id, labels, (), actor, now, revision)


def remove_label(
    node_id: UUID, key: str, *, actor: Actor, now: datetime, revision: int | None = None
) -> dict[str, str]:
    """Removes one key, if it is there; answers the set."""
    return _edit(node_id, {}, (key,), actor, now, revision)


def edit_labels(
    node_id: UUID, labels: Mapping[str, str], *, drop: Collection[str], actor: Actor, now: datetime
) -> dict[str, str]:
    """Sets these and removes the keys in `drop`, as one change; answers the set."""
    check_labels(labels)
    return _edit(node_id, labels, drop, actor, now)


def _edit(
    node_id: UUID,
    wanted: Mapping[str, str],
    drop: Collection[str] | None,
    actor: Actor,
    now: datetime,
    revision: int | None = None,
) -> dict[str, str]:
    """Writes `wanted` as the admin's and removes `drop`; None removes what is not wanted."""
    with transaction.atomic():
        change = Change(locked(node_id, revision), now)
        before = _labels(change.node)
        gone = {key for key in before if (key not in wanted if drop is None else key in drop)}
        _check_count(before.keys() - gone | wanted.keys())
        _write(change.node, wanted, Source.ADMIN)
        _remove(change.node, gone)
        _tell(change, actor, before, _labels(change.node))
        change.save()
        clear_cooldowns(now)
        return _labels(change.node)


def _check_count(keys: Collection[str]) -> None:
    if len(keys) > 2 * MOST_LABELS:
        raise errors.InvalidInput(f"labels: a node has at most {2 * MOST_LABELS}", field="labels")


def auto_labels(node: BackendNode) -> dict[str, str]:
    """R1.41, R1.42: what the registry itself says of a node."""
    labels = {"node.name": node.name, SLOTS: str(max(node.max_replicas_per_model, 1))}
    if node.gpu_vendor:
        labels["gpu.vendor"] = node.gpu_vendor
    if node.total_vram > 0:
        labels["gpu.vram"] = vram_bucket(node.total_vram)
    return labels


def vram_bucket(total: int) -> str:
    """R1.42: whole GiB, rounded down to a card's size."""
    gib = total // _GIB
    floor = next((step for step in _BUCKETS if gib >= step), gib)
    return "80GB+" if floor == _BUCKETS[0] else f"{floor}GB"


def reported_labels(reports: Sequence[tuple[Change, Mapping[str, str]]], actor: Actor) -> None:
    """R1.30: the workers' labels join the sets, an admin's stay, the registry's own win over both.

    Two statements for any number of nodes, and one for each node that loses a label.
    """
    known: dict[UUID, dict[str, NodeLabel]] = defaultdict(dict)
    old = [change.node.id for change, _ in reports if change.node.revision > 0]
    for label in NodeLabel.objects.filter(node_id__in=old) if old else ():
        known[label.node_id][label.key] = label
    rows: list[NodeLabel] = []
    for change, reported in reports:
        rows += _reported(change, reported, known[change.node.id], actor)
    _store(rows)


def _reported(
    change: Change, reported: Mapping[str, str], rows: Mapping[str, NodeLabel], actor: Actor
) -> list[NodeLabel]:
    """The labels to write; those that are gone are removed, and what changed is told."""
    automatic = auto_labels(change.node)
    held = {key for key, label in rows.items() if label.source == Source.ADMIN} | automatic.keys()
    own = {key: value for key, value in reported.items() if key not in held}
    stale = {key for key, label in rows.items() if label.source == Source.AUTO} - automatic.keys()
    gone = stale - own.keys()
    new = _unlike(rows, own, change.node, Source.WORKER) + _unlike(rows, automatic, change.node, Source.AUTO)
    if not gone and not new:
        return []
    _check_count((rows.keys() | own.keys()) - gone - automatic.keys())
    _remove(change.node, gone)
    before = {key: label.value for key, label in rows.items()}
    after = {key: value for key, value in before.items() if key not in gone} | own | automatic
    _tell(change, actor, before, after)
    return new


def _unlike(
    rows: Mapping[str, NodeLabel], labels: Mapping[str, str], node: BackendNode, source: NodeLabel.Source
) -> list[NodeLabel]:
    """Those of `labels` that are not there yet in just this way: a worker mostly repeats itself."""
    known = {key: label.value for key, label in rows.items() if label.source == source}
    unlike = {key: value for key, value in labels.items() if known.get(key) != value}
    return _rows(node, unlike, source)


def refresh_slots_label(node: BackendNode) -> None:
    """R1.45: `node.replica-slots` says the new cap; the other labels are left as they are.

    The event of the cap says it already.
    """
    _write(node, {SLOTS: auto_labels(node)[SLOTS]}, Source.AUTO)


def _labels(node: BackendNode) -> dict[str, str]:
    return dict(NodeLabel.objects.filter(node=node).order_by("key").values_list("key", "value"))


def _write(node: BackendNode, labels: Mapping[str, str], source: NodeLabel.Source) -> None:
    _store(_rows(node, labels, source))


def _rows(node: BackendNode, labels: Mapping[str, str], source: NodeLabel.Source) -> list[NodeLabel]:
    return [NodeLabel(node=node, key=key, value=value, source=source) for key, value in labels.items()]


def _store(rows: Sequence[NodeLabel]) -> None:
    NodeLabel.objects.bulk_create(
        rows, update_conflicts=True, unique_fields=["node", "key"], update_fields=["value", "source"]
    )


def _remove(node: BackendNode, keys: Collection[str]) -> None:
    if keys:
        NodeLabel.objects.filter(node=node, key__in=keys).delete()


def _tell(change: Change, actor: Actor, before: Mapping[str, str], after: Mapping[str, str]) -> None:
    """One event for what changed, none if nothing did."""
    detail = {
        "set": {key: value for key, value in after.items() if before.get(key) != value},
        "removed": sorted(before.keys() - after.keys()),
    }
    if any(detail.values()):
        change.tell(NodeEvent.Kind.LABELS, actor, "", detail)
