"""`make worker NAME=two`: one more worker on this machine for the cluster that runs on our data directory."""

import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from localai_cluster.embedded.layout import LOCAL_WORKER, WORKER_COMMAND, Layout
from localai_cluster.embedded.lock import holder_of
from localai_cluster.embedded.log import Log
from localai_cluster.embedded.places import Trouble


def environment(environ: Mapping[str, str], name: str) -> dict[str, str]:
    """The environment of the worker `name`. `Trouble` when no cluster runs there or the name will not do."""
    if not name or name == LOCAL_WORKER or not all(sign.isalnum() or sign in "-_." for sign in name):
        raise Trouble(f"{name!r} is no name for another worker.", "Say for instance: make worker NAME=two.")
    layout = Layout.of(environ)
    holder = holder_of(layout.data_dir)
    if not holder:
        raise Trouble(f"No cluster runs on {layout.data_dir}.", "Start one with `make run`.")
    running = replace(layout, host=str(holder["host"]), port=int(holder["port"]))
    nats_url = (layout.secrets.directory / "worker_nats_url").read_text(encoding="utf-8").strip()
    return running.worker_environment(name, layout.data_dir / "workers" / name, nats_url)


def main() -> int:
    """Becomes the worker; returns only when that is not possible."""
    try:
        env = environment(os.environ, sys.argv[1] if len(sys.argv) > 1 else "")
        Path(env["LOCALAI_BACKENDS_PATH"]).mkdir(parents=True, exist_ok=True)
        os.execve(WORKER_COMMAND[0], WORKER_COMMAND, env)
    except (Trouble, OSError) as error:
        Log().say("worker", str(error))
    return 1


if __name__ == "__main__":
    sys.exit(main())
