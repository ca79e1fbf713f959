"""Requests to load a model: how the operation `model_load` is created, its payload and its deadline.

The payload also has the resources that the load needs of a node (`Need`). Requests for inference that wait
for the load extend its deadline, so that it ends when none waits any more. A scale-up, which loads a further
replica, has no waiting request: its deadline follows from the limits for installs and loads (R2.24), and
moves while bytes arrive or LoadModel runs (progress deadline). The deadline is stored in the operation's row,
so it stays the same if another controller continues the load.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from django.db import transaction
from django.db.models import Exists, OuterRef, Q

from localai_cluster.kit import clock, conf
from nodes.definitions.files import Definition
from nodes.definitions.sizes import ModelFiles
from nodes.models import LOADING_PHASES, NodeModel
from nodes.models.replica import load_key
from nodes.placement import fit, load_times, memory
from nodes.placement.choose import Need
from nodes.placement.sizes import STATED_NEED
from nodes.replicas import fleet_queries
from operations.executor.work import Work, in_thread
from operations.ledger import admission
from operations.ledger.admission import Requester
from operations.models import Operation, Status

KIND = "model_load"
"""Kind of the operation that loads a model."""
EXCLUDED_NODES = "besides"
"""Payload key: ids of the nodes that the load must not use."""
ALLOWED_NODES = "only"
"""Payload key: ids of the nodes that the load may use; None or absent = all nodes."""
SCALE_UP = "another"
"""Payload key: True if the load is for one more replica."""
REASON = "reason"
"""Payload key: the reason for the scale-up."""
REPLACES = "replaces"
"""Payload key: id of the replica that is terminated when the new one serves."""
LACKS_ROOM = "lacks_room"
"""Payload key: True if the load waits for memory that the replica to replace uses."""
TURN = "turn"
"""Payload key: the node whose memory this load gets when the replicas on it may be evicted."""


@dataclass(frozen=True)
class LoadRequest:
    """What a load is requested to do, as stored in its operation's payload."""

    is_scale_up: bool
    """True: load one more replica. False: any serving replica satisfies the load."""
    excluded_nodes: frozenset[UUID]
    """Nodes that the load must not use, because their replicas are about to stop."""
    allowed_nodes: frozenset[UUID] | None
    """Nodes that the load may use; None = all nodes."""
    reason: str
    """Why a further replica is needed."""
    replaces: UUID | None = None
    """The replica of an earlier definition that is terminated when the new replica serves."""


ANY_REPLICA_REQUEST = LoadRequest(
    is_scale_up=False, excluded_nodes=frozenset(), allowed_nodes=None, reason=""
)
"""The load for an inference request: one replica, on any node."""


def request_of(operation: Operation) -> LoadRequest:
    """Parse the operation's payload."""
    payload = operation.payload
    allowed_nodes = payload.get(ALLOWED_NODES)
    return LoadRequest(
        is_scale_up=bool(payload.get(SCALE_UP)),
        excluded_nodes=frozenset(map(UUID, payload.get(EXCLUDED_NODES, ()))),
        allowed_nodes=None if allowed_nodes is None else frozenset(map(UUID, allowed_nodes)),
        reason=payload.get(REASON, ""),
        replaces=UUID(payload[REPLACES]) if payload.get(REPLACES) else None,
    )


_WRITE_INTERVAL = load_times.STALL / 20
"""Minimum seconds between two writes of the deadline."""


def initial_seconds() -> float:
    """Return the initial progress deadline of a scale-up, in seconds."""
    cluster = conf.cluster()
    return load_times.progress_deadline(cluster.install_timeout, cluster.model_load_timeout)


@dataclass(eq=False)
class ProgressDeadline:
    """The progress deadline of a load, as one attempt extends it. Only a scale-up has one."""

    _work: Work
    _moved_at: float = -_WRITE_INTERVAL
    _bytes: int = 0

    async def extend_on_progress(self, current_bytes: int) -> None:
        """Extend the deadline to `STALL` from now if `current_bytes` has increased."""
        if current_bytes > self._bytes and clock.monotonic() >= self._moved_at + _WRITE_INTERVAL:
            self._bytes, self._moved_at = current_bytes, clock.monotonic()
            await self.extend_for(min(load_times.STALL, initial_seconds()))

    async def extend_for(self, seconds: float) -> None:
        """Extend the deadline for a step that begins now and may take `seconds`."""
        operation, now = self._work.operation, clock.now()
        if request_of(operation).is_scale_up:
            age = (now - operation.created_at).total_seconds()
            remaining = load_times.extend_deadline(age, seconds, initial_seconds())
            await in_thread(admission.extend_need, {operation.id: now + timedelta(seconds=remaining)})


