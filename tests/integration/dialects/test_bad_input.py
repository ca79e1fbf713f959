"""What clients should not send to inference routes: refused by a 4xx that names the field, never a 5xx."""

import asyncio
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pytest_django import Settings

from localai_cluster.asgi import application
from localai_cluster.rpc.messages import Reply
from nodes.dialects.audio import SpeechBody
from nodes.dialects.images import ImagesBody
from nodes.dialects.openai import ChatBody, CompletionBody
from nodes.dialects.openai_common import MAX_BODY_BYTES
from nodes.dialects.retrieval import EmbeddingsBody, RerankBody
from nodes.dialects.tokens import DetokenizeBody, TokenizeBody
from nodes.models import NodeModel
from operations.models import Operation
from tests.support import hot
from tests.support.media import Artist
from tests.support.scripted import running, words
from tests.support.streaming import asked

pytestmark = pytest.mark.django_db(transaction=True)

CHAT = "/v1/chat/completions"
TALK: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
ROUTES: dict[str, tuple[dict[str, Any], type[msgspec.Struct]]] = {
    CHAT: (TALK, ChatBody),
    "/v1/completions": ({"model": "m", "prompt": "hello"}, CompletionBody),
    "/v1/embeddings": ({"model": "m", "input": "hello"}, EmbeddingsBody),
    "/v1/tokenize": ({"model": "m", "content": "hello"}, TokenizeBody),
    "/v1/detokenize": ({"model": "m", "tokens": [1]}, DetokenizeBody),
    "/v1/rerank": ({"model": "m", "query": "a", "documents": ["b"]}, RerankBody),
    "/v1/audio/speech": ({"model": "m", "input": "hello"}, SpeechBody),
    "/v1/images/generations": ({"model": "m", "prompt": "a cat"}, ImagesBody),
}
"""A good body of each route, and its fields."""
ODD: list[Any] = [
    7,
    -1,
    2**70,
    1.5,
    "odd",
    "",
    True,
    [],
    [[]],
    [None],
    {},
    {"type": "odd"},
    ["\u0000"],
    "é" * 999,
]


@pytest.fixture(autouse=True)
def definitions(tmp_path: Path, settings: Settings) -> None:
    """A models folder with `m`."""
    (tmp_path / "m.yaml").write_text("name: m\nbackend: scripted\nparameters: {model: m.bin}\n")
    settings.CLUSTER = dataclasses.replace(settings.CLUSTER, models_path=tmp_path, model_load_wait=0.5)


def answers(*requests: tuple[str, Any]) -> list[hot.Reply]:
    """What one engine and the edge answer to these, one after the other; streams and files count as 200."""

    async def whole() -> list[hot.Reply]:
        artist = Artist(script=words("Hello."), pieces=[Reply(audio=b"sound")])
        async with hot.serving() as picker, running(artist) as address, artist.disk.serving():
            await hot.in_thread(
                lambda: hot.replica(hot.node(http_address=artist.disk.address), "m", address=address)
            )
            found = [await _answer(path, body) for path, body in requests]
            assert picker.in_flight() == 0
        return found

    return asyncio.run(whole())


async def _answer(path: str, body: Any) -> hot.Reply:
    async with asked(application, path, body) as (answer, work):
        await work
    return hot.Reply(answer.status, answer.headers, json.loads(answer.taken) if answer.status > 200 else None)


