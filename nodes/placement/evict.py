"""Choose the least recently used replicas to evict for a load that lacks memory on every node. Pure.

An eviction helps only against a lack of memory. It cannot free a slot: slots are counted per model, and the
replicas that occupy them serve the model itself. All victims are on one node, and there are no more victims
than the load needs. The memory of replicas that are already terminating counts as free, and memory that loads
have reserved counts as used, so two loads never free the same memory twice. A replica of unknown size is
never a victim.

Under the policy `fit` a replica serves for a minimum time, a multiple of its load time, before it can be a
victim. After this time a busy replica can be a victim too: it receives no new requests, and its running
requests end. Loads that wait for the minimum time to pass get the memory in the order of their requests.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from uuid import UUID

from nodes.placement.choose import NO_NEED, Candidate, Need, Reason, has_memory
from nodes.placement.memory import FreeByGpu, add_freed_memory

JUST_LOADED = timedelta(seconds=5)
"""Time after its load for which a replica is protected, because waiting requests are about to use it."""
_DISTANT_PAST, _DISTANT_FUTURE = datetime.min.replace(tzinfo=UTC), datetime.max.replace(tzinfo=UTC)
_MAX_NAMED_REPLICAS, _MAX_NAME_LENGTH = 5, 64


class ProtectionReason(StrEnum):
    """Why a replica is protected from eviction."""

    BUSY = "busy"
    OWN = "of the model itself"
    SPREAD = "kept on every node by its rule"
    MINIMUM = "kept by the minimum of its rule"
    FRESH = "loaded a moment ago"
    SERVES = "that must serve longer"
    UNKNOWN = "of unknown size"


@dataclass(frozen=True)
class Resident:
    """A replica that uses memory of its node, with the facts that an eviction depends on."""

    id: UUID
    node_id: UUID
    name: str
    """`<model>#<index>`."""
    model_name: str
    leaving: bool
    """True if the replica gets no new requests because its engine is about to stop."""
    in_flight: int
    last_used: datetime
    vram: int
    """Estimated memory use in bytes; 0 = unknown."""
    loaded_at: datetime | None = None
    gpus: FreeByGpu = frozenset()
    """By GPU index: the part of `vram` on it; empty if unknown."""
    started_at: datetime | None = None
    """Start time of the replica's engine."""

    def serves_until(self, times: float) -> datetime:
        """Return the end of the replica's minimum time of serving: `times` its load time, if known."""
        if self.loaded_at is None:
            return _DISTANT_PAST
        load_time = self.loaded_at - (self.started_at or self.loaded_at)
        return self.loaded_at + max(load_time * times, JUST_LOADED)

    @property
    def replica_index(self) -> int:
        return int(self.name.rpartition("#")[2])


@dataclass(frozen=True)
class ProtectionRules:
    """The facts that protect replicas from eviction for a load of `model_name`."""

    model_name: str
    now: datetime
    loaded: Mapping[str, int]
    """Number of loaded replicas per model, in the whole cluster."""
    minimums: Mapping[str, int]
    """Minimum number of replicas per model, for the models that have a rule."""
    spread: Set[str] = frozenset()
    """Models whose rule wants a replica on every node."""
    least_serving: float | None = None
    """Multiple of its load time that a replica serves before it can be evicted while busy; None: never."""
    claimed: Set[UUID] = frozenset()
    """Nodes whose memory goes first to older loads that wait."""

    def find_protection(
        self, resident: Resident, evicted_count: Mapping[str, int]
    ) -> ProtectionReason | None:
        """Return why the replica is protected, or None. `evicted_count`: the evictions so far, per model."""
        if resident.model_name == self.model_name:
            return ProtectionReason.OWN
        if resident.in_flight > 0 and self.least_serving is None:
            return ProtectionReason.BUSY
        if resident.model_name in self.spread:
            return ProtectionReason.SPREAD
        remaining = self.loaded.get(resident.model_name, 0) - evicted_count.get(resident.model_name, 0)
        if resident.model_name in self.minimums and remaining <= self.minimums[resident.model_name]:
            return ProtectionReason.MINIMUM
        if resident.serves_until(0) > self.now:
            return ProtectionReason.FRESH
        if resident.serves_until(self.least_serving or 0) > self.now:
            return ProtectionReason.SERVES
        return ProtectionReason.UNKNOWN if resident.vram <= 0 else None


