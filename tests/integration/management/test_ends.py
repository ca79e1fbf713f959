"""A management command that cannot do its work ends with one line and an exit code, without a stack trace."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from django.db import IntegrityError, InterfaceError, OperationalError

from localai_cluster import manage
from localai_cluster.kit import nkeys
from tests.support import forking
from tests.support.cluster import ROOT
from tests.support.ports import free_port


def fail(error: BaseException) -> Callable[[list[str]], None]:
    def run(arguments: list[str]) -> None:
        raise error

    return run


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (OperationalError("connection failed: refused\n\tIs it running?"), "refused"),
        (InterfaceError(), "InterfaceError"),
        (UnicodeEncodeError("utf-8", "gpu\udcff", 3, 4, "surrogates not allowed"), r"'gpu\udcff'"),
        (EOFError(), "nothing was done"),
    ],
)
def test_what_the_product_did_not_cause_is_one_line(error: Exception, says: str) -> None:
    """The database is away, the terminal's character set is another one, Ctrl-D at a question."""
    with pytest.raises(SystemExit) as ended:
        manage._run_for_user(fail(error), [])
    line = str(ended.value.code)
    assert line.startswith("CommandError: ")
    assert says in line
    assert "\n" not in line


def test_ctrl_c_and_a_closed_pipe_end_as_in_a_shell() -> None:
    with pytest.raises(SystemExit) as ended:
        manage._run_for_user(fail(KeyboardInterrupt()), [])
    assert ended.value.code == 130


@pytest.mark.parametrize(
    "error", [IntegrityError("x"), UnicodeEncodeError("ascii", "é", 0, 1, "ordinal not in range(128)")]
)
def test_a_defect_keeps_its_stack_trace(error: Exception) -> None:
    with pytest.raises(type(error)):
        manage._run_for_user(fail(error), [])


@pytest.mark.parametrize(
    ("words", "settings", "says"),
    [
        (("nodes", "list"), {}, "CommandError: the database cannot be used (DATABASE_URL): connection "),
        (("migrate",), {}, "CommandError: the database cannot be used (DATABASE_URL): connection "),
        (("bootstrap",), {"CLUSTER_ENROL_NODE": "a\u202eb"}, "CommandError: CLUSTER_ENROL_NODE: name "),
    ],
)
@pytest.mark.django_db
def test_a_command_without_a_database(
    words: tuple[str, ...], settings: dict[str, str], says: str, tmp_path: Path
) -> None:
    away = f"127.0.0.1:{free_port()}"
    environment = {
        **os.environ,
        "DATABASE_URL": f"postgresql://u@{away}/x",
        "LOCALAI_NATS_URL": f"nats://{away}",
        "LOCALAI_NATS_ACCOUNT_SEED": nkeys.generate("account").seed,
        "CLUSTER_ENROL_SECRET": "0123456789abcdef" * 4,
        **settings,
    }
    done = forking.run_command(*words, env=environment, cwd=ROOT, folder=tmp_path)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith(says)
