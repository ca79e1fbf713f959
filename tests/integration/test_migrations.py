"""The models and their migrations agree, and several processes may make the schema at once."""

import os
import subprocess
import sys

import psycopg
import pytest
from django.core.management import call_command
from psycopg.conninfo import conninfo_to_dict

from operations.changes.events import conninfo
from tests.support.cluster import ROOT
from tests.support.effort import swept


@pytest.mark.django_db
def test_no_change_of_a_model_is_without_its_migration() -> None:
    """`makemigrations --check` would exit with 1."""
    call_command("makemigrations", "--check", "--dry-run", verbosity=0)


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