@dataclass(frozen=True)
class Eviction:
    """The node whose memory is freed for a load, and the replicas to evict there; no node if none helps."""

    node: Candidate | None
    victims: Sequence[Resident] = ()
    """Replicas to evict; empty if the terminating replicas free enough memory."""
    leaving: Sequence[Resident] = ()
    """Replicas that are already terminating."""
    why: str = ""
    """One sentence: which replicas the load waits for, or why no eviction can free the memory."""
    looked_at: Sequence[UUID] = ()
    among: Sequence[Resident] = ()
    guard: ProtectionRules | None = None
    """The input of the choice: considered nodes (`looked_at`), their replicas (`among`) and the protection
    rules."""
    turn: tuple[UUID, datetime] | None = None
    """If `node` is None: the node whose memory the load gets later, and the time at which it may evict
    there."""

    @property
    def drains(self) -> bool:
        """True if requests are running on replicas to evict."""
        return any(victim.in_flight for victim in self.victims)


def nodes_short_of_memory(
    fleet: Iterable[Candidate],
    refused: Mapping[UUID, Reason],
    backed_off: Set[UUID] = frozenset(),
    need: Need = NO_NEED,
) -> list[Candidate]:
    """Return the nodes that lack only memory; none if another node has it and merely backs off.

    `find_refusal` checks all other reasons first, so the returned nodes match the selector and have a free
    slot. If the need is a fraction of a GPU, nodes that report no GPU are excluded.
    """
    if Reason.SILENT in refused.values():
        return []
    short = (Reason.MEMORY, Reason.GPUS)
    lacking = [n for n in fleet if refused.get(n.id) in short and n.id not in backed_off]
    return [n for n in lacking if not need.lacks_card(n.card_vram)]


def choose_victims(
    nodes: Iterable[Candidate], residents: Iterable[Resident], guard: ProtectionRules, need: Need
) -> Eviction:
    """Choose replicas to evict for a load with this need, all on the node where they were idle longest."""
    considered, among = list(nodes), list(residents)
    by_node: dict[UUID, list[Resident]] = {node.id: [] for node in considered}
    for resident in among:
        if resident.node_id in by_node:
            by_node[resident.node_id].append(resident)
    options = [
        (node, victims)
        for node in considered
        if node.id not in guard.claimed
        and (victims := _fewest_victims(node, by_node[node.id], guard, need)) is not None
    ]
    looked_at = list(by_node)
    if not options:
        turn = _find_turn(considered, by_node, guard, need)
        reasons = [
            _describe_protections((rows for id, rows in by_node.items() if id not in guard.claimed), guard)
        ]
        if turn is not None:
            node, at = turn
            when = "after an older load" if node.id in guard.claimed else f"at {at:%H:%M:%S} UTC"
            reasons.append(f"its turn on {node.name} is {when}")
        why = "; ".join(filter(None, reasons))
        return Eviction(None, (), (), why, looked_at, among, guard, turn and (turn[0].id, turn[1]))
    node, victims = min(options, key=lambda option: _eviction_rank(*option))
    terminating = [resident for resident in by_node[node.id] if resident.leaving]
    return Eviction(
        node, victims, terminating, _describe_wait(node, victims, terminating), looked_at, among, guard
    )


