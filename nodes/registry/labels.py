"""Labels: a worker's, an administrator's and the registry's own (R1.40 to R1.44).

The source of a label decides who may replace it: a worker's labels never replace an administrator's, the
registry's own labels replace both, and are removed when they no longer apply. A change with the `revision`
that the administrator has seen raises Conflict (field `revision`) if the node has changed since.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from uuid import UUID

from localai_cluster.accounts.actors import Actor
from localai_cluster.kit import errors, names
from nodes.models import BackendNode, NodeEvent, NodeLabel
from nodes.registry.change import Change, node_change
from nodes.scheduling.passes import clear_cooldowns

MAX_LABELS = 64
MAX_KEY_LENGTH, MAX_VALUE_LENGTH = 128, 255
MAX_PENDING_LABEL_BYTES = 2048
"""Maximum bytes of all labels of a pending node, because anyone with the registration token can register
one."""
SLOTS_LABEL = "node.replica-slots"
_GIB = 1024**3
_VRAM_BUCKETS_GIB = (80, 48, 24, 16, 8)

Source = NodeLabel.Source


def check_labels(labels: Mapping[str, str]) -> None:
    """Raise InvalidInput with the key of an invalid label.

    A node has at most 64 labels, with keys of 1 to 128 and values of up to 255 characters.
    """
    if len(labels) > MAX_LABELS:
        raise errors.InvalidInput(f"labels: at most {MAX_LABELS} are allowed", field="labels")
    for key, value in labels.items():
        _check_label(key, value)


def _check_label(key: str, value: str) -> None:
    field = f"labels.{key[:MAX_KEY_LENGTH]}"
    if character := names.find_unprintable(key):
        raise errors.InvalidInput(f"labels: a key must not contain the character {character}", field="labels")
    if not key.strip() or len(key) > MAX_KEY_LENGTH:
        raise errors.InvalidInput(f"labels: a key must have 1 to {MAX_KEY_LENGTH} characters", field="labels")
    # Clients resolve such a path before they send it: DELETE …/labels/../../<id> would be another route.
    if {".", ".."} & set(key.split("/")):
        raise errors.InvalidInput("labels: a key must not contain . or .. as a path segment", field="labels")
    if len(value) > MAX_VALUE_LENGTH:
        raise errors.InvalidInput(f"{field} exceeds {MAX_VALUE_LENGTH} characters", field=field)
    names.check_text(value, field)


def edit_labels(
    node_id: UUID,
    labels: Mapping[str, str],
    *,
    drop: Collection[str] | None = (),
    actor: Actor,
    now: datetime,
    revision: int | None = None,
) -> dict[str, str]:
    """Set these labels of an administrator and remove the keys in `drop`; return all labels of the node.

    With `drop` None all other keys are removed. Raise InvalidInput, NotFound, or Conflict for another
    `revision` of the node.
    """
    check_labels(labels)
    with node_change(node_id, now, revision) as change:
        before = _stored_labels(change.node)
        removed_keys = {key for key in before if (key not in labels if drop is None else key in drop)}
        _check_count(before.keys() - removed_keys | labels.keys())
        _write_labels(change.node, labels, Source.ADMIN)
        _remove_labels(change.node, removed_keys)
        _record_change(change, actor, before, _stored_labels(change.node))
        change.save()
        clear_cooldowns(now)
        return _stored_labels(change.node)


def _check_count(keys: Collection[str]) -> None:
    if len(keys) > 2 * MAX_LABELS:
        raise errors.InvalidInput(f"labels: a node has at most {2 * MAX_LABELS}", field="labels")


def _check_bytes(labels: Mapping[str, str]) -> None:
    if sum(len(f"{key}{value}".encode()) for key, value in labels.items()) > MAX_PENDING_LABEL_BYTES:
        raise errors.InvalidInput(
            f"labels: a node that awaits approval can have at most {MAX_PENDING_LABEL_BYTES} bytes of labels",
            field="labels",
        )


def auto_labels(node: BackendNode) -> dict[str, str]:
    """Return the registry's own labels of a node (R1.41, R1.42)."""
    labels = {"node.name": node.name, SLOTS_LABEL: str(max(node.max_replicas_per_model, 1))}
    if node.gpu_vendor:
        labels["gpu.vendor"] = node.gpu_vendor
    if node.total_vram > 0:
        labels["gpu.vram"] = vram_bucket(node.total_vram)
    return labels


