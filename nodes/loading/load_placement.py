"""Place a load: reserve a slot on the best node whose worker answers, or wait and state the reason.

If necessary, replicas are evicted. The choice itself is pure (`nodes/placement`). This module reads the rows,
contacts workers and reserves the slot. After each failure it chooses again, so the next node is tried at
once.

A node stays `healthy` for up to a minute after its worker has died. So several nodes are contacted at once,
and many dead workers cost one short wait. If replicas must be evicted, the load keeps its slot and its memory
reserved while controllers stop the replicas, even if the load ends first.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any, assert_never
from uuid import UUID

from localai_cluster.kit import cancellation, clock, conf
from localai_cluster.messaging.bus import Bus, NotConnected
from localai_cluster.messaging.messages import ListReply
from nodes.backends.backend_requests import INSTALL
from nodes.commands.commands import Worker
from nodes.commands.outcomes import BusDown, Done, NoResponders, Refused, StillRunning, Unreadable
from nodes.decisions import decision_log, fleet_cache
from nodes.decisions.decision_log import DecisionRecord, SnapshotSections
from nodes.definitions.files import Definition
from nodes.definitions.folder import Folder
from nodes.definitions.sizes import ModelFiles
from nodes.loading import load_attempts, load_info, load_request
from nodes.loading.load_attempts import (
    Attempt,
    Cause,
    WorkerGone,
    refusals,
    refusals_error,
    retry_or_end,
)
from nodes.loading.load_request import LACKS_ROOM, TURN, LoadRequest, ProgressDeadline, request_of
from nodes.loading.load_snapshots import encode_load
from nodes.models import BackendNode, NodeBackend, ReplicaState
from nodes.placement.choose import Candidate, Decision, Need, lacks_disk
from nodes.placement.evict import Eviction, choose_victims, join_names
from nodes.placement.explain import DecisionOutcome, Explanation, FleetView
from nodes.placement.fit import EngineReading
from nodes.placement.load_decision import LoadQuestion, decide_load
from nodes.placement.load_times import (
    NodeBackoff,
    NodeBackoffs,
    add_failure,
    backed_off_nodes,
    from_payload,
    into_payload,
    seconds_until_retry,
)
from nodes.replicas import eviction, fleet_queries, slots
from nodes.replicas.slots import NoSlot, Slot, TunedLoad
from operations.executor.work import Abandoned, Work, in_thread
from operations.models import Operation, OperationTarget, TargetStatus

log = logging.getLogger(__name__)

_NODE_POLL_SECONDS = 5.0
_BUS_POLL_SECONDS = 1.0
ANSWER_WITHIN = 3.0
"""Seconds that a contacted worker may take to answer."""
CONTACTS_AT_ONCE = 16
"""Maximum number of nodes that are contacted at the same time."""
EVICTION_POLL = 0.5
_REFUSAL_LIFETIME = timedelta(minutes=10)
"""Time for which a node ranks last because the installation of the backend failed there."""
_NO_BUS_REASON = "this controller is not connected to the message bus"


@dataclass(frozen=True)
class ContactResult:
    """The best node whose worker answered, if any, and the better nodes whose workers did not."""

    node: Candidate | None
    silent: frozenset[UUID]
    listed: ListReply | None = None
    """The backends that the worker listed; None if it could not list them."""


@dataclass(frozen=True)
class LoadNeeds:
    """A model, the needs of its replica, and the models that should not share a node with it."""

    definition: Definition
    need: Need
    conflicts: frozenset[str] = frozenset()
    payload: int = 0
    """Bytes of the model's files; 0 = unknown."""
    files: ModelFiles | None = None
    readings: Sequence[EngineReading] = ()


async def read_needs(definitions: Folder, definition: Definition) -> LoadNeeds:
    """Read the needs of a load by this definition."""
    files = await definitions.sizes.of(definition)
    readings = await in_thread(load_info.readings_of, definition)
    need = load_request.estimate_need(definition, files, readings)
    conflicts = await definitions.conflicting(definition)
    return LoadNeeds(definition, need, conflicts, files.payload, files, readings)


