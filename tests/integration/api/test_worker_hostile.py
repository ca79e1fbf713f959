"""Registrations that no one should send: every one ends in a refusal that names the field, none in a 500."""

from typing import Any

import pytest
from django.conf import settings
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from nodes.models import BackendNode
from tests.support import api
from tests.support.effort import EFFORT
from tests.support.environment import REGISTRATION_TOKEN

pytestmark = pytest.mark.django_db

ENDPOINT = "/api/node/register"


@pytest.mark.rule("http-1.1")
@pytest.mark.parametrize("secret", ["A" * 64, "a" * 63, "a" * 65, "z" * 64, "é" * 64, " " * 64 + "a"])
def test_a_secret_is_64_hex_digits(secret: str) -> None:
    """400 naming the header."""
    refused = api.register(api.registration(), secret)
    assert refused.status_code == 400
    assert "X-LocalAI-Node-Secret" in api.message(refused)


SIZES = ("total_vram", "available_vram", "total_ram", "available_ram", "total_disk", "available_disk")
NOT_SIZES: tuple[Any, ...] = (-1, 2**63, 2**64, 10**400, 1.5, 1.0, "9", True, [1], {})
INVISIBLE = {
    "null": "\x00",
    "newline": "\n",
    "escape": "\x1b",
    "C1 control": "\x85",
    "right-to-left override": "\u202e",
    "isolate": "\u2066",
    "zero-width space": "\u200b",
    "zero-width joiner": "\u200d",
    "byte order mark": "\ufeff",
    "soft hyphen": "\u00ad",
    "line separator": "\u2028",
    "blank letter": "\u3164",
    "private use": "\ue000",
    "unassigned": "\U000e0fff",
    "tag": "\U000e0041",
    "lone surrogate": "\ud800",
}
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"name": 5}, "name"),
    ({"name": ["w"]}, "name"),
    ({"name": "   "}, "name"),
    ({"name": None}, "name"),
    ({"name": " w1"}, "name"),
    ({"name": "x" * 256}, "name"),
    ({"name": "\ufdfa" * 20}, "name"),
    ({"name": {"a": {"b": 1}}}, "name"),
    ({"node_type": "weird"}, "node_type"),
    ({"node_type": 1}, "node_type"),
    ({"node_type": "BACKEND"}, "node_type"),
    ({"address": ""}, "address"),
    ({"address": 7}, "address"),
    ({"address": "a\u202e:1"}, "address"),
    ({"address": "x" * 513}, "address"),
    ({"address": "gpu-1"}, "address"),
    ({"address": "gpu-1:0"}, "address"),
    ({"address": "unix:/run/engine.sock"}, "address"),
    ({"address": "dns:///gpu-1:7001"}, "address"),
    ({"address": "gpu-1:7001,gpu-2:7001"}, "address"),
    ({"address": "127.1:7001"}, "address"),
    ({"address": f"{'a.' * 127}a:1"}, "address"),
    ({"http_address": "127.0.0.1"}, "http_address"),
    ({"http_address": "http://127.0.0.1:1"}, "http_address"),
    ({"http_address": "10.0.0.9:51099"}, "http_address"),
    ({"http_address": "x" * 513}, "http_address"),
    ({"http_address": "a\nb"}, "http_address"),
    ({"gpu_vendor": "x" * 33}, "gpu_vendor"),
    ({"gpu_vendor": "nv\u200bidia"}, "gpu_vendor"),
    ({"gpu_compute_capability": "x" * 17}, "gpu_compute_capability"),
    ({"capability": "x" * 65}, "capability"),
    ({"capability": 1}, "capability"),
    ({"vram_budget": "9" * 33}, "vram_budget"),
    ({"vram_budget": 50}, "vram_budget"),
    ({"max_replicas_per_model": 2**40}, "max_replicas_per_model"),
    ({"max_replicas_per_model": 10_001}, "max_replicas_per_model"),
    ({"max_replicas_per_model": "2"}, "max_replicas_per_model"),
    ({"max_replicas_per_model": True}, "max_replicas_per_model"),
    ({"labels": ["a"]}, "labels"),
    ({"labels": "a=b"}, "labels"),
    ({"labels": {"k": 1}}, "labels"),
    ({"labels": {"k": None}}, "labels"),
    ({"labels": {"k": {"deep": {}}}}, "labels"),
    ({"labels": {"\ud800": 1}}, "labels"),
    ({"labels": {"": "v"}}, "labels"),
    ({"labels": {"k" * 129: "v"}}, "labels"),
    ({"labels": {"k": "v" * 256}}, "labels.k"),
    ({"labels": {f"k{i}": "" for i in range(65)}}, "labels"),
    ({"running_processes": {}}, "running_processes"),
    ({"running_processes": ["m#0"]}, "running_processes"),
    ({"running_processes": [{}]}, "running_processes"),
    ({"running_processes": [{"process_key": ""}]}, "running_processes.0.process_key"),
    ({"running_processes": [{"process_key": None}]}, "process_key"),
    ({"running_processes": [{"process_key": 1}]}, "process_key"),
    ({"running_processes": [{"process_key": "m#0", "address": 1}]}, "address"),
    ({"running_processes": [{"process_key": "m" * 301}]}, "running_processes.0.process_key"),
    ({"running_processes": [{"process_key": "m#0", "address": "x" * 513}]}, "running_processes.0.address"),
    ({"running_processes": [{"process_key": f"m#{i}"} for i in range(1025)]}, "running_processes"),
]


