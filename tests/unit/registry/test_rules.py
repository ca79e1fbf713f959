"""Pure rules of the registry: VRAM budgets, transitions, who a credential belongs to, error texts."""

from dataclasses import replace
from typing import Any
from uuid import UUID, uuid4

import pytest
from django.db import IntegrityError, InterfaceError, OperationalError
from hypothesis import given
from hypothesis import strategies as st

from localai_cluster.accounts.principals import hash_secret, offered_credential, secrets_equal
from localai_cluster.kit import errors
from localai_cluster.web.envelopes import exception_handler, field_message
from localai_cluster.web.throttle import TooManyFailures
from localai_cluster.web.wire import is_json, parse_json, refusal_headers
from nodes.registry import resources
from nodes.registry.identity import (
    UNKNOWN_FINGERPRINT,
    MustRotate,
    NodeFacts,
    OtherProcess,
    WrongCredential,
    authenticate,
    node_fingerprint,
)


@pytest.mark.rule("R1.49")
@pytest.mark.parametrize(
    ("text", "limit"),
    [
        ("", 0),
        ("50%", 500),
        (" 80 % ", 800),
        ("0%", 0),
        ("0.25", 250),
        ("1", 1000),
        ("300", 300),
        ("1KB", 1000),
        (".5kib", 512),
        ("2GiB", 1000),
        ("7B", 7),
    ],
)
def test_budget_grammar(text: str, limit: int) -> None:
    """R1.49, against a total of 1000 bytes; the ceiling is clamped to it."""
    assert resources.budget_ceiling(text, 1000) == limit


@pytest.mark.rule("R1.49", "http-1.1")
@pytest.mark.parametrize("text", ["101%", "-1", "1.5", "x", "5 apples", "%", "1e9", "-5GiB"])
def test_unreadable_budgets(text: str) -> None:
    """R1.49: an error for anyone who types it, no cap where a worker sends it."""
    with pytest.raises(ValueError, match="budget"):
        resources.budget_ceiling(text, 1000)
    assert resources.budget_ceiling_or_none(text, 1000) == 0


@pytest.mark.rule("R1.36", "R1.49")
@given(text=st.text(max_size=12) | st.from_regex(r"\d{1,5}(\.\d)?\s?(%|[kmgt]i?b)?", fullmatch=True))
def test_a_ceiling_lies_within_the_total(text: str) -> None:
    """R1.36: and what it leaves is never more than there was."""
    limit = resources.budget_ceiling_or_none(text, 10_000)
    assert 0 <= limit <= 10_000
    assert resources.cap_to_ceiling(9_000, limit) <= 9_000


ID, OTHER_ID = UUID(int=1), UUID(int=2)
OWN, OTHERS, STRANGERS = (hash_secret(text) for text in "abc")
PROCESS, FORMER = "1" * 32, "2" * 32
STRONG = NodeFacts(ID, OWN, weak=False, instance=PROCESS)
WEAK = NodeFacts(ID, "", weak=True)
UNBOUND = NodeFacts(ID, "", weak=False)
ANOTHER = NodeFacts(OTHER_ID, OTHERS, weak=False)
Refusal = type[errors.ClusterError] | None


@pytest.mark.rule("http-1.2", "http-1.3", "http-1.4", "http-1.5", "http-1.6")
@pytest.mark.parametrize(
    ("target", "fingerprint", "refusal"),
    [
        (STRONG, OWN, None),
        (STRONG, OTHERS, errors.Forbidden),
        (STRONG, STRANGERS, WrongCredential),
        (STRONG, UNKNOWN_FINGERPRINT, WrongCredential),
        (STRONG, "", errors.Forbidden),
        (WEAK, "", None),
        (WEAK, OTHERS, errors.Forbidden),
        (WEAK, STRANGERS, WrongCredential),
        (UNBOUND, "", errors.Forbidden),
        (UNBOUND, STRANGERS, WrongCredential),
        (None, OTHERS, errors.NotFound),
        (None, STRANGERS, errors.NotFound),
        (None, "", errors.NotFound),
        (None, UNKNOWN_FINGERPRINT, WrongCredential),
    ],
)
def test_a_credential_opens_its_own_node_only(
    target: NodeFacts | None, fingerprint: str, refusal: Refusal
) -> None:
    """D-IDENTITY: 401 for an unknown credential, 403 for another node's, 404 for an unknown id.

    An empty fingerprint is the shared token, where it is admitted.
    """
    assert _judged([row for row in (target, ANOTHER) if row], fingerprint) is refusal


def _judged(rows: list[NodeFacts], fingerprint: str, instance: str = "", **options: bool) -> Refusal:
    try:
        assert authenticate(ID, fingerprint, instance, rows, **options).node_id == ID
    except errors.ClusterError as error:
        return type(error)
    return None


ROTATING = replace(STRONG, rotating=True)


@pytest.mark.rule("http-1.1")
@pytest.mark.parametrize(
    ("target", "instance", "refusal"),
    [
        (STRONG, "", None),
        (STRONG, PROCESS, None),
        (STRONG, FORMER, OtherProcess),
        (STRONG, "X" * 32, errors.InvalidInput),
        (replace(STRONG, instance=""), PROCESS, OtherProcess),
        (ROTATING, PROCESS, MustRotate),
        (ROTATING, FORMER, MustRotate),
    ],
)
def test_the_process_counts_where_it_is_told(target: NodeFacts, instance: str, refusal: Refusal) -> None:
    """D-INSTANCE; a secret that is to be replaced is good for nothing else."""
    assert _judged([target], OWN, instance) is refusal
    if target is ROTATING:
        assert _judged([target], OWN, instance, rotating=True) is (
            OtherProcess if instance == FORMER else None
        )