async def reserve_slot(bus: Bus, work: Work, wanted: LoadNeeds) -> Attempt:
    """Reserve a slot on the best node whose worker answers; return the attempt to load the model there.

    Raises Postpone, LoadFailed or Abandoned if no node is available.
    """
    request = request_of(work.operation)
    backoffs = from_payload(work.operation.payload)
    refusing_nodes = frozenset(refusal.node_id for refusal in refusals(work.operation.payload))
    excluded_nodes = backed_off_nodes(backoffs, clock.now()) | refusing_nodes
    listings = dict[UUID, ListReply | None]()
    while True:
        question, decision = await in_thread(
            decide, wanted, request, backoffs, excluded_nodes, refusing_nodes
        )
        victims = None
        if question.evictable_nodes(decision):
            created = work.operation.created_at
            victims = await in_thread(find_eviction, wanted.definition.name, question, decision, created)
        explanation = decide_load(question, decision, victims)
        if explanation.node is None:
            raise await _record_without_node(work, question, backoffs, victims, explanation)
        ranked_nodes = decision.ranked or [explanation.node]
        if explanation.node.id not in listings:
            answer = await _contact_workers(
                bus, work, [node for node in ranked_nodes if node.id not in listings]
            )
            for node_id in answer.silent:
                backoffs = add_failure(backoffs, node_id, clock.now())
            excluded_nodes |= answer.silent
            if answer.node is not None:
                listings[answer.node.id] = answer.listed
            if answer.node is None or answer.node.id != explanation.node.id:
                continue  # otherwise the decision holds: its reservation checks the node again
        slot = await in_thread(_reserve, work, wanted, question, victims, explanation)
        if isinstance(slot, Slot):
            _warn_of_shortages(explanation.node, wanted)
            listed = listings[explanation.node.id]
            instance = listed.instance if listed is not None else ""
            worker = Worker(bus, str(slot.node_id), slot.node_name, instance, answered=listed is not None)
            deadline, evicted = ProgressDeadline(work), None if slot.gpu_layers else victims
            why, payload = explanation.sentence, wanted.payload
            return Attempt(
                work, wanted.definition, slot, worker, backoffs, why, deadline, payload, listed, evicted
            )
        # The next snapshot shows the reason too, so this node is refused then.
        log.info("no place for %s on %s: %s", wanted.definition.name, explanation.node.name, slot.reason)


def decide(
    wanted: LoadNeeds,
    request: LoadRequest,
    backoffs: NodeBackoffs,
    excluded_nodes: Set[UUID],
    refusing_nodes: Set[UUID],
) -> tuple[LoadQuestion, Decision]:
    """Read the rows and decide on the best node for a replica; return the question and the decision.

    A node that has recently failed to install the backend ranks last, like a node that has failed the load.
    """
    name = wanted.definition.name
    backoffs = {**_recent_refusals(wanted.definition.backend), **backoffs}
    selector = fleet_queries.selectors_of([name])[name]
    is_restricted = request.allowed_nodes is not None or bool(request.excluded_nodes)
    view, decision = fleet_cache.CACHE.decide(
        name,
        FleetView((), wanted.need, selector, backoffs, frozenset(excluded_nodes), is_restricted),
        allowed_nodes=request.allowed_nodes,
        excluded_nodes=request.excluded_nodes,
        conflicts=wanted.conflicts,
    )
    view, decision = fleet_queries.prefer_installed(view, decision, wanted.definition.backend)
    question = LoadQuestion(view, frozenset(refusing_nodes), evicts=not request.is_scale_up)
    if request.replaces is None or decision.node is not None:
        return question, decision
    former = eviction.serving(request.replaces)
    fits = former is not None and question.fits_by_replacing(former, decision)
    return replace(question, fits_by_replacement=fits), decision


def _recent_refusals(backend: str) -> dict[UUID, NodeBackoff]:
    """Return back-offs of nodes that recently failed to install the backend and still lack it. One query.

    These back-offs only rank the nodes last and do not exclude them.
    """
    since = clock.now() - _REFUSAL_LIFETIME
    failed = OperationTarget.objects.filter(
        status=TargetStatus.ERROR,
        finished_at__gt=since,
        operation__kind=INSTALL,
        operation__payload__backend__iexact=backend,
        operation__finished_at__gt=since,
    )
    lacking = failed.exclude(node_id__in=NodeBackend.objects.named(backend).values("node_id"))
    return {
        id: NodeBackoff(1, at) for id, at in lacking.values_list("node_id", "finished_at") if at is not None
    }


def _tuned(wanted: LoadNeeds, node_id: UUID) -> TunedLoad | None:
    """Return the options tuned to the node and the need with them; None if nothing differs. One query."""
    definition = wanted.definition
    if wanted.files is None or not conf.cluster().node_options:
        return None
    columns = ("total_vram", "vram_budget_bytes", "gpu_compute_capability")
    row = BackendNode.objects.filter(pk=node_id).values_list(*columns).first()
    options = tune_options(definition.options, definition.backend, Machine(*row) if row else Machine())
    if options == definition.options:
        return None
    tuned = replace(definition, options=options)
    return TunedLoad(load_request.estimate_need(tuned, wanted.files, wanted.readings), options)


