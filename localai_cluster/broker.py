"""Broker for django-q2's queue in the database that survives outages of the database.

The library's broker connects at its creation, so a process that starts during an outage ends at once; its
pusher sleeps 10 s and ends at the first failed poll, and its monitor ends at the first failed
acknowledgement. This broker logs one line and retries.
"""

# django-q2 carries no types.
# mypy: allow-untyped-calls

import logging
import time
from importlib import import_module
from typing import Any

from django.db import InterfaceError, OperationalError, close_old_connections, connections
from django.db.models import QuerySet
from django_q.brokers.orm import ORM
from django_q.conf import Conf
from django_q.models import OrmQ
from django_q.signals import post_execute
from django_q.utils import get_func_repr

from localai_cluster.metrics import passes

log = logging.getLogger(__name__)

POLL_RETRY_SECONDS = 1.0
"""Seconds after a failed poll until the queue is polled again."""


class PatientBroker(ORM):
    """The ORM broker of django-q2, which retries during an outage of the database."""

    @staticmethod
    def get_connection(list_key: str | None = None) -> "QuerySet[OrmQ]":
        """Return the queue's rows as a lazy queryset; the library's method connects at once."""
        database = str(Conf.ORM)
        if not connections[database].in_atomic_block:
            close_old_connections()
        return OrmQ.objects.using(database)

    def dequeue(self) -> list[tuple[int, str]] | None:
        """Claim and return the next task, for `retry` seconds; None if there is no task or an outage."""
        try:
            tasks: list[tuple[int, str]] | None = super().dequeue()
        except (OperationalError, InterfaceError) as error:
            log.warning("cannot take tasks off the queue, again in %.0f s: %s", POLL_RETRY_SECONDS, error)
            time.sleep(POLL_RETRY_SECONDS)
            return None
        return tasks

    def delete(self, task_id: Any) -> None:
        """Acknowledge a task. During an outage the task stays queued and runs again; tasks are idempotent."""
        try:
            super().delete(task_id)
        except (OperationalError, InterfaceError) as error:
            log.warning("task %s is not acknowledged and will run again: %s", task_id, error)


def count_tasks() -> None:
    """Count each task that ends in this process as a pass, in the metrics."""
    for module in ("nodes.reconcilers.tasks", "operations.reconcilers.tasks"):
        import_module(module)
    post_execute.connect(_record_pass)


def _record_pass(sender: Any, task: dict[str, Any], **more: Any) -> None:
    name = str(get_func_repr(task["func"])).rpartition(".")[2]
    passes.record_pass(name, (task["stopped"] - task["started"]).total_seconds(), ok=bool(task["success"]))