FINGERPRINTS = st.sampled_from([OWN, OTHERS, "", UNKNOWN_FINGERPRINT])
ROWS = st.lists(
    st.builds(
        NodeFacts,
        st.sampled_from([ID, OTHER_ID]),
        st.sampled_from([OWN, OTHERS, ""]),
        st.booleans(),
        st.sampled_from(["", PROCESS]),
        st.booleans(),
    ).filter(lambda row: not (row.fingerprint and row.weak)),
    unique_by=lambda row: row.id,
)


@given(fingerprint=FINGERPRINTS, rows=ROWS, instance=st.sampled_from(["", PROCESS, FORMER, "?"]))
def test_there_is_no_wrong_yes(fingerprint: str, rows: list[NodeFacts], instance: str) -> None:
    """In all cases only the holder of the row's own secret, in its process, is the node."""
    if _judged(rows, fingerprint, instance) is None:
        (row,) = (row for row in rows if row.id == ID)
        assert row.fingerprint == fingerprint
        assert fingerprint or row.weak
        assert instance in ("", row.instance)
        assert not row.rotating


@given(text=st.text(max_size=70) | st.from_regex(r"[0-9a-fA-F]{64}", fullmatch=True))
def test_what_can_be_a_nodes_secret(text: str) -> None:
    """64 lower-case hex digits; anything else is unknown and costs no query."""
    secret = len(text) == 64 and set(text) <= set("0123456789abcdef")
    assert node_fingerprint(text) == (hash_secret(text) if secret else UNKNOWN_FINGERPRINT)


def test_nothing_matches_an_unset_secret() -> None:
    """An empty setting opens nothing."""
    assert not secrets_equal("", "")
    assert not secrets_equal("x", "")
    assert secrets_equal("\udcff x", "\udcff x")


@pytest.mark.rule("http-0.2")
@pytest.mark.parametrize(
    ("headers", "credential"),
    [
        ({}, None),
        ({"authorization": "Bearer abc"}, "abc"),
        ({"authorization": "bearer  abc "}, "abc"),
        ({"authorization": "Basic abc", "x-api-key": "k"}, ""),
        ({"authorization": "Bearer"}, ""),
        ({"x-api-key": "k"}, "k"),
        ({"xi-api-key": "k"}, "k"),
    ],
)
def test_where_a_credential_may_stand(headers: dict[str, str], credential: str | None) -> None:
    """§0.2; a malformed Authorization header is a wrong credential, not an absent one."""
    assert offered_credential(headers) == credential


@pytest.mark.parametrize(
    ("detail", "text"),
    [
        ({"name": ["too long"]}, "name: too long"),
        ({"labels": {"k": ["must be a string"]}}, "labels.k: must be a string"),
        ({"non_field_errors": ["odd"]}, "odd"),
        (["odd"], "odd"),
        ({"items": [{}, {"x": ["bad"]}]}, "items.x: bad"),
    ],
)
def test_messages_name_the_field(detail: Any, text: str) -> None:
    """The issue: 400 naming the field."""
    assert field_message(detail) == text


@given(st.binary(max_size=200))
def test_any_bytes_are_a_value_or_invalid_input(raw: bytes) -> None:
    """Never another error."""
    value: Any = None
    try:
        value = parse_json(raw)
    except errors.InvalidInput:
        return
    assert value is None or isinstance(value, dict | list | str | int | float | bool)


@pytest.mark.rule("http-0.1")
@pytest.mark.parametrize("kind", ["", "application/json", "Application/JSON; charset=utf-8"])
def test_json_content_types(kind: str) -> None:
    """§0.1."""
    assert is_json(kind)
    assert not is_json("text/" + str(uuid4()))


def test_a_collision_that_no_one_foresaw_is_a_conflict(caplog: pytest.LogCaptureFixture) -> None:
    """A constraint has the last word between two callers; that is no 500, and the log has the cause."""
    try:
        raise IntegrityError("duplicate key value violates unique constraint")
    except IntegrityError as error:
        answer = exception_handler(error, {"view": None})
    assert answer is not None
    assert (answer.status_code, answer.data["error"]["code"]) == (409, 409)
    assert "duplicate key" not in answer.data["error"]["message"]
    assert "a constraint refused a write" in caplog.text


@pytest.mark.parametrize("kind", [OperationalError, InterfaceError])
def test_an_outage_is_no_server_error(kind: type[Exception]) -> None:
    """A connection that ended in between: 503, come again; what the driver said stays inside."""
    answer = exception_handler(kind("the connection is closed"), {"view": None})
    assert answer is not None
    assert (answer.status_code, answer.data["error"]["message"]) == (503, "the database is unavailable")


@pytest.mark.parametrize(("seconds", "said"), [(0.2, "1"), (59.001, "60"), (5.0, "5"), (-1.0, "1")])
def test_when_to_come_back_is_never_too_early(seconds: float, said: str) -> None:
    """Retry-After is in whole seconds, rounded up."""
    for error in (errors.Unavailable(retry_after=seconds), TooManyFailures(seconds)):
        assert refusal_headers(error) == {"Retry-After": said}
