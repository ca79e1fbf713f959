"""What loads still need of a node's memory: no byte counted twice, none given away twice."""

from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodes.placement.memory import NEVER, MemoryReading, Reservation, unallocated_bytes

START = datetime(2026, 8, 22, 10, tzinfo=UTC)
TOTAL = 1000


@dataclass
class Engine:
    """One load and what its engine has allocated."""

    reservation: Reservation
    allocated: int = 0


@dataclass
class Machine:
    """A node as it is, and what its last reading told of it."""

    engines: list[Engine] = field(default_factory=list)
    reading: MemoryReading = field(default_factory=lambda: MemoryReading(TOTAL, NEVER))
    now: datetime = START

    def tick(self) -> datetime:
        self.now += timedelta(seconds=1)
        return self.now

    def read(self) -> None:
        used = sum(engine.allocated for engine in self.engines)
        self.reading = MemoryReading(TOTAL - used, self.tick())

    def begin(self, needed: int) -> None:
        seen = Reservation(needed, self.reading.available, self.reading.at)
        self.engines.append(Engine(seen))

    def publish(self, engine: Engine) -> None:
        """An engine that has loaded has allocated all of it."""
        engine.allocated = engine.reservation.needed
        engine.reservation = replace(engine.reservation, loaded_at=self.tick())

    @property
    def free(self) -> int:
        """What placement takes for free."""
        return self.reading.available - unallocated_bytes(
            [engine.reservation for engine in self.engines], self.reading
        )

    @property
    def truly_free(self) -> int:
        """What is left when every engine has allocated what it needs."""
        return TOTAL - sum(engine.reservation.needed for engine in self.engines)


@pytest.mark.rule("R1.51", "R2.43")
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0], ids=["nothing", "half", "all"])
def test_a_beat_moves_nothing_that_a_load_has_reserved(share: float) -> None:
    """However much the engine has allocated when the beat comes, what is free stays the same."""
    machine = Machine()
    machine.read()
    machine.begin(400)
    assert machine.free == 600
    machine.engines[0].allocated = int(400 * share)
    machine.read()
    assert (machine.reading.available, machine.free) == (1000 - int(400 * share), 600)
    machine.publish(machine.engines[0])
    assert machine.free == 600, "the last reading does not show all of it"
    machine.read()
    assert (machine.reading.available, machine.free) == (600, 600), "now it does: nothing is reserved"


@pytest.mark.rule("R1.51")
def test_what_one_load_has_allocated_is_not_taken_for_the_others() -> None:
    """The first is published and its memory shows; the second has allocated nothing yet."""
    machine = Machine()
    machine.read()
    machine.begin(400)
    machine.begin(300)
    machine.publish(machine.engines[0])
    machine.read()
    assert (machine.reading.available, machine.free) == (600, 300)
    machine.begin(100)
    assert machine.free == 200
    machine.publish(machine.engines[1])
    machine.read()
    assert (machine.reading.available, machine.free) == (300, 200)


@pytest.mark.rule("R2.43")
def test_a_load_that_fails_takes_what_it_reserved_with_its_row() -> None:
    machine = Machine()
    machine.read()
    machine.begin(400)
    machine.begin(300)
    del machine.engines[0]
    assert machine.free == 700


@pytest.mark.rule("R1.36")
def test_a_budget_set_meanwhile_is_not_taken_for_memory_that_an_engine_has_allocated() -> None:
    load = Reservation(200, seen=1000, seen_at=START)
    assert unallocated_bytes([load], MemoryReading(500, START, ceiling=500)) == 200


steps = st.lists(
    st.tuples(
        st.sampled_from(["begin", "allocate", "publish", "read", "fail", "unload"]),
        st.integers(0, 50),
        st.integers(0, 9),
    ),
    max_size=40,
)


def played(machine: Machine, step: tuple[str, int, int]) -> bool:
    """Carries one step out if it is possible; whether memory was given back."""
    kind, amount, which = step
    loading = [engine for engine in machine.engines if engine.reservation.loaded_at is None]
    loaded = [engine for engine in machine.engines if engine.reservation.loaded_at is not None]
    if kind == "begin":
        machine.begin(amount)
    elif kind == "read":
        machine.read()
    elif kind in ("allocate", "publish", "fail") and loading:
        engine = loading[which % len(loading)]
        if kind == "allocate":
            engine.allocated = min(engine.allocated + amount, engine.reservation.needed)
        elif kind == "publish":
            machine.publish(engine)
        else:
            machine.engines.remove(engine)
            return True
    elif kind == "unload" and loaded:
        machine.engines.remove(loaded[which % len(loaded)])
        return True
    return False


@given(steps)
def test_what_is_free_is_exact_or_less(script: list[tuple[str, int, int]]) -> None:
    """At every moment: never more than there is, and exactly that as long as no memory was given back.

    All engines allocate what was estimated, in any steps, between any beats.
    """
    machine, given_back = Machine(), False
    machine.read()
    for step in script:
        given_back |= played(machine, step)
        assert machine.free <= machine.truly_free or given_back
        assert given_back or machine.free == machine.truly_free
        shown = machine.reading.available
        assert shown - machine.free <= sum(one.reservation.needed for one in machine.engines)


@given(steps)
def test_no_byte_is_given_away_twice(script: list[tuple[str, int, int]]) -> None:
    """Failed loads and unloads included; and when nothing loads any more, the next reading is the truth."""
    machine = Machine()
    machine.read()
    for step in script:
        played(machine, step)
        assert machine.free <= machine.truly_free
    for engine in machine.engines:
        if engine.reservation.loaded_at is None:
            machine.publish(engine)
    machine.read()
    assert machine.free == machine.truly_free == machine.reading.available
