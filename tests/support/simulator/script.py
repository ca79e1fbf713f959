"""The reaction of a simulated worker to a command: duration, reports and result. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from localai_cluster.kit.quantities import human_bytes
from localai_cluster.messaging import messages as m

MEBIBYTE = 1024 * 1024
ALL = (
    "backend.install",
    "backend.upgrade",
    "backend.cancel",
    "backend.stop",
    "backend.delete",
    "backend.list",
    "models.running",
    "model.unload",
    "model.stop",
    "model.delete",
    "stop",
)
"""The commands that one of our workers subscribes to, as the last parts of their subjects."""
STOCK = tuple(verb for verb in ALL if verb != "backend.cancel")


@dataclass(frozen=True)
class Act:
    """The reaction to one command: work for `seconds` with `ticks` progress reports, then answer.

    `refuse` is the error of the answer. `silent`: the worker does the work and never answers. `raw` is sent
    instead of the answer. `layers` are the bytes to download, one number for each layer of an image.
    """

    seconds: float = 0.0
    ticks: int = 0
    layers: tuple[int, ...] = (64 * MEBIBYTE,)
    refuse: str = ""
    silent: bool = False
    raw: bytes | None = None

    def progress(self, backend: str, *, stock: bool) -> Iterator[m.ProgressEvent]:
        """Yield `ticks` reports without ids, in the wording of a stock worker or of ours."""
        total = sum(self.layers)
        for number in range(1, self.ticks + 1):
            done = total * number // self.ticks
            yield _stock(self.layers, done, total, backend) if stock else _ours(done, total, number)


@dataclass
class Script:
    """The reactions of a worker, by command (`backend.install`).

    Each act of a list is used once, the last one from then on. An unnamed command succeeds at once. `knows`:
    the subscribed commands; other commands have no responder. `stock`: answer as a released worker of the
    reference does, with its traps (contract/nats.md §4.1).
    """

    acts: Mapping[str, Act | Sequence[Act]] = field(default_factory=dict)
    stock: bool = False
    knows: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        self.knows = self.knows or frozenset(STOCK if self.stock else ALL)
        self._used: dict[str, int] = {}

    def next(self, verb: str) -> Act:
        """Return the act for the next command of this name."""
        found = self.acts.get(verb, Act())
        if isinstance(found, Act):
            return found
        number = self._used[verb] = self._used.get(verb, 0) + 1
        return found[min(number, len(found)) - 1]


def _ours(done: int, total: int, number: int) -> m.ProgressEvent:
    return m.ProgressEvent(
        file_name="backend.tar.gz",
        current=human_bytes(done),
        total=human_bytes(total),
        percentage=round(100 * done / total, 1),
        phase="downloading",
        current_bytes=done,
        total_bytes=total,
        seq=number,
    )


def _stock(layers: Sequence[int], done: int, total: int, backend: str) -> m.ProgressEvent:
    """§4.3: `current` counts the present layer only, `total` all of them; the last event is extraction."""
    if done == total:
        label = f"Extracting images.example/{backend}:1"
        return m.ProgressEvent(
            file_name=label,
            current=human_bytes(total),
            total=human_bytes(total),
            percentage=100,
            phase="downloading",
        )
    index, before = 0, 0
    while before + layers[index] <= done:
        before += layers[index]
        index += 1
    return m.ProgressEvent(
        file_name=f"Downloading {index + 1}/{len(layers)} images.example/{backend}:1",
        current=human_bytes(done - before),
        total=human_bytes(total),
        percentage=100 * (done - before) / total,
        phase="downloading",
    )
