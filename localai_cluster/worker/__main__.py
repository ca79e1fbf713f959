"""The command `localai-cluster-worker`: settings from flags and environment, logging, exit codes.

Exit code 0 after an orderly stop, 2 for wrong settings (one line each, with the fix), 1 for any other error.
`localai-cluster-worker check` reports what the worker would meet; its exit code is 1 if it finds a problem.
"""

import asyncio
import logging
import sys
from collections.abc import Callable
from typing import Any

import click

from localai_cluster.kit import env, logs, processes
from localai_cluster.kit.errors import ClusterError
from localai_cluster.worker import check, identity
from localai_cluster.worker.config import SETTINGS, Config, InvalidSettings, build, flag
from localai_cluster.worker.lifecycle import run

log = logging.getLogger(__name__)


_STOCK_FLAGS_BY_SETTING = {f"nats_tls_{part}": (f"--nats-tls{part}",) for part in ("ca", "cert", "key")}
"""Command-line flags of stock (LocalAI's own) workers, by setting.

They replace the flags of `config.flag`.
"""


class _GroupedHelp(click.Command):
    """A command whose `--help` lists the settings by group, with defaults and variables."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write a section for each group of settings."""
        texts = env.read_field_docstrings(Config)
        for group in dict.fromkeys(entry.group for entry in SETTINGS):
            with formatter.section(group):
                formatter.write_dl(
                    [(flag(entry), _format_help(entry, texts)) for entry in SETTINGS if entry.group == group]
                )


def _format_help(entry: env.Setting, texts: dict[str, str]) -> str:
    default = f" Default: {entry.shown}." if entry.shown else ""
    return f"{texts[entry.key]}{default} [{', '.join(entry.names)}]"


def _add_setting_options(command: Callable[..., None]) -> Callable[..., None]:
    for entry in SETTINGS:
        # A switch also accepts true or false, as the environment variable does.
        is_switch = entry.format is env.BOOL_FORMAT
        switch: dict[str, Any] = {"is_flag": False, "flag_value": "true"} if is_switch else {}
        command = click.option(flag(entry), *_STOCK_FLAGS_BY_SETTING.get(entry.key, ()), entry.key, **switch)(
            command
        )
    return command


@click.command(cls=_GroupedHelp, context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("command", type=click.Choice(["run", "check"]), default="run")
@_add_setting_options
def main(command: str, **given: str | None) -> None:
    """Runs the LocalAI Cluster worker of this machine until it is stopped.

    With the argument `check` it reports what the worker would meet, and starts nothing.
    """
    sys.exit(_run_worker_or_check(given, check_only=command == "check"))


def _print_check_report(config: Config) -> int:
    own_identity = identity.NodeIdentity(config.data_dir, read_only=True)
    lines = asyncio.run(check.report_connections(config, own_identity)) + asyncio.run(
        check.report_machine(config)
    )
    for line in lines:
        is_problem = isinstance(line, check.Problem)
        click.echo(f"error: {line}" if is_problem else line, err=is_problem)
    return int(any(isinstance(line, check.Problem) for line in lines))


def _run_worker_or_check(options: dict[str, Any], *, check_only: bool) -> int:
    processes.raise_file_limit()
    try:
        config = build(options)
        if check_only:
            return _print_check_report(config)
        logging.basicConfig(level=logging.INFO, handlers=[logs.create_handler(sys.stderr)])
        # It would log one line per heartbeat.
        logging.getLogger("httpx").setLevel(logging.WARNING)
        with identity.lock_data_folder(config.data_dir):
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