def odd_requests() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Route, field and a body in which that field is odd."""
    for path, (good, body) in ROUTES.items():
        for name in (one.name for one in msgspec.structs.fields(body)):
            yield from ((path, name, good | {name: value}) for value in ODD)


def test_a_field_of_any_type_is_accepted_or_named() -> None:
    requests = list(odd_requests())
    found = answers(*((path, body) for path, _, body in requests))
    for (path, name, body), answer in zip(requests, found, strict=True):
        shown = f"{path} {name}={body[name]!r}: {answer.status} {answer.body}"
        assert answer.status in (200, 400, 404), shown
        if answer.status != 200:
            # What is right by itself may not go with another field.
            assert answer.body["error"]["param"] in {name, *ROUTES[path][0], "messages"}, shown


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b'{"model": "m", "messages": [{"role": "user", "content": "\xff\xfe"}]}', 400),
        (b'{"model": "m", "messages": [{"role": "user", "content": "\\ud800"}]}', 400),
        (b"[" * 100_000, 400),
        (b'{"model": ', 400),
        (b"null", 400),
        (b'{"model": "m", "temperature": NaN}', 400),
    ],
    ids=["no UTF-8", "half a character", "nested", "cut", "null", "no number"],
)
def test_a_body_that_cannot_be_read(raw: bytes, status: int) -> None:
    assert {answer.status for answer in answers(*((path, raw) for path in ROUTES))} == {status}


def test_a_body_beyond_the_limit_names_the_limit() -> None:
    large = json.dumps(TALK | {"messages": [{"role": "user", "content": "x" * MAX_BODY_BYTES}]}).encode()
    found = answers(*((path, large) for path in ROUTES if path != "/v1/embeddings"))
    for answer in found:
        assert answer.status == 413
        assert "bytes" in answer.body["error"]["message"]
    assert str(MAX_BODY_BYTES) in found[0].body["error"]["message"]


def test_what_is_much_is_named() -> None:
    user = {"role": "user", "content": "x"}
    much: list[tuple[str, dict[str, Any], str]] = [
        (CHAT, TALK | {"messages": [user] * 10_000}, "messages"),
        (CHAT, TALK | {"messages": [{"role": "wizard", "content": "x"}]}, "messages"),
        (CHAT, TALK | {"messages": [user | {"content": [{"type": "text", "text": "x"}] * 300}]}, "messages"),
        (CHAT, TALK | {"response_format": _format({"enum": list(range(20_000))})}, "response_format"),
        (CHAT, TALK | {"response_format": _format({"anyOf": [{}] * 20_000})}, "response_format"),
        (CHAT, TALK | {"response_format": _format({"$ref": "#"})}, "response_format"),
        ("/v1/completions", {"model": "m", "prompt": [1] * 2_000_000}, "prompt"),
        ("/v1/completions", {"model": "m", "prompt": [[1] * 300_000]}, "prompt"),
        *((CHAT, TALK | {"messages": [_picture(url)]}, "messages") for url in BROKEN),
    ]
    for (_, _, field), answer in zip(much, answers(*((path, body) for path, body, _ in much)), strict=True):
        assert answer.status == 400, f"{field}: accepted"
        assert answer.body["error"]["param"] == field


BROKEN = (
    *("", "x", "data:", "data:image/png;base64,", "data:image/png,aGk=", "file:///etc/passwd"),
    *(
        "http://127.0.0.1/a.png",
        "data:text/html;base64,aGk=",
        "data:image/png;base64,aG",
        "DATA:image/png;base64,é",
    ),
)


def _picture(url: str) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}


def _format(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


@pytest.mark.rule("A86", "R1.94")
def test_a_hundred_mixed_requests_change_nothing_about_the_model() -> None:
    """Good ones of every kind with varied parameters, and bad ones between them: one replica answers all."""
    good = [
        (path, body | changes)
        for number in range(13)
        for path, body, changes in (
            (CHAT, TALK, {"temperature": number / 10, "max_tokens": number + 1}),
            (CHAT, TALK, {"stream": True, "seed": number, "stop": ["x"] * (number % 3)}),
            (CHAT, TALK, {"response_format": {"type": "json_object"}, "top_p": number / 20}),
            ("/v1/completions", ROUTES["/v1/completions"][0], {"n": 1 + number % 3}),
            ("/v1/embeddings", ROUTES["/v1/embeddings"][0], {"encoding_format": "float"}),
            ("/v1/tokenize", ROUTES["/v1/tokenize"][0], {}),
            ("/v1/rerank", ROUTES["/v1/rerank"][0], {"top_n": number + 1}),
            ("/v1/images/generations", ROUTES["/v1/images/generations"][0], {"seed": number}),
        )
    ]
    bad = [(CHAT, TALK | {"temperature": 9}), ("/v1/audio/speech", {"model": "m", "input": "x", "speed": 99})]
    found = answers(*good[:50], *bad, *good[50:])
    assert [answer.status for answer in found] == [200] * 50 + [400] * 2 + [200] * (len(good) - 50)
    assert len(good) > 100
    replica = NodeModel.objects.get()
    assert (replica.in_flight, replica.state) == (0, "loaded")
    assert not Operation.objects.exists()
