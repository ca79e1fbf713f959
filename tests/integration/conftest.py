"""What heartbeats need: the web process's own pool, and their application."""

from collections.abc import AsyncIterator

import pytest
from asgiref.sync import sync_to_async
from django.db import connections

from localai_cluster.kit.database_pool import Pool
from nodes.api.heartbeats import HeartbeatApplication
from nodes.registry.heartbeats import IdentityCache
from operations.changes.events import conninfo
from tests.support.beating import Counted


@pytest.fixture
async def database() -> AsyncIterator[Counted]:
    """The test database through the web process's own pool."""
    pool = Pool(await sync_to_async(conninfo)())
    await pool.open()
    yield Counted(pool)
    await pool.close()
    await sync_to_async(connections.close_all)()


@pytest.fixture
def application(database: Counted) -> HeartbeatApplication:
    """The ASGI application over the test database."""
    return HeartbeatApplication(lambda: database, IdentityCache())
