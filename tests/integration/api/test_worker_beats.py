"""Heartbeats that are refused: strangers, copies, secrets to be replaced, bodies that cannot be read."""

import asyncio
from dataclasses import replace
from typing import Any
from uuid import uuid4

import pytest
from asgiref.sync import sync_to_async
from django.conf import settings
from django.db import OperationalError

from localai_cluster.accounts.actors import Actor, ActorKind
from localai_cluster.kit import clock
from nodes.api.heartbeats import HeartbeatApplication
from nodes.models import BackendNode, NodeConflict
from nodes.registry import claims, heartbeats
from tests.support import api
from tests.support.beating import Counted, beat, made, now_of
from tests.support.environment import REGISTRATION_TOKEN

pytestmark = pytest.mark.django_db(transaction=True)
ROOT = Actor(ActorKind.USER, "root")


@pytest.mark.rule("http-1.2", "R1.35")
async def test_refusals(application: HeartbeatApplication) -> None:
    """§1.2 with the identity of docs/architecture.md: 401 flat, 403 another node, 404 unknown."""
    node = await made()
    other = await made(name="w2", secret=api.OTHER_SECRET)
    before = (await now_of(node)).last_heartbeat
    cases = [
        (node.id, None, 401),
        (node.id, "x", 401),
        (node.id, REGISTRATION_TOKEN, 401),
        (uuid4(), "x", 401),
        (node.id, api.OTHER_SECRET, 403),
        (uuid4(), api.SECRET, 404),
        ("nope", api.SECRET, 404),
    ]
    answers = await asyncio.gather(*(beat(application, n, {}, secret=s) for n, s, _ in cases))
    assert [status for status, _ in answers] == [status for _, _, status in cases]
    assert isinstance(answers[0][1]["error"], str)
    assert answers[-1][1]["error"]["type"] == "node_error"
    assert (await now_of(node)).last_heartbeat == before
    right, wrong = await asyncio.gather(
        beat(application, other.id, secret=api.OTHER_SECRET), beat(application, other.id, secret="x")
    )
    assert (right[0], wrong[0]) == (200, 401)
    assert (await beat(application, node.id, method="GET"))[0] == 405


