"""Placement: feasibility and ranking as properties over arbitrary fleets."""

from datetime import UTC, datetime, timedelta
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodes.placement import load_times, memory
from nodes.placement.choose import (
    ANY_NODE,
    Candidate,
    Need,
    Reason,
    Selector,
    choose_node,
    find_refusal,
    free_index,
)
from nodes.placement.load_times import NodeBackoff
from nodes.placement.sizes import describe_disk_need

NOW = datetime(2026, 8, 22, 10, tzinfo=UTC)

LABELS = [(key, value) for key in ("tier", "zone") for value in ("a", "b")]
labels = st.frozensets(st.sampled_from(LABELS), max_size=2)
selectors = st.builds(Selector, model=st.just("m"), labels=st.none() | labels)

statuses = st.sampled_from(["pending", "healthy", "unhealthy", "offline", "draining"])
nodes = st.builds(
    Candidate,
    id=st.uuids(),
    name=st.text(min_size=1, max_size=5),
    node_type=st.sampled_from(["backend", "agent"]),
    status=statuses,
    free_vram=st.integers(-(2**40), 2**40),
    loaded=st.integers(0, 3),
    in_flight=st.integers(0, 9),
    used_indices=st.frozensets(st.integers(0, 3)),
    slots=st.integers(0, 4),
    labels=labels,
    available_vram=st.integers(0, 2**40),
    total_disk=st.sampled_from([0, 2**40]),
    available_disk=st.integers(0, 2**40),
    promised_bytes=st.sampled_from([0, 2**20, 2**39]),
    staged_bytes=st.sampled_from([0, 2**20, 2**39]),
    disk_quota=st.sampled_from([0, 1, 2**40]),
    other_models_bytes=st.integers(0, 2**40),
)
fleets = st.lists(nodes, max_size=8, unique_by=lambda node: node.id)


def view(**given_values: object) -> Candidate:
    plain = {
        "id": UUID(int=1),
        "name": "a",
        "node_type": "backend",
        "status": "healthy",
        "free_vram": 0,
        "loaded": 0,
        "in_flight": 0,
        "used_indices": frozenset(),
        "slots": 1,
    }
    return Candidate(**{**plain, **given_values})  # type: ignore[arg-type]


@pytest.mark.rule("R1.63", "R1.64", "R1.68", "R1.69", "R2.5")
@given(fleets, st.frozensets(st.uuids(), max_size=2), selectors)
def test_only_healthy_backend_nodes_that_match_and_have_a_free_slot_are_chosen(
    fleet: list[Candidate], resting: frozenset[UUID], selector: Selector
) -> None:
    """I10, R1.1, R1.63: nothing is placed on a pending, draining, offline, unhealthy, agent or full node.

    Nor on one outside the selector, and a selector that cannot be read matches nothing.
    """
    decision = choose_node(fleet, backed_off=resting, selector=selector)
    if decision.node is None:
        assert all(find_refusal(node, resting, selector=selector) is not None for node in fleet)
        return
    assert selector.labels is not None
    assert selector.labels <= decision.node.labels
    assert len(decision.node.used_indices) < decision.node.slots, "no node over its cap"
    assert decision.node.id not in resting
    assert (decision.node.status, decision.node.node_type) == ("healthy", "backend")
    assert decision.replica_index not in decision.node.used_indices
    assert 0 <= decision.replica_index < decision.node.slots


@pytest.mark.rule("R2.31")
@given(fleets)
def test_every_refused_node_keeps_its_reason(fleet: list[Candidate]) -> None:
    """Lesson 12: feasible and refused together are the whole fleet."""
    decision = choose_node(fleet)
    assert set(decision.refused) == {node.id for node in fleet if find_refusal(node) is not None}
    assert {node.id for node in decision.ranked} == {node.id for node in fleet} - set(decision.refused)


@given(fleets.flatmap(lambda fleet: st.tuples(st.just(fleet), st.permutations(fleet))), selectors)
def test_the_choice_does_not_depend_on_the_order_of_the_fleet(
    fleets: tuple[list[Candidate], list[Candidate]], selector: Selector
) -> None:
    """A placement that re-computes to another answer could not be explained (I14)."""
    one, other = (
        choose_node(
            [Candidate(**{**node.__dict__, "name": str(node.id)}) for node in fleet], selector=selector
        )
        for fleet in fleets
    )
    assert one == other
    assert one.describe_refusals() == other.describe_refusals()


