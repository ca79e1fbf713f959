"""`manage.py qcluster`: django-q2's task cluster, six processes that share most of their memory.

They are forks of one process and share the modules that it imported before the first fork; a module that a
fork imports later is its own. So the parent imports the tasks first, and never URLs, pages and the admin.

Every result passes one of the six, the monitor. So the monitor counts the passes and serves the metrics, from
its first result on, if an address is configured. A monitor that dies is replaced, and the new one counts from
zero.
"""

# django-q2 carries no types.
# mypy: allow-untyped-calls

import asyncio
import gc

# django-q2 carries no types.
# mypy: allow-untyped-calls
import logging
import multiprocessing
import os
import threading
from functools import cache
from importlib import import_module
from multiprocessing.process import BaseProcess
from typing import Any

import django_q.cluster
from django.core.checks import Tags
from django.core.management.base import CommandError
from django_q.cluster import Sentinel
from django_q.management.commands.qcluster import Command as QCluster
from django_q.signals import post_execute
from django_q.utils import get_func_repr

from localai_cluster import scraping
from localai_cluster.kit import conf
from localai_cluster.management import schema_version
from localai_cluster.metrics import passes
from nodes.reconcilers import tasks
from operations.reconcilers import tasks as ledger_schedules

log = logging.getLogger(__name__)

KILLED = 70
"""Exit status of a sentinel that gave up."""
_WATCH_EVERY = 0.1
"""Seconds between two looks at the processes during a stop."""


class CrashOnlySentinel(Sentinel):
    """Guards pool, monitor and pusher; ends with `KILLED` when a signal has ended one of them.

    They share two queues, each with a lock that a waiting reader holds. The kernel does not release the lock
    of a killed process, so its successor would wait forever: no task would run, and an orderly stop would
    take a minute or not end. So all of them end, and the supervisor (`make run`, systemd) starts them again.
    Interrupted tasks are handed out again.
    """

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


class Command(QCluster):
    """The library's own, started from a process that is small and ready to be forked."""

    # The settings. Django's other checks import every page; `manage.py check` and `serve` run them.
    requires_system_checks = (Tags.security,)

    def handle(self, *args: Any, **options: Any) -> None:
        """Prepares the memory that the forks share, then runs until SIGTERM or SIGINT.

        Ends with status 1 if one of its processes was killed.
        """
        schema_version.refuse_other(conf.cluster().database_url)
        for schedule in [*tasks.SCHEDULES, *ledger_schedules.SCHEDULES]:
            import_module(schedule.function.rpartition(".")[0])
        import_module("channels_redis.pubsub")
        if conf.cluster().tasks_metrics:
            post_execute.connect(count)
        gc.collect()
        # A collection writes to every object that it visits, and so would copy their pages in every fork.
        gc.freeze()
        setattr(django_q.cluster, "Sentinel", CrashOnlySentinel)  # noqa: B010 - a class, to mypy
        super().handle(*args, **options)
        for sentinel in multiprocessing.active_children():
            sentinel.join()
            if sentinel.exitcode:
                raise CommandError("the task cluster ended early; the lines above say why")


def count(sender: Any, task: dict[str, Any], **more: Any) -> None:
    """Count one result; receiver of django-q2's `post_execute`, in the monitor."""
    listen()
    name = str(get_func_repr(task["func"])).rpartition(".")[2]
    passes.ended(name, (task["stopped"] - task["started"]).total_seconds(), ok=bool(task["success"]))


@cache
def listen() -> None:
    """Serve the metrics of this process, in a thread that ends with it."""
    serving = scraping.serve("tasks", conf.cluster().tasks_metrics)
    threading.Thread(target=asyncio.run, args=(serving,), name="metrics", daemon=True).start()
