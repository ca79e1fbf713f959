"""GPUs of a node: which of them a load gets, as properties over arbitrary fleets."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localai_cluster.kit import errors
from localai_cluster.messaging.messages import InstallReply
from nodes.decisions.decision_log import encode, find_changes, restore
from nodes.definitions.files import parse_definition
from nodes.definitions.sizes import ModelFiles
from nodes.loading import load, load_request
from nodes.loading.load_attempts import NodeRefused
from nodes.loading.load_snapshots import decode_load, encode_load
from nodes.placement.choose import Candidate, Need, Reason, choose_node, find_refusal, gpu_shares
from nodes.placement.evict import (
    ProtectionRules,
    Resident,
    choose_victims,
    free_memory_of,
    nodes_short_of_memory,
)
from nodes.placement.explain import TERMS, FleetView, explain
from nodes.placement.load_decision import LoadQuestion, simulate_placements
from nodes.placement.memory import (
    NEVER,
    SPLIT_OVERHEAD,
    FreeByGpu,
    MemoryReading,
    Reservation,
    add_free_bytes,
    fill_gpus,
    fit_gpus,
    total_bytes,
    unallocated_on_gpu,
)
from nodes.registry import heartbeats, resources
from nodes.replicas.reserved_memory import GpuShare
from nodes.replicas.slots import Slot
from tests.unit.placement.test_choose import view

GIB = 2**30
NOW = datetime(2026, 8, 22, 10, tzinfo=UTC)
rooms = st.dictionaries(st.integers(0, 9), st.integers(-GIB, 49 * GIB), max_size=8).map(
    lambda told: frozenset(told.items())
)
amounts = st.integers(1, 120 * GIB)


def of(*sizes: float) -> FreeByGpu:
    """GPUs 0, 1 … with so many GiB free."""
    return frozenset((index, int(size * GIB)) for index, size in enumerate(sizes))


def machine(name: str, *sizes: float, **more: object) -> Candidate:
    free = int(sum(sizes) * GIB)
    plain = {"id": UUID(int=ord(name)), "name": name, "free_vram": free, "available_vram": free}
    return view(**{**plain, "gpus": of(*sizes), "slots": 9, **more})


machines = st.builds(
    lambda id, told, loaded, spare: view(
        id=id,
        name=str(id),
        gpus=told,
        free_vram=sum(room for _, room in told) - spare,
        available_vram=max(sum(room for _, room in told), 0),
        loaded=loaded,
        slots=9,
    ),
    st.uuids(),
    rooms,
    st.integers(0, 2),
    st.sampled_from([0, 0, GIB]),
)
fleets = st.lists(machines, max_size=6, unique_by=lambda node: node.id)


@pytest.mark.rule("R1.51", "R2.43")
@given(rooms, amounts)
def test_a_fit_holds_the_load_on_the_fewest_gpus_and_none_is_over_what_it_has(
    told: FreeByGpu, need: int
) -> None:
    """Under any free memory of the node: with all of it a fit exists exactly if some set of GPUs has room."""
    by_index = dict(told)
    shares = fit_gpus(10**15, told, need)
    if not told:
        assert shares == {}
        return
    sorted_rooms = sorted(by_index.values(), reverse=True)
    fewest = next(
        (
            count
            for count in range(1, len(sorted_rooms) + 1)
            if sum(sorted_rooms[:count]) - (count * SPLIT_OVERHEAD if count > 1 else 0) >= need
            and (count == 1 or sorted_rooms[count - 1] > SPLIT_OVERHEAD)
        ),
        None,
    )
    assert (shares is None) == (fewest is None)
    if shares is None:
        return
    assert len(shares) == fewest
    assert all(0 < share <= by_index[index] for index, share in shares.items())
    overhead = 0 if len(shares) == 1 else len(shares) * SPLIT_OVERHEAD
    assert need + overhead <= sum(shares.values()) < need + overhead + len(shares)
    if len(shares) == 1:
        ((index, _),) = shares.items()
        left = [room - need for room in by_index.values() if room >= need]
        assert by_index[index] - need == min(left), "best fit"
    assert fit_gpus(sum(shares.values()), told, need) == shares
    assert fit_gpus(sum(shares.values()) - 1, told, need) is None, "a budget of the node holds too"


@given(rooms, amounts)
def test_what_fits_nowhere_fills_what_there_is(told: FreeByGpu, need: int) -> None:
    """Under `prefer`: never more than is free on a GPU, and no more than the load needs."""
    shares = fill_gpus(told, need)
    assert all(0 < share <= dict(told)[index] for index, share in shares.items())
    assert sum(shares.values()) == min(need, sum(room for _, room in told if room > 0))


@pytest.mark.rule("R2.32", "R2.40")
@given(
    fleets.flatmap(lambda fleet: st.tuples(st.just(fleet), st.permutations(fleet))), amounts, st.booleans()
)
def test_under_require_no_gpu_is_over_its_budget_whatever_the_order(
    both: tuple[list[Candidate], list[Candidate]], amount: int, required: bool
) -> None:
    """What was chosen has room on its GPUs; what was refused for them has the memory, but not on GPUs."""
    need = Need(vram=amount, vram_required=required)
    decision, other = (choose_node(fleet, need=need) for fleet in both)
    assert decision == other
    assert decision.describe_refusals() == other.describe_refusals()
    if decision.node is not None and required:
        shares = gpu_shares(decision.node, need)
        assert shares is not None
        assert all(share <= dict(decision.node.gpus)[index] for index, share in shares.items())
    for node in both[0]:
        reason = decision.refused.get(node.id)
        assert (reason is Reason.GPUS) <= (node.free_vram >= amount and gpu_shares(node, need) is None)
        assert (reason is Reason.MEMORY) <= (node.free_vram < amount)


def read_back(view: FleetView) -> FleetView:
    """The view as the log has it."""
    state = restore([encode(find_changes({}, encode_load("1", "m", LoadQuestion(view))))])
    seen = decode_load(state, "1", "m")
    assert seen is not None
    return seen.question.view


@pytest.mark.rule("R2.32")
@given(fleets, st.integers(1, 40 * GIB))
def test_a_plan_puts_no_gpu_below_zero(fleet: list[Candidate], amount: int) -> None:
    """Twelve replicas one after another; a recomputed decision is the same."""
    snapshot = FleetView(fleet, Need(vram=amount, vram_required=True))
    assert read_back(snapshot).decide().node == snapshot.decide().node
    left = {node.id: dict(node.gpus) for node in fleet}
    for told in simulate_placements(LoadQuestion(snapshot), [None] * 12):
        if told.node is None:
            break
        for index, share in (gpu_shares(told.node, snapshot.need) or {}).items():
            left[told.node.id][index] -= share
            assert left[told.node.id][index] >= 0


def test_one_gpu_before_a_split_and_the_fullest_that_has_room() -> None:
    assert fit_gpus(10**15, of(24, 12, 16), 10 * GIB) == {1: 10 * GIB}
    assert fit_gpus(10**15, of(24, 12, 16), 20 * GIB) == {0: 20 * GIB}
    assert fit_gpus(10**15, of(24, 24), 20 * GIB) == {0: 20 * GIB}, "of equal ones the first"
    split = fit_gpus(10**15, of(24, 12, 16), 30 * GIB)
    assert split is not None
    assert split.keys() == {0, 2}
    assert split[0] > split[2]
    assert 31 * GIB <= total_bytes(split, 30 * GIB) <= 31 * GIB + 1, "rounded up"


def test_halves_are_not_one_gpu() -> None:
    """Two half-full cards are no free one: a split costs its overhead, so the last byte does not fit."""
    assert fit_gpus(24 * GIB, of(12, 12), 24 * GIB) is None
    assert fit_gpus(24 * GIB, of(12, 12), 23 * GIB) == {0: 12 * GIB, 1: 12 * GIB}
    assert fit_gpus(24 * GIB, frozenset(), 24 * GIB) == {}, "what is not known cannot refuse"
    assert fit_gpus(24 * GIB, of(12, 12), 0) == {}


def test_the_reason_names_what_each_gpu_has() -> None:
    """R2.39's words, for GPUs."""
    need = Need(vram=24 * GIB, vram_required=True)
    node = machine("a", 12, 11.5, 0.5)
    assert find_refusal(node, need=need) is Reason.GPUS
    said = choose_node([node], need=need).describe_refusals()
    assert said == (
        "no node can take it: 1 without a GPU, or GPUs together, that have the room it needs"
        " (24.0 GiB: a has 12.0 GiB + 11.5 GiB + 0.5 GiB free)"
    )
    many = machine("b", *[4] * 8)
    assert "+ 3 GPUs less free" in choose_node([many], need=replace(need, vram=30 * GIB)).describe_refusals()
    assert find_refusal(node, need=replace(need, own_gpus=True)) is None, "its definition says where"


