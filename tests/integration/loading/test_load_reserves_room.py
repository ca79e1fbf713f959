"""A load reserves the VRAM that its model needs, and waits for room on a node."""

from dataclasses import replace
from typing import Any

import pytest
from django.db.models import Sum
from pytest_django import Settings

from localai_cluster.rpc.errors import Lost
from nodes.models import BackendNode, NodeModel
from operations.executor.work import Postpone, in_thread
from operations.models import Operation
from tests.support import hot
from tests.support.loading import BACKEND, ROOM, STARTED, Stage, loads, stage, stops

__all__ = ["loads", "stage"]
pytestmark = pytest.mark.django_db(transaction=True)


@pytest.mark.rule("R2.32", "R2.40", "R2.43")
async def test_a_load_reserves_what_its_file_needs(
    stage: Stage, loads: list[Any], settings: Settings
) -> None:
    """Measured before the node is chosen, reserved with the slot, and kept until a reading shows it."""
    await hot.in_thread(lambda: BackendNode.objects.update(available_vram=10 * 2**30))
    (stage.folder / "echo").write_bytes(bytes(4096))
    stage.lists(stage.one, BACKEND)
    stage.installs(stage.one, STARTED)
    loads.append(Lost("the engine died"))
    await hot.in_thread(stage.need_until)
    await stage.play()
    await stops(stage)
    assert await in_thread(lambda: BackendNode.objects.aggregate(left=Sum("reserved_vram"))["left"]) == 0
    await in_thread(Operation.objects.update, payload={})
    settings.CLUSTER = replace(settings.CLUSTER, vram_policy="require")
    loaded = await stage.handler(stage.work)
    assert loaded["node"] == "one"
    assert loaded["why"] == "equal to two in every term, the first by name"
    row = await in_thread(NodeModel.objects.select_related("node").get)
    needed = 4096 + 2048 * 8192
    assert (row.vram_needed, row.vram_seen, row.loaded_at is not None) == (needed, 10 * 2**30, True)
    assert row.node.reserved_vram == needed


@pytest.mark.rule("R2.32", "R2.39", "T-DSK-6", "T-DSK-7", "T-DSK-8")
@pytest.mark.parametrize("lack", ROOM)
async def test_a_load_without_room_anywhere_waits_and_says_what_is_missing(
    stage: Stage, lack: str, settings: Settings
) -> None:
    """D-VRAM-POLICY, D-DISK-WAITS: no worker is asked anything; the operation names need and nodes."""
    figures, policy, said = ROOM[lack]
    await hot.in_thread(lambda: BackendNode.objects.update(**figures))
    settings.CLUSTER = replace(settings.CLUSTER, **policy)
    (stage.folder / "echo").write_bytes(bytes(4096))
    await hot.in_thread(stage.need_until)
    ended = await stage.play()
    assert isinstance(ended, Postpone), ended
    assert (ended.waiting, ended.reason) == (True, f"no node can take it: {said}")
    assert not stage.bus.asked


@pytest.mark.rule("R2.39", "T-DSK-9", "T-DSK-10")
async def test_the_disk_check_switched_off_only_warns(
    stage: Stage, loads: list[Any], settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    figures = ROOM["disk"][0]
    await hot.in_thread(lambda: BackendNode.objects.update(**figures))
    settings.CLUSTER = replace(settings.CLUSTER, disk_headroom_check=False)
    stage.lists(stage.one, BACKEND)
    stage.installs(stage.one, STARTED)
    assert (await stage.handler(stage.work))["node"] == "one"
    assert "one may have too little disk space for echo" in caplog.text
