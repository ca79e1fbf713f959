"""Failed tokens and secrets: 429 after too many from one address, one line a minute, never a lockout."""

import asyncio
import logging
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any
from unittest.mock import Mock
from uuid import UUID, uuid4

import pytest
from django.core.cache.backends.base import BaseCache
from django.core.cache.backends.locmem import LocMemCache
from django.core.cache.backends.redis import RedisCache
from django.test import Client
from redis.exceptions import ConnectionError as RedisGone

from localai_cluster.accounts.actors import Actor, ActorKind
from localai_cluster.embedded.bundled_servers import EmbeddedValkey
from localai_cluster.kit import clock
from localai_cluster.web import throttle
from localai_cluster.web.throttle import DEFAULT_LIMIT, WINDOW, Failures, TooManyFailures
from nodes.api.heartbeats import HeartbeatApplication
from nodes.registry import claims
from nodes.registry.heartbeats import IdentityCache
from tests.support import api
from tests.support.environment import API_KEY, REGISTRATION_TOKEN

START = datetime(2026, 8, 22, 10, 0, 5, tzinfo=UTC)
HERE = "192.0.2.7"


@pytest.fixture
def own() -> LocMemCache:
    """The counts of one process."""
    cache = LocMemCache("throttle-test", {})
    cache.clear()
    return cache


def fail(failures: Failures, times: int, address: str = HERE, at: datetime = START) -> None:
    for _ in range(times):
        failures.note(address, at)


@pytest.mark.rule("http-0.2", "R1.29")
def test_the_limit_holds_for_one_address_and_one_minute(own: LocMemCache) -> None:
    """D-FAILED-TOKENS: the thirtieth failure is the last that is looked at; the next minute is another."""
    failures = Failures(None, own)
    fail(failures, DEFAULT_LIMIT - 1)
    failures.check(HERE, START)
    fail(failures, 1)
    with pytest.raises(TooManyFailures) as refused:
        failures.check(HERE, START)
    assert (refused.value.status, refused.value.retry_after) == (429, 55.0)
    with pytest.raises(TooManyFailures):
        failures.note(HERE, START)
    failures.check("192.0.2.8", START)
    failures.check(HERE, START + timedelta(seconds=55))


@pytest.mark.parametrize(
    ("address", "who"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:2::9", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("", ""),
        ("unix:", ""),
        ("10.0.0.1; DROP", ""),
    ],
)
def test_whose_failures_count_together(address: str, who: str) -> None:
    """An IPv6 host has a whole /64 to come from; what is no address has no count."""
    assert throttle.counter_key(address) == who


def test_an_unknown_address_is_not_limited(own: LocMemCache) -> None:
    """Behind a proxy on a socket everyone would be locked out together."""
    failures = Failures(None, own)
    fail(failures, 2 * DEFAULT_LIMIT, address="")
    failures.check("", START)
    assert not own.get("|0")


