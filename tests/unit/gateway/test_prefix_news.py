"""What web processes tell each other of prompts (R3.20 to R3.23), and what they make of it."""

import asyncio
import json
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localai_cluster.kit import clock
from localai_cluster.messaging import messages
from localai_cluster.messaging.bus import Message, NotConnected
from nodes.gateway import prefix_updates
from nodes.gateway.prefix_routing import PrefixRouter
from nodes.gateway.prefix_table import prompt_chain
from nodes.gateway.prefix_updates import (
    Outbox,
    PrefixInvalidated,
    PrefixObserved,
    decode_update,
    subscribe_to_updates,
)
from nodes.gateway.request import InferenceRequest, Replica
from nodes.replicas import hooks
from nodes.replicas.hooks import RemovedReplica
from tests.conftest import until
from tests.support.bus import PlayedBus

NODE = UUID(int=7)
LARGEST = 2**64 - 1
OBSERVED = {"model": "m", "chain": [1, LARGEST], "node_id": str(NODE), "replica": 1}
INVALIDATED = {"model": "m", "node_id": str(NODE), "replica": -1}
CHAIN = prompt_chain("m", b"x" * 600)


def told(kind: str, body: Any) -> Any:
    return decode_update(
        f"prefixcache.{kind}", body if isinstance(body, bytes) else json.dumps(body).encode()
    )


@pytest.mark.rule("R3.20", "nats-7.4")
def test_what_is_on_the_wire() -> None:
    """R3.20: plain JSON numbers of 64 bits, the reference's names; a field that is not known is ignored."""
    observed = PrefixObserved("m", (1, LARGEST), NODE, 1)
    assert told("observe", OBSERVED) == told("observe", OBSERVED | {"more": 1}) == observed
    assert told("invalidate", INVALIDATED) == PrefixInvalidated("m", NODE, -1)
    assert (messages.PREFIX_OBSERVED_SUBJECT, messages.PREFIX_INVALIDATED_SUBJECT) == (
        "prefixcache.observe",
        "prefixcache.invalidate",
    )

    async def sent() -> list[tuple[str, bytes]]:
        bus = PlayedBus()
        telling = Outbox(bus)
        sending = asyncio.create_task(telling.run())
        telling.queue(observed)
        telling.queue_removal(RemovedReplica("m", NODE, hooks.ALL_REPLICAS))
        await until(lambda: len(bus.published) == 2)
        sending.cancel()
        return bus.published

    (first, one), (second, two) = asyncio.run(sent())
    assert (first, second) == (messages.PREFIX_OBSERVED_SUBJECT, messages.PREFIX_INVALIDATED_SUBJECT)
    assert (json.loads(one), json.loads(two)) == (OBSERVED, INVALIDATED)


@pytest.mark.rule("R3.20")
@pytest.mark.parametrize(
    ("kind", "body"),
    [
        pytest.param(kind, body, id=f"{number}")
        for number, (kind, body) in enumerate(
            [
                ("observe", OBSERVED | {"chain": []}),
                ("observe", OBSERVED | {"chain": [1] * 65}),
                ("observe", OBSERVED | {"chain": [-1]}),
                ("observe", OBSERVED | {"chain": [2**64]}),
                ("observe", OBSERVED | {"chain": [1.5]}),
                ("observe", OBSERVED | {"chain": [1e300]}),
                ("observe", OBSERVED | {"chain": [True]}),
                ("observe", OBSERVED | {"chain": ["1"]}),
                ("observe", OBSERVED | {"chain": None}),
                ("observe", OBSERVED | {"chain": {"0": 1}}),
                ("observe", OBSERVED | {"node_id": "n"}),
                ("observe", OBSERVED | {"node_id": 1}),
                ("observe", OBSERVED | {"replica": -1}),
                ("observe", OBSERVED | {"replica": 2**31}),
                ("observe", OBSERVED | {"replica": "0"}),
                ("observe", OBSERVED | {"model": ""}),
                ("observe", OBSERVED | {"model": "m" * 256}),
                ("observe", OBSERVED | {"model": None}),
                ("observe", INVALIDATED),
                ("invalidate", INVALIDATED | {"replica": -2}),
                ("invalidate", INVALIDATED | {"replica": None}),
                ("invalidate", {}),
                ("other", OBSERVED),
                ("observe", []),
                ("observe", b""),
                ("observe", b"{" * 100),
                ("observe", b"[" * 15000),
                ("observe", b"\xff\xfe"),
                ("observe", b'{"model":"' + b"m" * 20000),
            ]
        )
    ],
)
def test_what_cannot_be_right_is_ignored(kind: str, body: Any) -> None:
    """Wrong types, sizes and numbers: nothing is made of them, and nothing is raised."""
    assert told(kind, body) is None


@given(st.binary(max_size=200))
def test_any_bytes_are_harmless(body: bytes) -> None:
    """From the bus may come anything."""
    assert told("observe", body) is None


def landed(
    prefixes: PrefixRouter, place: tuple[UUID, int], *, remembered: bool | None = False
) -> InferenceRequest:
    request = InferenceRequest(model="m", chain=CHAIN)
    prefixes.set_preferred_replica(request)
    request.is_prefix_cached = remembered
    request.replica = Replica(UUID(int=1), *place, "m", "a:1")
    prefixes.record_pick(request)
    return request


def asked(prefixes: PrefixRouter) -> InferenceRequest:
    request = InferenceRequest(model="m", chain=CHAIN)
    prefixes.set_preferred_replica(request)
    return request


