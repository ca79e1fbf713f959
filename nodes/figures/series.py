"""Names of figures over time, the grid that aggregates values, and the packed block. Pure.

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
"""Prefix of a node's subject; its id follows."""
MODEL_PREFIX = "model/"
"""Prefix of a model's subject; its name follows."""
ALL_MODELS_SUBJECT = MODEL_PREFIX
"""Subject of the sums over all models."""
CLUSTER_FIGURES = (
    *("nodes", "gpus", "busy", "vram_used", "vram_total", "ram_used", "ram_total"),
    *("disk_used", "disk_total", "power"),
)
"""Names of the numbers in a sample of the cluster, in order."""
NODE_FIGURES = ("vram_used", "ram_used", "disk_used")
"""Names of the first numbers in a sample of a node. For each GPU, its index and numbers follow."""
GPU_FIGURES = ("vram_used", "busy", "temperature", "power")
"""Names of the numbers of one GPU in a sample of a node."""
MODEL_FIGURES = ("requests", "errors", "prompt_tokens", "completion_tokens", "first_tokens", "first_token_ms")
"""Names of the numbers in a sample of a model, in order."""
COUNTED_FIGURES = frozenset(MODEL_FIGURES)
"""Figures whose values are added when steps are merged. All other figures are averaged."""

Columns = dict[str, list[int | None]]
"""Values by the name of their figure, one for each step."""
Numbers = Sequence[int | None]


def floor_to_step(at: datetime, step: timedelta) -> datetime:
    """Return the start of the step that contains the time `at`."""
    return EPOCH + (at - EPOCH) // step * step


def epoch_seconds(at: datetime) -> int:
    """Return the whole seconds from 1970 to `at`."""
    return (at - EPOCH) // SECOND


def split_name(name: str) -> tuple[int | None, str]:
    """Split a name such as `gpu0.busy` into the GPU's index and the name of the figure.

    The index is None for a figure without a GPU.
    """
    gpu, dot, figure = name.partition(".")
    return (int(gpu.removeprefix("gpu")), figure) if dot else (None, name)


def names_of(subject: str, numbers: Numbers) -> tuple[str, ...]:
    """Return the names of a sample's numbers, "" for the index of a GPU."""
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
"""For each step, the sum of the values and the sum of the weights.

A value is weighted with its seconds, unless it is a count.
"""


class Grid:
    """Aggregates values of one subject to `count` coarser steps."""

    def __init__(self, start: datetime, step: timedelta, count: int) -> None:
        self._start, self._step, self._count = epoch_seconds(start), step // SECOND, count
        self._sums: dict[str, _StepSums] = {}

    def add_sample(self, at: datetime, subject: str, numbers: Numbers) -> None:
        """Add the numbers of one sample."""
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
        """Add the columns of a block that begins at `at`, with one value for each `step`."""
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
        """Return sums of counts and means of other figures, null for a step without values."""
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
    """Pack columns to a block: differences as MessagePack, in which small numbers need one byte."""
    return zlib.compress(_encode_columns({name: _differences(values) for name, values in columns.items()}))


def unpack(block: bytes) -> Columns:
    """Return the columns of a packed block."""
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
