"""Which handler carries out which kind of operation; the controller hands this table to its executor."""

from localai_cluster.messaging.bus import Bus
from nodes.backends import install
from nodes.definitions import Folder
from nodes.loading import load
from operations.executor import Handler
from operations.waiting import Hints


def handlers(bus: Bus, definitions: Folder, hints: Hints) -> dict[str, Handler]:
    """Kind of operation to handler."""
    return {
        install.KIND: install.InstallBackend(bus),
        load.KIND: load.LoadModel(bus, definitions, hints),
    }