@dataclass(frozen=True)
class ActiveLoads:
    """The active loads of some models: their numbers and restrictions."""

    counts: Mapping[str, int]
    waiting: Mapping[str, int]
    """By model: the number of its loads that wait."""
    pinned: Mapping[str, frozenset[UUID]]
    """By model: the nodes that its loads are restricted to."""
    replacing: Mapping[UUID, bool]
    """By replica that a load will replace: True if the load waits for the replica's memory."""


def any_replica(model_name: str, by: Requester) -> admission.OperationRequest:
    """Return the request for a load that any serving replica of the model satisfies."""
    return admission.OperationRequest(
        KIND, key=load_key(model_name), element=model_name, payload={"model": model_name}, by=by
    )


def request_load(model_name: str, by: Requester) -> Operation | None:
    """Create or join the load of the model; return None if a replica serves it.

    The load ends after the limit for installs unless requests wait for it. Raises Conflict while the model is
    being unloaded or deleted.
    """
    if fleet_queries.is_served(model_name):
        return None
    now = clock.now()
    needed_until = now + timedelta(seconds=conf.cluster().install_timeout)
    return admission.admit(replace(any_replica(model_name, by), needed_until=needed_until), now=now).operation


def request_scale_up(
    model_name: str,
    *,
    allowed_nodes: Collection[UUID] | None,
    actor: str,
    reason: str,
    replaces: UUID | None = None,
) -> Operation:
    """Create the load of one more replica, on one of the allowed nodes; None = any node that the rule allows.

    Every call creates a load; `active_loads` counts the loads. The replica `replaces` is terminated when the
    new replica serves. Raises Conflict while the model is being unloaded or deleted. Raises RuntimeError
    inside a transaction, because the transaction would hold the counter of changes while it waits for the
    model's lock.
    """
    now = clock.now()
    request = _scale_up(model_name, allowed_nodes, Requester(actor), reason, now, replaces)
    with transaction.atomic(durable=True):
        return admission.admit(request, now=now).operation


def request_replicas(model_name: str, count: int, *, node_id: UUID | None, by: Requester) -> list[Operation]:
    """Create the loads of `count` further replicas that a user requests, on one node or any; all or none.

    Raises the same errors as `request_scale_up`.
    """
    now = clock.now()
    allowed_nodes = None if node_id is None else [node_id]
    request = _scale_up(model_name, allowed_nodes, by, f"requested by {by.actor}", now)
    with transaction.atomic(durable=True):
        outcomes = admission.admit_many([request] * count, now=now)
        return [admission.require(outcome).operation for outcome in outcomes]


def _scale_up(
    model_name: str,
    allowed_nodes: Collection[UUID] | None,
    by: Requester,
    reason: str,
    now: datetime,
    replaces: UUID | None = None,
) -> admission.OperationRequest:
    return admission.OperationRequest(
        KIND,
        key=load_key(model_name),
        element=model_name,
        by=by,
        payload={
            "model": model_name,
            SCALE_UP: True,
            ALLOWED_NODES: None if allowed_nodes is None else sorted(map(str, allowed_nodes)),
            REASON: reason,
        }
        | ({} if replaces is None else {REPLACES: str(replaces)}),
        needed_until=now + timedelta(seconds=initial_seconds()),
        joins=False,
    )


def active_loads(model_names: Collection[str]) -> ActiveLoads:
    """Return the active loads of these models. One query."""
    loads = Operation.objects.active().filter(kind=KIND, element__in=model_names).order_by()
    counts, waiting = Counter(dict.fromkeys(model_names, 0)), Counter[str]()
    pinned: dict[str, frozenset[UUID]] = defaultdict(frozenset)
    replacing: dict[UUID, bool] = {}
    for name, status, payload in loads.values_list("element", "status", "payload"):
        counts[name] += 1
        waiting[name] += status == Status.WAITING
        if payload.get(ALLOWED_NODES):
            pinned[name] |= frozenset(map(UUID, payload[ALLOWED_NODES]))
        if payload.get(REPLACES):
            replacing[UUID(payload[REPLACES])] = status == Status.WAITING and bool(payload.get(LACKS_ROOM))
    return ActiveLoads(dict(counts), dict(waiting), dict(pinned), replacing)


def nodes_claimed_before(created_at: datetime, now: datetime) -> frozenset[UUID]:
    """Return the nodes whose memory goes first to older loads that have no slot yet. One query."""
    slot = NodeModel.objects.filter(owner_id=OuterRef("pk"), phase__in=LOADING_PHASES)
    needed = Q(needed_until__isnull=True) | Q(needed_until__gt=now)
    older = Operation.objects.active().filter(needed, ~Exists(slot), kind=KIND, created_at__lt=created_at)
    return frozenset(map(UUID, older.filter(payload__has_key=TURN).values_list("payload__turn", flat=True)))


NEEDED_FOR = timedelta(seconds=60)
"""Time for which one call of `load_on_other_node` keeps the load from being abandoned."""