def _find_turn(
    nodes: Iterable[Candidate],
    by_node: Mapping[UUID, Sequence[Resident]],
    guard: ProtectionRules,
    need: Need,
) -> tuple[Candidate, datetime] | None:
    """Return the node that can evict enough replicas first, and the time; None if no node ever can."""
    if guard.least_serving is None:
        return None
    times, later = guard.least_serving, replace(guard, now=_DISTANT_FUTURE)
    turns = [
        (node, max([guard.now, *(victim.serves_until(times) for victim in victims)]))
        for node in nodes
        if (victims := _fewest_victims(node, by_node[node.id], later, need)) is not None
    ]
    return min(turns, key=lambda turn: (turn[1], turn[0].name)) if turns else None


def _fewest_victims(
    node: Candidate, residents: Sequence[Resident], guard: ProtectionRules, need: Need
) -> tuple[Resident, ...] | None:
    """Return the fewest replicas of the node that free enough memory; None if all together do not.

    Idle replicas come first, the longest unused first; then busy replicas, the longest loaded first.
    """
    soon = free_memory_of(node, [resident for resident in residents if resident.leaving])
    victims: list[Resident] = []
    evicted_by_model: Counter[str] = Counter()
    is_enough = has_memory(soon, need)
    for resident in sorted(residents, key=_victim_order):
        if is_enough:
            break
        if not resident.leaving and guard.find_protection(resident, evicted_by_model) is None:
            victims.append(resident)
            evicted_by_model[resident.model_name] += 1
            is_enough = has_memory(free_memory_of(soon, victims), need)
    if not is_enough:
        return None
    for resident in sorted(victims, key=lambda victim: victim.in_flight == 0):
        remaining = [victim for victim in victims if victim is not resident]
        if has_memory(free_memory_of(soon, remaining), need):
            victims = remaining
    return tuple(victims)


def _victim_order(resident: Resident) -> tuple[bool, datetime, UUID]:
    is_busy = resident.in_flight > 0
    since = resident.loaded_at or _DISTANT_PAST if is_busy else resident.last_used
    return is_busy, since, resident.id


def free_memory_of(node: Candidate, freed: Iterable[Resident]) -> Candidate:
    """Return the node as if the replicas `freed` had freed their memory, on the GPUs that they used.

    Memory use is an estimate, so the free memory is limited to the totals of the node and its GPUs.
    """
    free, gpus = add_freed_memory(
        node.free_vram,
        node.gpus,
        [(resident.vram, resident.gpus) for resident in freed],
        most=node.most_vram,
        gpu_totals=node.gpu_totals,
    )
    return replace(node, free_vram=free, gpus=gpus)


def _eviction_rank(node: Candidate, victims: Sequence[Resident]) -> tuple[bool, bool, datetime, int, str]:
    is_busy, last_used, _ = max(map(_victim_order, victims), default=(False, _DISTANT_PAST, None))
    return is_busy, bool(victims), last_used, len(victims), node.name


def _describe_wait(node: Candidate, victims: Sequence[Resident], terminating: Sequence[Resident]) -> str:
    names = join_names([resident.name for resident in [*victims, *terminating]])
    if any(victim.in_flight for victim in victims):
        return f"waits for {names} on {node.name} to end its requests and stop: its least time is over"
    return f"waits for {names} on {node.name} to stop" + (", the least recently used" if victims else "")


def join_names(names: Iterable[str]) -> str:
    """Join the first few names, each cut in length, and append how many are left out."""
    sorted_names = sorted(names)
    suffix = (
        [f"{len(sorted_names) - _MAX_NAMED_REPLICAS} more"] if len(sorted_names) > _MAX_NAMED_REPLICAS else []
    )
    return ", ".join([*(name[:_MAX_NAME_LENGTH] for name in sorted_names[:_MAX_NAMED_REPLICAS]), *suffix])


def _describe_protections(residents: Iterable[Sequence[Resident]], guard: ProtectionRules) -> str:
    protected_count = Counter(
        str(guard.find_protection(replica, {}) or "too small")
        for of_node in residents
        for replica in of_node
        if not replica.leaving
    )
    if not protected_count:
        return ""
    reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(protected_count.items()))
    return f"no replica there can make room: {reasons}"
