"""django-q2's sentinel, which gives up when one of its processes was killed.

Its processes share two queues, each with a lock that a waiting reader holds. The kernel gives back no lock of
a killed process, so whoever comes in its place waits for ever: no task runs any more, and an orderly stop
takes a minute or does not end. So all of them end, and the supervisor (`make run`, systemd) starts them anew.
Tasks that were running are handed out again.
"""

# django-q2 carries no types.
# mypy: allow-untyped-calls

import logging
import os
import threading
from multiprocessing.process import BaseProcess
from typing import Any

from django_q.cluster import Sentinel

log = logging.getLogger(__name__)

KILLED = 70
"""Exit status of a sentinel that gave up."""
_WATCH_EVERY = 0.1
"""Seconds between two looks at the processes during a stop."""


class CrashOnlySentinel(Sentinel):
    """Guards pool, monitor and pusher; ends with `KILLED` when a signal has ended one of them."""

    def reincarnate(self, process: Any) -> None:
        """Replace a process that ended by itself or took too long; give up if it was killed."""
        self._give_up_if_killed(process)
        super().reincarnate(process)

    def stop(self) -> None:
        """Stop all in order; at once if one was killed before or is killed meanwhile."""
        threading.Thread(target=self._watch, args=(self._all(),), name="watch", daemon=True).start()
        super().stop()

    def _watch(self, processes: list[BaseProcess]) -> None:
        # The kernel may report a killed process only after the stop has begun.
        pause = threading.Event()
        while True:
            for process in processes:
                self._give_up_if_killed(process)
            pause.wait(_WATCH_EVERY)

    def _all(self) -> list[BaseProcess]:
        return [process for process in (*self.pool, self.monitor, self.pusher) if process is not None]

    def _give_up_if_killed(self, process: BaseProcess) -> None:
        if process.exitcode is None or process.exitcode >= 0:
            return
        log.error("process %s of the task cluster was killed: all of them end", process.pid)
        for other in self._all():
            other.kill()
        for other in self._all():
            other.join()
        os._exit(KILLED)
