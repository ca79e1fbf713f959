"""Programs (`make manage`, `make worker`) that use the cluster which runs on a data directory.

`make manage ARGS="nodes list"` runs a management command, `make worker NAME=two` adds a worker.
"""

import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from localai_cluster.embedded.layout import (
    LOCAL_WORKER_NAME,
    SERVER_URLS_FILE,
    WORKER_COMMAND,
    Layout,
    manage,
)
from localai_cluster.embedded.lock import holder_of
from localai_cluster.embedded.resources import SetupError
from localai_cluster.embedded.terminal import Log


def _running_layout(environ: Mapping[str, str]) -> Layout:
    """Return the layout of the running cluster. Raise SetupError if no cluster is running."""
    layout = Layout.of(environ)
    holder = holder_of(layout.data_dir)
    if not holder:
        raise SetupError(f"No cluster is running on {layout.data_dir}.", "Start one with `make run`.")
    return replace(layout, host=str(holder["host"]), port=int(holder["port"]))


def management_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a management command. Raise SetupError if no cluster is running."""
    layout = _running_layout(environ)
    urls: dict[str, str] = json.loads(
        (layout.secrets.directory / SERVER_URLS_FILE).read_text(encoding="utf-8")
    )
    return {**layout.product_environment({}), **urls}


def worker_environment(environ: Mapping[str, str], name: str) -> dict[str, str]:
    """Return the environment of the worker `name`.

    Raise SetupError if no cluster is running or the name cannot be used.
    """
    if not name:
        raise SetupError("NAME is required.", "Example: make worker NAME=two.")
    if name == LOCAL_WORKER_NAME:
        raise SetupError(
            f"The name {name!r} belongs to the worker of `make run`.", "Example: make worker NAME=two."
        )
    if name in (".", "..") or not all(sign.isalnum() or sign in "-_." for sign in name):
        raise SetupError(f"{name!r} is not a valid name.", "Use letters, digits, '-', '_' and '.'.")
    layout = _running_layout(environ)
    return layout.worker_environment(name, layout.data_dir / "workers" / name)


def _run_management_command(arguments: Sequence[str]) -> None:
    words = shlex.split(" ".join(arguments)) or ["help"]
    os.execve(sys.executable, manage(*words), management_environment(os.environ))


def _run_worker(arguments: Sequence[str]) -> None:
    env = worker_environment(os.environ, arguments[0] if arguments else "")
    Path(env["LOCALAI_BACKENDS_PATH"]).mkdir(parents=True, exist_ok=True)
    os.execve(WORKER_COMMAND[0], WORKER_COMMAND, env)


_RUN_BY_PROGRAM = {"manage": _run_management_command, "worker": _run_worker}


def main(program: str, *arguments: str) -> int:
    """Replace this process with the program `manage` or `worker`. Return an exit code only if that fails."""
    try:
        _RUN_BY_PROGRAM[program](arguments)
    except (SetupError, OSError, ValueError) as error:
        Log().say(program, str(error))
    return 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
