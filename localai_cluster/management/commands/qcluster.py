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
import multiprocessing
import threading
from functools import cache
from importlib import import_module
from typing import Any

import django_q.cluster
from django.core.checks import Tags
from django.core.management.base import CommandError
from django_q.management.commands.qcluster import Command as QCluster
from django_q.signals import post_execute
from django_q.utils import get_func_repr

from localai_cluster import scraping
from localai_cluster.kit import conf
from localai_cluster.management import schema_version
from localai_cluster.management.task_sentinel import CrashOnlySentinel
from localai_cluster.metrics import passes
from nodes.reconcilers import schedules
from operations.reconcilers import schedules as ledger_schedules


class Command(QCluster):
    """The library's own, started from a process that is small and ready to be forked."""

    # The settings. Django's other checks import every page; `manage.py check` and `serve` run them.
    requires_system_checks = (Tags.security,)

    def handle(self, *args: Any, **options: Any) -> None:
        """Prepares the memory that the forks share, then runs until SIGTERM or SIGINT.

        Ends with status 1 if one of its processes was killed.
        """
        schema_version.refuse_other(conf.cluster().database_url)
        for schedule in [*schedules.SCHEDULES, *ledger_schedules.SCHEDULES]:
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
