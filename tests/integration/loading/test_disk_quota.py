"""Disk quota and free disk of a node: loads that run at once, files that are there, and the refusals."""

import asyncio
import threading
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext
from pytest_django import Settings

from localai_cluster.accounts import actors
from localai_cluster.kit import clock
from nodes.decisions import fleet_cache
from nodes.decisions.fleet_cache import FleetQuestion
from nodes.loading import load_request, staging
from nodes.loading.transfer import UploadMeter
from nodes.models import BackendNode, BroughtModel, NodeModel
from nodes.models.replica import load_key
from nodes.placement.choose import Candidate, Need, Reason, find_refusal
from nodes.placement.explain import FleetView
from nodes.registry import overrides
from nodes.replicas import slots
from nodes.replicas.slots import NoSlot, Slot
from operations.executor.work import Postpone, Work, in_thread, write_batch
from operations.ledger import admission, attempts
from operations.ledger.admission import Requester
from operations.ledger.progress import Recorder
from tests.conftest import until
from tests.integration.loading.test_delivery import worker
from tests.integration.loading.test_load_steps import told
from tests.support.loading import BACKEND, STARTED, Stage, loads, stage

__all__ = ["loads", "stage", "told"]
pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.rule("R2.38")]  # D-DISK-QUOTA

GIB = 2**30
NEED = Need(disk=7 * GIB, files=6 * GIB)


def set_quota(node: BackendNode, text: str) -> None:
    overrides.set_disk_quota(node.pk, text, actor=actors.STATIC_KEY, now=clock.now())


def store(node: BackendNode, model: str, size: int) -> None:
    staging.store_staged_bytes(node.pk, model, size, now=clock.now())


def load_of(model: str) -> Work:
    now = clock.now()
    wanted = admission.OperationRequest(
        load_request.KIND,
        key=load_key(model, "2"),
        element=model,
        by=Requester("test"),
        needed_until=now + timedelta(hours=1),
    )
    admission.admit(wanted, now=now)
    (operation,) = attempts.claim("controller", now=now, lease=60, limit=1)
    return Work(operation, Recorder(write_batch))


def reserve(node: BackendNode, model: str, work: Work, need: Need = NEED) -> Slot | NoSlot:
    (view,) = [candidate for candidate in fleet_cache.read_fleet("") if candidate.id == node.pk]
    return slots.reserve(view, model, attempt=work.attempt, backend="echo", now=clock.now(), need=need)


def read_views(model: str, need: Need) -> list[Candidate]:
    """Return the nodes as all three readers show them, which must be equal."""
    one = fleet_cache.read_fleet(model)
    (of_many, _) = fleet_cache.read_fleets([FleetQuestion(model, ()), FleetQuestion("nothing", ())])
    cached = fleet_cache.FleetCache().decide(model, FleetView((), need))[0].nodes
    facts = [
        {(n.id, n.staged_bytes, n.disk_quota, n.other_models_bytes, n.promised_bytes) for n in nodes}
        for nodes in (one, of_many, cached)
    ]
    assert facts[0] == facts[1] == facts[2]
    return list(one)


def reason_on(node: BackendNode, model: str, need: Need = NEED) -> Reason | None:
    return next(find_refusal(view, need=need) for view in read_views(model, need) if view.id == node.pk)


async def test_a_model_must_fit_into_the_quota_and_counts_once(stage: Stage) -> None:
    """Files that are there need nothing more, also when the quota was lowered below them."""
    node = stage.one
    await in_thread(set_quota, node, "10GiB")
    await in_thread(store, node, "other", 4 * GIB)
    assert await in_thread(reason_on, node, "m") is None
    await in_thread(store, node, "other", 4 * GIB + 1)
    assert await in_thread(reason_on, node, "m") is Reason.QUOTA
    await in_thread(store, node, "m", 2 * GIB)
    assert await in_thread(reason_on, node, "m") is Reason.QUOTA, "what it has of m is part of m"
    await in_thread(store, node, "m", 6 * GIB)
    assert await in_thread(reason_on, node, "m") is None
    await in_thread(set_quota, node, "1GiB")
    assert await in_thread(reason_on, node, "m") is None
    assert await in_thread(reason_on, node, "n") is Reason.QUOTA
    assert await in_thread(reason_on, node, "n", Need(disk=GIB)) is None, "no files are sent for it"
    await in_thread(set_quota, node, "")
    assert await in_thread(reason_on, node, "n") is None


