"""What the inference edge accepts and answers, without any server."""

import asyncio
import base64
import json
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localai_cluster.edge import strip_slash
from localai_cluster.kit.errors import InvalidInput
from localai_cluster.rpc.messages import EmbeddingResult
from localai_cluster.web import wire
from nodes.dialects.retrieval import MAX_TEXT_BYTES, MAX_TEXTS, parse_request, render_response

GOOD: dict[str, Any] = {"model": "m", "input": "a"}


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"model": None}, "model"),
        ({"model": ""}, "model"),
        ({"model": 5}, "model"),
        ({"input": None}, "input"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", ""]}, "input"),
        ({"input": 5}, "input"),
        ({"input": {"text": "a"}}, "input"),
        ({"input": [1, -2]}, "input"),
        ({"input": [1, "a"]}, "input"),
        ({"input": [["a"], ["b"]]}, "input"),
        ({"input": ["a", ["b"]]}, "input"),
        ({"input": ["a"] * (MAX_TEXTS + 1)}, "input"),
        ({"input": "a" * (MAX_TEXT_BYTES + 1)}, "input"),
        ({"input": "€" * (MAX_TEXT_BYTES // 2)}, "input"),
        ({"encoding_format": "hex"}, "encoding_format"),
        ({"encoding_format": ["float"]}, "encoding_format"),
        ({"encoding_format": False}, "encoding_format"),
        ({"encoding_format": {}}, "encoding_format"),
        ({"dimensions": 0}, "dimensions"),
        ({"dimensions": "3"}, "dimensions"),
        ({"dimensions": True}, "dimensions"),
        ({"dimensions": 1.5}, "dimensions"),
        ({"user": 5}, "user"),
    ],
)
def test_wrong_fields_are_named(change: dict[str, Any], field: str) -> None:
    """Bad input is a 400 that names the field."""
    with pytest.raises(InvalidInput) as refused:
        parse_request(GOOD | change)
    assert refused.value.field == field


def test_the_first_wrong_field_is_named_in_any_order_of_the_body() -> None:
    """Fields are checked in one order; the message gives the path into a list."""
    with pytest.raises(InvalidInput) as refused:
        parse_request({"dimensions": 0, "input": 5, "model": 5, "user": 5, "encoding_format": "hex"})
    assert refused.value.field == "encoding_format"
    with pytest.raises(InvalidInput, match=r"^input\[1\]: ") as refused:
        parse_request({"dimensions": 0, "input": ["a", {}], "model": "m"})
    assert refused.value.field == "input"


def test_a_refusal_quotes_little_and_is_not_misled_by_it() -> None:
    """The value that is quoted may be of any length and may look like the library's own text."""
    with pytest.raises(InvalidInput) as refused:
        parse_request(GOOD | {"encoding_format": "hex" * 1000 + " - at `$.model`"})
    assert refused.value.field == "encoding_format"
    assert len(refused.value.message) < 300


def test_what_clients_send_is_accepted() -> None:
    """A text or a list of texts; `user`, `encoding_format` and unknown fields are fine."""
    assert parse_request(GOOD).inputs == ["a"]
    assert parse_request(GOOD | {"input": ["a", "b"]}).inputs == ["a", "b"]
    assert (
        parse_request(GOOD | {"encoding_format": "base64", "user": "u", "new": 1}).encoding_format == "base64"
    )
    assert parse_request(GOOD | {"encoding_format": None, "dimensions": 3}).dimensions == 3
    assert len(parse_request(GOOD | {"input": "a" * MAX_TEXT_BYTES}).inputs[0]) == MAX_TEXT_BYTES


def as_sent(vector: list[float]) -> EmbeddingResult:
    """What the engine's client hands over."""
    return EmbeddingResult.FromString(EmbeddingResult(embeddings=vector).SerializeToString())


def float32(number: float) -> bytes:
    """The bits of a number in single precision."""
    return struct.pack("<f", number)


VECTORS = st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=20)


@given(vector=VECTORS)
def test_vectors_are_printed_short_and_exact(vector: list[float]) -> None:
    """The text of each number reads as the same single precision, and takes at most nine digits."""
    body = render_response(parse_request(GOOD), [as_sent(vector)])
    texts = json.loads(body, parse_float=str)["data"][0]["embedding"]
    assert [float32(float(text)) for text in texts] == [float32(number) for number in vector]
    for text in texts:
        digits = text.lower().partition("e")[0].replace(".", "").replace("-", "").strip("0")
        assert len(digits) <= 9


@given(vector=VECTORS)
def test_base64_holds_the_same_numbers(vector: list[float]) -> None:
    """Little-endian single precision, as the openai client reads it."""
    body = render_response(parse_request(GOOD | {"encoding_format": "base64"}), [as_sent(vector)])
    packed = base64.b64decode(json.loads(body)["data"][0]["embedding"])
    assert packed == b"".join(float32(number) for number in vector)


def test_a_number_takes_the_fewest_digits() -> None:
    """A tenth in single precision is 0.10000000149011612 as a double; its shortest text is 0.1."""
    body = render_response(parse_request(GOOD), [as_sent([0.1, -1.5, 0.0])])
    assert b'"embedding":[0.1,-1.5,0.0]' in body


SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5)
JSON = (
    SCALARS
    | st.lists(SCALARS | st.lists(SCALARS), max_size=3)
    | st.dictionaries(st.text(), SCALARS, max_size=3)
)


