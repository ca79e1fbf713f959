"""Light workers: hundreds of nodes in one process and one event loop, over real HTTP and a real bus.

`script.py` says what a worker does with a command, `machine.py` what it has and answers, `worker.py` keeps it
registered and subscribed, `fleet.py` plays many of them. Nothing here runs an engine or knows pytest.
"""

from tests.support.simulator.fleet import Fleet, fleet
from tests.support.simulator.machine import Command
from tests.support.simulator.script import Act, Script
from tests.support.simulator.worker import SimulatedWorker

__all__ = ["Act", "Command", "Fleet", "Script", "SimulatedWorker", "fleet"]
