"""The end of a connection to the bus."""

import asyncio

import pytest

from localai_cluster.kit import cancellation
from localai_cluster.messaging.nats import NatsBus
from localai_cluster.messaging.servers import Servers
from tests.support.ports import free_port

PATIENCE = 60.0


@pytest.mark.parametrize("passes", range(20))
async def test_a_bus_closes_at_any_point_of_its_dialling(
    passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A controller stopped while it dialled never ended, as the library lost the cancellation."""
    monkeypatch.setattr(cancellation, "_CANCEL_REPEAT_SECONDS", 0.05)
    bus = NatsBus(Servers((f"nats://127.0.0.1:{free_port()}",)), name="closing")
    bus.start()
    for _ in range(passes):
        await asyncio.sleep(0)
    async with asyncio.timeout(PATIENCE):
        await bus.close()
    assert not bus.connected
