"""A signed-in browser at the inference edge: its session, the CSRF token, the page's origin, nothing less."""

import asyncio
from collections.abc import Mapping
from contextlib import AsyncExitStack
from datetime import timedelta
from typing import Any

import pytest
from django.conf import settings as django_settings
from django.contrib.auth import get_user_model
from django.db import DatabaseError
from django.test import Client
from pytest_django import Settings

from localai_cluster.accounts import sessions
from localai_cluster.accounts.models import InitialPassword
from localai_cluster.asgi import application
from localai_cluster.kit import clock
from localai_cluster.web.throttle import DEFAULT_LIMIT, WINDOW, Failures
from nodes.models import BackendNode
from tests.support import hot
from tests.support.answering import ASK, CHAT, definitions
from tests.support.environment import API_KEY
from tests.support.replicas import forget_nodes
from tests.support.scripted import Scripted, running, words

__all__ = ["definitions"]
pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.rule("UI-10.11")]

TOKEN = "c" * 32
HERE, ELSEWHERE = "http://cluster.test", "http://elsewhere.test"


@pytest.fixture(autouse=True)
def named(settings: Settings) -> None:
    """This host has a name."""
    settings.ALLOWED_HOSTS = ["cluster.test"]


def person(name: str = "ann", **more: Any) -> Any:
    """Somebody with a password of her own."""
    return get_user_model().objects.create_user(name, password="a long first sentence", **more)


def signed_in(user: Any, **more: str) -> dict[str, str]:
    """What the page sends; `more` replaces headers, "" leaves one out."""
    client = Client()
    client.force_login(user)
    session = client.cookies[django_settings.SESSION_COOKIE_NAME].value
    headers = {
        "host": "cluster.test",
        "origin": HERE,
        "cookie": f"csrftoken={TOKEN}; sessionid={session}",
        "x-csrftoken": TOKEN,
        "content-type": "application/json",
        **{name.replace("_", "-"): value for name, value in more.items()},
    }
    return {name: value for name, value in headers.items() if value}


def asked(headers: Mapping[str, str]) -> tuple[hot.Reply, Scripted]:
    """The reply to one chat request without a key, and the engine that may have made it."""
    engine = Scripted(words("Hello yourself"))

    async def whole() -> hot.Reply:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(hot.serving())
            address = await stack.enter_async_context(running(engine))
            await hot.in_thread(lambda: hot.replica(hot.node(), "m", address=address))
            answer = await hot.Client(application, key=None).post(CHAT, ASK, headers=headers)
            assert answer is not None
            return answer

    return asyncio.run(whole()), engine


@pytest.mark.rule("http-6.3", "http-0.2")
@pytest.mark.parametrize("admin", [True, False], ids=["admin", "user"])
def test_a_session_chats_and_an_administrator_is_told_the_node(admin: bool) -> None:
    answer, _ = asked(signed_in(person(is_staff=admin)))
    assert answer.status == 200
    assert answer.body["choices"][0]["message"]["content"] == "Hello yourself"
    told = {"x-localai-node": str(BackendNode.objects.get().id)} if admin else {}
    assert {name: value for name, value in answer.headers.items() if name == "x-localai-node"} == told


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"x_csrftoken": "", "origin": ""}, "token missing"),
        ({"x_csrftoken": "", "sec_fetch_site": "cross-site"}, "token missing"),
        ({"x_csrftoken": "", "sec_fetch_site": "same-site"}, "token missing"),
        ({"x_csrftoken": "", "sec_fetch_site": "none"}, "token missing"),
        ({"x_csrftoken": "", "origin": "https://cluster.test"}, "Origin checking failed"),
        ({"x_csrftoken": "", "origin": "http://cluster.test:81"}, "Origin checking failed"),
        ({"x_csrftoken": "d" * 32, "origin": ""}, "token from the 'X-Csrftoken' HTTP header incorrect"),
        ({"origin": ELSEWHERE}, "Origin checking failed"),
        ({"origin": "null"}, "Origin checking failed"),
        ({"origin": ELSEWHERE, "content_type": "multipart/form-data"}, "Origin checking failed"),
        ({"x_csrftoken": "", "origin": "", "content_type": "multipart/form-data"}, "token missing"),
    ],
    ids=[
        "no token",
        "cross-site",
        "same-site",
        "typed",
        "other scheme",
        "other port",
        "wrong token",
        "other site",
        "no site",
        "form of another site",
        "form",
    ],
)
def test_a_request_that_the_page_did_not_make_is_refused(changed: dict[str, str], words: str) -> None:
    answer, engine = asked(signed_in(person(is_staff=True), **changed))
    assert (answer.status, answer.body["error"]["code"]) == (403, "forbidden")
    assert words in answer.body["error"]["message"]
    assert not engine.asked


