"""`make manage ARGS="nodes list"`: a management command for the cluster that uses this data directory."""

import json
import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import replace

from localai_cluster.embedded.layout import ROOT, SERVER_URLS, Layout
from localai_cluster.embedded.lock import holder_of
from localai_cluster.embedded.log import Log
from localai_cluster.embedded.resources import SetupError


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of a management command. `SetupError` if no cluster is running there."""
    layout = Layout.of(environ)
    holder = holder_of(layout.data_dir)
    if not holder:
        raise SetupError(f"No cluster is running on {layout.data_dir}.", "Start one with `make run`.")
    running = replace(layout, host=str(holder["host"]), port=int(holder["port"]))
    urls: dict[str, str] = json.loads((layout.secrets.directory / SERVER_URLS).read_text(encoding="utf-8"))
    return {**running.product_environment({}), **urls}


def main() -> int:
    """Replaces this process with the command; returns only if that fails."""
    try:
        arguments = shlex.split(" ".join(sys.argv[1:])) or ["help"]
        os.execve(
            sys.executable, [sys.executable, str(ROOT / "manage.py"), *arguments], environment(os.environ)
        )
    except (SetupError, OSError, ValueError) as error:
        Log().say("manage", str(error))
    return 1


if __name__ == "__main__":
    sys.exit(main())
