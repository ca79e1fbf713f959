"""The jobs of controllers, people, web processes and workers in a history of replicas."""

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from random import Random
from typing import Any, cast
from uuid import UUID, uuid4

import psycopg
from django.db import connection, transaction

from localai_cluster.accounts import actors
from localai_cluster.kit import clock
from localai_cluster.kit.errors import ClusterError
from localai_cluster.kit.leases import LeaseLost
from localai_cluster.messaging import messages as m
from localai_cluster.messaging.bus import BusError, RequestTimeout
from nodes.backends import intent_queue, intents, inventory
from nodes.backends.intents import Ended, Intent, PutBack, Settlement
from nodes.commands import commands
from nodes.commands.outcomes import CommandFailed
from nodes.decisions import fleet_cache
from nodes.definitions.files import Definition
from nodes.definitions.folder import Folder
from nodes.loading import load_request
from nodes.loading.load import LoadModel
from nodes.loading.load_attempts import Attempt as PlacedAttempt
from nodes.loading.load_attempts import LoadFailed
from nodes.loading.load_request import ProgressDeadline
from nodes.models import LOADING_PHASES, BackendNode, NodeModel, PendingBackendOp, PhaseReason, ReplicaUse
from nodes.models.replica import load_key
from nodes.placement.choose import Need
from nodes.placement.evict import Eviction
from nodes.reconcilers.liveness import recount
from nodes.reconcilers.state_pass import StatePass
from nodes.registry import lifecycle, registration
from nodes.replicas import (
    checks,
    drains,
    engines,
    eviction,
    slots,
    statements,
    terminations,
    unload_requests,
)
from nodes.replicas.checks import ExitReport
from nodes.replicas.slots import NoSlot, Slot
from nodes.replicas.stops import Stopper
from nodes.replicas.unload_requests import DeleteModel, UnloadModel, UnloadRequest
from operations.executor import work as executor_work
from operations.executor.work import Abandoned, Postpone, WakeUps, Work
from operations.ledger import admission, attempts
from operations.ledger.admission import Requester
from operations.models import Event, Operation
from tests.support.fleet import ROOT, _finished, _Here, beat, beat_of, own_secret, register
from tests.support.replica_histories import SilentRecorder, Worker, World, call, pause

GB = 2**30
MEMORY = 2 * GB
"""Memory of a node in bytes; an engine takes one GB."""
LEASE = 15
"""Seconds; a stopped controller does not renew its leases."""
MODELS = ("m", "n")


class _Definitions:
    """A folder in which every model is defined, with a new object for each lookup."""

    async def find(self, name: str) -> Definition:
        """Return the model's definition."""
        return Definition(name, "echo", "", "", {}, revision=uuid4().hex)


class PlacedLoad(LoadModel):
    """The product's load, with the node and the evictions that its operation names."""

    def __init__(self, world: World) -> None:
        super().__init__(world, cast(Folder, _Definitions()), WakeUps())
        self._world = world

    async def _place(self, work: Work, definition: Definition) -> PlacedAttempt:
        payload = work.operation.payload
        definition = replace(definition, model="files" if payload["stages"] else "")
        slot, evicted = await executor_work.in_thread(self._reserve, work, definition.name)
        self._world.note(
            f"  slot {definition.name}#{slot.replica_index} on {slot.node_name}: {str(slot.id)[:4]}"
        )
        listed = m.ListReply((m.InstalledBackend("echo"),))
        worker = commands.Worker(self._world, str(slot.node_id), slot.node_name, answered=True)
        deadline = ProgressDeadline(work)
        return PlacedAttempt(work, definition, slot, worker, {}, "", deadline, 0, listed, evicted)

    @staticmethod
    def _reserve(work: Work, model: str) -> tuple[Slot, Eviction | None]:
        payload = work.operation.payload
        views = fleet_cache.read_fleet(model, allowed_nodes=[UUID(payload["node"])])
        if not views:
            raise LoadFailed("no node")
        found = [eviction.serving(UUID(id)) for id in payload["evicts"]]
        victims = [replace(victim, in_flight=0) for victim in found if victim is not None]
        leaving = eviction.terminating_replicas(views[0].id, now=clock.now()) if victims else []
        leaving = [replace(replica, in_flight=0) for replica in leaving]
        slot = call(
            slots.reserve,
            views[0],
            model,
            attempt=work.attempt,
            backend="echo",
            now=clock.now(),
            need=Need(vram=GB, vram_required=True),
            room=Eviction(views[0], victims) if victims else None,
        )
        if isinstance(slot, NoSlot):
            raise LoadFailed(slot.reason)
        return slot, Eviction(views[0], victims, leaving, "evicts") if victims else None