@pytest.mark.rule("R1.29", "http-1.1")
@pytest.mark.parametrize(
    ("body", "field"), WRONG, ids=[f"{number}-{field}" for number, (_, field) in enumerate(WRONG)]
)
def test_wrong_values_are_400_and_name_the_field(body: dict[str, Any], field: str) -> None:
    """D-LIMITS: wrong types, lengths and counts; nothing is stored."""
    refused = api.register(api.registration() | body)
    assert (refused.status_code, refused.json()["error"]["type"]) == (400, "node_error"), refused.content
    assert field in api.message(refused)
    assert not BackendNode.objects.exists()


@pytest.mark.rule("R1.29", "http-1.1")
@pytest.mark.parametrize("field", SIZES)
def test_what_is_no_size_is_400(field: str) -> None:
    """Byte counts are whole numbers from 0 to 2^63-1."""
    for value in NOT_SIZES:
        refused = api.register(api.registration() | {field: value})
        assert refused.status_code == 400, value
        assert field in api.message(refused), value
    assert api.register(api.registration() | {field: 2**63 - 1}).status_code == 201


@pytest.mark.rule("R1.22", "R1.40", "http-1.1")
@pytest.mark.parametrize("character", INVISIBLE.values(), ids=INVISIBLE.keys())
def test_what_cannot_be_seen_stands_in_no_name_and_no_label(character: str) -> None:
    """D-NAMES: control, bidi, zero-width, private and unassigned characters."""
    for body, field in (
        ({"name": f"gpu{character}1"}, "name"),
        ({"labels": {f"ti{character}er": "fast"}}, "labels"),
        ({"labels": {"tier": f"fa{character}st"}}, "labels.tier"),
    ):
        refused = api.register(api.registration() | body)
        assert refused.status_code == 400, body
        assert field in api.message(refused), body
    assert not BackendNode.objects.exists()


@pytest.mark.rule("R1.22", "http-1.1")
@pytest.mark.parametrize("name", ["GPU-A", "\uff47pu-a", "gpu-\u00aa", "Gpu-a"])
def test_a_name_that_looks_like_another_is_409(name: str) -> None:
    """D-NAMES: equal after NFKC and case folding; the one that is there goes on."""
    node = api.make_node("gpu-a")
    refused = api.register(api.registration(name), "c" * 64)
    assert refused.status_code == 409
    assert "name" in api.message(refused)
    assert api.node(node.id).name == "gpu-a"
    assert BackendNode.objects.count() == 1


@pytest.mark.rule("http-1.1")
@pytest.mark.parametrize("name", ["ärger", "机器-1", "gpu/a:1@b#c", "%2F", "a" * 255, "o'b; DROP", "-"])
def test_odd_names_are_names(name: str) -> None:
    """All that a person can see and tell apart."""
    answer = api.register(api.registration(name))
    assert (answer.status_code, answer.json()["name"]) == (201, name)