@pytest.mark.rule("http-1.2")
async def test_stock_workers_beat_with_the_shared_token(
    application: HeartbeatApplication, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LOCALAI_ALLOW_SHARED_TOKEN_NODES: for weakly known nodes only, and only while it is on."""
    allowing = replace(settings.CLUSTER, allow_shared_token_nodes=True)
    monkeypatch.setattr(settings, "CLUSTER", allowing)
    weak = await made(secret="")
    strong = await made(name="w2")
    assert (await beat(application, weak.id, secret=REGISTRATION_TOKEN))[0] == 200
    assert (await beat(application, strong.id, secret=REGISTRATION_TOKEN))[0] == 403
    assert (await beat(application, uuid4(), secret=REGISTRATION_TOKEN))[0] == 404
    monkeypatch.setattr(settings, "CLUSTER", replace(allowing, allow_shared_token_nodes=False))
    assert (await beat(application, weak.id, secret=REGISTRATION_TOKEN))[0] == 401


UNREADABLE: list[tuple[Any, ...]] = [
    (b"{bad", 400, "body"),
    (b"[1]", 400, "body"),
    (b"\xff", 400, "body"),
    (b"[" * 60_000, 400, "body"),
    (b'{"available_ram":' + b"9" * 5000 + b"}", 400, "body"),
    ({"available_ram": -1}, 400, "available_ram"),
    ({"available_ram": 1.0}, 400, "available_ram"),
    ({"available_ram": True}, 400, "available_ram"),
    ({"available_vram": 2**63}, 400, "available_vram"),
    ({"available_vram": 2**64}, 400, "available_vram"),
    ({"total_vram": [1]}, 400, "total_vram"),
    ({"total_disk": "9"}, 400, "total_disk"),
    ({"available_disk": {}}, 400, "available_disk"),
    ({"gpu_vendor": "a\x00"}, 400, "gpu_vendor"),
    ({"gpu_vendor": "\ud800"}, 400, "gpu_vendor"),
    ({"gpu_vendor": "x" * 33}, 400, "gpu_vendor"),
    ({"gpu_vendor": 3}, 400, "gpu_vendor"),
    (b" " * (64 * 1024 + 1), 413, "64 kB"),
]


@pytest.mark.rule("http-1.2", "R1.35")
async def test_a_beat_that_cannot_be_read_still_counts(application: HeartbeatApplication) -> None:
    """D-BEAT-MALFORMED: 400 naming the field; the time of a known node moves, no figure does."""
    node = await made(available_ram=3, available_vram=2, total_vram=2)
    answers = await asyncio.gather(*(beat(application, node.id, body) for body, _, _ in UNREADABLE))
    for (status, body), (sent, expected, says) in zip(answers, UNREADABLE, strict=True):
        assert status == expected, sent
        assert says in body["error"]["message"], sent
    stored = await now_of(node)
    assert stored.last_heartbeat != node.last_heartbeat
    assert (stored.available_ram, stored.available_vram, stored.gpu_vendor) == (3, 2, "")


@pytest.mark.rule("http-1.2", "http-0.1")
async def test_the_content_type_of_a_beat(application: HeartbeatApplication) -> None:
    """§0.1: a body that is not announced as JSON cannot be read; an empty one needs no announcement."""
    node = await made()
    kinds = {"text/plain": 400, "multipart/form-data": 400, "application/json; charset=x": 200, "": 200}
    full = await asyncio.gather(*(beat(application, node.id, {}, content_type=kind) for kind in kinds))
    assert [status for status, _ in full] == list(kinds.values())
    empty = await asyncio.gather(*(beat(application, node.id, b"", content_type=kind) for kind in kinds))
    assert {status for status, _ in empty} == {200}


@pytest.mark.rule("http-1.2")
async def test_a_stranger_learns_nothing_of_a_body(application: HeartbeatApplication) -> None:
    """Who is not the node gets 401, 403 or 404, no matter the body; nothing is written."""
    node, other = await made(), await made(name="w2", secret=api.OTHER_SECRET)
    cases = [
        (node.id, None, 401),
        (node.id, "x", 401),
        (node.id, api.OTHER_SECRET, 403),
        (uuid4(), api.SECRET, 404),
    ]
    answers = await asyncio.gather(*(beat(application, n, b"{bad", secret=s) for n, s, _ in cases))
    assert [status for status, _ in answers] == [status for _, _, status in cases]
    assert (await now_of(node)).last_heartbeat == node.last_heartbeat
    assert (await now_of(other)).last_heartbeat == other.last_heartbeat


async def run_by(instance: str) -> BackendNode:
    """A node whose worker runs as this process."""
    node = await made()
    await BackendNode.objects.filter(pk=node.pk).aupdate(instance=instance)
    return node


@pytest.mark.rule("http-1.2", "worker-6")
async def test_a_copied_data_folder_shows_in_its_beats(
    application: HeartbeatApplication, database: Counted
) -> None:
    """D-INSTANCE: 409 for the former process, a conflict with both addresses, the batch untouched."""
    node = await run_by("2" * 32)
    answers = await asyncio.gather(
        beat(application, node.id, instance="1" * 32),
        beat(application, node.id, {"available_ram": 5}, instance="2" * 32),
        beat(application, node.id, b"{bad", instance="1" * 32),
        beat(application, node.id, instance="no process"),
        beat(application, node.id, instance="\x00\xff"),
    )
    assert [status for status, _ in answers] == [409, 200, 409, 400, 400]
    assert "X-LocalAI-Node-Instance" in answers[3][1]["error"]["message"]
    assert (await now_of(node)).available_ram == 5
    conflict = await NodeConflict.objects.aget()
    assert (conflict.kind, conflict.claim, conflict.source_address) == ("instance", "1" * 32, "192.0.2.7")
    assert conflict.count == 2
    assert conflict.node_source_address == "127.0.0.1"
    assert [text for text in database.statements if "UPDATE" in text] == [heartbeats.WRITE_SQL]


async def test_a_conflict_that_cannot_be_noted_is_refused_all_the_same(
    application: HeartbeatApplication, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller's answer does not depend on the note."""
    node = await run_by("2" * 32)

    def broken(*_: Any, **__: Any) -> None:
        raise OperationalError("gone")

    monkeypatch.setattr(claims, "record_other_process", broken)
    assert (await beat(application, node.id, instance="1" * 32))[0] == 409


@pytest.mark.rule("http-1.2")
async def test_a_requested_rotation_is_said_in_the_refusal(application: HeartbeatApplication) -> None:
    """401 with `rotate`; the secret counts for nothing else."""
    node = await made()
    await sync_to_async(claims.request_rotation)(node.id, actor=ROOT, now=clock.now())
    status, body = await beat(application, node.id)
    assert (status, body["rotate"], isinstance(body["error"], str)) == (401, True, True)
    assert (await now_of(node)).last_heartbeat == node.last_heartbeat