def test_a_node_that_needs_no_split_comes_first_and_the_record_says_so() -> None:
    """Before one with more memory; `explain` has words for the term."""
    need = Need(vram=20 * GIB, vram_required=True)
    large, whole = machine("a", 16, 16, 16), machine("b", 24, loaded=1, in_flight=3)
    snapshot = FleetView([large, whole], need)
    told = explain(snapshot, snapshot.decide())
    assert told.node == whole
    assert told.sentence == "on the fewest GPUs: 1 against 2 on a"
    first, second = told.facts["best"]
    assert (first["gpus"], second["gpus"]) == ([0], [0, 1])
    assert (first["terms"]["gpus"], second["terms"]["gpus"]) == (1, 2)
    # It is recorded whether the backend is there only where that was looked up, for nodes that are equal.
    assert set(TERMS) - {"lacks_backend"} == set(first["terms"]) - {"has_memory"} | {"lacks_memory"}
    assert read_back(snapshot).decide() == snapshot.decide()


def test_a_record_names_the_gpus_that_lack_room() -> None:
    need = Need(vram=24 * GIB, vram_required=True)
    snapshot = FleetView([machine("a", 12, 12)], need)
    (miss,) = explain(snapshot, snapshot.decide()).facts["misses"]
    assert (miss["code"], miss["free_gpus"]) == ("gpus", [12 * GIB, 12 * GIB])