def test_one_line_a_minute_with_a_count(
    own: LocMemCache, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line of the second minute tells what the first one kept quiet; no token is ever in it."""
    failures = Failures(None, own)
    moment = START.timestamp()
    monkeypatch.setattr("django.core.cache.backends.locmem.time.time", lambda: moment)
    with caplog.at_level(logging.WARNING, logger="localai_cluster.web.throttle"):
        fail(failures, 12)
        moment += WINDOW
        fail(failures, 2, at=START + timedelta(seconds=WINDOW))
    assert [record.getMessage() for record in caplog.records] == [
        "failed tokens or secrets from 192.0.2.7 within two minutes: 1",
        "failed tokens or secrets from 192.0.2.7 within two minutes: 13",
    ]


def test_memory_is_bounded() -> None:
    """Many addresses push the oldest counts out, not the process."""
    small = throttle.in_memory_counters("throttle-small", 20)
    failures = Failures(None, small)
    addresses = [f"10.0.{number // 250}.{number % 250}" for number in range(400)]
    for address in addresses:
        failures.note(address, START)
    kept = [address for address in addresses if small.get(f"{address}|told")]
    assert kept[-1] == addresses[-1]
    assert len(kept) <= 60


def test_a_count_that_was_pushed_out_starts_anew() -> None:
    """Between two steps of one count the key may be gone."""
    kept = Mock(spec=BaseCache)
    kept.add.return_value = False
    kept.incr.side_effect = ValueError("no such key")
    kept.get.return_value = 0
    Failures(None, kept).note(HERE, START)
    assert kept.incr.call_count == 1


def shared_with(valkey: EmbeddedValkey, **options: Any) -> RedisCache:
    """Another web process's connection."""
    cache = RedisCache(
        valkey.url, {"KEY_PREFIX": "throttle-test", "OPTIONS": throttle._client_options() | options}
    )
    return cache


def test_web_processes_count_together(valkey: EmbeddedValkey, own: LocMemCache) -> None:
    """Fifteen failures here and fifteen there are thirty; the counts end by themselves."""
    here, there = Failures(shared_with(valkey), own), Failures(shared_with(valkey), own)
    fail(here, DEFAULT_LIMIT // 2, at=clock.now())
    now = clock.now()
    fail(there, DEFAULT_LIMIT, at=now + timedelta(seconds=WINDOW))
    with pytest.raises(TooManyFailures):
        here.check(HERE, now + timedelta(seconds=WINDOW))
    client = shared_with(valkey)._cache.get_client()
    lifetimes = [client.ttl(key) for key in client.keys("throttle-test*")]
    assert lifetimes
    assert all(0 < seconds <= 2 * WINDOW for seconds in lifetimes)


def test_no_one_is_locked_out_while_valkey_is_away(
    own: LocMemCache, caplog: pytest.LogCaptureFixture
) -> None:
    """Each process counts for itself; it asks again after a pause, and says so once."""
    gone = Mock(spec=BaseCache)
    gone.get.side_effect = gone.add.side_effect = RedisGone("gone")
    failures = Failures(gone, own)
    with caplog.at_level(logging.WARNING, logger="localai_cluster.web.throttle"):
        failures.check(HERE, START)
        fail(failures, DEFAULT_LIMIT)
    with pytest.raises(TooManyFailures):
        failures.check(HERE, START)
    failures.check("192.0.2.8", START)
    assert gone.get.call_count + gone.add.call_count == 1
    assert [r.getMessage() for r in caplog.records if "this process alone" in r.getMessage()] == [
        "failed tokens or secrets are counted by this process alone: ConnectionError"
    ]


def test_a_valkey_that_refuses_connections_costs_no_time(own: LocMemCache) -> None:
    """No second try, no waiting: the caller is a worker with ten seconds."""
    cache = RedisCache("redis://127.0.0.1:1/0", {"OPTIONS": throttle._client_options()})
    started = clock.monotonic()
    fail(Failures(cache, own), 3)
    assert clock.monotonic() - started < 10


# Over HTTP


def register_from(address: str, token: str, body_token: str = REGISTRATION_TOKEN, **body: Any) -> Any:
    caller = api.bearer(token)
    caller.client = Client(REMOTE_ADDR=address)
    return caller.post(
        "/api/node/register",
        api.registration(**{"address": "gpu-1:51100", **body}) | {"token": body_token},
        **{"X-LocalAI-Node-Secret": api.SECRET},
    )


@pytest.fixture
def exhausted(failed_tokens: Failures) -> None:
    """No further failure is allowed to this address, for this minute and the next."""
    now = clock.now()
    for at in (now, now + timedelta(seconds=WINDOW)):
        fail(failed_tokens, DEFAULT_LIMIT, at=at)


@pytest.mark.django_db
@pytest.mark.rule("http-1.1", "R1.29")
@pytest.mark.parametrize("wrong", [("wrong", REGISTRATION_TOKEN), (REGISTRATION_TOKEN, "wrong")])
def test_wrong_tokens_count_wherever_they_stand(wrong: tuple[str, str], failed_tokens: Failures) -> None:
    """In the header and in the body; then 429 with Retry-After, for right ones too, from there alone."""
    header, body = wrong
    now = clock.now()
    for at in (now, now + timedelta(seconds=WINDOW)):
        fail(failed_tokens, DEFAULT_LIMIT - 2, at=at)
    # The second one may be the first of another minute; the third one is over the limit in none.
    assert [register_from(HERE, header, body).status_code for _ in range(2)] == [401, 401]
    while register_from(HERE, header, body).status_code == 401:
        pass
    refused = register_from(HERE, REGISTRATION_TOKEN)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, 429)
    assert 1 <= int(refused["Retry-After"]) <= WINDOW
    assert register_from("192.0.2.8", REGISTRATION_TOKEN).status_code == 201


@pytest.mark.django_db
def test_a_refused_guess_leaves_no_line_of_its_own(caplog: pytest.LogCaptureFixture) -> None:
    """One line a minute and nothing beside it: the framework's own line would be one for every guess."""
    for _ in range(5):
        register_from(HERE, "a-guessed-token")
        register_from(HERE, REGISTRATION_TOKEN, "a-guessed-token")
        api.bearer("a-guessed-token").get(f"/api/node/{uuid4()}/models")
    lines = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert sorted(lines) == [
        "failed tokens or secrets from 127.0.0.1 within two minutes: 1",
        "failed tokens or secrets from 192.0.2.7 within two minutes: 1",
    ]


@pytest.mark.django_db
@pytest.mark.rule("http-1.1")
def test_what_is_no_guess_does_not_count(failed_tokens: Failures) -> None:
    """A missing header, an empty body, a person's key, a conflict: refused, and no failure of a token."""
    for _ in range(2 * DEFAULT_LIMIT):
        assert register_from(HERE, REGISTRATION_TOKEN, "").status_code == 401
    assert register_from(HERE, API_KEY).status_code == 403
    failed_tokens.check(HERE, clock.now())


@pytest.mark.django_db
@pytest.mark.rule("http-1.3", "http-1.6")
def test_a_right_secret_always_passes_and_a_wrong_one_does_not_say_so(exhausted: None) -> None:
    """No one can lock a node out by guessing from its address."""
    node = api.make_node()
    right, wrong = api.worker(), api.worker("f" * 64)
    right.client = wrong.client = Client(REMOTE_ADDR=HERE)
    path = f"/api/node/{node.id}/models"
    assert right.get(path).status_code == 200
    refused = wrong.get(path)
    assert (refused.status_code, refused.json()["error"]["type"]) == (429, "node_error")
    assert refused.has_header("Retry-After")


@pytest.mark.django_db
@pytest.mark.rule("http-1.1", "http-0.2")
@pytest.mark.parametrize("token", [REGISTRATION_TOKEN, "one-that-was-replaced"])
def test_a_known_worker_registers_again_from_an_exhausted_address(exhausted: None, token: str) -> None:
    """It must renew its credentials of the bus each day, whoever guesses behind the same proxy."""
    assert register_from(HERE, token, token).status_code == 429
    api.make_node(secret=api.SECRET)
    assert register_from(HERE, token, token).status_code == 201


@pytest.mark.django_db
@pytest.mark.rule("http-0.2", "http-1.6")
def test_the_right_shared_token_looks_like_a_wrong_one(exhausted: None, settings: Any) -> None:
    """D-FAILED-TOKENS: no way to go on guessing; yet a node that is known by it is not locked out."""
    settings.CLUSTER = replace(settings.CLUSTER, allow_shared_token_nodes=True)
    strong, weak = api.make_node(), api.make_node("w2", secret="")

    def models(token: str, node_id: UUID) -> int:
        caller = api.bearer(token)
        caller.client = Client(REMOTE_ADDR=HERE)
        return int(caller.get(f"/api/node/{node_id}/models").status_code)

    asked = [(token, node_id) for node_id in (uuid4(), strong.id) for token in ("wrong", REGISTRATION_TOKEN)]
    assert [models(token, node_id) for token, node_id in asked] == [429] * 4
    assert models(REGISTRATION_TOKEN, weak.id) == 200


@pytest.mark.django_db
def test_a_requested_rotation_is_no_failure(failed_tokens: Failures) -> None:
    """The secret is right: a worker that asks until it has changed locks no one out."""
    node = api.make_node()
    claims.request_rotation(node.id, actor=Actor(ActorKind.USER, "root"), now=clock.now())
    caller = api.worker()
    caller.client = Client(REMOTE_ADDR=HERE)
    for _ in range(DEFAULT_LIMIT + 2):
        assert caller.get(f"/api/node/{node.id}/models").json()["rotate"] is True
    failed_tokens.check(HERE, clock.now())


@pytest.mark.django_db(transaction=True)
@pytest.mark.rule("http-1.2")
async def test_heartbeats_count_too(exhausted: None) -> None:
    """In front of Django: a wrong secret is answered 429 from an exhausted address, 401 from another."""
    application = HeartbeatApplication(Mock(), IdentityCache())

    (over, headers), (other, _) = await asyncio.gather(
        beat_from(HERE, application), beat_from("192.0.2.8", application)
    )
    assert (over, other) == (429, 401)
    assert 1 <= int(headers[b"retry-after"]) <= WINDOW


@pytest.mark.django_db(transaction=True)
@pytest.mark.rule("http-1.2", "http-0.2")
async def test_heartbeats_do_not_tell_the_right_token(
    exhausted: None, application: HeartbeatApplication, settings: Any
) -> None:
    """D-FAILED-TOKENS: from an exhausted address 429 like a wrong one, from another the node is unknown."""
    settings.CLUSTER = replace(settings.CLUSTER, allow_shared_token_nodes=True)
    token, unknown = REGISTRATION_TOKEN, str(uuid4())
    (here, _), (there, _) = await asyncio.gather(
        beat_from(HERE, application, token, unknown), beat_from("192.0.2.8", application, token, unknown)
    )
    assert (here, there) == (429, 404)


async def beat_from(
    address: str, application: HeartbeatApplication, token: str = "wrong", node_id: str = "x"
) -> tuple[int, dict[bytes, bytes]]:
    """One heartbeat: its status and headers."""
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": f"/api/node/{node_id}/heartbeat",
        "headers": [(b"authorization", b"Bearer " + token.encode())],
        "client": [address, 1],
    }
    await application(scope, receive, send)
    return sent[0]["status"], dict(sent[0]["headers"])
