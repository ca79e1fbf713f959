"""What controller and tasks do not import: they show no page, and every import is memory of each of them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PAGES = (
    "localai_cluster.urls",
    "localai_cluster.api_document",
    "nodes.admin",
    "django_q.admin",
    "drf_spectacular.generators",
    "daphne",
    "uvicorn",
    "numpy",
)
LIST = """
import json, sys
import django
from django.core.management import get_commands, load_command_class

django.setup()
name = sys.argv[1]
found = load_command_class(get_commands()[name], name)
found.check(tags=list(found.requires_system_checks))
print(json.dumps(sorted(sys.modules)))
"""


@pytest.mark.parametrize("command", ["controller", "qcluster"])
def test_background_processes_leave_the_pages_out(command: str) -> None:
    """Start-up, the checks of the settings included, imports neither URLs, admin nor web server."""
    done = subprocess.run(
        [sys.executable, "-c", LIST, command],
        cwd=ROOT,
        env={**os.environ, "DJANGO_SETTINGS_MODULE": "localai_cluster.settings"},
        capture_output=True,
        text=True,
        check=True,
    )
    imported = set(json.loads(done.stdout.splitlines()[-1]))
    assert imported.isdisjoint(PAGES), imported.intersection(PAGES)


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
