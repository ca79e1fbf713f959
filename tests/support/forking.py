"""Fork processes of a cluster from a process that has imported the product.

A start by `exec` spends one to two seconds of processor time on imports. The fork server of the standard
library, one for each process of the test run, imports once; a fork then reads its own arguments and
environment. Tests of the start itself, of `make run` and of the deployments start their processes by `exec`.
"""

import atexit
import gc
import logging
import multiprocessing
import os
import subprocess
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

MANAGE, WORKER = ("manage.py",), ("-m", "localai_cluster.worker")
"""How the commands begin that can be forked."""
STRICT = "error::RuntimeWarning"
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    [
        # First: it limits the threads of NumPy.
        "localai_cluster.management.commands.serve",
        "localai_cluster.management.commands.controller",
        "localai_cluster.management.commands.qcluster",
        "localai_cluster.manage",
        "localai_cluster.urls",
        "localai_cluster.worker.__main__",
        "drf_spectacular.openapi",
        "numpy",
        "anyio._backends._asyncio",
        "channels_redis.pubsub",
        "django.core.management.commands.migrate",
        "uvicorn.loops.uvloop",
    ]
)


class Fork(subprocess.Popen[bytes]):
    """A forked process, the leader of a session of its own; `Popen` sends its signals."""

    def __init__(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: Path,
        log: Path,
        errors: Path | None = None,
    ) -> None:
        logs = (log, errors or log)
        for file in logs:
            file.touch()
        self._child_created = False  # so that `Popen.__del__` has nothing to do
        self.args, self.returncode = argv, None
        self._process = _CONTEXT.Process(
            target=_become, args=(tuple(argv), dict(env), cwd, logs), daemon=True
        )
        self._process.start()
        assert self._process.pid
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """Return the exit code, as `Popen` does; None while it runs."""
        # Read once: the process may end between two reads.
        self.returncode = code = self._process.exitcode
        return code

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end and return the exit code."""
        self._process.join(timeout)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return code


def can_fork(argv: Sequence[str]) -> bool:
    """Return True if the command can be forked."""
    return tuple(argv[:1]) == MANAGE or tuple(argv[:2]) == WORKER


def run_command(
    *words: str, env: Mapping[str, str], cwd: Path, folder: Path
) -> "subprocess.CompletedProcess[str]":
    """Run a management command to its end; its output is kept in `folder`.

    A RuntimeWarning is an error: it is a coroutine that nobody awaits.
    """
    output, errors = folder / "output", folder / "errors"
    for file in (output, errors):
        file.write_text("")
    process = Fork(
        (*MANAGE, *words), env={**env, "PYTHONWARNINGS": STRICT}, cwd=cwd, log=output, errors=errors
    )
    code = process.wait()
    return subprocess.CompletedProcess(words, code, output.read_text(), errors.read_text())


def _become(argv: tuple[str, ...], env: Mapping[str, str], cwd: Path, logs: tuple[Path, Path]) -> None:
    """Run the command in this fork; its exit code is that of the process."""
    gc.freeze()
    os.setsid()
    for number, log in enumerate(logs, start=1):
        os.dup2(os.open(log, os.O_WRONLY | os.O_APPEND), number)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    try:
        _run(argv)
    finally:
        atexit._run_exitfuncs()  # which the fork server omits


def _run(argv: tuple[str, ...]) -> None:
    from localai_cluster import manage
    from localai_cluster.kit import failpoints
    from localai_cluster.worker import __main__ as worker

    failpoints.arm()
    if os.environ.get("PYTHONWARNINGS") == STRICT:
        warnings.simplefilter("error", RuntimeWarning)
    if argv[:2] == WORKER:
        sys.argv = [str(worker.__file__), *argv[2:]]
        logging.root.handlers.clear()
        logging.getLogger("uvicorn").setLevel(logging.NOTSET)
        worker.main()
    else:
        sys.argv = sys.orig_argv[1:] = list(argv)
        _forget_settings()
        manage.main()


def _forget_settings() -> None:
    """Have Django read the settings again from this environment and these arguments."""
    from django.conf import settings
    from django.db import connections
    from django.utils.functional import empty

    del sys.modules["localai_cluster.settings"]
    settings._wrapped = empty
    connections.__dict__.pop("settings", None)
    type(connections).__init__(connections)
