"""The programs of the Makefile that are no tests: they begin without pytest and without Django's settings."""

import os
import subprocess
import sys

from tests.support.cluster import ROOT

PROGRAMS = (
    "tests.acceptance.placement_story",
    "tests.browser.measure",
    "tests.browser.shots",
    "tests.browser.story",
    "tests.measure.__main__",
    "tests.sweep",
)


def test_programs_begin_without_settings() -> None:
    environment = {key: value for key, value in os.environ.items() if key != "DJANGO_SETTINGS_MODULE"}
    command = [sys.executable, "-c", f"import {', '.join(PROGRAMS)}"]
    done = subprocess.run(
        command, cwd=ROOT, env=environment | {"PYTHONPATH": str(ROOT)}, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr.decode()
