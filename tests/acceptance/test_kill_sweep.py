"""Kill -9 at every point between two writes or messages (`kill_sweep.py`); a run takes one of each kind."""

import asyncio
import os

import pytest

from tests.acceptance.kill_rounds import on_a_real_worker, on_simulated_workers
from tests.acceptance.kill_sweep import Result, Round, Sweep, kill
from tests.acceptance.test_operations import bus_of
from tests.support.cluster import TOKEN, running_cluster
from tests.support.effort import EFFORT, swept
from tests.support.simulator import Fleet, Script, fleet
from tests.support.simulator.script import STOCK
from tests.support.sources import started

OLD = frozenset(STOCK) - {"backend.upgrade", "model.stop"}

TRIES = 3
"""How often a round is played until its victim comes to the point: on a busy machine a look in time may come
before the hint that the point is about."""


def chosen(rounds: list[Round]) -> list[Round]:
    """All rounds in `make sweep`; one of each kind of point otherwise, or those that KILL_SWEEP names."""
    if wanted := os.environ.get("KILL_SWEEP"):
        return [one for one in rounds if one.point.startswith(tuple(wanted.split()))]
    if EFFORT > 1:
        return rounds
    # The points of a worker are one kind.
    kinds = {one.point.rpartition(":")[2]: one for one in rounds if one.victim == "controller"}
    return [*kinds.values(), *[one for one in rounds if one.victim == "worker"][:1]]


@pytest.mark.rule("A78")
async def test_nothing_of_commands_on_backends_is_lost_by_a_kill_at_any_point() -> None:
    """Accepted means findable, owned or explained, once a fence, ended in time."""
    with (
        started(redirects=False) as source,
        running_cluster(CLUSTER_OPERATION_LEASE="2s", HF_MIRROR=source.url("")) as cluster,
    ):
        web = await asyncio.to_thread(cluster.web)
        workers = fleet(
            web.url,
            TOKEN,
            3,
            bus=bus_of(cluster),
            script=lambda number: Script(stock=True, knows=OLD) if number == 2 else Script(),
            beat_every=4,
        )
        async with workers as simulated:
            sweep = Sweep(cluster, web, simulated, asyncio.get_running_loop(), source=source)
            results = await asyncio.to_thread(played, sweep, chosen(on_simulated_workers()))
    assert [str(result) for result in results if result.wrong] == []


@swept
def test_nothing_of_loads_is_lost_by_a_kill_at_any_point() -> None:
    """The same with a real worker, whose disk is whole as well."""
    with (
        started(redirects=False) as source,
        running_cluster(CLUSTER_OPERATION_LEASE="2s", HF_MIRROR=source.url("")) as cluster,
    ):
        web = cluster.web()
        sweep = Sweep(cluster, web, Fleet([]), source=source)
        sweep.start_worker()
        sweep.ready_files()
        results = played(sweep, chosen(on_a_real_worker()))
    assert [str(result) for result in results if result.wrong] == []


def played(sweep: Sweep, rounds: list[Round]) -> list[Result]:
    """Carries the rounds out and prints the table."""
    results = []
    try:
        for one in rounds:
            result = kill(sweep, one)
            for _ in range(TRIES - 1):
                result = result if result.visited else kill(sweep, one)
            results.append(result)
            print(f"{results[-1]} {results[-1].seconds:.1f} s |", flush=True)
    finally:
        sweep.registry.stop()
    return results
