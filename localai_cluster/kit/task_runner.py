"""django-q2's task cluster in one process: its worker on the main thread, pusher and monitor as threads.

The library runs a process for each of the three, because a worker may hang or die, and a sentinel that
watches the others; each takes 20 MB. Here the library's time limit interrupts a hung task by SIGALRM, which
only the main thread receives. A task that ignores SIGALRM ends the process, as a crash does, and the
supervisor (`make run`, systemd) restarts the process. Interrupted tasks are run again.
"""

# django-q2 carries no types.
# mypy: allow-untyped-calls

import faulthandler
import logging
import threading
from queue import Queue
from typing import Any

from django.db import connections
from django_q.monitor import monitor
from django_q.pusher import pusher
from django_q.worker import worker

log = logging.getLogger(__name__)

_STOP_ITEM = "STOP"
"""Item of a queue at which django-q2's worker and monitor return."""


class _TaskTimer:
    """The seconds that remain for the running task. django-q2's worker sets them as it would a shared value.

    At zero the process ends and prints the tracebacks of all threads; the worker sets three seconds more than
    its own limit. A thread of the C library ends the process, so a task that holds the interpreter is ended
    too.
    """

    def __init__(self) -> None:
        self._lock, self._seconds = threading.RLock(), -1.0

    def get_lock(self) -> Any:
        return self._lock

    @property
    def value(self) -> float:
        return self._seconds

    @value.setter
    def value(self, seconds: float) -> None:
        self._seconds = seconds
        if seconds > 0:
            faulthandler.dump_traceback_later(seconds, exit=True, file=2)
        else:
            faulthandler.cancel_dump_traceback_later()


class TaskRunner:
    """Takes tasks off django-q2's queue and runs them, one at a time, until `stop`."""

    def __init__(self) -> None:
        self._is_stopping = self._has_ended = False
        # The library expects queues of processes.
        self._tasks: Any = Queue(maxsize=1)
        self._results: Any = Queue()

    def stop(self) -> None:
        """Stop taking tasks, and let the running task end. Safe in a signal handler and from any thread."""
        self._is_stopping = True

    def is_set(self) -> bool:
        """Return True after `stop`. The pusher uses this object as an event.

        `threading.Event` has a lock, so a signal handler could not set it safely.
        """
        return self._is_stopping

    def run(self) -> None:
        """Run tasks until `stop`; call it on the main thread."""
        saving = threading.Thread(target=self._save_results, name="monitor", daemon=True)
        for thread in (saving, threading.Thread(target=self._read_tasks, name="pusher", daemon=True)):
            thread.start()
        log.info("ready to run tasks")
        timer: Any = _TaskTimer()
        while not self._has_ended:
            try:
                # It also returns after a task that took too long.
                worker(self._tasks, self._results, timer)
            except (Exception, SystemExit):  # the latter is also the library's signal of a time-out
                log.exception("a task could not be run")
            timer.value = -1
            # A task that was cut may have left a statement running and locks taken.
            connections.close_all()
        self._results.put(_STOP_ITEM)
        saving.join()

    def _read_tasks(self) -> None:
        while not self._is_stopping:
            try:
                pusher(self._tasks, self)
            except Exception:
                log.exception("a task could not be read")
        self._has_ended = True
        self._tasks.put(_STOP_ITEM)

    def _save_results(self) -> None:
        while True:
            try:
                monitor(self._results)
                return
            except Exception:
                log.exception("a result could not be saved; its task will run again")
