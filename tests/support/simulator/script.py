"""What a simulated worker does with a command: how long it takes, what it reports, how it ends. Pure."""

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
"""The commands that a worker of ours listens for, as their subjects end."""
STOCK = tuple(verb for verb in ALL if verb != "backend.cancel")


@dataclass(frozen=True)
class Act:
    """One command: works for `seconds` with `ticks` reports of progress, then answers.

    `refuse` is the error it answers with. `silent`: it does the work and never answers. `raw` is sent in
    place of the answer. `layers` are the bytes to download, one number for each layer of an image.
    """

    seconds: float = 0.0
    ticks: int = 0
    layers: tuple[int, ...] = (64 * MEBIBYTE,)
    refuse: str = ""
    silent: bool = False
    raw: bytes | None = None

    def progress(self, backend: str, *, stock: bool) -> Iterator[m.ProgressEvent]:
        """What it reports, without the ids: `ticks` events, as a stock worker or ours words them."""
        total = sum(self.layers)
        for number in range(1, self.ticks + 1):
            done = total * number // self.ticks
            yield _stock(self.layers, done, total, backend) if stock else _ours(done, total, number)


@dataclass
class Script:
    """What a worker does with each command, by name (`backend.install`).

    Of a list each act is used once, the last one from then on. A command that is not named succeeds at once.
    `knows`: what it listens for; on anything else there is no responder. `stock`: answers as a released
    worker of the reference does, with its traps (contract/nats.md §4.1).
    """

    acts: Mapping[str, Act | Sequence[Act]] = field(default_factory=dict)
    stock: bool = False
    knows: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        self.knows = self.knows or frozenset(STOCK if self.stock else ALL)
        self._used: dict[str, int] = {}

    def next(self, verb: str) -> Act:
        """The act for the next command of this name."""
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
