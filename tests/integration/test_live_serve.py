"""`/ws/feed` over a real web process: a stop sends clients away at once, a slow reader costs no memory."""

import asyncio
import json
import signal
import socket
from pathlib import Path
from typing import Any

import pytest
from django.db import connection
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from localai_cluster import clock, names
from nodes.models import BackendNode, NodeLabel
from tests.integration.test_hot_serve import ADMIN, serving
from tests.support import hot

pytestmark = pytest.mark.django_db(transaction=True)

NODES, LABELS, ROUNDS = 400, 30, 7


def feed_of(url: str) -> str:
    """The socket's address."""
    return url.replace("http", "ws", 1) + "/ws/feed"


async def until(link: ClientConnection, kind: str) -> dict[str, Any]:
    """Reads until a message of this kind."""
    while True:
        message: dict[str, Any] = json.loads(await asyncio.wait_for(link.recv(), 60))
        if message["type"] == kind:
            return message


def test_a_stopping_process_sends_its_watchers_away(tmp_path: Path) -> None:
    """1012 within a second of SIGTERM, so that a page connects to another process before anybody notices."""

    async def scenario(url: str, stop: Any) -> tuple[int, float]:
        async with connect(feed_of(url), additional_headers=ADMIN, proxy=None) as link:
            await until(link, "nodes.snapshot")
            stop()
            began = clock.monotonic()
            with pytest.raises(ConnectionClosed) as closed:
                await until(link, "a message that never comes")
            assert closed.value.rcvd is not None
            return closed.value.rcvd.code, clock.monotonic() - began

    with serving(tmp_path) as (process, url):
        code, seconds = asyncio.run(scenario(url, lambda: process.send_signal(signal.SIGTERM)))
        assert process.wait(timeout=90) == 0
    assert (code, seconds < 10) == (1012, True)
    assert b"Traceback" not in (tmp_path / "log").read_bytes()


def seed() -> None:
    """Nodes whose changes are larger than what a connection buffers."""
    nodes = [
        BackendNode(name=f"n{number}", name_key=names.key(f"n{number}"), address="10.0.0.1:1")
        for number in range(NODES)
    ]
    BackendNode.objects.bulk_create(nodes)
    NodeLabel.objects.bulk_create(
        NodeLabel(node=node, key=f"k{number}", value="") for node in nodes for number in range(LABELS)
    )


def change(turn: int) -> None:
    """All labels of all nodes at once."""
    with connection.cursor() as cursor:
        cursor.execute("UPDATE node_labels SET value = rpad(%s, 255, 'x')", [f"turn {turn} "])
        cursor.execute("SELECT pg_notify('cluster_nodes', '')")
    connection.close()


def test_who_reads_slowly_gets_what_he_missed_as_one(tmp_path: Path) -> None:
    """What cannot be sent is not kept: later changes are merged, and nothing is missing in the end."""

    async def scenario(url: str) -> tuple[int, set[str]]:
        slow_socket = socket.socket()
        slow_socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow_socket.connect(("127.0.0.1", int(url.rpartition(":")[2])))
        slow = connect(
            feed_of(url), sock=slow_socket, additional_headers=ADMIN, proxy=None, max_size=None, max_queue=1
        )
        fast = connect(feed_of(url), additional_headers=ADMIN, proxy=None, max_size=None)
        async with slow as slow_link, fast as fast_link:
            for link in (slow_link, fast_link):
                await until(link, "nodes.snapshot")
            for turn in range(ROUNDS):
                await hot.in_thread(lambda turn=turn: change(turn))
                await until(fast_link, "nodes.delta")
            deltas, values = 0, {""}
            while values != {f"turn {ROUNDS - 1} "}:
                delta = await until(slow_link, "nodes.delta")
                deltas += 1
                values = {one["labels"]["k0"].rstrip("x") for one in delta["changed"]}
            return deltas, values

    seed()
    with serving(tmp_path) as (_, url):
        deltas, _ = asyncio.run(scenario(url))
    assert deltas < ROUNDS - 1
