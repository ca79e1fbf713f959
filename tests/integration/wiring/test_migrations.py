"""The models and their migrations agree, and several processes may make the schema at once."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest
from django.core.management import call_command
from django.db import connection
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict

from localai_cluster import __version__
from localai_cluster.kit import clock
from localai_cluster.management import schema_version
from nodes.figures import store as figures
from nodes.figures.series import floor_to_step
from operations.changes.events import conninfo
from tests.support import forking
from tests.support.cluster import ROOT
from tests.support.effort import swept
from tests.support.ports import free_port


@pytest.mark.django_db
def test_no_change_of_a_model_is_without_its_migration() -> None:
    """`makemigrations --check` would exit with 1."""
    call_command("makemigrations", "--check", "--dry-run", verbosity=0)


@pytest.fixture
def migrated_by() -> Iterator[Callable[[str, set[tuple[str, str]]], str]]:
    """Makes a database with these migrations of ours that this version has migrated; answers its URL."""
    here = conninfo_to_dict(conninfo())

    def create(version: str, migrations: set[tuple[str, str]]) -> str:
        url = f"postgresql://{here['user']}@/other_version?host={here['host']}"
        with psycopg.connect(conninfo(), autocommit=True) as link:
            link.execute("CREATE DATABASE other_version")
        with psycopg.connect(url, autocommit=True) as link:
            link.execute("CREATE TABLE django_migrations (app text, name text)")
            link.cursor().executemany("INSERT INTO django_migrations VALUES (%s, %s)", sorted(migrations))
            link.execute(sql.SQL("COMMENT ON TABLE django_migrations IS {}").format(sql.Literal(version)))
        return url

    yield create
    with psycopg.connect(conninfo(), autocommit=True) as link:
        link.execute("DROP DATABASE IF EXISTS other_version WITH (FORCE)")


def complaint_of(command: str, url: str, folder: Path) -> str:
    """The one line with which a command of `manage.py` ends on that database."""
    several = {"CLUSTER_WEB_PROCESSES": "2"}  # the parent ends with the first, and its line
    environment = {**os.environ, **several, "DATABASE_URL": url, "PORT": str(free_port())}
    done = forking.run_command(command, env=environment, cwd=ROOT, folder=folder)
    assert done.returncode == 1, done.stderr
    (line,) = done.stderr.splitlines()
    return line


@pytest.mark.django_db(transaction=True)
def test_nothing_starts_on_a_database_of_a_later_version(
    migrated_by: Callable[[str, set[tuple[str, str]]], str], tmp_path: Path
) -> None:
    """Review X5: both versions and the way back, instead of "Failing row contains"."""
    later = ("nodes", "9999_of_a_later_version")
    url = migrated_by("7.0.0", {*schema_version.own_migrations(), later})
    for command in ("migrate", "serve", "controller", "qcluster"):
        line = complaint_of(command, url, tmp_path)
        assert "migrated by version 7.0.0 (nodes.9999_of_a_later_version)" in line
        assert f"this is version {__version__}, " in line
        assert "Start the later version again, or restore the backup" in line


@pytest.mark.django_db(transaction=True)
def test_server_processes_do_not_start_before_the_migration(
    migrated_by: Callable[[str, set[tuple[str, str]]], str], tmp_path: Path
) -> None:
    """Review X5: the other way round. `migrate` is what such a database needs."""
    migrations = schema_version.own_migrations()
    url = migrated_by("0.0.1", {*migrations} - {max(entry for entry in migrations if entry[0] == "nodes")})
    line = complaint_of("controller", url, tmp_path)
    assert f"has not been migrated to version {__version__} (nodes." in line
    assert "last migrated by version 0.0.1" in line
    assert "run `manage.py migrate`" in line


@pytest.mark.django_db
def test_migrate_notes_its_version_and_knows_all_migrations() -> None:
    """The database of the tests was made by `migrate`."""
    with psycopg.connect(conninfo(), autocommit=True) as link:
        schema = schema_version.Schema.of(link)
    assert schema == schema_version.Schema(schema_version.own_migrations(), __version__)
    assert {app for app, _ in schema.applied} == {"accounts", "nodes", "operations"}
    schema_version.refuse_other("postgresql://nobody@127.0.0.1:1/away")


@pytest.mark.django_db
def test_migrate_creates_the_partitions_of_figures() -> None:
    """A request before the first sample makes PostgreSQL log no error; `migrate` runs at each start."""
    at = clock.now()  # before `migrate`: a period may end meanwhile
    with connection.cursor() as cursor:
        call_command("migrate", verbosity=0)
        cursor.execute("INSERT INTO figure_samples (subject, at, numbers) VALUES ('model/', %s, '{1}')", [at])
        cursor.execute("INSERT INTO figure_hours (subject, at, body) VALUES ('model/', %s, '')", [at])
    for table in figures.TABLES:
        starts = {floor_to_step(moment, table.width) for moment in (at, at + table.width)}
        assert starts <= set(table.starts()), "of now and of the next period"


@pytest.mark.django_db
def test_migrate_to_a_schema_without_figures_creates_no_partitions() -> None:
    with connection.cursor() as cursor:
        cursor.execute("DROP TABLE figure_samples, figure_hours, figure_days")
    call_command("migrate", verbosity=0)


@swept
@pytest.mark.rule("R1.9")
@pytest.mark.django_db(transaction=True)
def test_three_processes_make_the_schema_at_once() -> None:
    """Each waits for the one before and finds nothing left to do."""
    here = conninfo_to_dict(conninfo())
    with psycopg.connect(conninfo(), autocommit=True) as link:
        link.execute("CREATE DATABASE made_at_once")
        url = f"postgresql://{here['user']}@/made_at_once?host={here['host']}"
        command = [sys.executable, "manage.py", "migrate", "--verbosity", "0"]
        environment = {**os.environ, "DATABASE_URL": url}
        children = [
            subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE) for _ in range(3)
        ]
        errors = [child.communicate(timeout=720)[1] for child in children]
        link.execute("DROP DATABASE made_at_once WITH (FORCE)")
    assert [child.returncode for child in children] == [0, 0, 0], errors
