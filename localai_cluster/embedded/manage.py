"""`make manage ARGS="nodes list"`: a management command for the cluster that runs on our data directory."""

import json
import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import replace

from localai_cluster.embedded.layout import ROOT, Layout
from localai_cluster.embedded.lock import holder_of
from localai_cluster.embedded.log import Log
from localai_cluster.embedded.places import Trouble

SERVER_URLS = "server_urls"
"""The file among the secrets in which `make run` leaves the addresses of its own servers."""


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of a management command. `Trouble` when no cluster runs there."""
    layout = Layout.of(environ)
    holder = holder_of(layout.data_dir)
    if not holder:
        raise Trouble(f"No cluster runs on {layout.data_dir}.", "Start one with `make run`.")
    running = replace(layout, host=str(holder["host"]), port=int(holder["port"]))
    urls: dict[str, str] = json.loads((layout.secrets.directory / SERVER_URLS).read_text(encoding="utf-8"))
    return {**running.product_environment({}), **urls}


def main() -> int:
    """Becomes the command; returns only when that is not possible."""
    try:
        arguments = shlex.split(" ".join(sys.argv[1:])) or ["help"]
        os.execve(
            sys.executable, [sys.executable, str(ROOT / "manage.py"), *arguments], environment(os.environ)
        )
    except (Trouble, OSError, ValueError) as error:
        Log().say("manage", str(error))
    return 1


if __name__ == "__main__":
    sys.exit(main())
