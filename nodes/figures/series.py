"""The form of figures over time: their names, the grid that adds them up, and the packed block. Pure.

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
SECOND, MINUTE, HOUR, DAY = (timedelta(seconds=seconds) for seconds in (1, 60, 3600, 86400))
SAMPLE_EVERY = timedelta(seconds=10)

CLUSTER_SUBJECT, NODE_PREFIX, MODEL_PREFIX = "cluster", "node/", "model/"
ALL_MODELS = MODEL_PREFIX
"""The subject of the sums over all models."""
CLUSTER = (
    *("nodes", "gpus", "busy", "vram_used", "vram_total", "ram_used", "ram_total"),
    *("disk_used", "disk_total", "power"),
)
NODE = ("vram_used", "ram_used", "disk_used")
GPU = ("vram_used", "busy", "temperature", "power")
MODEL = ("requests", "errors", "prompt_tokens", "completion_tokens", "first_tokens", "first_token_ms")
"""The numbers of a sample in their order; a node's are followed by index and numbers of each GPU."""
COUNTS = frozenset(MODEL)
"""Figures that are added up over time; all others are averaged."""

Columns = dict[str, list[int | None]]
Numbers = Sequence[int | None]


def floor(at: datetime, step: timedelta) -> datetime:
    """Return the beginning of the step that `at` is in."""
    return EPOCH + (at - EPOCH) // step * step


def seconds(at: datetime) -> int:
    """Return the whole seconds since 1970."""
    return (at - EPOCH) // SECOND


def split_name(name: str) -> tuple[int | None, str]:
    """Return the GPU's index, None for a figure of the subject itself, and the figure's name."""
    gpu, dot, figure = name.partition(".")
    return (int(gpu.removeprefix("gpu")), figure) if dot else (None, name)


def names_of(subject: str, numbers: Numbers) -> tuple[str, ...]:
    """Return the name of each number of a sample; "" for the index of a GPU."""
    if subject.startswith(NODE_PREFIX):
        return _node_names(tuple(numbers[len(NODE) :: len(GPU) + 1]))
    return CLUSTER if subject == CLUSTER_SUBJECT else MODEL


@lru_cache(maxsize=1024)
def _node_names(indices: tuple[int | None, ...]) -> tuple[str, ...]:
    return (*NODE, *(name for index in indices for name in _gpu_names(index)))


@cache
def _gpu_names(index: int | None) -> tuple[str, ...]:
    return ("", *(f"gpu{index}.{figure}" for figure in GPU))


_Sums = tuple[list[float], list[float]]
"""By step: the sum of the values, each weighted with its seconds unless it is a count, and of the weights."""


class Grid:
    """The figures of one subject on a grid of `count` steps; values of any finer step are added up."""

    def __init__(self, start: datetime, step: timedelta, count: int) -> None:
        self._start, self._step, self._count = seconds(start), step // SECOND, count
        self._sums: dict[str, _Sums] = {}

    def add_sample(self, at: datetime, subject: str, numbers: Numbers) -> None:
        """Add one sample."""
        index = (seconds(at) - self._start) // self._step
        if not 0 <= index < self._count:
            return
        weight = SAMPLE_EVERY // SECOND
        for name, number in zip(names_of(subject, numbers), numbers, strict=False):
            if number is not None and name:
                totals, weights = self._sums_of(name)
                totals[index] += number if name in COUNTS else number * weight
                weights[index] += weight

    def add_block(self, at: datetime, step: timedelta, columns: Mapping[str, Numbers]) -> None:
        """Add the values of a block that begins at `at`, one for each `step`."""
        first, weight = seconds(at) - self._start, step // SECOND
        for name, values in columns.items():
            totals, weights = self._sums_of(name)
            factor = 1 if name in COUNTS else weight
            for offset, value in enumerate(values):
                index = (first + offset * weight) // self._step
                if value is not None and 0 <= index < self._count:
                    totals[index] += value * factor
                    weights[index] += weight

    def columns(self) -> Columns:
        """Return the sums of counts and the means of all other figures, null for a step without values."""
        return {
            name: [
                None if not weight else round(total if name in COUNTS else total / weight)
                for total, weight in zip(totals, weights, strict=True)
            ]
            for name, (totals, weights) in self._sums.items()
        }

    def _sums_of(self, name: str) -> _Sums:
        sums = self._sums.get(name)
        if sums is None:
            sums = self._sums[name] = ([0.0] * self._count, [0.0] * self._count)
        return sums


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Columns).decode


def pack(columns: Mapping[str, Numbers]) -> bytes:
    """Return the block of these columns: differences as MessagePack, whose small numbers have one byte."""
    return zlib.compress(_encode({name: _differences(values) for name, values in columns.items()}))


def unpack(block: bytes) -> Columns:
    """Return the columns of a block."""
    return {name: _added_up(values) for name, values in _decode(zlib.decompress(block)).items()}


def _differences(values: Iterable[int | None]) -> list[int | None]:
    last, result = 0, list[int | None]()
    for value in values:
        result.append(None if value is None else value - last)
        last = last if value is None else value
    return result


def _added_up(values: Iterable[int | None]) -> list[int | None]:
    last, result = 0, list[int | None]()
    for value in values:
        last += value or 0
        result.append(None if value is None else last)
    return result