def resident(number: int, index: int, size: float, **more: object) -> Resident:
    plain = {
        "id": UUID(int=number),
        "node_id": UUID(int=ord("a")),
        "name": f"r{number}#0",
        "model_name": f"r{number}",
        "leaving": False,
        "in_flight": 0,
        "last_used": NOW - timedelta(seconds=100 - number),
        "vram": int(size * GIB),
        "gpus": frozenset({(index, int(size * GIB))}),
    }
    return Resident(**{**plain, **more})  # type: ignore[arg-type]


def room_by(residents: Sequence[Resident], need: Need, *sizes: float) -> list[str] | None:
    node = machine("a", *sizes)
    short = nodes_short_of_memory([node], choose_node([node], need=need).refused)
    found = choose_victims(short, residents, ProtectionRules("m", NOW, {}, {}), need)
    return None if found.node is None else [one.name for one in found.victims]


@pytest.mark.rule("R2.51")
def test_victims_leave_a_gpu_where_the_load_then_fits() -> None:
    """One that was used later, if only its GPU gets room; nobody on another GPU goes for it."""
    need = Need(vram=20 * GIB, vram_required=True)
    here, there = resident(1, 0, 4), resident(2, 1, 16)
    assert room_by([here, there], need, 4, 6) == ["r2#0"]
    assert room_by([here], need, 4, 6) is None
    assert room_by([replace(there, gpus=frozenset())], need, 4, 6) is None, "nobody knows where it is"
    leaving = replace(there, leaving=True)
    assert room_by([here, leaving], need, 4, 6) == []


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 12), st.booleans()), max_size=6),
    st.lists(st.integers(0, 12), min_size=1, max_size=3),
    st.integers(1, 40),
)
def test_after_its_victims_have_gone_the_load_fits_and_none_goes_in_vain(
    told: list[tuple[int, int, bool]], sizes: list[int], amount: int
) -> None:
    need = Need(vram=amount * GIB, vram_required=True)
    found = [
        resident(number, index, size, leaving=leaving) for number, (index, size, leaving) in enumerate(told)
    ]
    node = machine("a", *sizes)
    short = nodes_short_of_memory([node], choose_node([node], need=need).refused)
    chosen = choose_victims(short, found, ProtectionRules("m", NOW, {}, {}), need)
    if chosen.node is None:
        return
    leaving = [one for one in found if one.leaving]
    assert find_refusal(free_memory_of(node, [*leaving, *chosen.victims]), need=need) is None
    for one in chosen.victims:
        others = [other for other in chosen.victims if other is not one]
        assert find_refusal(free_memory_of(node, [*leaving, *others]), need=need) is not None


def test_what_loads_reserve_counts_on_its_gpu_only() -> None:
    """With nothing, half and all of it allocated; what is on no GPU in particular counts on each."""
    split = Reservation(9, 48, NOW, gpus={0: (6, 24), 1: (3, 24)})
    for allocated in (0, 3, 6):
        reading = MemoryReading(24 - allocated, NOW + timedelta(seconds=10))
        assert unallocated_on_gpu([split], 0, reading) == 6 - allocated
    assert unallocated_on_gpu([split], 1, MemoryReading(24, NOW)) == 3
    assert unallocated_on_gpu([split], 2, MemoryReading(24, NOW)) == 0
    anywhere = Reservation(5, 48, NEVER)
    assert [unallocated_on_gpu([split, anywhere], index, MemoryReading(24, NOW)) for index in (0, 1, 2)] == [
        11,
        8,
        5,
    ]
    read = replace(split, loaded_at=NOW)
    assert unallocated_on_gpu([read], 0, MemoryReading(18, NOW + timedelta(seconds=1))) == 0


def test_rooms_change_on_the_gpus_that_are_named() -> None:
    assert add_free_bytes(of(1, 2), [(1, GIB), (7, GIB)]) == of(1, 3)
    assert add_free_bytes(of(1, 2), [(0, -GIB)]) == of(0, 2)