class Cluster:
    """The jobs of the processes; each runs in its actor."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.requests: list[tuple[UUID, UUID]] = []
        """The running requests: process and replica."""
        self.processes: list[UUID] = []
        self.uncounted: set[UUID] = set()
        """Live web processes that were declared dead; they count their requests in again later."""

    # --- controllers

    def works(self, controller: str) -> None:
        """Let a controller claim an operation and execute it."""
        for operation in call(attempts.claim, controller, now=clock.now(), lease=LEASE, limit=1):
            self.world.note(f"  {controller} has {operation.kind} {str(operation.id)[:4]}:{operation.fence}")
            with suppress(LeaseLost):
                self._execute(operation)

    def _execute(self, operation: Operation) -> None:
        attempt, failure = (operation.id, operation.fence), ""
        handlers: dict[str, Any] = {load_request.KIND: PlacedLoad, unload_requests.DELETE_KIND: DeleteModel}
        handler = handlers.get(operation.kind, UnloadModel)(self.world)
        is_load = operation.kind == load_request.KIND
        try:
            with self.ended(partial(abandoned_loads, operation.element) if is_load else set):
                asyncio.run(handler(Work(operation, SilentRecorder())))
        except (ClusterError, Postpone, CommandFailed) as error:
            failure = str(error) or "failed"
            self.world.note(f"  {failure}")
        except Abandoned as reason:
            self.world.note(f"  {reason}")
            call(attempts.finish, *attempt, Event.CANCEL, now=clock.now(), message=str(reason))
            return
        if failure and self.world.are_faults_on and operation.attempts < 2 and is_load:
            until = clock.now() + timedelta(seconds=1)
            call(attempts.put_back, *attempt, Event.POSTPONE, now=clock.now(), until=until, reason=failure)
            return
        event = Event.FAIL if failure else Event.COMPLETE
        call(attempts.finish, *attempt, event, now=clock.now(), error=failure)

    def stops(self) -> None:
        """Let a controller stop the due engines."""
        with self.ended(abandoned_loads), self.ended(overdue):
            asyncio.run(Stopper(self.world).run_pass())

    @contextmanager
    def ended(self, left: Callable[[], set[str]]) -> Iterator[None]:
        """Check that nothing that `left` finds before the block is left after it, also if the job fails."""
        before, failure = left(), None
        try:
            yield
        except (ClusterError, Postpone, CommandFailed, Abandoned) as error:
            failure = error
        stays = before & left()
        assert not stays, f"nobody moves these on: {stays}"
        if failure:
            raise failure

    def reaps(self) -> None:
        """Let a controller take over the operations that another one has left."""
        call(attempts.reap, now=clock.now())
        call(intents.reap, now=clock.now())

    def recovers(self) -> None:
        """Let a controller take over everything that another one has left."""
        self.reaps()
        call(drains.return_without_upgrade)
        self.stops()

    def checks(self) -> None:
        """Let a controller check the engines that may have ended."""
        since = clock.now() - timedelta(hours=1)
        call(checks.request_checks, heartbeat_since=since, now=clock.now())
        asyncio.run(StatePass(self.world).run_pass())

    def compares(self) -> None:
        """Let a controller compare the rows of the nodes with the lists of their workers."""
        for worker in list(self.world.workers.values()):
            asyncio.run(inventory.compare_replicas(self.world, worker.id, worker.name))

    def upgrades(self, controller: str) -> None:
        """Let a controller claim an upgrade, wait for the requests and have the worker stop the engines."""
        for intent in call(intents.claim, controller, now=clock.now(), lease=LEASE, limit=1):
            self.world.note(f"  {controller} has an upgrade of {intent.node.name}: {intent.fence}")
            with suppress(LeaseLost):
                settlement = self._upgrade(intent)
                if not (isinstance(settlement, PutBack) and settlement.busy):
                    call(drains.end_upgrade, intent.id, intent.fence)
                call(intents.record_outcomes, {(intent.id, intent.fence): (settlement, ())}, now=clock.now())

    def _upgrade(self, intent: Intent) -> Settlement:
        node = intent.node
        if intent.row.unanswered_since is None:
            while True:
                drain, is_overdue = call(intent_queue._withdraw, intent, MODELS)
                if is_overdue or not drain.running:
                    break
                pause("sleep")
        before = call(engines.engine_ids, node.id)
        try:
            keys = self.world.upgrade(node.id)
        except RequestTimeout:
            call(intents.record_overdue, intent, "no answer", now=clock.now())
            return PutBack("no answer", 1.0, busy=True)
        except BusError:
            return PutBack("no worker", 1.0)
        call(engines.end_stopped, node.id, keys, among=before)
        asyncio.run(inventory.compare_replicas(self.world, node.id, node.name))
        return Ended()

    # --- people and web processes

    def asks_for_load(self, dice: Random) -> None:
        """Request one more replica of a model on a node."""
        rows = list(NodeModel.objects.filter(phase="serving").order_by("created_at"))
        leaving = list(NodeModel.engines.filter(phase__in=("stopping", "departed")).order_by("created_at"))
        payload: dict[str, Any] = {
            "node": str(dice.choice(list(self.world.workers))),
            "stages": dice.random() < 0.3,
            "evicts": [],
            load_request.SCALE_UP: True,
            load_request.REPLACES: None,
        }
        model = dice.choice(MODELS)
        if leaving and dice.random() < 0.5:
            # Where the model was before.
            former = dice.choice(leaving)
            model, payload["node"] = former.model_name, str(former.node_id)
        if rows and dice.random() < 0.4:
            used = [row for row in rows if row.in_flight]
            victim = dice.choice(used if used and dice.random() < 0.5 else rows)
            payload |= {"evicts": [str(victim.id)], "node": str(victim.node_id)}
        if (old := [row for row in rows if row.model_name == model]) and dice.random() < 0.3:
            payload["replaces"] = str(dice.choice(old).id)
        request = admission.OperationRequest(
            load_request.KIND,
            key=load_key(model),
            element=model,
            by=Requester("test"),
            payload=payload,
            joins=False,
        )
        admission.admit(request, now=clock.now())

    def asks_for_unload(self, dice: Random) -> None:
        """Request the unload of a model or a replica, as an operator."""
        rows = list(NodeModel.objects.all().select_related("node").order_by("created_at"))
        if rows:
            waiting = [row for row in rows if row.phase in ("draining", "terminating")]
            row = dice.choice(waiting if waiting and dice.random() < 0.5 else rows)
            node, index = dice.choice([(None, None), (row.node, None), (row.node, row.replica_index)])
            wish = UnloadRequest(
                row.model_name, Requester("anna"), node=node, index=index, grace=dice.choice([0, 60])
            )
            if index is None and dice.random() < 0.2:
                unload_requests.delete(wish, now=clock.now())
            else:
                unload_requests.unload(wish, now=clock.now())

    def asks_for_upgrade(self, dice: Random) -> None:
        """Request the upgrade of a node's backend, as an operator."""
        node_id = dice.choice(list(self.world.workers))
        if not BackendNode.objects.filter(pk=node_id).exists():
            return
        wish = {"operation_id": uuid4(), "spares_requests": True, "next_retry_at": clock.now()}
        PendingBackendOp.objects.get_or_create(node_id=node_id, backend="echo", op="upgrade", defaults=wish)

    def cancels(self, dice: Random) -> None:
        """Cancel an operation."""
        active = list(Operation.objects.active().order_by("created_at").values_list("pk", flat=True))
        if active:
            admission.cancel(dice.choice(active), actor="anna", now=clock.now())

    def picks(self, dice: Random) -> None:
        """Begin some requests."""
        if not self.processes or (len(self.processes) < 2 and dice.random() < 0.3):
            self.processes.append(uuid4())
        process = dice.choice(self.processes)
        self._settle(process)
        asked = {"ask": 0, "scope": -1, "model": dice.choice(MODELS), "key": "", "n": 1}
        for _ in range(dice.choice([1, 2, 3])):
            self.requests += [(process, row[0]) for row in self._exchange(process, picks=[asked])]

    def releases(self, dice: Random) -> None:
        """End a request."""
        if self.requests:
            process, replica = self.requests.pop(dice.randrange(len(self.requests)))
            self._exchange(process, releases=[{"id": str(replica), "n": 1}])

    def _exchange(self, process: UUID, **wishes: Any) -> list[Any]:
        with connection.cursor() as cursor:
            cursor.execute(statements.ANNOUNCE, self._identity(process))
        wanted = {"picks": [], "releases": [], "keys": [], **wishes}
        with psycopg.RawCursor(connection.connection) as cursor:
            return cursor.execute(statements.EXCHANGE, [process, clock.now(), json.dumps(wanted)]).fetchall()

    @staticmethod
    def _identity(process: UUID) -> dict[str, Any]:
        now = clock.now()
        process_row = {"process": process, "host": "h", "pid": 1, "version": "", "started": now}
        return {**process_row, "now": now, "gap": now, "ids": [], "counts": []}

    def web_process_stops(self, dice: Random) -> None:
        """End a web process, which counts its requests out."""
        if self.processes:
            process = self.processes.pop(dice.randrange(len(self.processes)))
            with transaction.atomic(), connection.cursor() as cursor:
                for text in (statements.LOCK_USED, statements.RELEASE_ALL, statements.DELETE_PROCESS):
                    cursor.execute(text, self._identity(process))
            self.uncounted.discard(process)
            self.requests = [one for one in self.requests if one[0] != process]

    def web_process_is_silent(self, dice: Random) -> None:
        """Declare a web process dead, truly or wrongly; the pass counts its requests out."""
        if not self.processes:
            return
        process = dice.choice(self.processes)
        with transaction.atomic():
            used = ReplicaUse.objects.filter(process_id=process).values("replica_id")
            rows = NodeModel.objects.filter(pk__in=used).order_by("id").select_for_update(of=("self",))
            locked = list(rows.values_list("pk", flat=True))
            with connection.cursor() as cursor:
                since = clock.now() + timedelta(seconds=1)
                values: dict[str, Any] = {
                    "ids": [process],
                    "locked": locked,
                    "since": since,
                    "now": clock.now(),
                }
                cursor.execute(statements.DROP_DEAD_PROCESSES, values)
        if dice.random() < 0.5:
            self.processes.remove(process)
            self.requests = [one for one in self.requests if one[0] != process]
        else:
            self.uncounted.add(process)
            if dice.random() < 0.5:
                self.releases(dice)

    def settles(self, dice: Random) -> None:
        """Let a web process correct its counts, as it does periodically."""
        if self.processes:
            process = dice.choice(self.processes)
            self.uncounted.add(process)
            self._settle(process)

    def _settle(self, process: UUID) -> None:
        """Let a process that was declared dead count its requests in again before it picks."""
        if process not in self.uncounted:
            return
        held = Counter(replica for holder, replica in self.requests if holder == process)
        values = self._identity(process) | {"ids": list(held), "counts": list(held.values())}
        with transaction.atomic(), connection.cursor() as cursor:
            for text in (statements.ANNOUNCE, statements.LOCK_USED, statements.SETTLE):
                cursor.execute(text, values)
        self.uncounted.discard(process)

    def recounts(self, dice: Random) -> None:
        """Check that the pass finds no count to correct."""
        assert not recount(), "counts were corrected"

    def loses(self, dice: Random) -> None:
        """Let a request fail on a replica that it had picked, possibly long ago."""
        rows = list(NodeModel.objects.exclude(address="").order_by("created_at"))
        if rows:
            row = dice.choice(rows)
            reason = dice.choice([PhaseReason.LOST, PhaseReason.LOST, PhaseReason.WRONG_MODEL])
            _finished(terminations.lose(_Here(), row.id, row.address, reason=reason))

    def loses_dead(self) -> None:
        """Let requests find the replicas that have no engine."""
        workers = self.world.workers
        for row in NodeModel.objects.filter(phase="serving"):
            if (str(row), row.address) not in workers[row.node_id].running():
                _finished(terminations.lose(_Here(), row.id, row.address, reason=PhaseReason.LOST))

    def reports_an_exit(self, dice: Random) -> None:
        """Let a worker report an ended engine, possibly long ago or repeatedly."""
        worker = dice.choice(list(self.world.workers.values()))
        if worker.exited:
            key, address = dice.choice(worker.exited)
            _finished(checks.report_exits(_Here(), worker.id, [ExitReport(key, address)]))

    # --- nodes

    def registers(self, worker: Worker, running: list[tuple[str, str]] | None = None) -> None:
        """Register the worker with its running engines, or those at the beginning of the registration."""
        running = worker.running() if running is None else running
        made = register(
            worker.name,
            secret=own_secret(worker.name),
            instance=worker.instance,
            now=clock.now(),
            auto_approve=True,
            total_vram=MEMORY,
            available_vram=worker.free_memory(MEMORY, GB),
            max_replicas_per_model=2,
            running_processes=[registration.Running(*one) for one in running],
        )
        worker.is_registered, worker.is_reachable = True, True
        if worker.id != made.node.id:
            self.world.workers.pop(worker.id, None)
            worker.id = made.node.id
            self.world.workers[worker.id] = worker

    def beats(self, worker: Worker) -> None:
        """Let the worker report its memory."""
        node = BackendNode.objects.get(pk=worker.id)
        figures = {"instance": worker.instance, "available_vram": worker.free_memory(MEMORY, GB)}
        beat(beat_of(node, secret=own_secret(worker.name), at=clock.now(), **figures))

    def busy_worker(self, dice: Random) -> Worker | None:
        """Return a worker with an engine that is being started or about to stop."""
        rows = NodeModel.objects.exclude(phase="serving").order_by("created_at")
        busy = [self.world.workers[id] for id in rows.values_list("node_id", flat=True)]
        return dice.choice(busy) if busy else None

    def falls_silent(self, worker: Worker) -> None:
        """Declare the node gone; its engines keep running."""
        worker.is_reachable = False
        lifecycle.mark_silent([worker.id], limit=-3600, actor=actors.CONTROLLER, now=clock.now())

    def deregisters(self, worker: Worker) -> None:
        """Remove the node as an admin; its worker ends with its engines and registers as a new node later."""
        lifecycle.deregister(worker.id, actor=ROOT, now=clock.now())
        worker.crash()
        worker.is_reachable = False

    def drains(self, worker: Worker) -> None:
        """Drain the node as an admin."""
        lifecycle.drain(worker.id, actor=ROOT, now=clock.now(), deadline=30)

    def resumes(self, worker: Worker) -> None:
        """Resume the node as an admin."""
        lifecycle.resume(worker.id, actor=ROOT, now=clock.now())


def abandoned_loads(model: str | None = None) -> set[str]:
    """Return the rows of loads whose attempt does not run, independent of the product's view."""
    rows = NodeModel.engines.filter(phase__in=LOADING_PHASES)
    rows = rows if model is None else rows.filter(model_name=model)
    running = set(Operation.objects.filter(status="processing").values_list("pk", "fence"))
    return {f"{row} {row.pk}" for row in rows if (row.owner_id, row.owner_fence) not in running}


def overdue() -> set[str]:
    """Return the rows of nodes that have been silent for too long."""
    gone = NodeModel.engines.filter(phase="departed", deadline__lt=clock.now() - timedelta(seconds=1))
    return {f"{row} {row.pk}" for row in gone}
