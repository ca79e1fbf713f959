"""The invariants after each step of a history of replicas (`replica_player.py`)."""

from collections import Counter
from datetime import UTC, datetime, timedelta
from uuid import UUID

from localai_cluster.kit import conf
from nodes.decisions import fleet_cache
from nodes.models import LOADING_PHASES, BackendNode, NodeModel, Phase
from nodes.replicas import reserved_memory
from nodes.replicas.states import PHASES
from operations.models import ACTIVE, Operation, OperationTarget
from operations.targets import ENDED
from tests.support.replica_histories import World
from tests.support.replica_jobs import GB, MEMORY, Cluster
from tests.support.replica_log import ALLOWED, Row, read_state, take_changes

WAITING = (Phase.DRAINING, Phase.TERMINATING)
MAX_GRACE = 60
"""Maximum seconds of grace that an operator grants in these histories."""
CLOCK_TOLERANCE = timedelta(seconds=1)


class Invariants:
    """Compares the rows with workers, requests and operations, and with the rows before the step."""

    def __init__(self, world: World, cluster: Cluster) -> None:
        self.world, self.cluster = world, cluster
        self.reserved: dict[UUID, dict[UUID, int]] = {}
        """By node: the bytes that loads have added to its column since its last reading."""
        self.unsure: set[UUID] = set()
        """Nodes whose column may be wrong until the next reading, because a process was killed after a
        commit.
        """
        self.last: dict[UUID, NodeModel] = {}
        self.published: set[UUID] = set()
        """Loads that have published their replica."""
        self.state: tuple[str, ...] = ()
        self.rows: dict[UUID, NodeModel] = {}
        self.nodes: list[BackendNode] = []
        take_changes()

    def check(self, *, is_committing: bool, was_blocked: bool) -> None:
        """Check all invariants.

        `is_committing`: a process is between a commit and its follow-up. `was_blocked`: a second process
        continued in this step, because it held a lock.
        """
        if is_changed := (state := read_state()) != self.state:
            self.state, self.nodes = state, list(BackendNode.objects.all())
            self.rows = {row.pk: row for row in NodeModel.engines.all()}
        rows = self.rows
        if is_changed:
            self._changes_follow_the_table(rows, was_blocked)
            self._rows_have_owners(rows)
            self._free_memory_is_exact(rows)
        self._engines_have_rows(rows)
        self._requests_are_counted(rows)
        self._learn_reserved(rows)
        self._engines_fit(rows)
        if not is_committing:
            self._memory_is_reserved()

    def reading(self, node_id: UUID) -> None:
        """Record that the node has reported its memory, so that its column is empty again."""
        self._learn_reserved({row.pk: row for row in NodeModel.engines.all()})
        if not BackendNode.objects.filter(pk=node_id, vram_read_at=self.world.time).exists():
            return
        loads = self.reserved.pop(node_id, {})
        if any(id in self.last and self.last[id].created_at >= self.world.time for id in loads):
            # By the clock of its controller one of them is newer: the column stays.
            self.unsure.add(node_id)
        else:
            self.unsure.discard(node_id)

    def killed_after_commit(self) -> None:
        """Record that the follow-up of a commit is lost until the next reading corrects it."""
        self.unsure |= set(self.world.workers)

    # --- changes

    def _changes_follow_the_table(self, rows: dict[UUID, NodeModel], was_blocked: bool) -> None:
        for before, after in take_changes():
            phases = (before and before.phase, after and after.phase)
            assert phases in ALLOWED, f"{after or before}: {phases[0]} was followed by {phases[1]}"
            if before is None or after is None:
                continue
            if before.phase in LOADING_PHASES and after.phase == Phase.SERVING and not was_blocked:
                self._is_published_by_its_attempt(before, rows)
            if phases == (Phase.DRAINING, Phase.SERVING) and before.reason == "unload" and before.owner:
                mine = OperationTarget.objects.filter(operation_id=before.owner[0], node_id=before.node_id)
                active = mine.filter(operation__status__in=ACTIVE).exclude(status__in=ENDED)
                assert was_blocked or not active.exists(), f"{before} returns while its unload goes on"
            if after.phase in WAITING:
                self._waits_no_longer(before, after)
            if before.phase in WAITING and after.phase == Phase.STOPPING and before.deadline:
                is_over = before.deadline <= self.world.time + CLOCK_TOLERANCE
                assert not before.in_flight or is_over, f"{before} is stopped while requests may run there"

    def _is_published_by_its_attempt(self, before: Row, rows: dict[UUID, NodeModel]) -> None:
        assert before.owner is not None, before
        operation = Operation.objects.get(pk=before.owner[0])
        is_current = operation.fence == before.owner[1]
        assert is_current, f"{before} was published by an attempt that is over: {operation.fence}"
        assert operation.id not in self.published, f"{before} is the second replica of one load"
        self.published.add(operation.id)
        if (former := operation.payload["replaces"]) and self._served(UUID(former)):
            row = rows.get(UUID(former))
            assert row is None or row.phase != "serving", f"{before} has replaced {row}, which serves"

    def _served(self, id: UUID) -> bool:
        return id in self.last and self.last[id].phase == "serving"

    def _waits_no_longer(self, before: Row, after: Row) -> None:
        assert after.deadline is not None, after
        if before.phase in WAITING and before.deadline is not None:
            assert after.deadline <= before.deadline, f"{after} waits longer than {before}"
            return
        cluster = conf.cluster()
        grace = {
            "unload": MAX_GRACE,
            "upgrade": cluster.upgrade_drain,
            "replaced": cluster.request_timeout,
            "evicted": 0,
        }.get(after.reason, cluster.unload_grace)
        latest = self.world.time + timedelta(seconds=grace) + CLOCK_TOLERANCE
        assert after.deadline <= latest, f"{after} waits until {after.deadline}, not {latest}"
        is_evicted = after.reason == "evicted"
        assert not (is_evicted and before.in_flight), f"{after} is evicted while requests run there"

    # --- rows

    def _engines_have_rows(self, rows: dict[UUID, NodeModel]) -> None:
        """Each engine that was started, or may still run, has its row until its end is confirmed."""
        for worker in self.world.workers.values():
            for process in worker.processes.values():
                row = rows.get(process.row)
                assert row is not None, f"{process.key} at {process.address} runs and has no row"
                assert row.phase not in ("reserved", "staging"), f"{row} runs before it was started"
                same = row.address in ("", process.address)
                assert same, f"{row} at {process.address} is written as {row.address}"
                is_ready = row.phase != "serving" or process.has_loaded
                assert is_ready, f"{row} serves, and its engine has loaded no model"
            for message in worker.delayed:
                assert message.what != "start" or message.row in rows, (
                    f"{message.key} may start and has no row"
                )
        for id in self.world.stopped & rows.keys():
            assert rows[id].phase in ("stopping", "departed"), (
                f"{rows[id]} was stopped and is {rows[id].phase}"
            )

    def _rows_have_owners(self, rows: dict[UUID, NodeModel]) -> None:
        """Each row has the owner, the deadline and the reason that the table of transitions requires."""
        for row in rows.values():
            rules = PHASES[Phase(row.phase)]
            said = f"{row} {row.phase} {row.owner_kind} {row.owner_id} {row.deadline} {row.reason}"
            assert row.owner_kind in rules.owners if rules.owners else not row.owner_kind, said
            assert (row.owner_id is not None) == (row.owner_kind in ("operation", "intent")), said
            assert (row.deadline is not None) == bool(rules.deadline), said
            assert row.reason in rules.reasons if rules.reasons else not row.reason, said

    def _requests_are_counted(self, rows: dict[UUID, NodeModel]) -> None:
        """Each count is the number of running requests of processes that were not declared dead."""
        held = [one for one in self.cluster.requests if one[1] in rows and rows[one[1]].phase != "departed"]
        self.cluster.requests = held
        counts = Counter(replica for process, replica in held if process not in self.cluster.uncounted)
        for row in rows.values():
            assert row.in_flight == counts[row.pk], f"{row} counts {row.in_flight} of {counts[row.pk]}"

    # --- memory

    def _engines_fit(self, rows: dict[UUID, NodeModel]) -> None:
        """The engines of a node, including those that its loads may still start, fit its memory."""
        for worker in self.world.workers.values():
            running = {process.row for process in worker.processes.values()}
            starting = [
                row
                for row in rows.values()
                if row.node_id == worker.id and row.started_at and not row.loaded_at and row.pk not in running
            ]
            taken = sum(row.vram_needed for row in starting) + GB * len(running)
            assert taken <= MEMORY, f"{worker.name}: {len(running)} engines run, and {starting} may start"

    def _free_memory_is_exact(self, rows: dict[UUID, NodeModel]) -> None:
        """The free memory of a node follows from its reading and from the rows of its engines."""
        reservations = reserved_memory.by_node(NodeModel.engines.all())
        for node in self.nodes:
            free = fleet_cache.effectively_free_bytes(vars(node), reservations.get(node.pk, ()))
            expected = _free_bytes(node, [row for row in rows.values() if row.node_id == node.pk])
            assert free == expected, f"{node.name} counts {free} bytes as free, by its rows {expected}"

    def _memory_is_reserved(self) -> None:
        """A node's column is the sum over the loads that have added to it since its last reading."""
        for node in self.nodes:
            if node.status == "healthy" and node.pk not in self.unsure:
                amount = sum(self.reserved.get(node.pk, {}).values())
                assert node.reserved_vram == amount, (
                    f"{node.name} has {node.reserved_vram} reserved, its loads {amount}"
                )

    def _learn_reserved(self, rows: dict[UUID, NodeModel]) -> None:
        """Record which loads have begun, and which of these loads or their replicas have ended."""
        for id, row in rows.items():
            if id not in self.last and row.vram_on_node:
                self.reserved.setdefault(row.node_id, {})[id] = row.vram_needed
        for id, row in self.last.items():
            if id not in rows:
                self.reserved.get(row.node_id, {}).pop(id, None)
        self.last = rows


