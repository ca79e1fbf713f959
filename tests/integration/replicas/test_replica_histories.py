"""The life of replicas against a small model: two controllers, workers and requests, in any order.

Nothing here is derived from the product's statements. A history is a list of numbers, each of which decides
one step (`replica_player.py`). After each step the invariants hold (`replica_invariants.py`), and once faults
stop everything converges. Planted defects (`replica_mutants.py`) show that the histories find something.
"""

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pytest_django.plugin import DjangoDbBlocker

from tests.support.effort import swept
from tests.support.replica_histories import Actor
from tests.support.replica_log import replica_log
from tests.support.replica_mutants import MUTANTS, QUICK
from tests.support.replica_player import STEPS, History, failure
from tests.sweep import SHOWN

pytestmark = [
    pytest.mark.django_db(transaction=True),
    # A process that is killed while it prepares its stops leaves them.
    pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning"),
]

HISTORIES = 50
HALVES = 2
"""Tests that share these histories, so that none of them takes long."""
MOST = 50
"""Histories that a planted defect may stay hidden."""
MANY = 1990
"""Histories of `make sweep`, besides those with processes (`tests/acceptance/test_replica_processes.py`)."""


@pytest.fixture(scope="module")
def actors(django_db_setup: None, django_db_blocker: DjangoDbBlocker) -> Iterator[list[Actor]]:
    """Two controllers, and one actor for everybody else, who never stops at a point."""
    with django_db_blocker.unblock(), replica_log():
        everybody = [Actor("c1"), Actor("c2"), Actor("web")]
        everybody[2].runs_through = lambda point: None
        yield everybody
        for actor in everybody:
            actor.end()


@pytest.mark.parametrize("half", range(HALVES))
@settings(
    max_examples=HISTORIES // HALVES,
    # The same histories in each run; `make sweep` tries others.
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    print_blob=True,
)
@given(st.lists(st.integers(0, 2**32), min_size=STEPS, max_size=STEPS))
def test_any_history_is_consistent_and_converges(actors: list[Actor], half: int, numbers: list[int]) -> None:
    """Each of them, with the steps of the one that fails in as few numbers as Hypothesis finds."""
    # Each half draws the same numbers.
    History(actors).play([number ^ half for number in numbers])


def found_after(actors: list[Actor], mutant: str, most: int, first: int = 0) -> tuple[int, str]:
    """Return how many histories it takes to find the planted defect, and how it shows; 0 if none does."""
    with pytest.MonkeyPatch.context() as patch:
        MUTANTS[mutant](patch)
        for count in range(most):
            if reason := failure(actors, first + count):
                return count + 1, reason.splitlines()[0]
    return 0, ""


@pytest.mark.parametrize("mutant", QUICK)
def test_a_planted_defect_is_found(actors: list[Actor], mutant: str) -> None:
    """The histories are no formality."""
    count, reason = found_after(actors, mutant, MOST, QUICK[mutant])
    print(f"{mutant}: {count} {reason}")
    assert count, f"{mutant}: {MOST} histories do not find it"


@swept
@pytest.mark.parametrize("mutant", MUTANTS)
def test_every_planted_defect_is_found(actors: list[Actor], mutant: str) -> None:
    """Print how many histories it took."""
    count, reason = found_after(actors, mutant, 4 * MOST)
    show(f"{mutant:40} {count or 'not found':>9}  {reason}")
    assert count, f"{mutant}: {4 * MOST} histories do not find it"


@swept
def test_many_histories_are_consistent_and_converge(actors: list[Actor]) -> None:
    """Print the seed of each that fails; `numbers_of` gives its steps again."""
    failed = {}
    for seed in range(MANY):
        if reason := failure(actors, seed):
            failed[seed] = reason
            show(f"seed {seed}: {reason.splitlines()[0]}")
    show(f"histories {MANY}  steps {STEPS}  failures {len(failed)}")
    assert not failed, next(iter(failed.values()))


def show(line: str) -> None:
    """Print a line of the table of `make sweep`."""
    print(f"{SHOWN}{line}", flush=True)
