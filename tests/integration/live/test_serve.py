"""`/ws/feed` over a real web process: a stop sends clients away at once, a slow reader costs no memory."""

import asyncio
import json
import signal
import socket
from pathlib import Path
from typing import Any

import httpx
import pytest
from django.contrib.auth import BACKEND_SESSION_KEY, HASH_SESSION_KEY, SESSION_KEY, get_user_model
from django.db import connection
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from localai_cluster.accounts.sessions import SessionStore
from localai_cluster.kit import clock, names
from nodes.backends.intents import Ended, record_outcomes
from nodes.models import BackendNode, NodeLabel
from tests.integration.wiring.test_serve import ADMIN, serving
from tests.support import hot
from tests.support.intents import INSTALL, ask, claim

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


@pytest.mark.rule("A42", "A80", "O48", "O81", "O95", "H2")
def test_two_processes_show_the_same_and_signing_out_of_one_closes_the_sockets_of_the_other(
    tmp_path: Path,
) -> None:
    """Sockets: long before the next look after 15 s, with the code that sends a page to sign in; others stay.

    Operations: whichever process is asked, what runs is listed, and what has ended is not.
    """
    user = get_user_model().objects.create_superuser("root", password="a-long-sentence-9")
    session = SessionStore()
    login_of(user, session)

    async def scenario(here: str, there: str) -> tuple[int, float]:
        cookie = {"Cookie": f"sessionid={session.session_key}; csrftoken={CSRF}"}
        mine = connect(feed_of(there), additional_headers=cookie, proxy=None)
        other = connect(feed_of(there), additional_headers=ADMIN, proxy=None)
        async with mine as link, other as stays, httpx.AsyncClient(base_url=here) as client:
            await until(link, "nodes.snapshot")
            began = clock.monotonic()
            answer = await client.post("/api/auth/logout", headers={**cookie, "X-CSRFToken": CSRF})
            assert answer.status_code == 200
            with pytest.raises(ConnectionClosed) as closed:
                await until(link, "a message that never comes")
            seconds = clock.monotonic() - began
            await until(stays, "alive")
            assert closed.value.rcvd is not None
            return closed.value.rcvd.code, seconds

    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    with serving(tmp_path / "a") as (_, here), serving(tmp_path / "b") as (_, there):
        lists_agree(here, there)
        code, seconds = asyncio.run(scenario(here, there))
    assert (code, seconds < 10) == (4401, True), seconds


def lists_agree(here: str, there: str) -> None:
    """A hundred looks by turns during an install; one after its end at each of the processes."""
    job = str(ask(INSTALL, hot.node("one")).id)
    (intent,) = claim()

    def jobs(url: str, path: str = "") -> list[str]:
        entries = client.get(f"{url}/api/operations{path}").json()["operations"]
        return [entry["jobID"] for entry in entries]

    with httpx.Client(headers=ADMIN) as client:
        assert [jobs(url) for url in (here, there) * 50] == [[job]] * 100
        record_outcomes({(intent.id, intent.fence): (Ended(), ())}, now=clock.now())
        assert [jobs(url) for url in (here, there)] == [[], []]
        assert [jobs(url, "/history") for url in (here, there)] == [[job], [job]]


CSRF = "c" * 32


def login_of(user: Any, session: SessionStore) -> None:
    """A session of the user, as signing in makes it."""
    session[SESSION_KEY], session[HASH_SESSION_KEY] = str(user.pk), user.get_session_auth_hash()
    session[BACKEND_SESSION_KEY] = "localai_cluster.accounts.passwords.SessionBackend"
    session.save()


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
