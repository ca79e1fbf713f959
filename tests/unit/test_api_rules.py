"""Pure rules of the registry: VRAM budgets, transitions, who a credential belongs to, error texts."""

from datetime import UTC, datetime
from typing import Any
from uuid import UUID, uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localai_cluster import errors
from nodes import budget
from nodes.api.envelopes import field_message
from nodes.api.parsers import is_json, parse_json
from nodes.identity import NodeFacts, hash_secret, judge, offered, same

NOW = datetime(2026, 8, 22, 10, tzinfo=UTC)


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
    assert budget.ceiling(text, 1000) == limit


@pytest.mark.parametrize("text", ["101%", "-1", "1.5", "x", "5 apples", "%", "1e9", "-5GiB"])
def test_unreadable_budgets(text: str) -> None:
    """R1.49: an error for whoever types it, no cap where a worker sends it."""
    with pytest.raises(ValueError, match="budget"):
        budget.ceiling(text, 1000)
    assert budget.ceiling_or_none(text, 1000) == 0


@given(text=st.text(max_size=12) | st.from_regex(r"\d{1,5}(\.\d)?\s?(%|[kmgt]i?b)?", fullmatch=True))
def test_a_ceiling_lies_within_the_total(text: str) -> None:
    """R1.36: and what it leaves is never more than there was."""
    limit = budget.ceiling_or_none(text, 10_000)
    assert 0 <= limit <= 10_000
    assert budget.cap(9_000, limit) <= 9_000


FINGERPRINTS = st.sampled_from([hash_secret("a"), hash_secret("b"), ""])
IDS = st.sampled_from([UUID(int=1), UUID(int=2), UUID(int=3)])
ROWS = st.lists(
    st.builds(NodeFacts, IDS, FINGERPRINTS, st.booleans()).filter(lambda r: not (r.fingerprint and r.weak)),
    unique_by=lambda row: row.id,
)


@given(node_id=IDS, fingerprint=FINGERPRINTS, rows=ROWS)
def test_a_credential_opens_its_own_node_only(node_id: UUID, fingerprint: str, rows: list[NodeFacts]) -> None:
    """401 for nobody's credential, 403 for another node's, 404 for an unknown id; never a wrong yes."""
    target = next((row for row in rows if row.id == node_id), None)
    owns = target is not None and target.fingerprint == fingerprint and (bool(fingerprint) or target.weak)
    known = not fingerprint or any(row.fingerprint == fingerprint for row in rows)
    expected: type[errors.ClusterError] | None = None
    if not owns:
        refused = errors.NotFound if target is None else errors.Forbidden
        expected = refused if known else errors.NotAuthenticated
    if expected is None:
        assert judge(node_id, fingerprint, "", rows).node_id == node_id
    else:
        with pytest.raises(expected):
            judge(node_id, fingerprint, "", rows)


def test_nothing_matches_an_unset_secret() -> None:
    """An empty setting opens nothing."""
    assert not same("", "")
    assert not same("x", "")
    assert same("\udcff x", "\udcff x")


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
    assert offered(lambda name: headers.get(name, "")) == credential


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


@pytest.mark.parametrize("kind", ["", "application/json", "Application/JSON; charset=utf-8"])
def test_json_content_types(kind: str) -> None:
    """§0.1."""
    assert is_json(kind)
    assert not is_json("text/" + str(uuid4()))