def load_on_other_node(model: str, node_id: UUID, operation_id: UUID | None) -> Operation:
    """Load the model on a node other than `node_id`, whose replica is about to stop; return the load.

    `operation_id` is the load that an earlier call has returned, None for the first call. The load may be one
    that was active already. Raises Conflict while other work on the model is in progress.
    """
    now = clock.now()
    if operation_id is None:
        request = admission.OperationRequest(
            KIND,
            key=load_key(model),
            element=model,
            by=Requester("system"),
            payload={EXCLUDED_NODES: [str(node_id)]},
            needed_until=now + NEEDED_FOR,
        )
        return admission.admit(request, now=now).operation
    admission.extend_need({operation_id: now + NEEDED_FOR})
    return Operation.objects.get(pk=operation_id)


VRAM = "vram_needed"
"""Payload key of a waiting load's need: bytes of memory."""
DISK = "disk_needed"
"""Payload key of a waiting load's need: bytes of disk space."""
FILES = "files_size"
"""Payload key of a waiting load's need: bytes of the files that are sent."""
OWN_GPUS = "own_gpus"
"""Payload key of a waiting load's need: True if the definition selects the GPUs."""
VRAM_SHARE = "vram_share"
"""Payload key of a waiting load's need: the fraction of a GPU that the backend takes."""
CARDS = "cards"
"""Payload key of a waiting load's need: the number of GPUs of which the backend takes `vram_share`."""


def estimate_need(
    definition: Definition, files: ModelFiles, readings: Sequence[fit.EngineReading] = ()
) -> Need:
    """Return what a replica of this definition needs (R2.40, R2.37, D-FIT).

    The memory is the first known of: what the definition states, the fraction of a GPU that the backend
    takes, the `readings` of its engines, and the estimate.
    """
    options, backend = definition.options, definition.backend
    share, cards = (0.0, 0) if definition.vram else fit.card_share(backend, options)
    kind = fit.device_kind(backend)
    terms: fit.Terms = ((STATED_NEED, definition.vram),) if definition.vram else ()
    counted: Sequence[fit.EngineReading] = ()
    by_gpu: fit.Pairs = ()
    contexts: fit.Pairs = ()
    own_gpus = bool(options.get("MainGPU") or options.get("TensorSplit"))
    if not terms and not share and kind != "cpu":
        load_options = fit.load_options(options)
        terms, counted = fit.apply_readings(fit.estimate(files, load_options, kind), readings)
        if files.weights > 0:
            contexts = fit.smaller_contexts(files, load_options, kind)
            by_gpu = fit.by_gpu(files, load_options, kind) if own_gpus else ()
    need = _need_of(
        fit.total_bytes(terms), memory.required_disk(files.payload), files.payload, own_gpus=own_gpus
    )
    can_be_partial = definition.auto_layers and need.unknown_fits and terms and not definition.vram
    partial = fit.fewer_layers(files, fit.load_options(options), kind, need.vram) if can_be_partial else ()
    return replace(
        need,
        vram_share=share,
        cards=cards,
        terms=terms,
        by_gpu=by_gpu,
        contexts=contexts,
        partial=partial,
        source=STATED_NEED if definition.vram else "learned" if counted else "estimated",
        readings=len(counted),
        learned_at=max((reading.at for reading in counted), default=""),
    )


def payload_with_need(payload: Mapping[str, Any], need: Need) -> dict[str, Any]:
    """Return a copy of the payload with the need of the load."""
    needed = {VRAM: need.vram, DISK: need.disk, FILES: need.files, OWN_GPUS: need.own_gpus}
    return {**payload, **needed, VRAM_SHARE: need.vram_share, CARDS: need.cards}


def parse_need(payload: Mapping[str, Any]) -> Need:
    """Return the need in an operation's payload, which `payload_with_need` adds; without it an empty need."""
    need = _need_of(
        payload.get(VRAM, 0),
        payload.get(DISK, 0),
        payload.get(FILES, 0),
        own_gpus=payload.get(OWN_GPUS, False),
    )
    return replace(need, vram_share=payload.get(VRAM_SHARE, 0.0), cards=payload.get(CARDS, 0))


def _need_of(vram: int, disk: int, files: int, *, own_gpus: bool) -> Need:
    """Return a need of these bytes; settings decide whether nodes without them are excluded (R2.32,
    R2.39)."""
    settings = conf.cluster()
    disk, files = (0, 0) if settings.shared_models else (disk, files)  # R2.36
    need = Need(vram, disk=disk, disk_required=settings.disk_headroom_check, files=files, own_gpus=own_gpus)
    return under_policy(need)


def under_policy(need: Need) -> Need:
    """Return the need under the operator's policy for memory (R2.32)."""
    policy = conf.cluster().vram_policy
    return replace(need, vram_required=policy in ("fit", "require"), unknown_fits=policy == "fit")
