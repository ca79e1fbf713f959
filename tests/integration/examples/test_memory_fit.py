"""The estimate beside the buffers that llama.cpp allocates (D-FIT): `make sweep` writes `docs/fit.md`.

The files have the dimensions of published models and a hole for the tensors (`tests/support/gguf_files.py`),
so nothing is downloaded and a row costs seconds.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from gguf import GGMLQuantizationType as Type

from nodes.definitions.sizes import ModelFiles, read_header
from nodes.placement import fit
from tests.support import gguf_files, llama_buffers
from tests.support.backends import ROOT
from tests.support.effort import swept
from tests.support.gguf_files import Dimensions
from tests.support.gguf_models import HELD_OUT, MODELS

MIB, GIB = 2**20, 2**30
CONTEXT = 2048
LARGEST_FILE = 8 * GIB
"""llama.cpp reads a mapped file ahead, so larger ones would fill the machine's page cache."""
ROUNDED = 0.006
"""MiB: llama.cpp prints two decimals."""


@dataclass(frozen=True)
class Row:
    """One model: its terms and llama.cpp's buffers, in MiB."""

    model: Dimensions
    size: int
    estimated: dict[str, float]
    measured: dict[str, float]

    def error(self, *terms: str) -> float:
        """The error of these terms together, as a share of what was measured."""
        expected, found = (
            sum(side.get(term, 0) for term in terms) for side in (self.measured, self.estimated)
        )
        return (found - expected) / expected if expected else 0.0

    @property
    def whole(self) -> float:
        return self.error("weights", "context", "buffers", "output")


def compare(folder: Path, model: Dimensions, options: dict[str, Any], parameters: dict[str, Any]) -> Row:
    """Estimate the model and have llama.cpp load it, with weights of as few bits as possible."""
    kind = model.kind if model.width % 256 else Type.IQ1_S
    path = gguf_files.write(folder / f"{model.name}.gguf", replace(model, kind=kind))
    size = path.stat().st_size
    header = read_header(path)
    terms = fit.estimate(ModelFiles(size, header=header), fit.load_options(options), "cpu")
    estimated = {name: amount / MIB for name, amount in terms}
    # The measurement has no copies in another layout: mapped weights are compared as they are in the file.
    estimated["weights"] = sum(tensor.size for tensor in header.tensors) / MIB if header is not None else 0.0
    measured: dict[str, float] = {}
    if size <= LARGEST_FILE:
        found = llama_buffers.measure(path, json.dumps({"n_ctx": CONTEXT, **parameters}))
        measured = {
            "weights": found["model"],
            "context": found["KV"] + found["RS"],
            "buffers": found["compute"],
            "output": found["output"],
        }
    path.unlink()
    return Row(model, size, estimated, measured)


def check(row: Row) -> None:
    """The goals: the cache to 1 %, the whole at most 3 % too low and 12 % too high."""
    context = row.estimated.get("context", 0.0)
    assert context == pytest.approx(row.measured["context"], rel=0.01, abs=ROUNDED), row
    assert -0.03 <= row.whole <= 0.12, row


OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "slots": ({"Options": ["parallel:4"], "ContextSize": 3000}, {"n_parallel": 4, "n_ctx": 3000}),
    "parts": (
        {"Options": ["parallel:4", "kv_unified:false"], "ContextSize": 3000},
        {"n_parallel": 4, "n_ctx": 3000, "kv_unified": False},
    ),
    "eight bits": (
        {"CacheTypeKey": "q8_0", "CacheTypeValue": "q8_0"},
        {"cache_type_k": 8, "cache_type_v": 8},
    ),
    "without flash attention": ({"FlashAttention": "off"}, {"flash_attn_type": 0}),
    "embeddings": ({"Embeddings": True}, {"embedding": True}),
}


@pytest.mark.rule("R2.41")
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize(
    "name",
    [
        "gemma-3-1b",
        *(
            pytest.param(n, marks=swept)
            for n in ("Qwen3-0.6B", "LFM2-350M", "granite-4.0-h-micro", "gpt-oss-20b", "bge-small-en")
        ),
    ],
)
def test_the_options_of_a_load(
    tmp_path: Path, name: str, options: tuple[dict[str, Any], dict[str, Any]]
) -> None:
    (model,) = (model for model in (*MODELS, *HELD_OUT) if model.name == name)
    row = compare(tmp_path, model, {"ContextSize": CONTEXT, **options[0]}, options[1])
    context = row.estimated.get("context", 0.0)
    assert context == pytest.approx(row.measured["context"], rel=0.01, abs=ROUNDED), row
    assert row.whole >= -0.03, row


