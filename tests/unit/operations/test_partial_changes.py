"""Changes that name only the parts that moved: what a page shows is what it would show from whole ones."""

import itertools
from datetime import UTC, datetime
from typing import Any
from uuid import UUID, uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st

from operations.changes.feed import PARTIAL_KEY, as_dict, change_of, merge_changes
from operations.models import Operation, OperationTarget, TargetStatus

NODES = [UUID(int=number) for number in range(4)]
AT = datetime(2026, 8, 22, 10, tzinfo=UTC)
Shown = dict[str, dict[str, Any]]


def operation(parts: dict[UUID, float], seq: int) -> tuple[Operation, list[OperationTarget]]:
    """An install on these nodes, as far as each is."""
    made = Operation(
        id=UUID(int=9), kind="backend_install", element="echo", seq=seq, progress=seq,
        created_at=AT, next_attempt_at=AT,
    )  # fmt: skip
    targets = [
        OperationTarget(
            operation=made,
            node_id=node,
            node_name=str(node),
            percentage=value,
            status=TargetStatus.DOWNLOADING,
        )
        for node, value in parts.items()
    ]
    return made, targets


def applied(shown: Shown, changes: list[dict[str, Any]]) -> Shown:
    """As a page does it."""
    for change in changes:
        known = shown.get(change["jobID"])
        if PARTIAL_KEY not in change:
            shown = {**shown, change["jobID"]: change}
        elif known is not None:
            moved = {part["node_id"]: part for part in change["nodes"]}
            nodes = [moved.get(part["node_id"], part) for part in known["nodes"]]
            told = {key: value for key, value in change.items() if key != PARTIAL_KEY}
            shown = {**shown, change["jobID"]: {**told, "nodes": nodes}}
    return shown


MOVES = st.lists(
    st.dictionaries(st.sampled_from(NODES), st.integers(0, 100).map(float), max_size=len(NODES)), max_size=6
)


@given(moves=MOVES, cuts=st.sets(st.integers(0, 6)))
@pytest.mark.rule("UI-0.13")
def test_partial_changes_together_or_one_by_one_show_the_whole(
    moves: list[dict[UUID, float]], cuts: set[int]
) -> None:
    now = dict.fromkeys(NODES, 0.0)
    first = as_dict(*operation(now, 0))
    changes = []
    for seq, move in enumerate(moves, 1):
        now |= move
        made, targets = operation(now, seq)
        changes.append(change_of(made, targets, [one for one in targets if one.node_id in move]))
    whole = as_dict(*operation(now, len(moves)))
    shown: Shown = {first["jobID"]: first}
    assert applied(shown, changes) == {whole["jobID"]: whole}
    edges = sorted({0, len(moves), *(cut for cut in cuts if cut <= len(moves))})
    for start, end in itertools.pairwise(edges):
        shown = applied(shown, merge_changes(changes[start:end]))
    assert shown == {whole["jobID"]: whole}


def test_a_change_of_one_part_is_as_large_as_one_part() -> None:
    made, targets = operation({uuid4(): 1.0 for _ in range(1000)}, 1)
    change = change_of(made, targets, targets[:1])
    assert (len(change["nodes"]), change[PARTIAL_KEY]) == (1, True)
    assert PARTIAL_KEY not in change_of(made, targets, targets)
    assert len(change_of(made, targets)["nodes"]) == 1000


def test_a_partial_change_after_a_whole_one_makes_a_whole_one_and_order_is_that_of_the_last() -> None:
    made, targets = operation(dict.fromkeys(NODES, 0.0), 1)
    other = {**as_dict(Operation(kind="model_load", element="m")), "seq": 2}
    moved, later = operation(dict.fromkeys(NODES, 5.0), 3)
    found = merge_changes([change_of(made, targets), other, change_of(moved, later, later[:1])])
    assert [one["seq"] for one in found] == [2, 3]
    assert PARTIAL_KEY not in found[1]
    assert [part["percentage"] for part in found[1]["nodes"]] == [5.0, 0.0, 0.0, 0.0]
