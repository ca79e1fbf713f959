"""PostgreSQL for tests: without flushes to the disk, and with the schema made once a run.

Every process of a run and every cluster of a test copies one data folder, which has two databases with the
schema: the one that servers use, and the one that pytest-django uses.
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

from localai_cluster.embedded.bundled_servers import DATABASE, EmbeddedPostgres
from tests.support.environment import RUN

ROOT = Path(__file__).resolve().parents[2]
KEPT = ("django_migrations", "django_content_type", "auth_permission")
"""Tables with rows that the schema itself needs."""
_MANY = 200
"""Rows from which a table is truncated: what a deletion leaves behind would slow later tests down."""


class FastPostgres(EmbeddedPostgres):
    """A server that survives a kill, but no power cut."""

    def argv(self) -> list[str]:
        """The arguments of the product's own server, and the settings that make it fast."""
        quick = ("fsync=off", "synchronous_commit=off", "full_page_writes=off")
        return [*super().argv(), *(word for setting in quick for word in ("-c", setting))]

    def prepare(self) -> None:
        """Starts from the run's own data folder."""
        if not self.data.exists():
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            shutil.copytree(migrated_data(), self.data, symlinks=True)
        super().prepare()


@lru_cache(maxsize=1)
def migrated_data() -> Path:
    """The data folder of a stopped PostgreSQL with the schema in it."""
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
        with psycopg.connect(server.url.replace(f"/{DATABASE}?", "/postgres?"), autocommit=True) as link:
            link.execute(f"CREATE DATABASE test_{DATABASE} TEMPLATE {DATABASE}")


class _Bare(FastPostgres):
    """The server that makes the data folder."""

    def prepare(self) -> None:
        EmbeddedPostgres.prepare(self)


@lru_cache(maxsize=1)
def _statement() -> str:
    tables = [name for name in connection.introspection.table_names() if name not in KEPT]
    names = ", ".join(f"'{name}'" for name in tables)
    return (
        f"DO $$ DECLARE name text; gone bigint; BEGIN FOREACH name IN ARRAY ARRAY[{names}] LOOP"
        " EXECUTE format('DELETE FROM %I', name); GET DIAGNOSTICS gone = ROW_COUNT;"
        f" IF gone > {_MANY} THEN EXECUTE format('TRUNCATE %I CASCADE', name); END IF;"
        " END LOOP; END $$"
    )


def empty_tables(*_: Any) -> None:
    """Removes all rows that a test has committed.

    Django's `flush` truncates every table and makes its content types and permissions again, which takes a
    hundred times as long for the few rows of a test.
    """
    statement = _statement()
    with connection.cursor() as cursor:
        cursor.execute("SET session_replication_role = replica")
        cursor.execute(statement)
        cursor.execute("SET session_replication_role = DEFAULT")
