"""Worker, web process and controller use as many file descriptors as they may."""

import resource
import sys
from collections.abc import Iterator

import pytest
from click.testing import CliRunner

from localai_cluster import manage
from localai_cluster.worker.__main__ import main

LOW = 512


@pytest.fixture
def hard() -> Iterator[int]:
    """Lower the soft limit of this process; return the hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (LOW, hard))
    yield hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def is_raised(hard: int) -> bool:
    """Return True if the soft limit is above the one that the test began with."""
    now = resource.getrlimit(resource.RLIMIT_NOFILE)
    return now[0] > LOW and now[1] == hard


def test_a_worker_raises_its_limit(hard: int) -> None:
    CliRunner().invoke(main, ["check", "--addr", "nonsense"])
    assert is_raised(hard)


@pytest.mark.parametrize("command", ["serve", "controller"])
def test_a_process_of_the_server_raises_its_limit(
    hard: int, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["manage.py", command, "--help"])
    with pytest.raises(SystemExit):
        manage.main()
    assert is_raised(hard)
