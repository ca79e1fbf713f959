"""Placement: feasibility and ranking as properties over arbitrary fleets."""

from uuid import UUID

from hypothesis import given
from hypothesis import strategies as st

from nodes.placement.choose import NodeView, Reason, choose, free_index, refusal

statuses = st.sampled_from(["pending", "healthy", "unhealthy", "offline", "draining"])
nodes = st.builds(
    NodeView,
    id=st.uuids(),
    name=st.text(min_size=1, max_size=5),
    node_type=st.sampled_from(["backend", "agent"]),
    status=statuses,
    free_vram=st.integers(-(2**40), 2**40),
    loaded=st.integers(0, 3),
    in_flight=st.integers(0, 9),
    taken=st.frozensets(st.integers(0, 3)),
    slots=st.integers(0, 4),
)
fleets = st.lists(nodes, max_size=8, unique_by=lambda node: node.id)


def view(**given_values: object) -> NodeView:
    plain = {
        "id": UUID(int=1),
        "name": "a",
        "node_type": "backend",
        "status": "healthy",
        "free_vram": 0,
        "loaded": 0,
        "in_flight": 0,
        "taken": frozenset(),
        "slots": 1,
    }
    return NodeView(**{**plain, **given_values})  # type: ignore[arg-type]


@given(fleets, st.frozensets(st.uuids(), max_size=2))
def test_only_healthy_backend_nodes_with_a_free_slot_are_chosen(
    fleet: list[NodeView], avoid: frozenset[UUID]
) -> None:
    """I10, R1.1, R1.63: nothing is placed on a pending, draining, offline, unhealthy, agent or full node."""
    decision = choose(fleet, avoid=avoid)
    if decision.node is None:
        assert all(refusal(node) is not None for node in fleet)
        return
    assert (decision.node.status, decision.node.node_type) == ("healthy", "backend")
    assert decision.replica_index not in decision.node.taken
    assert 0 <= decision.replica_index < decision.node.slots


@given(fleets)
def test_every_refused_node_keeps_its_reason(fleet: list[NodeView]) -> None:
    """Lesson 12: feasible and refused together are the whole fleet."""
    decision = choose(fleet)
    assert set(decision.refused) == {node.id for node in fleet if refusal(node) is not None}


@given(fleets)
def test_the_choice_does_not_depend_on_the_order_of_the_fleet(fleet: list[NodeView]) -> None:
    """A placement that re-computes to another answer could not be explained (I14)."""
    named = [NodeView(**{**node.__dict__, "name": str(node.id)}) for node in fleet]
    assert choose(named).node == choose(list(reversed(named))).node


@given(nodes)
def test_the_lowest_free_index_is_taken(node: NodeView) -> None:
    """R1.63: the lowest integer in [0, cap) not in use."""
    expected = sorted(set(range(node.slots)) - node.taken)
    assert free_index(node) == (expected[0] if expected else None)


def test_an_idle_node_wins_then_the_one_with_more_free_memory() -> None:
    """R1.70: idle first, most effectively free memory among equals."""
    busy = view(id=UUID(int=1), loaded=1, free_vram=100)
    small, large = view(id=UUID(int=2), free_vram=1), view(id=UUID(int=3), free_vram=50)
    assert choose([busy, small, large]).node == large


def test_a_node_that_just_failed_is_the_last_resort() -> None:
    """A node that did not answer is avoided, unless there is no other."""
    failed, other = view(id=UUID(int=1), free_vram=9), view(id=UUID(int=2), loaded=2)
    assert choose([failed, other], avoid={failed.id}).node == other
    assert choose([failed], avoid={failed.id}).node == failed


def test_the_reason_names_what_to_do() -> None:
    """The caller learns whether to add a node, approve one or wait."""
    assert choose([]).why_none() == "no node is registered"
    assert choose([view(status="pending")]).why_none() == "only pending nodes (1): approve one"
    mixed = choose([view(status="offline"), view(id=UUID(int=2), status="draining")]).why_none()
    assert mixed == "no node can take it: 1 draining, 1 offline"
    assert refusal(view(taken=frozenset({0}))) is Reason.FULL