def slot(*shares: GpuShare) -> Slot:
    return Slot(UUID(int=1), UUID(int=2), "one", 0, shares)


DEFINITION = {"name": "m", "backend": "b", "parameters": {"model": "m.gguf"}}


def test_an_engine_is_told_its_split_and_a_worker_must_say_what_it_did() -> None:
    """No split for one GPU; a worker that names other GPUs, or none, has not done it."""
    plain = {"Model": "m.gguf"}
    two = slot(GpuShare("GPU-b", 12 * GIB), GpuShare("GPU-a", 6 * GIB))
    assert load.reserved_gpus(two) == ("GPU-b", "GPU-a")
    assert load.with_gpu_split(plain, two)["TensorSplit"] == "12288,6144"
    assert load.with_gpu_split(plain, slot(GpuShare("GPU-b", GIB))) == plain
    load.check_gpus(InstallReply(True, gpus=("GPU-b", "GPU-a")), two)
    load.check_gpus(InstallReply(True), slot())
    load.check_gpus(InstallReply(True, gpus=("GPU-b",)), slot())
    wrong: list[tuple[str, ...]] = [(), ("GPU-a", "GPU-b"), ("GPU-b",), ("GPU-b", "GPU-a", "GPU-c")]
    for told in wrong:
        with pytest.raises(NodeRefused, match="GPUs chosen"):
            load.check_gpus(InstallReply(True, gpus=told), two)


@pytest.mark.parametrize("key", ["main_gpu", "tensor_split"])
def test_a_definition_that_says_its_gpus_sees_all_of_them(key: str) -> None:
    """Its numbers would mean other GPUs if it saw only some."""
    files = ModelFiles()
    assert not load_request.estimate_need(parse_definition(DEFINITION, "m.yaml"), files).own_gpus
    assert load_request.estimate_need(parse_definition({**DEFINITION, key: "1"}, "m.yaml"), files).own_gpus


GPU = {"index": 0, "uuid": "GPU-a", "name": "NVIDIA L4", "total_vram": 24, "free_vram": 20, "utilization": 7}


def test_gpus_are_read_by_index_and_the_unknown_is_ignored() -> None:
    assert heartbeats.parse_heartbeat({"gpus": None})["gpus"] is None
    assert resources.parse_gpus([]) == []
    second = {"index": 1, "total_vram": 24, "free_vram": 24, "new": [1]}
    assert resources.parse_gpus([second, GPU]) == [
        GPU,
        {"index": 1, "uuid": "", "name": "", "total_vram": 24, "free_vram": 24, "utilization": None},
    ]


WRONG: list[tuple[str, Any]] = [
    ("gpus", "x"),
    ("gpus", {}),
    ("gpus", [GPU | {"index": index, "uuid": ""} for index in range(65)]),
    ("gpus", [GPU, GPU | {"uuid": "GPU-b"}]),
    ("gpus", [GPU, GPU | {"index": 1}]),
    ("gpus.0", [7]),
    ("gpus.1", [GPU, None]),
    *(("gpus.0.index", [GPU | {"index": value}]) for value in (-1, 1024, "0", None, True, 1.0)),
    *(("gpus.0.uuid", [GPU | {"uuid": value}]) for value in (1, "x" * 97, "a\nb", "\x00", "\ud800")),
    *(("gpus.0.name", [GPU | {"name": value}]) for value in (1, "x" * 129, "\u200b")),
    *(("gpus.0.total_vram", [GPU | {"total_vram": value}]) for value in (None, -1, 2**63, 0.5, False)),
    *(("gpus.0.free_vram", [GPU | {"free_vram": value}]) for value in ("1", 2**63)),
    *(("gpus.0.utilization", [GPU | {"utilization": value}]) for value in (-1, 101, "7")),
]


@pytest.mark.parametrize(("field", "told"), WRONG, ids=range(len(WRONG)))
def test_what_is_no_gpu_is_refused_by_its_field(field: str, told: object) -> None:
    with pytest.raises(errors.InvalidInput) as refused:
        resources.parse_gpus(told)
    assert refused.value.field == field


def test_gpus_and_totals_are_one_reading() -> None:
    """R1.33: GPUs alone are the total as well; a total alone means that the GPUs are not known any more."""
    assert heartbeats.parse_heartbeat({"gpus": [GPU]})["available_vram"] == 20
    both = heartbeats.parse_heartbeat({"gpus": [GPU], "available_vram": 9})
    assert (both["available_vram"], both["gpus"]) == (9, [GPU])
    assert heartbeats.parse_heartbeat({"available_vram": 9})["gpus"] == []
    assert heartbeats.parse_heartbeat({"available_ram": 9})["gpus"] is None