async def test_a_percentage_follows_the_reported_disk(stage: Stage) -> None:
    """The generated column takes it of the disk as it is now; also of the largest number."""
    await in_thread(set_quota, stage.one, "50%")
    for total, quota in ((0, 0), (30 * GIB, 15 * GIB), (2**63 - 1, (2**63 - 1) // 2)):
        await in_thread(partial(BackendNode.objects.update, total_disk=total))
        stored = await in_thread(BackendNode.objects.get, pk=stage.one.pk)
        assert stored.disk_quota_bytes == quota


async def test_of_two_loads_at_once_one_gets_the_last_bytes(stage: Stage) -> None:
    """Each holds its files in its row, under the node's lock, until they are recorded."""
    await in_thread(lambda: BackendNode.objects.update(max_replicas_per_model=2))
    await in_thread(set_quota, stage.one, "10GiB")
    works = {model: await in_thread(load_of, model) for model in ("m", "n")}
    tasks = (in_thread(reserve, stage.one, model, work) for model, work in works.items())
    results = await asyncio.gather(*tasks)
    assert sorted(type(result).__name__ for result in results) == ["NoSlot", "Slot"]
    (refused,) = [result for result in results if isinstance(result, NoSlot)]
    assert refused.reason == (
        "6.0 GiB of 10.0 GiB of the quota for models are used, 6.0 GiB more are needed;"
        " remove models there that are not used, or raise the quota"
    )
    (placed,) = [result for result in results if isinstance(result, Slot)]
    row = await in_thread(NodeModel.objects.get, pk=placed.id)
    other = next(model for model in works if model != row.model_name)
    assert await in_thread(reason_on, stage.one, other) is Reason.QUOTA
    assert await in_thread(reason_on, stage.one, row.model_name) is None, "replicas share the files"
    work = works[row.model_name]
    await in_thread(partial(slots.end_attempt, placed, attempt=work.attempt, now=clock.now()))
    assert await in_thread(reason_on, stage.one, other) is None, "a failed load holds nothing"


async def test_of_two_loads_at_once_one_gets_the_last_free_bytes(stage: Stage) -> None:
    """What a load has yet to send is not free for others; what has arrived is used and counts once."""
    need, node = Need(disk=7 * GIB, disk_required=True, files=6 * GIB), stage.one

    def set_free(size: int) -> None:
        BackendNode.objects.update(total_disk=100 * GIB, available_disk=size, max_replicas_per_model=2)

    await in_thread(set_free, 12 * GIB)
    works = {model: await in_thread(load_of, model) for model in ("m", "n")}
    tasks = (in_thread(reserve, node, model, work, need) for model, work in works.items())
    results = await asyncio.gather(*tasks)
    assert [result.reason for result in results if isinstance(result, NoSlot)] == [Reason.DISK]
    (placed,) = [result for result in results if isinstance(result, Slot)]
    row = await in_thread(NodeModel.objects.get, pk=placed.id)
    (other,) = set(works) - {row.model_name}
    assert await in_thread(reason_on, node, other, need) is Reason.DISK
    views = [await in_thread(read_views, model, need) for model in (other, row.model_name)]
    (of_other, of_own) = (next(view for view in seen if view.id == node.pk) for seen in views)
    assert (of_other.available_disk, of_other.promised_bytes) == (12 * GIB, 6 * GIB), (
        "as the page of the node"
    )
    assert (of_own.available_disk, of_own.promised_bytes) == (12 * GIB, 0)
    assert await in_thread(reason_on, node, row.model_name, need) is None, "replicas share the files"
    assert await in_thread(reason_on, node, other, replace(need, disk=6 * GIB)) is None
    await in_thread(set_free, 8 * GIB)
    assert await in_thread(reason_on, node, other, replace(need, disk=6 * GIB)) is Reason.DISK
    await in_thread(store, node, row.model_name, 4 * GIB)
    assert await in_thread(reason_on, node, other, replace(need, disk=6 * GIB)) is None
    assert await in_thread(reason_on, node, other, need) is Reason.DISK
    work = works[row.model_name]
    await in_thread(partial(slots.end_attempt, placed, attempt=work.attempt, now=clock.now()))
    assert await in_thread(reason_on, node, other, need) is None, "a failed load holds nothing"


async def test_a_cancelled_store_ends_before_the_last_one(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cancelled twice, a load still stores its last number, and no earlier one after it."""
    store, running, released = staging.store_staged_bytes, threading.Event(), threading.Event()
    stored: list[int] = []

    def slow(node_id: UUID, model: str, size: int, *, now: datetime) -> None:
        running.set()
        released.wait(60)
        store(node_id, model, size, now=now)
        stored.append(size)

    monkeypatch.setattr(staging, "store_staged_bytes", slow)
    meter, lock = UploadMeter({"a.gguf": 9}, "one"), asyncio.Lock()
    slot = SimpleNamespace(node_id=stage.one.pk)
    attempt: Any = SimpleNamespace(slot=slot, definition=SimpleNamespace(name="m"))

    def begin() -> asyncio.Task[None]:
        return asyncio.create_task(staging._store_current_bytes(attempt, meter, lock))

    try:
        meter.start_file("a.gguf", 4)
        periodic = begin()
        assert await asyncio.to_thread(running.wait, 60)
        periodic.cancel()
        await asyncio.gather(periodic, return_exceptions=True)
        meter.finish_file("a.gguf")
        last = begin()
        await asyncio.sleep(0)  # it has begun
        last.cancel()
        await asyncio.gather(last, return_exceptions=True)
        assert lock.locked(), "the first thread still runs"
    finally:
        released.set()
    await until(lambda: len(stored) == 2)
    assert stored == [4, 9]
    assert (await in_thread(BroughtModel.objects.get)).size == 9


async def test_of_two_stagings_at_once_one_gets_the_last_bytes(stage: Stage) -> None:
    """As loads whose files could not be measured before: the plan of the staging decides."""
    works = [await in_thread(load_of, model) for model in ("m", "n")]
    places = [
        await in_thread(reserve, stage.one, model, work, Need())
        for model, work in zip("mn", works, strict=True)
    ]
    await in_thread(set_quota, stage.one, "10GiB")

    def begin(number: int) -> bool | None:
        slot = places[number]
        assert isinstance(slot, Slot)
        return slots.begin_staging(slot, attempt=works[number].attempt, files=6 * GIB)

    results = await asyncio.gather(*(in_thread(begin, number) for number in (0, 1)), return_exceptions=True)
    (refusal,) = [result for result in results if result is not True]
    assert isinstance(refusal, slots.InsufficientDisk)
    assert await in_thread(lambda: NodeModel.objects.filter(phase="staging").count()) == 1


async def test_files_are_held_by_the_row_until_they_are_recorded(stage: Stage) -> None:
    """Between the record and the end of the staging they count once, afterwards by the record alone."""
    await in_thread(set_quota, stage.one, "10GiB")
    work = await in_thread(load_of, "m")
    slot = await in_thread(reserve, stage.one, "m", work)
    assert isinstance(slot, Slot)
    await in_thread(partial(slots.begin_staging, slot, attempt=work.attempt, files=6 * GIB))

    def others() -> int:
        (node,) = [view for view in read_views("n", NEED) if view.id == stage.one.pk]
        return node.other_models_bytes

    assert await in_thread(others) == 6 * GIB
    await in_thread(store, stage.one, "m", 6 * GIB)
    assert await in_thread(others) == 6 * GIB
    await in_thread(partial(slots.end_staging, slot, attempt=work.attempt))
    assert await in_thread(others) == 6 * GIB
    await in_thread(lambda: BroughtModel.objects.all().delete())
    assert await in_thread(others) == 0


async def test_a_load_waits_for_the_quota_with_the_figures(stage: Stage, settings: Settings) -> None:
    """No worker is asked; with space on another node the load goes there, files and all."""
    settings.CLUSTER = replace(settings.CLUSTER, models_path=stage.folder)
    (stage.folder / "echo").write_bytes(bytes(4096))
    await in_thread(lambda: BackendNode.objects.exclude(pk=stage.one.pk).delete())
    await in_thread(set_quota, stage.one, "1GiB")
    await in_thread(store, stage.one, "other", GIB - 4095)
    await in_thread(stage.need_until)
    ended = await stage.play()
    assert isinstance(ended, Postpone), ended
    assert ended.waiting
    assert ended.reason == (
        "no node can take it: 1 without space in the disk quota for models (4 KiB of files:"
        " one: 0.9 GiB of 1.0 GiB of the quota for models are used, 4 KiB more are needed);"
        " remove models there that are not used, or raise the quota"
    )
    assert not stage.bus.asked


async def test_a_staging_counts_its_files_before_the_first_byte(
    stage: Stage, settings: Settings, told: list[Any], tmp_path: Path
) -> None:
    """Whether they are sent or fetched by the worker; the next node is tried."""
    settings.CLUSTER = replace(settings.CLUSTER, models_path=stage.folder)
    (stage.folder / "echo").write_bytes(bytes(4096))
    for node in (stage.one, stage.two):
        stage.lists(node, BACKEND)
        stage.installs(node, STARTED)
    await in_thread(set_quota, stage.one, "4095")
    async with worker(tmp_path / "w", stage.two):
        assert (await stage.handler(stage.work))["node"] == "two"
    recorded = await in_thread(lambda: list(BroughtModel.objects.values_list("node__name", "size")))
    assert recorded == [("two", 4096)]


def test_the_number_of_queries_does_not_grow_with_nodes_and_models() -> None:
    def count() -> int:
        with CaptureQueriesContext(connection) as queries:
            fleet_cache.read_fleets([FleetQuestion(f"m{number}", ()) for number in range(20)])
        return len(queries)

    def add(first: int, last: int) -> None:
        for number in range(first, last):
            node = BackendNode.objects.create(
                name=f"n{number}", address=f"10.0.0.{number}:1", disk_quota="9", disk_quota_size=9
            )
            for model in range(number):
                store(node, f"m{model}", 5)

    add(0, 2)
    before = count()
    add(2, 8)
    assert count() == before == 4