@pytest.mark.rule("R3.9", "R3.21", "T-PFX-49", "T-PFX-53", "T-PFX-54", "T-PFX-55")
def test_news_are_told_once_and_never_repeated() -> None:
    """R3.21: what changes nothing is not told, and what was heard is not told again."""
    sent: list[Any] = []
    ours, peer = PrefixRouter(300, sent.append), PrefixRouter(300, sent.append)
    landed(ours, (NODE, 1))
    landed(ours, (NODE, 1), remembered=True)
    assert sent == [PrefixObserved("m", CHAIN, NODE, 1)]
    peer.apply_update(sent[0])
    assert (asked(peer).preferred, asked(peer).cached_ratio) == ((NODE, 1), 1.0)
    peer.apply_update(PrefixInvalidated("m", NODE, 0))
    assert asked(peer).preferred == (NODE, 1)
    peer.apply_update(PrefixInvalidated("m", NODE, 1))
    assert (asked(peer).preferred, asked(peer).cached_ratio) == (None, 0.0)
    peer.apply_update(sent[0])
    peer.apply_update(PrefixInvalidated("m", NODE, -1))
    assert asked(peer).preferred is None
    assert len(sent) == 1


@pytest.mark.rule("R3.15", "R3.17", "T-ROU-28", "T-ROU-29", "T-ROU-30", "T-ROU-32", "T-ROU-33")
def test_only_what_went_by_the_prefix_is_remembered() -> None:
    """R3.15: without a chain nothing is advised; a pick that the rule made otherwise leaves no trace."""
    ours = PrefixRouter(300, lambda news: None)
    plain = InferenceRequest(model="m")
    ours.set_preferred_replica(plain)
    assert (plain.preferred, plain.cached_ratio) == (None, None)
    ours.record_pick(plain)
    landed(ours, (NODE, 1), remembered=None)
    assert ours.entries() == 0
    landed(ours, (NODE, 1))
    assert ours.entries() == 3
    assert (asked(ours).preferred, asked(ours).cached_ratio) == ((NODE, 1), 1.0)


@pytest.mark.rule("R3.18", "T-ROU-34", "T-ROU-35", "T-ROU-36")
def test_pressure_is_a_request_that_was_kept_away() -> None:
    """R3.18: a replica had share enough, and another one got it; never for a prompt that is new."""
    ours, now = PrefixRouter(300, lambda news: None), clock.now()
    landed(ours, (NODE, 1))
    landed(ours, (NODE, 1), remembered=True)
    assert ours._pressure.recent_times("m", now) == ()
    landed(ours, (NODE, 2), remembered=True)
    assert len(ours._pressure.recent_times("m", now)) == 1


@pytest.mark.rule("R3.21", "R3.23", "T-PFX-48", "T-PFX-50", "T-PFX-51", "T-PFX-52", "R1.106")
def test_a_removal_is_told_whether_or_not_it_was_known() -> None:
    """R3.21: by who removed the row; and by a NOTIFY, which all processes of the cluster hear."""
    for removed in (RemovedReplica("a b/c", NODE, 3), RemovedReplica("m", NODE, -1)):
        assert hooks.decode(hooks.encode(removed)) == removed
    ours = PrefixRouter(300, lambda news: None)
    ours.forget_replica(RemovedReplica("m", NODE, -1))
    assert not ours._affinity._tables
    landed(ours, (NODE, 1))
    ours.forget_replica(RemovedReplica("m", NODE, 0))
    assert asked(ours).preferred == (NODE, 1)
    ours.forget_replica(RemovedReplica("m", NODE, 1))
    assert asked(ours).preferred is None


def test_a_lost_bus_costs_only_the_news() -> None:
    """What cannot be sent is dropped, and what is told after that leaves."""

    class Lost(PlayedBus):
        async def publish(self, subject: str, payload: bytes) -> None:
            if not self.connected:
                raise NotConnected
            await super().publish(subject, payload)

    async def scenario() -> list[tuple[str, bytes]]:
        bus = Lost()
        bus.connected, telling = False, Outbox(bus)
        sending = asyncio.create_task(telling.run())
        for index in range(prefix_updates.MAX_QUEUED_UPDATES + 5):
            telling.queue(PrefixInvalidated("m", NODE, index))
        assert len(telling._waiting) == prefix_updates.MAX_QUEUED_UPDATES
        await until(lambda: not telling._waiting)
        bus.connected = True
        telling.queue(PrefixInvalidated("m", NODE, 1))
        await until(lambda: bool(bus.published))
        sending.cancel()
        return bus.published

    assert len(asyncio.run(scenario())) == 1


def test_what_is_heard_is_taken_in_order() -> None:
    """One subscription for both kinds."""

    async def scenario() -> list[Any]:
        bus, heard = PlayedBus(), []  # type: ignore[var-annotated]
        await subscribe_to_updates(bus, heard.append)
        handler = bus.handlers[messages.PREFIX_SUBJECTS]
        for kind, body in (("observe", OBSERVED), ("invalidate", INVALIDATED), ("observe", [])):
            await handler(Message(f"prefixcache.{kind}", json.dumps(body).encode(), wants_reply=False))
        return heard

    assert asyncio.run(scenario()) == [
        PrefixObserved("m", (1, LARGEST), NODE, 1),
        PrefixInvalidated("m", NODE, -1),
    ]
