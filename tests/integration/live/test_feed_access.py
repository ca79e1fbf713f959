"""`/ws/feed`: only admins may watch, and the end of an access closes its sockets."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any
from unittest.mock import AsyncMock

import pytest
from asgiref.sync import sync_to_async
from channels.testing import WebsocketCommunicator
from django.contrib.auth import get_user_model
from django.contrib.sessions.models import Session
from django.db import connections
from django.test import Client

from localai_cluster.accounts import passwords, principals
from localai_cluster.accounts.models import ApiKey, InitialPassword
from localai_cluster.edge import websocket_application
from localai_cluster.kit import cancellation, clock
from localai_cluster.web import sockets
from nodes.gateway import gateway
from operations.executor.work import WakeUps
from tests.support import live
from tests.support.feed import PAGE, Open, process, signed_in, tab

__all__ = ["process", "tab"]
pytestmark = pytest.mark.django_db(transaction=True)


async def refused(headers: Any) -> tuple[bool, int]:
    """Whether the socket was opened first, and the code with which it was closed."""
    socket = WebsocketCommunicator(websocket_application, "/ws/feed", headers=list(headers))
    accepted, code = await socket.connect(timeout=30)
    if accepted:
        code = (await socket.receive_output(timeout=30))["code"]
    await socket.disconnect()
    return accepted, int(code or 0)


async def test_only_admins_may_watch() -> None:
    """Our own page learns the reason from the close code; programs and other pages are not let in at all."""
    user = await sync_to_async(get_user_model().objects.create_user)("ann", password="x")
    _, plain = await sync_to_async(principals.create_api_key)(user, "k")
    key = (b"x-api-key", plain.encode())
    foreign = [(b"host", b"cluster:8080"), (b"origin", b"http://evil.example")]
    found = [
        await refused(headers)
        for headers in ([], [key], PAGE, [*PAGE, key], foreign, [*live.ADMIN, *foreign])
    ]
    await sync_to_async(connections.close_all)()
    assert found == [(False, 4401), (False, 4403), (True, 4401), (True, 4403), (False, 4401), (False, 4403)]


ENDS: dict[str, Callable[[Any], Any]] = {
    "signed out": lambda user: Client.logout,
    "deactivated": lambda user: get_user_model().objects.filter(pk=user.pk).update(is_active=False),
    "password changed": lambda user: (user.set_password("y"), user.save()),
    "password to be changed": lambda user: InitialPassword.objects.create(user=user),
}


@pytest.mark.parametrize("how", ENDS)
async def test_a_session_that_ends_closes_its_sockets(
    tab: Open, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Asked again while the socket is open; 4401 sends the page to sign in."""
    monkeypatch.setattr(sockets, "CHECK_SECONDS", 0.05)
    user, headers = await signed_in()
    page = await (await tab(headers=headers)).greeted()
    if how == "signed out":
        key = headers[-1][1].decode().removeprefix("sessionid=")
        await sync_to_async(sign_out)(key)
    else:
        await sync_to_async(ENDS[how])(user)
    assert await page.closed() == 4401


def sign_out(key: str) -> None:
    from django.contrib.sessions.backends.db import SessionStore

    SessionStore(key).flush()


