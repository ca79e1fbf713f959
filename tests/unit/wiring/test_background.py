"""What each kind of process leaves out at its start: every import is memory of each of them, and time."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
NOWHERE = ("httpx._main", "rich", "numpy", "django.test", "rest_framework.test", "unittest", "daphne")
PAGES = (
    "localai_cluster.urls",
    "localai_cluster.api_document",
    "nodes.admin",
    "django_q.admin",
    "drf_spectacular.utils",
    "redis",
    "uvicorn",
)
DOCUMENT = ("localai_cluster.api_document", "drf_spectacular.openapi", "drf_spectacular.generators")
LIST = """
import json, sys
import django
from django.core.management import get_commands, load_command_class
from django.urls import get_resolver

django.setup()
name = sys.argv[1]
command = load_command_class(get_commands()[name], name)
if name == "serve":
    get_resolver().url_patterns
else:
    command.check(tags=list(command.requires_system_checks))
"""
PRINT = "print(json.dumps(sorted(name for name, module in sys.modules.items() if module)))"
WORKER = "import json, sys, localai_cluster.worker.__main__"


@pytest.mark.parametrize(
    ("program", "absent"),
    [
        ((LIST, "serve"), DOCUMENT),
        ((LIST, "controller"), PAGES),
        ((LIST, "qcluster"), PAGES),
        ((WORKER,), ("django", "redis", "psycopg")),
    ],
    ids=["web", "controller", "tasks", "worker"],
)
def test_a_process_starts_without_what_it_does_not_need(
    program: Sequence[str], absent: Sequence[str]
) -> None:
    """Item 5 of review 22: NumPy waits for the first embedding, drf-spectacular for the first document."""
    done = subprocess.run(
        [sys.executable, "-c", f"{program[0]}\n{PRINT}", *program[1:]],
        cwd=ROOT,
        env={**os.environ, "DJANGO_SETTINGS_MODULE": "localai_cluster.settings"},
        capture_output=True,
        text=True,
        check=True,
    )
    imported = set(json.loads(done.stdout.splitlines()[-1]))
    assert imported.isdisjoint((*NOWHERE, *absent)), imported.intersection((*NOWHERE, *absent))


@pytest.mark.parametrize("command", ["controller", "qcluster"])
def test_background_processes_still_check_their_settings(command: str) -> None:
    """A wrong setting ends the start with its line."""
    done = subprocess.run(
        [sys.executable, "manage.py", command],
        cwd=ROOT,
        env={**os.environ, "CLUSTER_OPERATION_LEASE": "soon"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert "CLUSTER_OPERATION_LEASE" in done.stderr
