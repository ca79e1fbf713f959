"""The port allocator: rules as properties, time as a parameter."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from localai_cluster.worker.ports import QUARANTINE_SECONDS, RESERVATION_SECONDS, NoFreePort, PortAllocator


class Ports(RuleBasedStateMachine):
    """Random allocations, releases and waits on a small range."""

    def __init__(self) -> None:
        super().__init__()
        self.ports = PortAllocator(100, 105)
        self.now = 0.0
        self.used: dict[int, str] = {}
        self.released: dict[int, float] = {}

    @rule(key=st.sampled_from("abcdefgh"))
    def allocate(self, key: str) -> None:
        try:
            port = self.ports.allocate(key, self.now)
        except NoFreePort:
            resting = [p for p, at in self.released.items() if self.now < at + QUARANTINE_SECONDS]
            assert len(set(self.used) | set(resting)) == 6
            return
        assert 100 <= port <= 105
        assert port not in self.used
        if port in self.released:
            assert self.now >= self.released.pop(port) + QUARANTINE_SECONDS
        self.used[port] = key

    @precondition(lambda self: self.used)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        port = data.draw(st.sampled_from(sorted(self.used)))
        del self.used[port]
        self.released[port] = self.now
        self.ports.release(port, self.now)
        self.ports.release(port, self.now)

    @rule(seconds=st.floats(0, 400))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def released_twice_changes_nothing(self) -> None:
        self.ports.release(99, self.now)


TestPorts = Ports.TestCase


@pytest.mark.rule("worker-9")
def test_the_first_gets_the_base_port_and_a_key_its_own_again() -> None:
    """worker.md §9: base port first; after the quarantine the key's own last port wins."""
    ports = PortAllocator(50051, 50060)
    assert ports.allocate("a#0", 0) == 50051
    assert ports.allocate("b#0", 0) == 50052
    ports.release(50051, 0)
    ports.release(50052, 0)
    assert ports.allocate("c#0", QUARANTINE_SECONDS - 0.1) == 50053
    assert ports.allocate("b#0", QUARANTINE_SECONDS) == 50052
    assert ports.allocate("d#0", QUARANTINE_SECONDS) == 50054, "50051 is still reserved for a#0"
    assert ports.allocate("e#0", RESERVATION_SECONDS) == 50051


@pytest.mark.rule("worker-9", "W25")
def test_a_reserved_port_is_used_before_nothing_is() -> None:
    """worker.md §9 steps 4 and 5 (W25)."""
    ports = PortAllocator(1, 1)
    ports.release(ports.allocate("a", 0), 0)
    with pytest.raises(NoFreePort, match="between 1 and 1: 0 in use, 1 in quarantine"):
        ports.allocate("b", 14.9)
    assert ports.allocate("b", 15) == 1