@pytest.mark.rule("R1.63", "T-REG-68")
@given(nodes)
def test_the_lowest_free_index_is_taken(node: Candidate) -> None:
    """R1.63: the lowest integer in [0, cap) not in use; rows above a lowered cap count too (R1.64)."""
    expected = (
        sorted(set(range(node.slots)) - node.used_indices) if len(node.used_indices) < node.slots else []
    )
    assert free_index(node) == (expected[0] if expected else None)


needs = st.builds(
    Need,
    vram=st.integers(0, 2**40),
    vram_required=st.booleans(),
    disk=st.integers(0, 2**40),
    disk_required=st.booleans(),
    files=st.integers(0, 2**40),
)
GIB = 2**30


@given(fleets, needs)
def test_no_node_is_over_its_budget_where_that_is_required(fleet: list[Candidate], need: Need) -> None:
    """R2.32 under `require`, R2.38: what was chosen has the room; what was refused for it has not."""
    decision = choose_node(fleet, need=need)
    for node in decision.ranked:
        assert node.free_vram >= need.vram or not need.vram_required or not need.vram
        free_disk = max(node.available_disk - node.promised_bytes, 0) + node.staged_bytes
        assert not node.total_disk or free_disk >= need.disk or not need.disk_required
        fits_quota = not node.disk_quota or node.other_models_bytes + need.files <= node.disk_quota
        assert fits_quota or need.files <= node.staged_bytes, "D-DISK-QUOTA"
    for node in fleet:
        if decision.refused.get(node.id) is Reason.MEMORY:
            assert node.free_vram < need.vram
        if decision.refused.get(node.id) is Reason.DISK:
            assert node.total_disk > 0
            assert max(node.available_disk - node.promised_bytes, 0) + node.staged_bytes < need.disk
        if decision.refused.get(node.id) is Reason.QUOTA:
            assert node.other_models_bytes + need.files > node.disk_quota > 0


@given(fleets, st.integers(1, 2**40))
def test_lack_of_memory_alone_keeps_no_node_out_by_default(fleet: list[Candidate], vram: int) -> None:
    """R2.32: it only ranks lower than every node that has the memory and failed no more often."""
    decision, plain = choose_node(fleet, need=Need(vram=vram)), choose_node(fleet)
    assert decision.refused == plain.refused
    fits = [node.free_vram >= vram for node in decision.ranked]
    assert fits == sorted(fits, reverse=True)


@pytest.mark.rule("R1.70", "R1.71", "R1.72", "T-ROU-5", "T-ROU-6", "T-ROU-7", "R2.33")
def test_the_order_with_and_without_an_estimate() -> None:
    """With one: idle nodes that have it, then others that have it by requests. Else by available memory."""
    nodes = [
        view(id=UUID(int=1), name="idle-small", free_vram=10, available_vram=90),
        view(id=UUID(int=2), name="idle-large", free_vram=50, available_vram=60),
        view(id=UUID(int=3), name="busy", free_vram=95, available_vram=95, loaded=1, in_flight=2),
        view(id=UUID(int=4), name="quiet", free_vram=70, available_vram=70, loaded=1, in_flight=1),
    ]

    def order(vram: int) -> list[str]:
        return [node.name for node in choose_node(nodes, need=Need(vram=vram)).ranked]

    assert order(8) == ["idle-large", "idle-small", "quiet", "busy"]
    assert order(40) == ["idle-large", "quiet", "busy", "idle-small"]
    assert order(80) == ["busy", "idle-small", "idle-large", "quiet"]
    assert order(0) == order(99) == ["idle-small", "idle-large", "quiet", "busy"]


@pytest.mark.rule("R2.37", "R2.39")
@pytest.mark.parametrize(
    ("payload", "said"),
    [
        (0, "2.0 GiB assumed for files of unknown size"),
        (100, "100 B of files and 1.0 GiB to spare"),
        (3_000_000, "3 MiB of files and 1.0 GiB to spare"),
        (40 * GIB, "40.0 GiB of files and 2.0 GiB to spare"),
    ],
)
def test_the_disk_space_that_is_needed_is_explained(payload: int, said: str) -> None:
    """Review X10: a load of a model of 100 bytes was refused for want of "2.0 GiB"."""
    assert describe_disk_need(payload, memory.required_disk(payload)) == said