@swept
@pytest.mark.rule("R2.41")
def test_the_table(tmp_path: Path) -> None:
    """Every model; the goals hold for all of them and also for those that chose no constant."""
    rows = [compare(tmp_path, model, {"ContextSize": CONTEXT}, {}) for model in (*MODELS, *HELD_OUT)]
    (ROOT / "docs" / "fit.md").write_text(document(rows), "utf-8")
    measured = [row for row in rows if row.measured]
    assert len(measured) >= 30
    assert len({row.model.architecture for row in measured}) >= 12
    for row in measured:
        check(row)


HEAD = """# What fits: estimates and measurements

Written by `make sweep` (`tests/integration/examples/test_memory_fit.py`). Each row is a file with the
dimensions of a published model and a hole in place of its weights, loaded by llama.cpp (xllamacpp, CPU) with
{context:,} tokens of context, one slot, mapped weights and `fit` switched off. Weights have 1.6 bits where
possible, which makes the other terms the larger part. Figures are MiB: estimated / reported by llama.cpp.
*Held out* models, most of them of architectures that are above too, were measured after the constants had
been chosen. The error is that of all terms together, weights included, and of buffers alone.

Where it is bad, on 2026-11-27: without flash attention buffers are 11 % too high for DeepSeek-V2-Lite, 4 %
for LFM2-1.2B, and 3 % too low for gemma-3-1b; as an embedding model LFM2 takes half of what is estimated. Not
measured: the copies of weights in another layout (`CPU_REPACK`), the memory of a whole process, projectors,
draft models, several devices.

| of {count} models | median | 95 % below | lowest | highest |
|---|---|---|---|---|
{summary}

GPUs: not measured. The compute buffers of eight of these models agree with those that gguf-parser-go
publishes for a GPU within 4 % (`tests/unit/placement/test_fit.py`); the backend's own context
(`BACKEND_CONTEXT` in `nodes/placement/fit.py`) is a published figure.

## Learned

An estimate ends where a reading begins. After each load the worker measures the engine: its processes' memory
on the GPUs (NVML, ROCm) and their proportional share of the main memory. Where the worker does not tell (a
stock worker, a container that hides process ids), the difference of the node's readings before and after the
load counts, if no other engine used the same GPUs and no other load ran on the node. Otherwise nothing is
learned. The largest of the last five readings of the same stored definition, backend build and kind of device
is the need of the next load, never less than weights and context of the estimate; a difference below that was
disturbed and does not count. Of three models that load on one GPU at once each is learned exactly by its own
figure, and none without it (`tests/integration/loading/test_load_info.py`). Real GPUs: not measured.

## The models

| model | architecture | file, GiB | context | buffers | error of buffers | error |
|---|---|---|---|---|---|---|
"""


def document(rows: Sequence[Row]) -> str:
    """The table, worst first within its kind of row."""
    measured = [row for row in rows if row.measured]
    kinds = {
        "whole": [row.whole for row in measured],
        "whole, held out": [row.whole for row in measured if row.model in HELD_OUT],
        "context": [row.error("context") for row in measured],
        "buffers": [row.error("buffers") for row in measured],
    }
    summary = "\n".join(summarised(name, errors) for name, errors in kinds.items())
    head = HEAD.format(context=CONTEXT, count=len(measured), summary=summary)
    return head + "\n".join(map(line, rows)) + "\n"


def summarised(name: str, errors: Sequence[float]) -> str:
    sizes = sorted(map(abs, errors))
    figures = (f"{median(sizes):.1%}", f"{sizes[int(len(sizes) * 0.95) - 1]:.1%}")
    return f"| {name} | {' | '.join(figures)} | {min(errors):+.1%} | {max(errors):+.1%} |"


def line(row: Row) -> str:
    name = row.model.name + (" (held out)" if row.model in HELD_OUT else "")
    start = f"| {name} | {row.model.architecture} | {row.size / GIB:.1f} |"
    if not row.measured:
        context, buffers = (row.estimated.get(term, 0) for term in ("context", "buffers"))
        return f"{start} {context:.1f} / not measured | {buffers:.1f} / not measured | | |"
    pairs = (
        f"{row.estimated.get(term, 0):.1f} / {row.measured[term]:.1f}" for term in ("context", "buffers")
    )
    return f"{start} {' | '.join(pairs)} | {row.error('buffers'):+.1%} | {row.whole:+.1%} |"