@pytest.mark.rule("http-0.1", "http-5.4")
@pytest.mark.parametrize(
    "said",
    [
        {"sec_fetch_site": "same-origin", "origin": ELSEWHERE},
        {"sec_fetch_site": "same-origin"},
        {"origin": HERE},
    ],
    ids=["Sec-Fetch-Site alone", "both", "Origin alone"],
)
def test_a_page_of_this_origin_needs_no_token(said: dict[str, str]) -> None:
    """D-SIGN-IN: the reference's pages know no token; the browser says where a request comes from."""
    answer, engine = asked(signed_in(person(), x_csrftoken="", **said))
    assert answer.status == 200
    assert engine.asked


def test_who_is_signed_out_is_refused() -> None:
    ann = person(is_staff=True)
    headers = signed_in(ann)
    ann.set_password("another long sentence")
    ann.save()
    answer, engine = asked(headers)
    assert (answer.status, answer.body["error"]["code"]) == (401, "unauthorized")
    assert answer.headers["www-authenticate"] == "Bearer"
    assert not engine.asked


@pytest.mark.parametrize(
    "cookie",
    ["", f"csrftoken={TOKEN}", "sessionid=", 'sessionid="unknown\\000"', "a=sessionid"],
    ids=["no cookie", "another", "empty", "impossible", "only a value"],
)
def test_no_session_is_no_credential(cookie: str) -> None:
    headers = {"host": "cluster.test", "origin": HERE, "cookie": cookie, "x-csrftoken": TOKEN}
    answer, engine = asked({name: value for name, value in headers.items() if value})
    assert (answer.status, answer.body["error"]["code"]) == (401, "unauthorized")
    assert not engine.asked


@pytest.mark.rule("http-0.2")
def test_sessions_that_are_not_there_count_as_wrong_keys(failed_keys: Failures) -> None:
    """D-FAILED-TOKENS: 429 after too many from one address; a session that holds goes on from there."""
    now = clock.now()
    for minute in (now, now + timedelta(seconds=WINDOW)):
        for _ in range(DEFAULT_LIMIT):
            failed_keys.note("192.0.2.7", minute)
    headers = signed_in(person())
    refused, _ = asked(headers | {"cookie": f"csrftoken={TOKEN}; sessionid={'a' * 32}"})
    assert (refused.status, refused.body["error"]["code"]) == (429, "too_many_failures")
    assert 1 <= int(refused.headers["retry-after"]) <= WINDOW
    forget_nodes()
    assert asked(headers)[0].status == 200
    forget_nodes()
    assert asked(headers | {"cookie": "sessionid="})[0].status == 401, "no guess"


def test_who_is_no_longer_active_is_refused() -> None:
    ann = person()
    headers = signed_in(ann)
    get_user_model().objects.update(is_active=False)
    answer, _ = asked(headers)
    assert answer.status == 401


def test_a_generated_password_has_to_be_changed_first() -> None:
    ann = person(is_staff=True)
    InitialPassword.objects.create(user=ann)
    answer, engine = asked(signed_in(ann))
    assert (answer.status, answer.body["error"]["code"]) == (403, "password_change_required")
    assert not engine.asked


def test_a_wrong_key_beside_a_session_is_a_wrong_key() -> None:
    answer, _ = asked(signed_in(person(is_staff=True), authorization="Bearer lac-unknown"))
    assert answer.status == 401


def test_without_a_database_it_is_said_that_it_may_work_later(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(_: object) -> None:
        raise DatabaseError("gone")

    headers = signed_in(person())
    monkeypatch.setattr("django.contrib.auth.get_user", gone)
    answer, _ = asked(headers)
    assert (answer.status, answer.headers["retry-after"]) == (503, "2")


def test_a_key_causes_no_look_for_a_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "principal_of_request", None)
    headers = signed_in(person(), authorization=f"Bearer {API_KEY}")
    answer, _ = asked(headers)
    assert answer.status == 200
