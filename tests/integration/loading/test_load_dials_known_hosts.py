"""A load connects to an engine on its node's own hosts only."""

import asyncio
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from pytest_django import Settings

from localai_cluster.kit import names
from localai_cluster.messaging import messages as m
from nodes.models import NodeEvent
from nodes.replicas.stops import Stopper
from operations.executor.work import Postpone
from tests.conftest import until
from tests.support import hot
from tests.support.loading import BACKEND, Stage, stage

__all__ = ["stage"]
pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def listening() -> Iterator[socket.socket]:
    """A host of this machine that no node has registered."""
    with socket.create_server(("127.0.0.2", 0)) as server:
        server.setblocking(False)
        yield server


def met(server: socket.socket) -> bool:
    """Whether somebody has connected."""
    try:
        server.accept()[0].close()
    except BlockingIOError:
        return False
    return True


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.2:{port}",
        "ipv4:127.0.0.2:{port}",
        "ipv4:127.0.0.1:1,127.0.0.2:{port}",
        "dns:///127.0.0.2:{port}",
        "127.0.0.1:1,127.0.0.2:{port}",
        "127.0.0.1@127.0.0.2:{port}",
        "http://127.0.0.2:{port}",
        "0177.0.0.2:{port}",
        "127.0.0.2:{port}/",
        "unix:{path}",
        "unix://{path}",
        "127.0.0.1:1" + "\x00" * 9,
        "127.0.0.1",
        "127.0.0.1:0",
    ],
)
async def test_an_engine_is_dialled_on_its_own_host_only(
    stage: Stage, listening: socket.socket, tmp_path: Path, address: str
) -> None:
    """The operation names both values, the timeline keeps it, and no one is connected to."""
    with socket.socket(socket.AF_UNIX) as local:
        local.bind(str(tmp_path / "engine.sock"))
        local.listen()
        local.setblocking(False)
        said = address.format(port=listening.getsockname()[1], path=tmp_path / "engine.sock")
        stage.lists(stage.one, BACKEND)
        stage.installs(stage.one, m.InstallReply(True, said))
        await hot.in_thread(stage.need_until)
        ended = await stage.play()
        assert isinstance(ended, Postpone), ended
        assert "127.0.0.1:1'" in ended.reason
        assert names.to_single_line(said) in ended.reason
        assert not met(listening)
        assert not met(local)
    told = await hot.in_thread(NodeEvent.objects.get)
    assert (told.node_id, told.kind) == (stage.one.id, "address_refused")
    assert told.detail == {"replied": names.to_single_line(said), "registered": "127.0.0.1:1"}
    await Stopper(stage.bus).run_pass()
    assert stage.bus.stops(stage.one.id) == ["echo#0"], "its engine is stopped all the same"


async def test_an_engine_is_dialled_on_a_host_that_the_operator_lists(
    stage: Stage, listening: socket.socket, settings: Settings
) -> None:
    """And the test above would see a connection."""
    settings.CLUSTER = replace(settings.CLUSTER, node_hosts={"one": frozenset({"127.0.0.2"})})
    stage.lists(stage.one, BACKEND)
    stage.installs(stage.one, m.InstallReply(True, f"127.0.0.2:{listening.getsockname()[1]}"))
    await hot.in_thread(stage.need_until)
    playing = asyncio.create_task(stage.play())
    await until(lambda: asyncio.to_thread(met, listening))
    playing.cancel()
    await asyncio.gather(playing, return_exceptions=True)
    assert not await hot.in_thread(NodeEvent.objects.exists)
