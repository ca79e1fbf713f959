"""Lightweight workers: hundreds of nodes in one process and one event loop, with real HTTP and a real bus.

`script.py` determines the reaction to a command, `machine.py` has the state and the answers, `worker.py`
keeps a worker registered and subscribed, `fleet.py` runs many workers. The simulator runs no engine and does
not depend on pytest.
"""

from tests.support.simulator.fleet import Fleet, fleet
from tests.support.simulator.machine import Command
from tests.support.simulator.script import Act, Script
from tests.support.simulator.worker import SimulatedWorker

__all__ = ["Act", "Command", "Fleet", "Script", "SimulatedWorker", "fleet"]
