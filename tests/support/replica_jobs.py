"""What controllers, people, web processes and workers do in a history of replicas, each as one job."""

import asyncio
import json
from contextlib import suppress
from datetime import timedelta
from random import Random
from typing import Any
from uuid import UUID, uuid4

import psycopg
from django.db import connection, transaction

from localai_cluster.accounts import actors
from localai_cluster.kit import clock
from localai_cluster.kit.leases import LeaseLost
from localai_cluster.messaging.bus import BusError, RequestTimeout
from nodes.commands.outcomes import CommandFailed
from nodes.decisions import fleet_cache
from nodes.loading import load_request
from nodes.models import BackendNode, NodeModel, PhaseReason
from nodes.models.replica import load_key
from nodes.placement.choose import Need
from nodes.placement.evict import Eviction
from nodes.registry import lifecycle, registration
from nodes.replicas import engine_ends, eviction, slots, statements, terminations, unload_requests
from nodes.replicas.lifecycle import AttemptId
from nodes.replicas.slots import NoSlot, Slot
from nodes.replicas.stops import Stopper
from nodes.replicas.unload import UnloadModel
from nodes.replicas.unload_requests import UnloadRequest
from operations.executor.work import Work
from operations.ledger import admission, attempts
from operations.models import Operation
from operations.states import Event
from tests.support.fleet import ROOT, _finished, _Here, beat, beat_of, own_secret, register
from tests.support.replica_histories import SilentRecorder, Worker, World, call, pause

GB = 2**30
MODELS = ("m", "n")


class LoadFailed(Exception):
    """The attempt of a load ends without a replica."""


