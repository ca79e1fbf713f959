"""PostgreSQL for tests: without flushes to disk, and with a schema that is created once per run.

Every process of a run and every test cluster copies one data folder, which has two databases with the schema:
one for the servers, and one for pytest-django.
"""

import fcntl
import os
import shutil
import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

import psycopg
from django.db import connection

from localai_cluster.embedded.bundled_servers import DATABASE_NAME, EmbeddedPostgres
from tests.support.environment import RUN

ROOT = Path(__file__).resolve().parents[2]
KEPT = ("django_migrations", "django_content_type", "auth_permission")
"""Tables with rows that belong to the schema itself."""
_MANY = 200
"""Number of rows from which a table is truncated, because dead rows would slow later tests down."""


class FastPostgres(EmbeddedPostgres):
    """A server that survives a kill, but no power failure."""

    def argv(self) -> list[str]:
        """Return the arguments of the product's own server, and the settings that make it fast."""
        quick = ("fsync=off", "synchronous_commit=off", "full_page_writes=off")
        return [*super().argv(), *(word for setting in quick for word in ("-c", setting))]

    def prepare(self) -> None:
        """Copy the run's data folder."""
        if not self.data.exists():
            copy_migrated_data(self.directory)
        super().prepare()


def copy_migrated_data(directory: Path) -> None:
    """Give the PostgreSQL of this folder the schema: its first start would spend seconds on that."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    shutil.copytree(migrated_data(), directory / "pgdata", symlinks=True)


@lru_cache(maxsize=1)
def migrated_data() -> Path:
    """Return the data folder of a stopped PostgreSQL with the schema."""
    folder = RUN / "template"
    with (RUN / "template.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            _migrate(RUN / "template.new")
            (RUN / "template.new").rename(folder)
    return folder / "pgdata"


def _migrate(folder: Path) -> None:
    server = _Bare(folder)
    with server:
        environment = {**os.environ, "DATABASE_URL": server.url, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "manage.py", "migrate", "--verbosity", "0"]
        subprocess.run(command, cwd=ROOT, env=environment, check=True)
        with psycopg.connect(server.url.replace(f"/{DATABASE_NAME}?", "/postgres?"), autocommit=True) as link:
            link.execute(f"CREATE DATABASE test_{DATABASE_NAME} TEMPLATE {DATABASE_NAME}")


class _Bare(FastPostgres):
    """The server that creates the data folder."""

    def prepare(self) -> None:
        EmbeddedPostgres.prepare(self)


def reset(link: psycopg.Connection[Any]) -> None:
    """Reset a pooled connection: no locks, no channels, no settings."""
    link.execute("DISCARD ALL")


class Cleaner:
    """The connection that empties the tables after each test of this process.

    A new connection for each test would read the whole catalogue and plan every deletion again.
    """

    def __init__(self) -> None:
        self._link: psycopg.Connection[Any] | None = None

    def run(self) -> None:
        """Empty the tables; reconnect if a test has ended the server or its connections."""
        try:
            self._opened().execute("SELECT pg_temp.empty_tables()")
        except psycopg.OperationalError:
            self.close()
            self._opened().execute("SELECT pg_temp.empty_tables()")

    def close(self) -> None:
        """Close the connection; the next run opens a new one."""
        if self._link is not None:
            self._link.close()
        self._link = None

    def _opened(self) -> psycopg.Connection[Any]:
        settings = connection.settings_dict
        if self._link is None or self._link.closed or self._link.info.dbname != settings["NAME"]:
            self.close()
            named = {"dbname": settings["NAME"], "user": settings["USER"], "host": settings["HOST"]}
            self._link = psycopg.connect(**named, autocommit=True, application_name="empty-tables")
            self._link.execute("SET session_replication_role = replica")
            self._link.execute(_function())
        return self._link


cleaner = Cleaner()


def _function() -> str:
    tables = [name for name in connection.introspection.table_names() if name not in KEPT]
    steps = (
        f'DELETE FROM "{name}"; GET DIAGNOSTICS gone = ROW_COUNT;'
        f' IF gone > {_MANY} THEN TRUNCATE "{name}" CASCADE; END IF;'
        for name in tables
    )
    return (
        "CREATE FUNCTION pg_temp.empty_tables() RETURNS void LANGUAGE plpgsql AS"
        f" $$ DECLARE gone bigint; BEGIN {' '.join(steps)} END $$"
    )


def empty_tables(*_: Any) -> None:
    """Remove all rows that a test has committed.

    Django's `flush` truncates every table and recreates its content types and permissions, which takes a
    hundred times as long for the few rows of a test.
    """
    connection.close()  # it may hold a lock
    cleaner.run()