def vram_bucket(total: int) -> str:
    """Return the total VRAM in GiB, rounded down to a common size of GPU memory (R1.42)."""
    gib = total // _GIB
    floor = next((step for step in _VRAM_BUCKETS_GIB if gib >= step), gib)
    return "80GB+" if floor == _VRAM_BUCKETS_GIB[0] else f"{floor}GB"


def merge_reported_labels(reports: Sequence[tuple[Change, Mapping[str, str]]], actor: Actor) -> None:
    """Merge the labels that workers report into the stored sets (R1.30).

    An administrator's labels stay; the registry's own labels replace a worker's and an administrator's. Two
    statements for any number of nodes, and one for each node that loses a label.
    """
    rows_by_node: dict[UUID, dict[str, NodeLabel]] = defaultdict(dict)
    old = [change.node.id for change, _ in reports if change.node.revision > 0]
    for label in NodeLabel.objects.filter(node_id__in=old) if old else ():
        rows_by_node[label.node_id][label.key] = label
    rows: list[NodeLabel] = []
    for change, reported in reports:
        rows += _merge_reported(change, reported, rows_by_node[change.node.id], actor)
    _store_rows(rows)


def _merge_reported(
    change: Change, reported: Mapping[str, str], rows: Mapping[str, NodeLabel], actor: Actor
) -> list[NodeLabel]:
    """Remove stale labels, record the changes, and return the labels to write."""
    automatic = auto_labels(change.node)
    reserved_keys = {key for key, label in rows.items() if label.source == Source.ADMIN} | automatic.keys()
    worker_labels = {key: value for key, value in reported.items() if key not in reserved_keys}
    stale = {key for key, label in rows.items() if label.source == Source.AUTO} - automatic.keys()
    removed_keys = stale - worker_labels.keys()
    changed_rows = _changed_rows(rows, worker_labels, change.node, Source.WORKER) + _changed_rows(
        rows, automatic, change.node, Source.AUTO
    )
    if not removed_keys and not changed_rows:
        return []
    _check_count((rows.keys() | worker_labels.keys()) - removed_keys - automatic.keys())
    if change.node.approved_at is None:
        of_worker = {key: label.value for key, label in rows.items() if label.source == Source.WORKER}
        _check_bytes(of_worker | worker_labels)
    _remove_labels(change.node, removed_keys)
    before = {key: label.value for key, label in rows.items()}
    after = (
        {key: value for key, value in before.items() if key not in removed_keys} | worker_labels | automatic
    )
    _record_change(change, actor, before, after)
    return changed_rows


def _changed_rows(
    rows: Mapping[str, NodeLabel], labels: Mapping[str, str], node: BackendNode, source: NodeLabel.Source
) -> list[NodeLabel]:
    """Return the rows for those labels whose value or source differs from the stored one.

    Most reports repeat the labels, so usually there are none.
    """
    stored = {key: label.value for key, label in rows.items() if label.source == source}
    changed = {key: value for key, value in labels.items() if stored.get(key) != value}
    return _label_rows(node, changed, source)


def refresh_slots_label(node: BackendNode) -> None:
    """Set the label `node.replica-slots` to the node's new replica cap (R1.45).

    No event is recorded, because the event of the cap contains the value.
    """
    _write_labels(node, {SLOTS_LABEL: auto_labels(node)[SLOTS_LABEL]}, Source.AUTO)


def _stored_labels(node: BackendNode) -> dict[str, str]:
    return dict(NodeLabel.objects.filter(node=node).order_by("key").values_list("key", "value"))


def _write_labels(node: BackendNode, labels: Mapping[str, str], source: NodeLabel.Source) -> None:
    _store_rows(_label_rows(node, labels, source))


def _label_rows(node: BackendNode, labels: Mapping[str, str], source: NodeLabel.Source) -> list[NodeLabel]:
    return [NodeLabel(node=node, key=key, value=value, source=source) for key, value in labels.items()]


def _store_rows(rows: Sequence[NodeLabel]) -> None:
    NodeLabel.objects.bulk_create(
        rows, update_conflicts=True, unique_fields=["node", "key"], update_fields=["value", "source"]
    )


def _remove_labels(node: BackendNode, keys: Collection[str]) -> None:
    if keys:
        NodeLabel.objects.filter(node=node, key__in=keys).delete()


def _record_change(change: Change, actor: Actor, before: Mapping[str, str], after: Mapping[str, str]) -> None:
    """Record the differences between two sets of labels as one event; nothing if they are equal."""
    detail = {
        "set": {key: value for key, value in after.items() if before.get(key) != value},
        "removed": sorted(before.keys() - after.keys()),
    }
    if any(detail.values()):
        change.record_event(NodeEvent.Kind.LABELS, actor, "", detail)
