"""`make worker NAME=two`: adds a worker on this machine to the cluster that uses this data directory."""

import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from localai_cluster.embedded.layout import LOCAL_WORKER, WORKER_COMMAND, Layout
from localai_cluster.embedded.lock import holder_of
from localai_cluster.embedded.log import Log
from localai_cluster.embedded.resources import SetupError


def environment(environ: Mapping[str, str], name: str) -> dict[str, str]:
    """The environment of the worker `name`. `SetupError` if no cluster is running or the name is unusable."""
    if not name:
        raise SetupError("NAME is required.", "Example: make worker NAME=two.")
    if name == LOCAL_WORKER:
        raise SetupError(
            f"The name {name!r} belongs to the worker of `make run`.", "Example: make worker NAME=two."
        )
    if not all(sign.isalnum() or sign in "-_." for sign in name):
        raise SetupError(f"{name!r} is not a valid name.", "Use letters, digits, '-', '_' and '.'.")
    layout = Layout.of(environ)
    holder = holder_of(layout.data_dir)
    if not holder:
        raise SetupError(f"No cluster is running on {layout.data_dir}.", "Start one with `make run`.")
    running = replace(layout, host=str(holder["host"]), port=int(holder["port"]))
    return running.worker_environment(name, layout.data_dir / "workers" / name)


def main() -> int:
    """Replaces this process with the worker; returns only if that fails."""
    try:
        env = environment(os.environ, sys.argv[1] if len(sys.argv) > 1 else "")
        Path(env["LOCALAI_BACKENDS_PATH"]).mkdir(parents=True, exist_ok=True)
        os.execve(WORKER_COMMAND[0], WORKER_COMMAND, env)
    except (SetupError, OSError) as error:
        Log().say("worker", str(error))
    return 1


if __name__ == "__main__":
    sys.exit(main())
