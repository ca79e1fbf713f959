"""`manage.py migrate`, run by one process at a time (R1.9), because several may start together."""

from contextlib import suppress
from typing import Any

from django.core.management.commands.migrate import Command as Migrate
from django.db import OperationalError, connection

from localai_cluster.kit import clock
from localai_cluster.kit.transactions import Lock, wait_for_lock
from localai_cluster.management.schema_version import Schema, note_version, refuse_newer
from nodes.figures import store as figures


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
                _create_partitions()


def _create_partitions() -> None:
    """Create the partitions of figures before a process writes to them, if the migrations create the tables.

    Without them PostgreSQL would log an error for the first report of each web process.
    """
    if figures.SAMPLES_TABLE.name in connection.introspection.table_names():
        with suppress(OperationalError):  # a lock is held for long: the sampling task tries again
            figures.create_partitions(clock.now())