@given(
    st.fixed_dictionaries({}, optional=dict.fromkeys((*GOOD, "encoding_format", "dimensions", "user"), JSON))
)
def test_any_object_is_accepted_or_refused(body: dict[str, Any]) -> None:
    """No combination of values is anything but accepted or a 400 with a field."""
    field: str | None = "model"
    try:
        parse_request(body)
    except InvalidInput as refused:
        field = refused.field
    assert field in (*GOOD, "encoding_format", "dimensions", "user")


@pytest.mark.parametrize("body", [b"{", b"[1]", b'"a"', b"null", b"\xff", b'{"a": NaN}', b'{"a": "\\ud800"}'])
def test_malformed_bodies(body: bytes) -> None:
    """Malformed JSON is a 400."""
    with pytest.raises(InvalidInput):
        wire.parse_json_object(body)


def test_an_empty_body_is_an_empty_object() -> None:
    """§0.1: a request with Content-Length 0 parses as an empty object."""
    assert wire.parse_json_object(b"") == {}


def test_the_body_limit_names_itself() -> None:
    """The refusal of an oversized body names the limit, and the rest of the body is not read."""
    served = 0

    async def receive() -> wire.Message:
        nonlocal served
        served += 1
        return {"type": "http.request", "body": b"x" * 1_000_000, "more_body": True}

    with pytest.raises(InvalidInput, match=f"over {wire.MAX_BODY // 1024} kB"):
        asyncio.run(wire.read_json_object(receive, "", wire.MAX_BODY))
    assert served == wire.MAX_BODY // 1_000_000 + 1


@pytest.mark.parametrize(
    ("given_path", "path"),
    [
        ("/v1/embeddings/", "/v1/embeddings"),
        ("/embeddings/", "/embeddings"),
        ("/api/nodes/", "/api/nodes"),
        ("/healthz/", "/healthz"),
        ("/ws/operations/", "/ws/operations"),
        ("/admin/", "/admin/"),
        ("/", "/"),
        ("/v1/embeddings", "/v1/embeddings"),
        ("/static/a/", "/static/a/"),
    ],
)
def test_trailing_slashes(given_path: str, path: str) -> None:
    """§0.1: accepted without a redirect on every API route, left alone elsewhere."""
    scope = strip_slash({"path": given_path, "raw_path": given_path.encode()})
    assert (scope["path"], scope["raw_path"]) == (path, path.encode())


def test_an_escaped_slash_at_the_end_belongs_to_the_name() -> None:
    """§0.1: decoded once, and not taken for the end of the path."""
    scope = {"path": "/api/nodes/x/labels/a/", "raw_path": b"/api/nodes/x/labels/a%2F"}
    assert strip_slash(scope) is scope
