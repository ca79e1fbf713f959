"""The codec against real traffic of the reference and against hostile bytes."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localai_cluster.messaging import messages
from localai_cluster.messaging import messages as m
from tests.support.effort import EFFORT
from tests.support.message_faults import KINDS, faulty, valid

RECORDINGS = Path(__file__).parents[2] / "data" / "nats"


def recorded() -> list[tuple[type, Any]]:
    """Every recorded payload of a node subject or of a reply to one, with the type it must decode to."""
    found: list[tuple[type, Any]] = []
    for path in sorted(RECORDINGS.glob("*.jsonl")):
        replies: dict[str, type] = {}
        for line in path.read_text().splitlines():
            entry = json.loads(line)
            subject, data = entry.get("subject", ""), entry.get("data")
            if subject in replies:
                found.append((replies.pop(subject), data))
            if subject.endswith(".progress") and ".backend.install." in subject:
                found.append((m.ProgressEvent, data))
            command = ".".join(subject.split(".")[2:])
            if subject.startswith("nodes.") and command in m.COMMANDS:
                request, reply = m.COMMANDS[command]
                found.append((request, data))
                if reply is not None and "reply_to" in entry:
                    replies[entry["reply_to"]] = reply
    return found


def test_recorded_messages_round_trip_exactly() -> None:
    """nats.md §4: names, types and omission agree with what a running reference sent and answered."""
    seen = set()
    for kind, data in recorded():
        message: Any = messages.decode(json.dumps(data).encode(), kind)
        expected = data or {}
        if kind is m.ListReply and expected.get("backends", ()) is None:
            expected = {**expected, "backends": []}
        assert json.loads(messages.encode(message)) == expected, kind
        seen.add(kind)
    assert {m.InstallRequest, m.InstallReply, m.UpgradeReply, m.ListReply, m.ProgressEvent} <= seen


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("body", [b"", b"  \n", b"null", b"{}", b'{"unknown":[1,{"x":null}]}'])
def test_no_payload_is_the_message_of_zero_values(kind: type, body: bytes) -> None:
    """nats.md §1: an empty body and `null` are accepted, unknown fields ignored."""
    assert messages.decode(body, kind) == kind()


def test_names_match_in_any_case_and_the_exact_one_wins() -> None:
    """nats.md §1: field names are matched case-insensitively."""
    assert messages.decode(b'{"Backend":"a","MODEL_ID":"b"}', m.InstallRequest).model_id == "b"
    assert messages.decode(b'{"Backend":"a","backend":"b","BACKEND":"c"}', m.InstallRequest).backend == "b"


def test_null_fields_and_null_lists_are_zero_values() -> None:
    """nats.md §1: `"backends": null` when nothing is installed."""
    assert messages.decode(b'{"backends":null,"error":null}', m.ListReply) == m.ListReply()
    assert messages.decode(b'{"models":[null]}', m.RunningReply).models == (m.RunningModel(),)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b'{"backend":5}', "backend"),
        (b'{"force":"true"}', "force"),
        (b'{"force":1}', "force"),
        (b'{"replica_index":"1"}', "replica_index"),
        (b'{"replica_index":1.0}', "replica_index"),
        (b'{"replica_index":true}', "replica_index"),
        (b'{"replica_index":99999999999999999999}', "replica_index"),
    ],
)
def test_a_wrong_type_names_the_field(body: bytes, field: str) -> None:
    """nats.md §1: a wrong JSON type is a decode error."""
    with pytest.raises(messages.DecodeError, match=field) as caught:
        messages.decode(body, m.InstallRequest)
    assert caught.value.field == field


def test_a_wrong_type_inside_a_list_names_the_way_to_it() -> None:
    with pytest.raises(messages.DecodeError, match=r"models\[1\]\.replica_index"):
        messages.decode(b'{"models":[{},{"replica_index":"x"}]}', m.RunningReply)


@pytest.mark.parametrize(
    "body",
    [
        b"[]",
        b"5",
        b'"x"',
        b"{",
        b"{'backend':'x'}",
        b'{"percentage":NaN}',
        b'{"percentage":1e999}',
        b"[" * 100_000,
        b'{"replica_index":' + b"9" * 5000 + b"}",
        b" " * (messages.MAX_MESSAGE_BYTES + 1),
    ],
)
def test_hostile_bodies_are_refused_with_our_error(body: bytes) -> None:
    with pytest.raises(messages.DecodeError):
        messages.decode(body, m.ProgressEvent)


def test_a_list_that_would_take_the_event_loop_is_refused() -> None:
    """A worker's small reply with 99,000 empty entries took a second of the processor."""
    body = b'{"models": [' + b"{}," * 4096 + b"{}]}"
    with pytest.raises(messages.DecodeError, match="models: more than 4096 entries"):
        messages.decode(body, m.RunningReply)
    assert len(messages.decode(body.replace(b"{},", b"", 1), m.RunningReply).models) == 4096