@pytest.fixture
async def told(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    """What a web process hears from the database; nothing is looked at without that."""
    plain, heard = sockets.recheck_sockets, asyncio.Event()

    def look_again(access_name: str = "") -> None:
        heard.set()
        plain(access_name)

    monkeypatch.setattr(sockets, "recheck_sockets", look_again)
    monkeypatch.setattr(sockets, "CHECK_SECONDS", 3600)
    listening = asyncio.create_task(gateway._listen_for_notifications(WakeUps()))
    await asyncio.wait_for(heard.wait(), 60)
    yield
    await cancellation.cancel_and_wait(listening)


async def test_an_access_that_ends_while_the_socket_opens_closes_it_at_once(
    tab: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it is among the open sockets no hint can reach it, and no timer does."""
    monkeypatch.setattr(sockets, "CHECK_SECONDS", 3600)
    _, headers = await signed_in()
    key = headers[-1][1].decode().removeprefix("sessionid=")
    plain = sockets.LiveSocket.connect

    async def late(socket: sockets.LiveSocket) -> None:
        await sync_to_async(sign_out)(key)
        await plain(socket)

    monkeypatch.setattr(sockets.LiveSocket, "connect", late)
    assert await (await tab(headers=headers)).closed() == 4401


ACCESS_ENDS: dict[str, Callable[[Any, str], Any]] = {
    "signed out": lambda user, key: sign_out(key),
    "password changed": lambda user, key: passwords.change_password(user.pk, "x", "a-longer-sentence-9"),
    "password set in the admin": lambda user, key: (user.set_password("y"), user.save()),
    "deactivated": lambda user, key: get_user_model().objects.filter(pk=user.pk).update(is_active=False),
    "deleted": lambda user, key: get_user_model().objects.filter(pk=user.pk).delete(),
    "no admin any more": lambda user, key: (
        get_user_model().objects.filter(pk=user.pk).update(is_staff=False, is_superuser=False)
    ),
}


@pytest.mark.parametrize("how", ACCESS_ENDS)
async def test_the_end_of_an_access_closes_its_sockets_at_once(tab: Open, told: None, how: str) -> None:
    """Join, the edge: the database tells; somebody else's sockets stay open and are not even looked at."""
    user, headers = await signed_in()
    page = await (await tab(headers=headers)).greeted()
    await (await tab(headers=live.ADMIN)).greeted()
    scopes: list[Any] = [one.scope for one in sockets._open_sockets]
    (other,) = [scope for scope in scopes if scope["principal"] == principals.STATIC_ADMIN]
    other["current_principal"] = AsyncMock()
    key = headers[-1][1].decode().removeprefix("sessionid=")
    await sync_to_async(ACCESS_ENDS[how])(user, key)
    assert await page.closed() == (4403 if how == "no admin any more" else 4401)
    other["current_principal"].assert_not_awaited()


@pytest.mark.parametrize("how", ["revoked", "deleted"])
async def test_the_end_of_a_key_closes_its_sockets_at_once(tab: Open, told: None, how: str) -> None:
    """A program's socket is its key's."""
    user, _ = await signed_in()
    key, plain = await sync_to_async(principals.create_api_key)(user, "k")
    program = await (await tab(headers=[(b"x-api-key", plain.encode())])).greeted()
    keys = ApiKey.objects.filter(pk=key.pk)
    if how == "revoked":
        await sync_to_async(keys.update)(revoked_at=clock.now())
    else:
        await sync_to_async(keys.delete)()
    assert await program.closed() == 4401


async def test_many_sessions_that_end_at_once_are_one_notice(tab: Open, told: None) -> None:
    """Of thousands no one wants to be told one by one."""
    _, headers = await signed_in()
    page = await (await tab(headers=headers)).greeted()
    rows = [
        Session(session_key=f"{number:032}", session_data="", expire_date=clock.now())
        for number in range(101)
    ]
    await sync_to_async(Session.objects.bulk_create)(rows)
    await sync_to_async(Session.objects.all().delete)()
    assert await page.closed() == 4401


async def test_what_was_missed_while_no_one_listened_is_looked_at(
    tab: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection that hears the database may be cut: after each new one all sockets find out again."""
    monkeypatch.setattr(sockets, "CHECK_SECONDS", 3600)
    user, headers = await signed_in()
    page = await (await tab(headers=headers)).greeted()
    await sync_to_async(get_user_model().objects.filter(pk=user.pk).update)(is_active=False)
    heard = asyncio.create_task(gateway._listen_for_notifications(WakeUps()))
    assert await page.closed() == 4401
    await cancellation.cancel_and_wait(heard)


async def test_a_revoked_key_and_a_lost_role_close_the_socket(
    tab: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program's key is looked at again too; who is no admin any more gets 4403."""
    monkeypatch.setattr(sockets, "CHECK_SECONDS", 0.05)
    user, headers = await signed_in()
    key, plain = await sync_to_async(principals.create_api_key)(user, "k")
    program = await (await tab(headers=[(b"x-api-key", plain.encode())])).greeted()
    page = await (await tab(headers=headers)).greeted()
    await sync_to_async(ApiKey.objects.filter(pk=key.pk).update)(revoked_at=clock.now())
    assert await program.closed() == 4401
    users = get_user_model().objects.filter(pk=user.pk)
    await sync_to_async(users.update)(is_staff=False, is_superuser=False)
    assert await page.closed() == 4403
