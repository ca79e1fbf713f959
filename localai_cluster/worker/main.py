"""The command `localai-cluster-worker`: settings from flags and environment, logging, exit codes.

Exit 0 after an orderly end, 2 for a setting that is wrong (one line that names it and its mend), 1 for the
rest.
"""

import asyncio
import logging
import sys
from collections.abc import Callable
from typing import Any

import click

from localai_cluster import logs
from localai_cluster.errors import ClusterError
from localai_cluster.worker import identity
from localai_cluster.worker.agent import run
from localai_cluster.worker.config import SETTINGS, InvalidSetting, build

log = logging.getLogger(__name__)


def _with_settings(command: Callable[..., None]) -> Callable[..., None]:
    for setting in reversed(SETTINGS):
        # A switch takes true or false too, because that is how the environment gives it.
        switch: dict[str, Any] = {"is_flag": False, "flag_value": "true"} if setting.switch else {}
        command = click.option(
            setting.flag, setting.key, envvar=list(setting.environment), help=setting.help, **switch
        )(command)
    return command


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@_with_settings
def main(**given: str | None) -> None:
    """Runs the LocalAI Cluster worker of this machine until it is told to stop."""
    sys.exit(_run(given))


def _run(given: dict[str, Any]) -> int:
    try:
        config = build(given)
        _log_to_stderr()
        with identity.claim(config.data_dir):
            asyncio.run(run(config, identity.Identity(config.data_dir)))
    except (InvalidSetting, identity.IdentityProblem) as error:
        click.echo(f"error: {error.message}", err=True)
        return 2
    except ClusterError as error:
        log.error("%s", error.message)
        return 1
    except OSError as error:
        log.error("%s", error)
        return 1
    return 0


def _log_to_stderr() -> None:
    logging.basicConfig(level=logging.INFO, handlers=[logs.handler(sys.stderr)])
    # One line for every heartbeat would drown the rest.
    logging.getLogger("httpx").setLevel(logging.WARNING)


if __name__ == "__main__":
    main()