def _free_bytes(node: BackendNode, rows: list[NodeModel]) -> int:
    """Return the free bytes of the node by the rules of `placement/memory.py`, without its code."""
    never = datetime.min.replace(tzinfo=UTC)
    read_at, counted = node.vram_read_at or never, [row for row in rows if row.loaded_at is None]
    while True:
        earliest = min([read_at, *(row.vram_seen_at or never for row in counted)])
        later = [row for row in rows if row not in counted and row.loaded_at and row.loaded_at > earliest]
        if not later:
            break
        counted += later
    credit = node.returned_vram if node.returned_beside and node.returned_beside == node.vram_read_at else 0
    available = node.available_vram + credit
    unread = [row for row in counted if row.loaded_at is None or row.loaded_at > read_at]
    pending = min(
        sum(row.vram_needed for row in unread),
        max([0, *(available - _left_after(row, counted) for row in counted)]),
    )
    return available - max(node.reserved_vram, pending)


def _left_after(row: NodeModel, counted: list[NodeModel]) -> int:
    """Return the bytes of this load's reading that remain after this load and all later loads."""
    never = datetime.min.replace(tzinfo=UTC)
    since = [each for each in counted if (each.vram_seen_at or never) >= (row.vram_seen_at or never)]
    return row.vram_seen - sum(each.vram_needed for each in since)