@pytest.mark.rule("R2.38", "R2.39", "T-DSK-3", "T-DSK-4", "T-DSK-5", "T-DSK-7", "T-DSK-9")
def test_a_node_without_the_disk_space_is_refused() -> None:
    """One that reports no disk is not; the sentence names the requirement and what each node has."""
    small = view(id=UUID(int=1), name="small", total_disk=100 * GIB, available_disk=20 * GIB)
    full = view(id=UUID(int=2), name="full", total_disk=50 * GIB, available_disk=0)
    silent = view(id=UUID(int=3), name="silent", total_disk=0)
    large, little = Need(disk=70 * GIB, disk_required=True), Need(disk=2 * GIB, disk_required=True)
    assert choose_node([small, full, silent], need=large).node == silent
    assert choose_node([small, full], need=little).node == small
    decision = choose_node([small, full], need=large)
    assert decision.refused == {small.id: Reason.DISK, full.id: Reason.DISK}
    assert decision.describe_refusals() == (
        "no node can take it: 2 without the disk space it needs"
        " (70.0 GiB: small has 20.0 GiB of 100.0 GiB free, full has 0.0 GiB of 50.0 GiB free)"
    )
    assert choose_node([full], need=Need(disk=70 * GIB)).node == full, "the switch is off"
    away = choose_node([view(status="offline")], need=large).describe_refusals()
    assert away == "no node can take it: 1 offline", "that is no matter of disks"


@pytest.mark.rule("R2.38", "R2.39")
def test_a_refusal_names_the_free_space_that_other_loads_will_take() -> None:
    """Else the operator reads of a full disk, which no page shows, and deletes files."""
    disk = {"total_disk": 100 * GIB, "available_disk": 50 * GIB}
    plain = view(id=UUID(int=1), name="plain", **disk | {"available_disk": 20 * GIB})
    held = view(id=UUID(int=2), name="held", promised_bytes=40 * GIB, **disk)
    over = view(id=UUID(int=3), name="over", promised_bytes=60 * GIB, **disk)
    assert choose_node([held], need=Need(disk=10 * GIB, disk_required=True)).node == held
    decision = choose_node([over, held, plain], need=Need(disk=30 * GIB, disk_required=True))
    assert decision.describe_refusals() == (
        "no node can take it: 3 without the disk space it needs"
        " (30.0 GiB: plain has 20.0 GiB of 100.0 GiB free,"
        " held has 50.0 GiB of 100.0 GiB free, of which other loads will take 40.0 GiB,"
        " over has 50.0 GiB of 100.0 GiB free, of which other loads will take 50.0 GiB)"
    )


@pytest.mark.rule("R2.38", "R2.39")  # D-DISK-QUOTA
def test_a_refusal_for_the_quota_says_what_is_used_and_missing() -> None:
    """The nearest node comes first; what a node has of the model counts as used and not as missing."""
    near = view(id=UUID(int=1), name="near", disk_quota=50 * GIB, other_models_bytes=40 * GIB)
    part = view(id=UUID(int=2), name="part", disk_quota=9 * GIB, other_models_bytes=GIB, staged_bytes=2 * GIB)
    need = Need(files=12 * GIB)
    decision = choose_node([part, near], need=need)
    assert set(decision.refused.values()) == {Reason.QUOTA}
    assert decision.describe_refusals() == (
        "no node can take it: 2 without space in the disk quota for models (12.0 GiB of files:"
        " near: 40.0 GiB of 50.0 GiB of the quota for models are used, 12.0 GiB more are needed,"
        " part: 3.0 GiB of 9.0 GiB of the quota for models are used, 10.0 GiB more are needed);"
        " remove models there that are not used, or raise the quota"
    )
    assert choose_node([part, near], need=Need(files=10 * GIB)).node == near


@pytest.mark.rule("R2.32")
def test_a_refusal_for_memory_says_how_much_is_missing() -> None:
    """The nodes with most come first, and only some are named."""
    fleet = [view(id=UUID(int=n), name=f"n{n}", free_vram=n * GIB) for n in range(7)]
    said = choose_node(fleet, need=Need(vram=8 * GIB, vram_required=True)).describe_refusals()
    assert said == (
        "no node can take it: 7 without the VRAM it needs (8.0 GiB: n6 has 6.0 GiB free, n5 has 5.0 GiB"
        " free, n4 has 4.0 GiB free, n3 has 3.0 GiB free, n2 has 2.0 GiB free, and 2 more)"
    )


@pytest.mark.rule("R2.33")
def test_an_idle_node_wins_then_the_one_with_more_free_memory() -> None:
    """R1.70: idle first, most effectively free memory among equals."""
    busy = view(id=UUID(int=1), loaded=1, available_vram=100)
    small, large = view(id=UUID(int=2), available_vram=1), view(id=UUID(int=3), available_vram=50)
    assert choose_node([busy, small, large]).node == large