class Cluster:
    """What the processes do, each as one job of its actor."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.requests: list[tuple[UUID, UUID]] = []
        """The requests that run: process and replica."""
        self.processes: list[UUID] = []

    # --- controllers

    def works(self, controller: str) -> None:
        """A controller claims an operation and carries it out."""
        for operation in call(attempts.claim, controller, now=clock.now(), lease=60, limit=1):
            self.world.note(f"  {controller} has {operation.kind} {str(operation.id)[:4]}:{operation.fence}")
            with suppress(LeaseLost):
                self._carry_out(operation)

    def _carry_out(self, operation: Operation) -> None:
        attempt, failure = (operation.id, operation.fence), ""
        try:
            if operation.kind == load_request.KIND:
                self._load(operation)
            else:
                asyncio.run(UnloadModel(self.world)(Work(operation, SilentRecorder())))
        except (LoadFailed, CommandFailed) as error:
            failure = str(error) or "failed"
        if (
            failure
            and self.world.are_faults_on
            and operation.attempts < 2
            and operation.kind == load_request.KIND
        ):
            until = clock.now() + timedelta(seconds=1)
            call(attempts.put_back, *attempt, Event.POSTPONE, now=clock.now(), until=until, reason=failure)
            return
        event = Event.FAIL if failure else Event.COMPLETE
        call(attempts.finish, *attempt, event, now=clock.now(), error=failure)

    def _load(self, operation: Operation) -> None:
        attempt, model = AttemptId(operation.id, operation.fence), operation.element
        call(slots.end_abandoned_loads, model, now=clock.now())
        views = call(fleet_cache.read_fleet, model, only=[UUID(operation.payload["node"])])
        if not views:
            raise LoadFailed("no node")
        found = [call(eviction.serving, UUID(id)) for id in operation.payload["evicts"]]
        victims = [one for one in found if one is not None]
        slot = call(
            slots.reserve,
            views[0],
            model,
            attempt=attempt,
            backend="echo",
            now=clock.now(),
            need=Need(vram=GB, vram_required=True),
            room=Eviction(views[0], victims) if victims else None,
        )
        if isinstance(slot, NoSlot):
            raise LoadFailed(slot.reason)
        self.world.note(f"  slot {model}#{slot.replica_index} on {slot.node_name}: {str(slot.id)[:4]}")
        try:
            for _ in range(6):
                if not call(eviction.remaining_rows([one.id for one in victims]).exists):
                    break
                pause("sleep")
            else:
                raise LoadFailed("no room")
            self._publish(operation, slot, attempt)
        except LoadFailed:
            call(slots.end_attempt, slot, attempt=attempt, now=clock.now())
            raise

    def _publish(self, operation: Operation, slot: Slot, attempt: AttemptId) -> None:
        if operation.payload["stages"]:
            if not call(slots.begin_staging, slot, attempt=attempt):
                raise LoadFailed("another load sends the files")
            call(slots.end_staging, slot, attempt=attempt)
        call(attempts.confirm, operation.id, operation.fence)
        if not slots_started(slot, attempt):
            raise LoadFailed("the slot was lost")
        address = self._start(operation, slot)
        call(slots.record_answer, slot, address)
        call(engine_ends.end_at_address, address, node_id=slot.node_id, but=slot.id)
        pause("load the model")
        replaces = operation.payload["replaces"]
        if not call(
            slots.publish,
            slot,
            attempt=attempt,
            address=address,
            backend="echo",
            options={},
            revision="",
            now=clock.now(),
            replaces=UUID(replaces) if replaces else None,
        ):
            raise LoadFailed("the slot was lost")

    def _start(self, operation: Operation, slot: Slot) -> str:
        key = f"{operation.element}#{slot.replica_index}"
        for _ in range(3):
            try:
                address = self.world.start(slot.node_id, slot.id, key)
            except RequestTimeout:
                call(attempts.confirm, operation.id, operation.fence)
            except BusError as error:
                raise LoadFailed("no worker") from error
            except ValueError as refused:
                call(slots.record_answer, slot)
                raise LoadFailed("refused") from refused
            else:
                call(slots.record_answer, slot)
                return address
        raise LoadFailed("no answer")

    def stops(self) -> None:
        """A controller stops what is due."""
        asyncio.run(Stopper(self.world).run_pass())

    def reaps(self) -> None:
        """A controller takes back leases that ran out."""
        call(attempts.reap, now=clock.now())

    # --- people and web processes

    def asks_for_load(self, dice: Random) -> None:
        """One more replica of a model is wanted on a node."""
        rows = list(NodeModel.objects.filter(phase="serving").order_by("created_at"))
        payload: dict[str, Any] = {
            "node": str(dice.choice(list(self.world.workers))),
            "stages": dice.random() < 0.3,
            "evicts": [],
            "replaces": None,
        }
        model = dice.choice(MODELS)
        if rows and dice.random() < 0.3:
            victim = dice.choice(rows)
            payload |= {"evicts": [str(victim.id)], "node": str(victim.node_id)}
        if (old := [row for row in rows if row.model_name == model]) and dice.random() < 0.3:
            payload["replaces"] = str(dice.choice(old).id)
        request = admission.OperationRequest(
            load_request.KIND, key=load_key(model), element=model, actor="test", payload=payload
        )
        admission.admit_one_more(request, now=clock.now())

    def asks_for_unload(self, dice: Random) -> None:
        """An operator has a model or a replica unloaded."""
        rows = list(NodeModel.objects.all().select_related("node").order_by("created_at"))
        if rows:
            row = dice.choice(rows)
            node, index = dice.choice([(None, None), (row.node, None), (row.node, row.replica_index)])
            wish = UnloadRequest(row.model_name, "anna", node=node, index=index, grace=dice.choice([0, 60]))
            unload_requests.unload(wish, now=clock.now())

    def cancels(self, dice: Random) -> None:
        """Somebody cancels an operation."""
        active = list(Operation.objects.active().order_by("created_at").values_list("pk", flat=True))
        if active:
            admission.cancel(dice.choice(active), actor="anna", now=clock.now())

    def picks(self, dice: Random) -> None:
        """A request begins."""
        if not self.processes:
            self.processes.append(uuid4())
        process = dice.choice(self.processes)
        asked = {"ask": 0, "scope": -1, "model": dice.choice(MODELS), "key": "", "n": 1}
        for row in self._exchange(process, picks=[asked]):
            self.requests.append((process, row[0]))

    def releases(self, dice: Random) -> None:
        """A request ends."""
        if self.requests:
            process, replica = self.requests.pop(dice.randrange(len(self.requests)))
            self._exchange(process, releases=[{"id": str(replica), "n": 1}])

    def _exchange(self, process: UUID, **wishes: Any) -> list[Any]:
        values: dict[str, Any] = {
            "process": process,
            "host": "h",
            "pid": 1,
            "version": "",
            "gap": clock.now(),
        }
        with connection.cursor() as cursor:
            cursor.execute(statements.ANNOUNCE, values | {"started": clock.now(), "now": clock.now()})
        wanted = {"picks": [], "releases": [], "keys": [], **wishes}
        with psycopg.RawCursor(connection.connection) as cursor:
            return cursor.execute(statements.EXCHANGE, [process, clock.now(), json.dumps(wanted)]).fetchall()

    def web_process_dies(self, dice: Random) -> None:
        """A web process falls silent; its requests are counted out."""
        if self.processes:
            process = self.processes.pop()
            with transaction.atomic(), connection.cursor() as cursor:
                values: dict[str, Any] = {"ids": [], "process": process, "now": clock.now()}
                cursor.execute(statements.LOCK_USED, values)
                cursor.execute(statements.RELEASE_ALL, values)
                cursor.execute(statements.DELETE_PROCESS, values)
            self.requests = [one for one in self.requests if one[0] != process]

    def loses(self, dice: Random) -> None:
        """A request got no answer from a replica that it had picked, maybe long ago."""
        rows = list(NodeModel.objects.exclude(address="").order_by("created_at"))
        if rows:
            row = dice.choice(rows)
            reason = dice.choice([PhaseReason.LOST, PhaseReason.LOST, PhaseReason.WRONG_MODEL])
            _finished(terminations.lose(_Here(), row.id, row.address, reason=reason))

    def loses_dead(self) -> None:
        """Requests find out which replicas have no engine."""
        workers = self.world.workers
        for row in NodeModel.objects.filter(phase="serving"):
            if (str(row), row.address) not in workers[row.node_id].running():
                _finished(terminations.lose(_Here(), row.id, row.address))

    # --- nodes

    def registers(self, worker: Worker) -> None:
        """The worker registers, with what it runs."""
        made = register(
            worker.name,
            secret=own_secret(worker.name),
            instance=worker.instance,
            now=clock.now(),
            auto_approve=True,
            total_vram=3 * GB,
            available_vram=3 * GB,
            max_replicas_per_model=2,
            running_processes=[registration.Running(*one) for one in worker.running()],
        )
        worker.is_registered, worker.is_reachable = True, True
        if worker.id != made.node.id:
            self.world.workers.pop(worker.id, None)
            worker.id = made.node.id
            self.world.workers[worker.id] = worker

    def beats(self, worker: Worker) -> None:
        """The worker reports its memory."""
        node = BackendNode.objects.get(pk=worker.id)
        figures = {"instance": worker.instance, "available_vram": 3 * GB}
        beat(beat_of(node, secret=own_secret(worker.name), at=clock.now(), **figures))

    def falls_silent(self, worker: Worker) -> None:
        """The node is declared gone; its engines run on."""
        worker.is_reachable = False
        lifecycle.mark_silent([worker.id], limit=-3600, actor=actors.CONTROLLER, now=clock.now())

    def deregisters(self, worker: Worker) -> None:
        """An admin removes the node; its worker ends with its engines and registers as a new node later."""
        lifecycle.deregister(worker.id, actor=ROOT, now=clock.now())
        worker.crash()
        worker.is_reachable = False

    def drains(self, worker: Worker) -> None:
        """An admin drains the node."""
        lifecycle.drain(worker.id, actor=ROOT, now=clock.now(), deadline=30)

    def resumes(self, worker: Worker) -> None:
        """An admin resumes the node."""
        lifecycle.resume(worker.id, actor=ROOT, now=clock.now())


def slots_started(slot: Slot, attempt: AttemptId) -> bool:
    """Record that the start is sent; the time of the start is when that is committed."""
    pause("start")
    return slots.start(slot, attempt=attempt, now=clock.now())