@pytest.mark.rule("R1.29", "http-1.1")
def test_the_order_of_the_checks() -> None:
    """Body, token, type, name, address, lengths, labels, secret: what comes first is complained of first."""
    faults: list[tuple[dict[str, Any], str, int]] = [
        ({"total_ram": -1}, "total_ram", 400),
        ({"token": ""}, "token", 401),
        ({"node_type": "weird"}, "node_type", 400),
        ({"name": ""}, "name is required", 400),
        ({"address": ""}, "address is required", 400),
        ({"http_address": "x" * 513}, "http_address exceeds", 400),
        ({"labels": {"k" * 129: ""}}, "labels", 400),
        ({}, "X-LocalAI-Node-Secret", 400),
    ]
    body, secret = api.registration(), "no secret"
    for fault, _, _ in faults:
        body |= fault
    for fault, says, status in faults:
        refused = api.register(body, secret)
        assert refused.status_code == status, says
        assert says in api.message(refused)
        right: dict[str, Any] = {"total_ram": 1, "http_address": "", "labels": {}, "node_type": "backend"}
        body |= {name: (right | api.registration())[name] for name in fault}
    assert api.register(body).status_code == 201


MALFORMED = {
    "half an object": b"{bad",
    "an array": b"[1]",
    "a text": b'"x"',
    "null": b"null",
    "no UTF-8": b"\xff\xfe",
    "deep arrays": b"[" * 100_000,
    "deep objects": b'{"a":' * 100_000,
    "a number without end": b'{"total_ram":' + b"9" * 5000 + b"}",
    "not a number": b'{"a":NaN}',
    "infinity": b'{"total_ram":Infinity}',
    "two bodies": b"{}{}",
}


@pytest.mark.rule("http-1.1", "http-0.1")
@pytest.mark.parametrize("raw", MALFORMED.values(), ids=MALFORMED.keys())
def test_malformed_bodies_are_400(raw: bytes) -> None:
    """§1.1: before any look at the body's token."""
    refused = api.register(raw)
    assert (refused.status_code, refused.json()["error"]["type"]) == (400, "node_error")


@pytest.mark.rule("http-1.1")
@pytest.mark.parametrize("field", ["unknown", "labels", "name", "running_processes", "total_ram"])
def test_deep_nesting_is_no_trouble(field: str) -> None:
    """Within the limit, in an unknown field, it does not matter; deeper it is refused unread."""
    deep: Any = {}
    for _ in range(31):
        deep = {"a": [deep]}
    answer = api.register(api.registration() | {field: deep})
    assert answer.status_code == (201 if field == "unknown" else 400)
    refused = api.register(api.registration() | {field: {"a": [deep]}})
    assert (refused.status_code, api.message(refused)) == (
        400,
        "the request body is nested more than 64 levels deep",
    )


@pytest.mark.rule("http-1.1")
def test_a_body_is_bounded() -> None:
    """The limit of Django holds for streams too, which Django itself does not see to."""
    padding = "x" * settings.DATA_UPLOAD_MAX_MEMORY_SIZE
    refused = api.register(api.registration(unknown=padding))
    assert (refused.status_code, refused.json()["error"]["code"]) == (413, 413)
    assert api.register(api.registration(unknown=padding[:-1000])).status_code == 201


def test_other_content_types_are_400() -> None:
    """§0.1: a body that is not announced as JSON is a parse failure."""
    caller = api.bearer(REGISTRATION_TOKEN)
    refused = caller.send("POST", ENDPOINT, b"a=b", **{"content-type": "text/plain"})
    assert refused.status_code == 400


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
FIELDS = st.sampled_from(
    [
        "name",
        "node_type",
        "address",
        "labels",
        "total_vram",
        "available_disk",
        "vram_budget",
        "gpu_vendor",
        "max_replicas_per_model",
        "running_processes",
    ]
)


@given(body=st.dictionaries(FIELDS, JSON, max_size=5))
@hypothesis_settings(
    max_examples=60 * EFFORT, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_any_json_ends_in_201_or_a_refusal(body: dict[str, Any]) -> None:
    """Never a 500, no matter what a worker with the token sends."""
    answer = api.register(body | {"token": REGISTRATION_TOKEN})
    assert answer.status_code in (201, 400, 409), answer.content
