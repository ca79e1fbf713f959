"""`manage.py qcluster`: django-q2's task cluster, six processes that share most of their memory.

They are forks of one process. What it has imported before the first fork they share; what one of them imports
or writes to later is its own. So it imports the tasks first and URLs, pages and the admin never.
"""

# django-q2 carries no types.
# mypy: allow-untyped-calls

import gc
from importlib import import_module
from typing import Any

from django.core.checks import Tags
from django_q.management.commands.qcluster import Command as QCluster

from nodes.reconcilers import schedules
from operations.reconcilers import schedules as ledger_schedules


class Command(QCluster):
    """The library's own, started from a process that is small and ready to be forked."""

    # The settings. Django's other checks import every page; `manage.py check` and `serve` run them.
    requires_system_checks = (Tags.security,)

    def handle(self, *args: Any, **options: Any) -> None:
        """Prepares the memory that the forks share, then runs until SIGTERM or SIGINT."""
        for schedule in [*schedules.SCHEDULES, *ledger_schedules.SCHEDULES]:
            import_module(schedule.function.rpartition(".")[0])
        import_module("channels_redis.pubsub")
        gc.collect()
        # A collection writes to every object that it looks at, and so would copy all of it in every fork.
        gc.freeze()
        super().handle(*args, **options)