def _reserve(
    work: Work, wanted: LoadNeeds, question: LoadQuestion, victims: Eviction | None, explanation: Explanation
) -> Slot | NoSlot:
    """Reserve the slot that was decided on. The snapshot is stored first, in a transaction of its own."""
    assert explanation.node is not None
    now, definition, layers = clock.now(), wanted.definition, explanation.gpu_layers
    snapshot_ref = decision_log.store_snapshot(
        encode_load(str(work.id), definition.name, question, victims), now=now
    )
    return slots.reserve(
        explanation.node,
        definition.name,
        attempt=work.attempt,
        backend=definition.backend,
        now=now,
        need=wanted.need.with_layers(layers),
        room=None if layers else victims,
        why=DecisionRecord(definition.name, work.id, explanation, snapshot_ref),
        gpu_layers=layers,
        tuned=None if layers else _tuned(wanted, explanation.node.id),
    )


def _warn_of_shortages(node: Candidate, wanted: LoadNeeds) -> None:
    if lacks_disk(node, wanted.need):
        log.warning("%s may have too little disk space for %s", node.name, wanted.definition.name)
    if node.conflicts:
        log.warning("%s goes to %s, %s", wanted.definition.name, node.name, node.describe_conflicts())


async def _contact_workers(bus: Bus, work: Work, nodes: Sequence[Candidate]) -> ContactResult:
    try:
        return await contact_best(bus, nodes)
    except NotConnected:
        raise await in_thread(
            load_attempts.record_without_slot,
            work.id,
            Cause.NO_BUS,
            _NO_BUS_REASON,
            seconds=_BUS_POLL_SECONDS,
            waiting=False,
        ) from None


async def _record_without_node(
    work: Work,
    question: LoadQuestion,
    backoffs: NodeBackoffs,
    victims: Eviction | None,
    explanation: Explanation,
) -> Exception:
    """Record the decision, and return the exception that ends this attempt with the same sentence.

    Recording comes first, so that every waiting load has a record. The payload of a waiting load contains its
    need, which determines when the load is woken; `LACKS_ROOM`, which makes the replica pass terminate the
    replaced replica first; and the node whose memory the load gets before younger loads. `backoffs` are the
    load's own: each attempt reads the recent refusals of its backend.
    """
    back_off = seconds_until_retry(backoffs, clock.now())
    seconds = _NODE_POLL_SECONDS if back_off is None else min(back_off, _NODE_POLL_SECONDS)
    turn = victims.turn if victims is not None else None
    if turn is not None and (until := (turn[1] - clock.now()).total_seconds()) > 0:
        seconds = min(seconds, until)
    # Refresh: requests that came while workers were contacted have moved the load's deadline.
    operation = await in_thread(Operation.objects.get, pk=work.id)
    if explanation.outcome == DecisionOutcome.REFUSED:
        outcome: Exception = refusals_error(operation.payload)
    else:
        payload = {**operation.payload, LACKS_ROOM: question.fits_by_replacement}
        payload.pop(TURN, None)
        payload |= {TURN: str(turn[0])} if turn is not None else {}
        payload = load_request.payload_with_need(payload, question.view.need)
        payload = into_payload(payload, backoffs)
        outcome = retry_or_end(operation, explanation.sentence, seconds=seconds, payload=payload)
    is_abandoned = isinstance(outcome, Abandoned)
    if is_abandoned:
        explanation = replace(explanation, outcome=DecisionOutcome.REFUSED)
    fleet_sections = encode_load(str(work.id), operation.element, question, victims, is_expired=is_abandoned)
    await in_thread(_record, operation, explanation, fleet_sections)
    return outcome


def _record(operation: Operation, explanation: Explanation, fleet_sections: SnapshotSections) -> None:
    now = clock.now()
    snapshot_ref = decision_log.store_snapshot(fleet_sections, now=now)
    decision_log.record(DecisionRecord(operation.element, operation.pk, explanation, snapshot_ref), now=now)


async def contact_best(bus: Bus, ranked: Sequence[Candidate]) -> ContactResult:
    """Contact the workers of the first `CONTACTS_AT_ONCE` nodes, and return the best node that answers.

    Raises NotConnected when this process has lost the bus: missing answers then prove nothing about the
    nodes.
    """
    tasks = {node.id: asyncio.create_task(_contact_node(bus, node)) for node in ranked[:CONTACTS_AT_ONCE]}
    silent: set[UUID] = set()
    try:
        for node in ranked[:CONTACTS_AT_ONCE]:
            is_connected, listed = await tasks[node.id]
            if is_connected:
                return ContactResult(node, frozenset(silent), listed)
            silent.add(node.id)
        return ContactResult(None, frozenset(silent))
    finally:
        await cancellation.cancel_and_wait(*tasks.values())


