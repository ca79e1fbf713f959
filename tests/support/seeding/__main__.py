"""The command: write the fleet, then keep it moving for `--seconds`, or until it is stopped.

It prints `seeded` when all rows exist, and removes nothing.
"""

import argparse
import os
import signal
import sys
import threading
from random import Random

import django

MOVES_A_SECOND = 4
"""Moves per second. Each moves a quarter of the operations, so each operation ticks once a second."""
PLACES = 120


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.seeding", description=__doc__)
    parser.add_argument("--nodes", type=int, default=300)
    parser.add_argument("--operations", type=int, default=0, help="operations that move")
    parser.add_argument("--seconds", type=float, default=0.0, help="how long everything keeps moving")
    parser.add_argument(
        "--pace", type=float, default=1.0, help="how fast everything moves; 0.5 is half as fast"
    )
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--tame", action="store_true", help="no hostile names, for pictures")
    parser.add_argument("--force", action="store_true", help="write beside nodes that are there")
    return parser.parse_args()


def main() -> int:
    """Run the command; return 1 if the database has nodes and `--force` is not set."""
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "localai_cluster.settings")
    django.setup()
    from localai_cluster.kit import clock
    from nodes.models import BackendNode
    from tests.support.seeding import nodes, work

    asked, stop = arguments(), threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    if BackendNode.objects.exists() and not asked.force:
        print("there are nodes in this database already; --force writes beside them", file=sys.stderr)
        return 1
    random = Random(asked.seed)
    ids = nodes.write(asked.nodes, random, clock.now(), tame=asked.tame)
    healthy = BackendNode.objects.filter(pk__in=ids, status="healthy").order_by("name")
    places = [(pk, name) for pk, name in healthy.values_list("id", "name")[:PLACES]]
    lanes = work.lanes(asked.operations, places, random)
    for lane in lanes:
        work.begin(lane, random, clock.now())
    print(f"seeded {len(ids)} nodes and {len(lanes)} operations", flush=True)

    began, turn, moves_a_second = clock.monotonic(), 0, MOVES_A_SECOND * asked.pace
    while not stop.is_set() and (left := asked.seconds - (clock.monotonic() - began)) > 0:
        if turn % MOVES_A_SECOND == 0:
            nodes.beat(ids, turn // MOVES_A_SECOND, clock.now())
        work.move(lanes[turn % MOVES_A_SECOND :: MOVES_A_SECOND], random, clock.now())
        turn += 1
        stop.wait(min(left, max(0.0, began + turn / moves_a_second - clock.monotonic())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