def test_lone_surrogates_and_broken_utf8_do_not_travel_on() -> None:
    message = messages.decode(b'{"backend":"\\ud800x\xff"}', m.InstallRequest)
    assert message.backend == "\ufffdx\ufffd"
    assert messages.decode(messages.encode(message), m.InstallRequest) == message


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(max_examples=20 * EFFORT)
def test_any_message_round_trips(kind: type, data: st.DataObject) -> None:
    message = data.draw(valid(kind))
    assert messages.decode(messages.encode(message), kind) == message


@pytest.mark.rule("nats-1")
@pytest.mark.parametrize("kind", [kind for kind in KINDS if dataclasses.fields(kind)])
@given(data=st.data())
@settings(max_examples=20 * EFFORT)
def test_a_fault_anywhere_in_a_message_names_its_field(kind: type, data: st.DataObject) -> None:
    """Wrong types and numbers that are too large; without the field, or with null, it has its zero value."""
    body, field = data.draw(faulty(kind))
    with pytest.raises(messages.DecodeError) as caught:
        messages.decode(json.dumps(body).encode(), kind)
    assert caught.value.field == field
    assert len(caught.value.message) < 200
    name = field.partition("[")[0].partition(".")[0]
    without = {key: value for key, value in body.items() if key != name}
    zero: Any = messages.decode(json.dumps(without).encode(), kind)
    assert getattr(zero, name) == getattr(kind(), name)
    assert messages.decode(json.dumps(body | {name: None}).encode(), kind) == zero


@given(st.binary(max_size=60))
def test_any_bytes_decode_or_are_refused(body: bytes) -> None:
    try:
        messages.decode(body, m.InstallRequest)
    except messages.DecodeError:
        return


def test_galleries_travel_as_json_inside_a_string() -> None:
    """nats.md §4.1: double encoded; `null` is a list of nothing; bad JSON is an error."""
    galleries = (
        m.Gallery(url="file:///g/index.yaml", name="local"),
        m.Gallery("u", "n", ("m1",), m.Verification("i")),
    )
    text = messages.encode_galleries(galleries)
    assert json.loads(text)[0] == {"url": "file:///g/index.yaml", "name": "local"}
    assert messages.decode_galleries(text) == galleries
    assert messages.decode_galleries("null") == ()
    for bad in ("{", "{}", '[{"url":1}]', '["x"]'):
        with pytest.raises(messages.DecodeError):
            messages.decode_galleries(bad)


@given(st.text(max_size=20))
@pytest.mark.rule("O82")
def test_subject_tokens_follow_the_rule(value: str) -> None:
    """nats.md §1.1: six characters become a dash, one for one; nothing else changes."""
    token = messages.token(value)
    assert len(token) == len(value)
    for before, after in zip(value, token, strict=True):
        assert after == ("-" if before in ".*> \t\n" else before)


@pytest.mark.rule("R6.1", "nats-2.1")
def test_subjects() -> None:
    """nats.md §1.1, §2.1."""
    assert messages.node_prefix("host.a 1*b") == "nodes.host-a-1-b"
    assert messages.install_progress("n", "o.p") == "nodes.n.backend.install.o-p.progress"
    assert messages.subject("backend.cancel", "n") == "nodes.n.backend.cancel"
    assert messages.subject("models.running", "n") == "nodes.n.models.running"
    assert messages.subject("stop", "n") == "nodes.n.stop"


@given(st.text(max_size=10), st.integers(0, 10**8))
def test_process_keys_split_at_the_last_hash(name: str, index: int) -> None:
    """worker.md §7: parse at the last `#`; the suffix must be an integer."""
    assert m.split_process_key(m.process_key(name, index)) == ((name, index) if name else None)


@pytest.mark.parametrize("key", ["", "x", "#1", "x#", "x#-1", "x#a", "x#²", "x#" + "9" * 40])
def test_what_is_not_a_process_key(key: str) -> None:
    assert m.split_process_key(key) is None
