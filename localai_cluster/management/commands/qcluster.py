"""`manage.py qcluster`: runs the scheduled tasks in a process of their own.

`manage.py controller --tasks` runs them inside of the controller.
"""

import asyncio
import gc
import signal
import threading
from typing import Any

from django.core.checks import Tags
from django.core.management.base import BaseCommand

from localai_cluster import scraping
from localai_cluster.broker import count_tasks
from localai_cluster.kit import conf
from localai_cluster.kit.task_runner import TaskRunner
from localai_cluster.management import schema_version


class Command(BaseCommand):
    """Runs tasks until SIGTERM or SIGINT."""

    help = "Runs the scheduled tasks."
    # The settings. Django's other checks import every page; `manage.py check` and `serve` run them.
    requires_system_checks = (Tags.security,)

    def handle(self, *args: Any, **options: Any) -> None:
        gc.freeze()
        gc.enable()
        schema_version.refuse_other(conf.cluster().database_url)
        runner = TaskRunner()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: runner.stop())
        count_tasks()
        serving = scraping.serve("tasks", conf.cluster().tasks_metrics)
        threading.Thread(target=asyncio.run, args=(serving,), name="metrics", daemon=True).start()
        runner.run()
