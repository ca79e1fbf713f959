"""Names of figures over time, the grid that aggregates them, and the packed block. Pure.

A sample is a row of whole numbers whose meaning follows from its subject (`cluster`, `node/<id>`,
`model/<name>`). A block holds the columns of one subject for an hour or a day. Memory is in MiB, so that a
column of differences is small; a missing value is null.
"""

import zlib
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import cache, lru_cache

import msgspec

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
SECOND, MINUTE, HOUR, DAY = (timedelta(seconds=count) for count in (1, 60, 3600, 86400))
SAMPLE_EVERY = timedelta(seconds=10)

CLUSTER_SUBJECT = "cluster"
NODE_PREFIX = "node/"
"""Prefix of the subject of a node; the node's id follows."""
MODEL_PREFIX = "model/"
"""Prefix of the subject of a model; the model's name follows."""
ALL_MODELS_SUBJECT = MODEL_PREFIX
"""Subject of the sums over all models."""
CLUSTER_FIGURES = (
    *("nodes", "gpus", "busy", "vram_used", "vram_total", "ram_used", "ram_total"),
    *("disk_used", "disk_total", "power"),
)
"""Names of the numbers of a sample of the cluster, in their order."""
NODE_FIGURES = ("vram_used", "ram_used", "disk_used")
"""Names of the first numbers of a node's sample. The index and the numbers of each GPU follow."""
GPU_FIGURES = ("vram_used", "busy", "temperature", "power")
"""Names of the numbers of each GPU."""
MODEL_FIGURES = ("requests", "errors", "prompt_tokens", "completion_tokens", "first_tokens", "first_token_ms")
"""Names of the numbers of a model's sample, in their order."""
COUNTED_FIGURES = frozenset(MODEL_FIGURES)
"""Figures that are summed over time; all other figures are averaged."""

Columns = dict[str, list[int | None]]
Numbers = Sequence[int | None]


def floor_to_step(at: datetime, step: timedelta) -> datetime:
    """Return the start of the step that contains `at`."""
    return EPOCH + (at - EPOCH) // step * step


def epoch_seconds(at: datetime) -> int:
    """Return the whole seconds since 1970."""
    return (at - EPOCH) // SECOND


def split_name(name: str) -> tuple[int | None, str]:
    """Split a name such as `gpu0.busy` into the GPU's index and the figure's name.

    The index is None for a figure of the subject itself.
    """
    gpu, dot, figure = name.partition(".")
    return (int(gpu.removeprefix("gpu")), figure) if dot else (None, name)


def names_of(subject: str, numbers: Numbers) -> tuple[str, ...]:
    """Return the name of each number of a sample; "" for a GPU's index."""
    if subject.startswith(NODE_PREFIX):
        return _node_names(tuple(numbers[len(NODE_FIGURES) :: len(GPU_FIGURES) + 1]))
    return CLUSTER_FIGURES if subject == CLUSTER_SUBJECT else MODEL_FIGURES


@lru_cache(maxsize=1024)
def _node_names(indices: tuple[int | None, ...]) -> tuple[str, ...]:
    return (*NODE_FIGURES, *(name for index in indices for name in _gpu_names(index)))


@cache
def _gpu_names(index: int | None) -> tuple[str, ...]:
    return ("", *(f"gpu{index}.{figure}" for figure in GPU_FIGURES))


_StepSums = tuple[list[float], list[float]]
"""For each step: the sum of the values and the sum of their weights.

A value is weighted with its seconds, unless it is a count.
"""


class Grid:
    """Figures of one subject on a grid of `count` steps, aggregated from values of finer steps."""

    def __init__(self, start: datetime, step: timedelta, count: int) -> None:
        self._start, self._step, self._count = epoch_seconds(start), step // SECOND, count
        self._sums: dict[str, _StepSums] = {}

    def add_sample(self, at: datetime, subject: str, numbers: Numbers) -> None:
        """Add a sample."""
        index = (epoch_seconds(at) - self._start) // self._step
        if not 0 <= index < self._count:
            return
        weight = SAMPLE_EVERY // SECOND
        for name, number in zip(names_of(subject, numbers), numbers, strict=False):
            if number is not None and name:
                totals, weights = self._sums_of(name)
                totals[index] += number if name in COUNTED_FIGURES else number * weight
                weights[index] += weight

    def add_block(self, at: datetime, step: timedelta, columns: Mapping[str, Numbers]) -> None:
        """Add the values of a block that begins at `at`, one for each `step`."""
        first, weight = epoch_seconds(at) - self._start, step // SECOND
        for name, values in columns.items():
            totals, weights = self._sums_of(name)
            factor = 1 if name in COUNTED_FIGURES else weight
            for offset, value in enumerate(values):
                index = (first + offset * weight) // self._step
                if value is not None and 0 <= index < self._count:
                    totals[index] += value * factor
                    weights[index] += weight

    def columns(self) -> Columns:
        """Return the sums of counts and the means of all other figures, null for a step without values."""
        return {
            name: [
                None if not weight else round(total if name in COUNTED_FIGURES else total / weight)
                for total, weight in zip(totals, weights, strict=True)
            ]
            for name, (totals, weights) in self._sums.items()
        }

    def _sums_of(self, name: str) -> _StepSums:
        sums = self._sums.get(name)
        if sums is None:
            sums = self._sums[name] = ([0.0] * self._count, [0.0] * self._count)
        return sums


_encode_columns = msgspec.msgpack.Encoder().encode
_decode_columns = msgspec.msgpack.Decoder(Columns).decode


def pack(columns: Mapping[str, Numbers]) -> bytes:
    """Pack the columns to a block: differences as MessagePack, in which small numbers need one byte."""
    return zlib.compress(_encode_columns({name: _differences(values) for name, values in columns.items()}))


def unpack(block: bytes) -> Columns:
    """Unpack the columns of a block."""
    return {name: _running_sums(values) for name, values in _decode_columns(zlib.decompress(block)).items()}


def _differences(values: Iterable[int | None]) -> list[int | None]:
    last, result = 0, list[int | None]()
    for value in values:
        result.append(None if value is None else value - last)
        last = last if value is None else value
    return result


def _running_sums(values: Iterable[int | None]) -> list[int | None]:
    last, result = 0, list[int | None]()
    for value in values:
        last += value or 0
        result.append(None if value is None else last)
    return result
