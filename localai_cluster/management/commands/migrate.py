"""`manage.py migrate`, run by one process at a time (R1.9), because several may start together."""

from typing import Any

from django.core.management.commands.migrate import Command as Migrate
from django.db import connection

from localai_cluster.kit.transactions import Lock, wait_for_lock
from localai_cluster.management.schema_version import Schema, note_version, refuse_newer


class Command(Migrate):
    """Django's command `migrate`, under the schema lock."""

    def handle(self, *args: Any, **options: Any) -> None:
        """Migrate the database. Raise CommandError if later code has migrated it.

        If another process is migrating, wait for its end; then nothing is left to do.
        """
        with wait_for_lock(Lock.SCHEMA):
            connection.ensure_connection()
            refuse_newer(Schema.of(connection.connection))
            super().handle(*args, **options)
            if not (options["plan"] or options["check_unapplied"]):
                note_version(connection.connection)
