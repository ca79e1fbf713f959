"""Which nodes have the memory for a model, what is missing, and what would help (D-FIT, UW9)."""

from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodes.definitions.files import parse_definition
from nodes.definitions.headers import read_header
from nodes.definitions.sizes import ModelFiles
from nodes.loading import load_request
from nodes.placement import fit
from nodes.placement.choose import (
    Candidate,
    Need,
    choose_node,
    find_refusal,
    gpu_shares,
    has_memory,
    smaller_context,
    usable_bytes,
)
from nodes.placement.evict import ProtectionRules, Resident
from nodes.placement.explain import FleetView, MemoryVerdict, NodeMemory, explain_memory
from nodes.placement.sizes import STATED_NEED
from tests.support import gguf_files
from tests.support.gguf_models import MODELS
from tests.unit.placement.test_choose import view
from tests.unit.placement.test_gpus import NOW, machine, of, read_back, resident

GIB = 2**30
K = 1024
NEED = Need(
    vram=10 * GIB,
    terms=(("weights", 7 * GIB), ("context", 2 * GIB), ("buffers", GIB - 10), ("output", 10)),
    contexts=((32 * K, 0), (16 * K, GIB), (8 * K, GIB + GIB // 2), (4 * K, 2 * GIB)),
)
GUARD = ProtectionRules("m", NOW, {"r1": 1}, {})


def on(name: str, free: float, **facts: object) -> Candidate:
    return view(
        id=UUID(int=ord(name[-1])),
        name=name,
        free_vram=int(free * GIB),
        available_vram=int(free * GIB),
        most_vram=24 * GIB,
        **facts,
    )


def explain(*nodes: Candidate, need: Need = NEED, residents: tuple[Resident, ...] = ()) -> list[NodeMemory]:
    return list(explain_memory(FleetView(nodes, need), residents, GUARD).nodes)


def on_node(node: Candidate, gib: float, **facts: object) -> Resident:
    return resident(1, 0, gib, node_id=node.id, gpus=frozenset(), **facts)


@pytest.mark.rule("R2.41", "UW9")
def test_each_node_has_its_verdict_and_what_would_help() -> None:
    """The issue's sentence: it fits, it fits with less context, something has to be unloaded; or refused."""
    fits, small, full, off = (
        on("gpu-1", 22.15),
        on("gpu-2", 9.2),
        on("gpu-3", 8.625),
        on("gpu-4", 24, status="offline"),
    )
    fleet = FleetView([off, full, small, fits], NEED)
    found = explain_memory(fleet, [on_node(full, 4)], GUARD)
    assert [entry.describe() for entry in found.nodes] == [
        "fits on gpu-1 (needs 10.0 of 22.1 GiB)",
        "on gpu-2 with 16k context: 0.9 GiB missing for all of it",
        "not on gpu-3: 1.4 GiB missing, unload r1#0 or lower the context to 8k",
        "not on gpu-4: offline",
    ]
    assert found.describe().startswith(
        "fits on gpu-1 (needs 10.0 of 22.1 GiB: weights 7.0, context 2.0, buffers 1.0); on gpu-2 with"
    )
    assert [(entry.usable, entry.missing) for entry in found.nodes[:2]] == [
        (fits.free_vram, 0),
        (small.free_vram, 10 * GIB - small.free_vram),
    ]


@pytest.mark.rule("R2.41", "UW9")
def test_what_is_not_known_is_no_lack() -> None:
    (unknown,) = explain(on("a", 24), need=Need())
    assert unknown.describe() == "may fit on a: the need is not known"
    (node,) = explain(view(name="a"))
    assert (node.describe(), node.missing) == ("may fit on a: it reports no VRAM", 0)
    (far,) = explain(on("a", 1))
    assert far.describe() == "not on a: 9.0 GiB missing"


@pytest.mark.rule("R2.35")
def test_a_protected_replica_is_not_to_be_unloaded() -> None:
    node = on("a", 2)
    busy = on_node(node, 20, in_flight=1)
    for replica in (busy, replace(busy, in_flight=0, loaded_at=NOW - timedelta(seconds=1))):
        assert explain(node, residents=(replica,))[0].unload == ()


def test_a_long_fleet_is_cut_and_counted() -> None:
    found = explain_memory(FleetView([on(f"n{chr(65 + i)}", i) for i in range(40)], NEED), [], GUARD)
    assert (len(found.nodes), found.considered) == (20, 40)
    assert found.nodes[0].node.name == f"n{chr(65 + 39)}"
    assert found.describe().endswith("; and 35 more")


@given(
    st.lists(st.integers(0, 24), max_size=4),
    st.integers(0, 48),
    st.integers(1, 40),
    st.sampled_from((0, 1, 2)),
    st.booleans(),
)
def test_a_need_of_what_is_usable_fits_and_of_more_does_not(
    sizes: list[int], free: int, amount: int, cards: int, own: bool
) -> None:
    """On one GPU, split, in equal parts, on the GPUs that the definition names, and without any."""
    by_gpu = ((0, GIB), (1, 3 * GIB)) if own else ()
    need = Need(vram=amount * GIB, cards=0 if own else cards, own_gpus=own, by_gpu=by_gpu)
    node = replace(machine("a", *sizes), free_vram=free * GIB)
    usable = usable_bytes(node, need)
    if has_memory(node, need):
        assert usable >= need.vram
        return
    assert usable < need.vram
    assert usable <= 0 or has_memory(node, replace(need, vram=usable))
    assert not has_memory(node, replace(need, vram=usable + 1))


@pytest.mark.rule("R2.31", "R2.32")
def test_the_refusal_of_a_request_says_what_would_fit() -> None:
    """Terms and context, but no other model's name; the same from the stored snapshot."""
    need = replace(NEED, vram_required=True)
    snapshot = FleetView([on("gpu-1", 9.2), on("gpu-2", 8)], need)
    sentence = choose_node(snapshot.nodes, need=need).describe_refusals()
    assert sentence == (
        "no node can take it: 2 without the VRAM it needs (10.0 GiB for weights 7.0, context 2.0,"
        " buffers 1.0: gpu-1 has 9.1 GiB free, gpu-2 has 8.0 GiB free); with 16k context it fits on gpu-1"
    )
    assert read_back(snapshot).decide().describe_refusals() == sentence


@pytest.mark.rule("R2.31", "R2.32", "UW9")
def test_a_need_that_the_definition_states_has_no_terms() -> None:
    """In the refusal and in the verdict it reads as a sentence."""
    need = Need(10 * GIB, vram_required=True, terms=((STATED_NEED, 10 * GIB),), source=STATED_NEED)
    small, large = on("gpu-1", 9.2), on("gpu-2", 12)
    assert choose_node([small], need=need).describe_refusals() == (
        "no node can take it: 1 without the VRAM it needs"
        " (10.0 GiB as its definition states: gpu-1 has 9.1 GiB free)"
    )
    assert explain_memory(FleetView([small, large], need), [], GUARD).describe() == (
        "fits on gpu-2 (needs 10.0 of 12.0 GiB as its definition states); not on gpu-1: 0.9 GiB missing"
    )


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    """Qwen3-8B, whose layers are equal."""
    (model,) = (model for model in MODELS if model.name == "Qwen3-8B")
    path = gguf_files.write(tmp_path_factory.mktemp("models") / "m.gguf", model)
    return ModelFiles(path.stat().st_size, header=read_header(path))


def need_of(files: ModelFiles, **settings: Any) -> Need:
    document = {"name": "m", "backend": "b", "parameters": {"model": "m.gguf"}, **settings}
    return load_request.estimate_need(parse_definition(document, "m.yaml"), files)


def parts(need: Need) -> Mapping[int, int]:
    return dict(need.by_gpu)


@pytest.mark.rule("R2.41")
def test_a_smaller_context_saves_what_the_estimate_of_it_lacks(files: ModelFiles) -> None:
    need = need_of(files, context_size=10_000)
    assert [tokens for tokens, _ in need.contexts] == [10_000, 8192, 4096, 2048, 1024]
    for tokens, saved in need.contexts:
        assert need.vram - saved == need_of(files, context_size=tokens).vram
    node = view(free_vram=need.vram - need.contexts[2][1])
    assert smaller_context(node, need) == 4096
    assert need_of(files, vram_needed="9GiB").contexts == need_of(files, backend="vllm").contexts == ()
    assert [tokens for tokens, _ in need_of(files, context_size=1).contexts] == [1]


@pytest.mark.rule("R2.41", "R2.43")
def test_a_definition_that_splits_has_a_need_for_each_gpu(files: ModelFiles) -> None:
    """Whole layers by the shares, the output on the last GPU, buffers and the backend's context on each."""
    need = need_of(files, tensor_split="3,0,1")
    assert files.header is not None
    terms, sizes = dict(need.terms), {tensor.name: tensor.size for tensor in files.header.tensors}
    each = (terms["buffers"] + terms["backend"]) // 2
    layer = sum(size for name, size in sizes.items() if name.startswith("blk.0."))
    output = sizes["output.weight"] + sizes["output_norm.weight"]
    context = terms["context"] // 36
    assert parts(need) == {0: each + 28 * (layer + context), 2: each + 8 * (layer + context) + output}
    assert sum(parts(need).values()) == need.vram
    assert parts(need_of(files, main_gpu="1", options=["split_mode:none"])) == {1: need_of(files).vram}
    for settings in (
        {"main_gpu": "1"},
        {"tensor_split": "x"},
        {"tensor_split": "1,1", "options": ["sm:row"]},
    ):
        assert parts(need_of(files, **settings)) == {}
    halves = parts(need_of(ModelFiles(8 * GIB), tensor_split="1/1"))
    assert halves[0] == halves[1] == need_of(ModelFiles(8 * GIB)).vram // 2


@pytest.mark.rule("R2.32", "R2.43")
def test_the_gpus_that_a_definition_names_are_checked_one_by_one() -> None:
    """Enough memory altogether is not enough; without the second GPU the first must hold all."""
    need = Need(vram=20 * GIB, vram_required=True, own_gpus=True, by_gpu=((0, 15 * GIB), (1, 5 * GIB)))
    wide, even, single = machine("a", 16, 8), machine("b", 12, 12), machine("c", 24)
    assert gpu_shares(wide, need) == {0: 15 * GIB, 1: 5 * GIB}
    assert gpu_shares(single, need) == {0: 20 * GIB}
    assert find_refusal(even, need=need) == "without a GPU, or GPUs together, that have the room it needs"
    assert gpu_shares(machine("d", 24), replace(need, by_gpu=((1, 20 * GIB),))) is None
    assert gpu_shares(replace(even, gpus=of()), need) == {}, "what is not reported cannot refuse"
    (entry,) = explain_memory(FleetView([even], need), [], GUARD).nodes
    assert (entry.verdict, entry.usable // GIB) == (MemoryVerdict.LACKS_MEMORY, 16)


@given(
    st.lists(st.floats(0, 10), min_size=1, max_size=4),
    st.integers(0, 99),
    st.sampled_from(("", "none", "layer", "row")),
    st.integers(0, 5),
)
def test_the_parts_of_the_gpus_are_the_whole(
    files: ModelFiles, split: list[float], layers: int, mode: str, main: int
) -> None:
    load = fit.load_options(
        {
            "TensorSplit": ",".join(map(str, split)),
            "NGPULayers": layers,
            "MainGPU": str(main),
            "Options": [f"split_mode:{mode}"],
        }
    )
    whole = fit.total_bytes(fit.estimate(files, load))
    found = dict(fit.by_gpu(files, load))
    assert not found or abs(sum(found.values()) - whole) <= len(found)


def test_a_question_with_parts_is_stored_and_read_back() -> None:
    need = replace(NEED, own_gpus=True, by_gpu=((0, 6 * GIB), (1, 4 * GIB)))
    assert read_back(FleetView([machine("a", 12, 12)], need)).need == need