def test_a_node_that_failed_this_load_comes_after_those_that_did_not() -> None:
    """Its rest is over, so it is the last resort: another node is tried first, however full that one is."""
    failed, other = view(id=UUID(int=1), free_vram=9), view(id=UUID(int=2), loaded=2)
    known = {failed.id: NodeBackoff(1, NOW)}
    assert choose_node([failed, other], backoffs=known).node == other
    assert choose_node([failed], backoffs=known).node == failed


def test_a_resting_node_is_not_chosen_and_the_reason_is_kept() -> None:
    """A load says that it waits for a node which did not answer, instead of asking it all the time."""
    silent = view()
    decision = choose_node([silent], backed_off={silent.id})
    assert decision.node is None
    assert decision.refused == {silent.id: Reason.SILENT}
    assert decision.describe_refusals() == "no node can take it: 1 not answering or failed a moment ago"


def test_a_nodes_rest_doubles_up_to_a_limit_and_delays_no_other() -> None:
    """The back-off belongs to the node: another one that fails for the first time starts at the beginning."""
    one, other, known, rests = UUID(int=1), UUID(int=2), dict[UUID, NodeBackoff](), []
    for _ in range(12):
        known = load_times.add_failure(known, one, NOW)
        rests.append((known[one].until - NOW).total_seconds())
    assert rests == [1, 2, 4, 8] + [15] * 8
    known = load_times.add_failure(known, other, NOW)
    assert (known[other].times, load_times.seconds_until_retry(known, NOW)) == (1, 1)
    later = NOW + timedelta(seconds=1)
    assert load_times.backed_off_nodes(known, NOW) == {one, other}
    assert load_times.backed_off_nodes(known, later) == {one}
    assert load_times.seconds_until_retry(known, later) == pytest.approx(14)
    assert load_times.seconds_until_retry({}, NOW) is None


def test_setbacks_survive_the_payload() -> None:
    """The next attempt may be another controller's; what else the payload says stays."""
    known = load_times.add_failure({}, UUID(int=1), NOW)
    payload = load_times.into_payload({"model": "m"}, known)
    assert load_times.from_payload(payload) == known
    assert payload["model"] == "m"
    assert load_times.from_payload({}) == {}


def test_the_reason_names_what_to_do() -> None:
    """The caller learns whether to add a node, approve one or wait."""
    assert choose_node([]).describe_refusals() == "no node is registered"
    assert choose_node([view(status="pending")]).describe_refusals() == "only pending nodes (1): approve one"
    mixed = choose_node([view(status="offline"), view(id=UUID(int=2), status="draining")]).describe_refusals()
    assert mixed == "no node can take it: 1 draining, 1 offline"
    assert find_refusal(view(used_indices=frozenset({0}))) is Reason.FULL


@pytest.mark.rule("R2.5", "R1.68", "R1.69")
@pytest.mark.parametrize(
    ("selector", "said"),
    [
        ({("tier", "fast"), ("gpu", "a")}, "the selector of model m: gpu=a, tier=fast"),
        (None, "the selector of model m, which cannot be read"),
    ],
    ids=["demands", "unreadable"],
)
def test_a_selector_that_nothing_matches_is_named_with_its_model(
    selector: set[tuple[str, str]] | None, said: str
) -> None:
    """Whether a node that does not match is there or not says nothing: it is of no use."""
    demanded = Selector("m", None if selector is None else frozenset(selector))
    fleet = [
        view(labels=frozenset({("tier", "fast")})),
        view(id=UUID(int=2), status="offline", labels=frozenset({("gpu", "a")})),
        view(id=UUID(int=3), node_type="agent"),
    ]
    assert choose_node(fleet, selector=demanded).describe_refusals() == f"no node matches {said}"


@pytest.mark.rule("R2.5")
def test_a_node_that_does_not_match_is_one_reason_among_others() -> None:
    slow, full = (
        view(),
        view(id=UUID(int=2), labels=frozenset({("tier", "fast")}), used_indices=frozenset({0})),
    )
    fast = Selector("m", frozenset({("tier", "fast")}))
    said = choose_node([slow, full], selector=fast).describe_refusals()
    assert said == "no node can take it: 1 no free slot for this model, 1 not matching the rule's selector"
    assert choose_node([slow, full], selector=ANY_NODE).node == slow