async def _contact_node(bus: Bus, node: Candidate) -> tuple[bool, ListReply | None]:
    try:
        async with asyncio.timeout(ANSWER_WITHIN):
            answer = await Worker(bus, str(node.id), node.name).backends(ANSWER_WITHIN)
    except TimeoutError:
        return False, None
    match answer:
        case Done(listed):
            return True, listed
        case Refused() | Unreadable():
            return True, None  # the worker is connected; the attempt judges its reply
        case NoResponders() | StillRunning():
            return False, None
        case BusDown(reason):
            raise NotConnected(reason)
        case _:
            assert_never(answer)


def find_eviction(
    model_name: str, question: LoadQuestion, decision: Decision, created_at: datetime | None = None
) -> Eviction | None:
    """Return the eviction for a load; None if no node lacks only memory.

    The result has no node if no eviction helps. `created_at`: the time of the load's request, None = now.
    Older loads get freed memory first.
    """
    nodes, need = question.evictable_nodes(decision), question.view.need
    if not nodes:
        return None
    now = clock.now()
    residents = eviction.residents([node.id for node in nodes], now=now)
    claimed = load_request.nodes_claimed_before(created_at or now, now)
    guard = eviction.guard(model_name, residents, now=now, claimed=claimed)
    return choose_victims(nodes, residents, guard, need)


async def wait_until_evicted(attempt: Attempt, evicted: Eviction) -> None:
    """Wait until the evicted replicas have stopped. Raise WorkerGone if one of them stays or serves again."""
    replicas, seconds = [*evicted.victims, *evicted.leaving], eviction.STOPS_WITHIN.total_seconds()
    if any(replica.in_flight for replica in replicas):
        seconds += conf.cluster().request_timeout
    deadline, node_name = clock.monotonic() + seconds, attempt.slot.node_name
    await attempt.report("loading", evicted.why)
    while remaining := await in_thread(_remaining_replicas, [replica.id for replica in replicas]):
        if serving := [name for name, state in remaining if state == ReplicaState.LOADED]:
            raise WorkerGone(f"{join_names(serving)} on {node_name} serves again")
        if clock.monotonic() >= deadline:
            names = join_names(name for name, _ in remaining)
            raise WorkerGone(f"{names} on {node_name} did not stop within {seconds:.0f} s")
        await asyncio.sleep(EVICTION_POLL)


def _remaining_replicas(replica_ids: Sequence[UUID]) -> list[tuple[str, str]]:
    return [(str(row), row.state) for row in eviction.remaining_rows(replica_ids)]


_GIB = 2**30
_DEFAULT_BATCH_SIZES = (512, 2048)
"""Batch sizes that may be changed; any other value was configured."""
_DEFAULT_CONTEXT_TOKENS = 4096
_SCRATCH_BYTES_PER_TOKEN = 1536 * 16
"""Bytes per token of context that the larger batch allocates."""
_MIN_GPU_GENERATION = 12
_PARALLEL_BY_MEMORY = ((32 * _GIB, 8), (8 * _GIB, 4), (4 * _GIB, 2))
"""Pairs of usable memory in bytes and the number of parallel requests; the first pair that fits applies."""


@dataclass(frozen=True)
class Machine:
    """The facts about a node from which options are tuned."""

    total_vram: int = 0
    """Bytes of VRAM; 0 = unknown."""
    budget: int = 0
    """Bytes of the memory budget; 0 = no limit."""
    compute_capability: str = ""

    @property
    def usable(self) -> int:
        """Usable memory in bytes."""
        return min(self.total_vram, self.budget) if self.budget else self.total_vram

    @property
    def generation(self) -> int:
        """Major version of the GPU's compute capability; 0 = unknown."""
        major = self.compute_capability.partition(".")[0]
        return int(major) if major.isascii() and major.isdigit() else 0


def tune_options(options: Mapping[str, Any], backend: str, machine: Machine) -> dict[str, Any]:
    """Return the options tuned to this machine; configured values stay."""
    result = dict(options)
    roomy = (
        0
        < (options.get("ContextSize") or _DEFAULT_CONTEXT_TOKENS) * _SCRATCH_BYTES_PER_TOKEN
        <= machine.usable // 4
    )
    if result.get("NBatch") in _DEFAULT_BATCH_SIZES:
        result["NBatch"] = 2048 if roomy and machine.generation >= _MIN_GPU_GENERATION else 512
    extra = list(result.get("Options") or ())
    is_configured = any(
        str(option).partition(":")[0].strip() in ("parallel", "n_parallel") for option in extra
    )
    parallel = next((count for least, count in _PARALLEL_BY_MEMORY if machine.usable >= least), 0)
    if "llama-cpp" in backend.lower() and roomy and parallel and not is_configured:
        result["Options"] = [*extra, f"parallel:{parallel}"]
    return result
