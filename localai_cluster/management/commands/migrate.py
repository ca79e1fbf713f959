"""`manage.py migrate`, by one process at a time (R1.9): several may start together."""

from typing import Any

from django.core.management.commands.migrate import Command as Migrate

from localai_cluster.locks import Lock, wait_for_lock


class Command(Migrate):
    """Django's command, under the schema lock."""

    def handle(self, *args: Any, **options: Any) -> None:
        """Waits for a migration in another process, after which nothing is left to do."""
        with wait_for_lock(Lock.SCHEMA):
            super().handle(*args, **options)
