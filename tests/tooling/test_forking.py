"""A forked process of a test cluster is what a started one would be."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cluster import ROOT
from tests.support.forking import Fork, can_fork, run_command

_SETTINGS = """
import sys
from django.conf import settings
from django.db import connection
print(settings.CLUSTER.operation_lease, settings.CLUSTER.models_path, settings.IS_WEB, sys.argv[:2])
print(settings.DATABASES, connection.settings_dict)
"""
_ENVIRONMENT = {
    "PATH": os.environ["PATH"],
    "PYTHONPATH": str(ROOT),
    "DATABASE_URL": "postgresql://somebody@nowhere.invalid:1/another",
    "LOCALAI_MODELS_PATH": "/srv/other-models",
    "CLUSTER_OPERATION_LEASE": "77s",
    "SECRET_KEY": "another-secret-key-for-this-test-only",
}


def forked(tmp_path: Path, *argv: str, **more: str) -> Fork:
    """A fork that writes to the file `log`."""
    assert can_fork(argv)
    return Fork(argv, env=_ENVIRONMENT | more, cwd=ROOT, log=tmp_path / "log")


def test_it_reads_its_own_environment_and_arguments(tmp_path: Path) -> None:
    argv = ("manage.py", "shell", "--no-imports", "-c", _SETTINGS)
    started = subprocess.run(
        [sys.executable, *argv], cwd=ROOT, env=_ENVIRONMENT, capture_output=True, text=True, check=True
    )
    assert forked(tmp_path, *argv).wait(60) == 0
    assert (tmp_path / "log").read_text() == started.stdout
    assert started.stdout.startswith("77.0 /srv/other-models ")


@pytest.mark.parametrize("argv", [("manage.py", "nonsense"), ("-m", "localai_cluster.worker")])
def test_its_output_and_exit_code_are_those_of_the_command(tmp_path: Path, argv: tuple[str, ...]) -> None:
    started = subprocess.run(
        [sys.executable, *argv], cwd=ROOT, env=_ENVIRONMENT, capture_output=True, text=True, check=False
    )
    assert forked(tmp_path, *argv).wait(60) == started.returncode != 0
    assert (tmp_path / "log").read_text() == started.stdout + started.stderr


def test_a_signal_ends_it(tmp_path: Path) -> None:
    fork = forked(tmp_path, "manage.py", "shell", "--no-imports", "-c", "import signal; signal.pause()")
    assert fork.poll() is None
    fork.send_signal(signal.SIGTERM)
    assert fork.wait(60) == -signal.SIGTERM


def test_a_command_that_is_run_to_its_end_keeps_what_it_prints_apart(tmp_path: Path) -> None:
    """Callers parse its output; a coroutine that nobody awaits is an error."""
    script = "import sys, warnings; print(1); print(2, file=sys.stderr); warnings.warn('x', {})"
    for category, code in (("RuntimeWarning", 1), ("UserWarning", 0)):
        words = ("shell", "--no-imports", "-c", script.format(category))
        done = run_command(*words, env=_ENVIRONMENT, cwd=ROOT, folder=tmp_path)
        assert (done.returncode, done.stdout) == (code, "1\n")
        assert done.stderr.startswith("2\n")
        assert f"{category}: x" in done.stderr


def test_its_end_between_two_reads_is_seen_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process may end while `poll` runs: what it returns and `returncode` agree."""
    fork = forked(tmp_path, "manage.py", "nonsense")
    fork.wait(60)
    codes = iter([None, 0, 0])
    monkeypatch.setattr(type(fork._process), "exitcode", property(lambda _: next(codes)))
    while fork.poll() is None:
        assert fork.returncode is None
    assert fork.returncode == 0
