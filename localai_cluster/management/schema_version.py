"""Refuses a database with the schema of another version (review X5).

`manage.py migrate` stores its version as the comment of Django's table of migrations. The migrations
themselves decide: if the database has a migration of ours that this code lacks, then later code has migrated
the database, and this code would write rows that the schema does not allow.
"""

import pkgutil
from collections.abc import Collection
from dataclasses import dataclass
from importlib import import_module

import psycopg
from django.core.management.base import CommandError
from psycopg import sql

from localai_cluster import __version__

_APPS = {"accounts": "localai_cluster.accounts", "nodes": "nodes", "operations": "operations"}
_CONNECT_SECONDS = 5

Migration = tuple[str, str]
"""A migration: app and name."""


@dataclass(frozen=True)
class Schema:
    """Our migrations in a database, and the version that migrated the database last; "" if unknown."""

    applied: frozenset[Migration]
    version: str

    @classmethod
    def of(cls, connection: "psycopg.Connection[tuple[str, ...]]") -> "Schema":
        """Read the schema of a database by an autocommit connection. A new database has no migrations."""
        table = connection.execute(
            "SELECT obj_description(oid, 'pg_class') FROM pg_class"
            " WHERE oid = to_regclass('django_migrations')"
        ).fetchone()
        if table is None:
            return cls(frozenset(), "")
        rows = connection.execute(
            "SELECT app, name FROM django_migrations WHERE app = ANY(%s)", [list(_APPS)]
        ).fetchall()
        return cls(frozenset((app, name) for app, name in rows), table[0] or "")


def own_migrations() -> frozenset[Migration]:
    """Return the migrations of this code."""
    return frozenset(
        (app, module.name)
        for app, package in _APPS.items()
        for module in pkgutil.iter_modules(import_module(f"{package}.migrations").__path__)
    )


def refuse_newer(schema: Schema) -> None:
    """Raise CommandError, which states the remedy, if later code has migrated the database."""
    if unknown := schema.applied - own_migrations():
        later = f"version {schema.version}" if schema.version else "a later version"
        raise CommandError(
            f"The database was migrated by {later} ({_listed(unknown)}); this is version {__version__},"
            " which does not have these migrations. Start the later version again, or restore the backup that"
            " was made before the upgrade."
        )


def refuse_other(url: str) -> None:
    """Raise CommandError unless the database has exactly the migrations of this code.

    A database that does not respond is accepted: server processes start without it and wait.
    """
    try:
        with psycopg.connect(url, autocommit=True, connect_timeout=_CONNECT_SECONDS) as connection:
            schema = Schema.of(connection)
    except psycopg.OperationalError:
        return
    refuse_newer(schema)
    if missing := own_migrations() - schema.applied:
        before = f" It was last migrated by version {schema.version}." if schema.version else ""
        raise CommandError(
            f"The database has not been migrated to version {__version__} ({_listed(missing)}).{before}"
            " Stop the server processes of the earlier version and run `manage.py migrate`."
        )


def note_version(connection: "psycopg.Connection[tuple[str, ...]]") -> None:
    """Record that this version has migrated the database."""
    comment = sql.SQL("COMMENT ON TABLE django_migrations IS {}").format(sql.Literal(__version__))
    connection.execute(comment)


def _listed(migrations: Collection[Migration]) -> str:
    """Return the last migration as `app.name`, and the number of the others."""
    app, name = max(migrations, key=lambda migration: (migration[1], migration[0]))
    return f"{app}.{name}" + (f" and {len(migrations) - 1} more" if len(migrations) > 1 else "")
