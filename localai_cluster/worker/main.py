"""The command `localai-cluster-worker`: settings from flags and environment, logging, exit codes.

Exit code 0 after an orderly stop, 2 for wrong settings (one line each, with the fix), 1 for any other error.
"""

import asyncio
import logging
import sys
from collections.abc import Callable
from typing import Any

import click

from localai_cluster.kit import logs
from localai_cluster.kit.errors import ClusterError
from localai_cluster.worker import identity
from localai_cluster.worker.config import SETTINGS, InvalidSettings, build
from localai_cluster.worker.lifecycle import run

log = logging.getLogger(__name__)


def _with_settings(command: Callable[..., None]) -> Callable[..., None]:
    for setting in reversed(SETTINGS):
        # A switch also accepts true or false, as the environment variable does.
        switch: dict[str, Any] = {"is_flag": False, "flag_value": "true"} if setting.switch else {}
        command = click.option(
            setting.flag, setting.key, envvar=list(setting.environment), help=setting.help, **switch
        )(command)
    return command


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@_with_settings
def main(**given: str | None) -> None:
    """Runs the LocalAI Cluster worker of this machine until it is stopped."""
    sys.exit(_run(given))


def _run(options: dict[str, Any]) -> int:
    try:
        config = build(options)
        logging.basicConfig(level=logging.INFO, handlers=[logs.handler(sys.stderr)])
        # It would log one line per heartbeat.
        logging.getLogger("httpx").setLevel(logging.WARNING)
        with identity.claim(config.data_dir):
            asyncio.run(run(config, identity.NodeIdentity(config.data_dir)))
    except (InvalidSettings, identity.IdentityError) as error:
        for line in error.message.splitlines():
            click.echo(f"error: {line}", err=True)
        return 2
    except ClusterError as error:
        log.error("%s", error.message)
        return 1
    except OSError as error:
        log.error("%s", error)
        return 1
    return 0


if __name__ == "__main__":
    main()
