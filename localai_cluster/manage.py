"""The command `localai-cluster-manage`, also `manage.py`: Django's command line for this project."""

import gc
import os
import signal
import sys
from collections.abc import Callable, Sequence

from localai_cluster.kit import processes

_SERVER_COMMANDS = ("serve", "controller", "qcluster")


def main() -> None:
    """Run the command named in the arguments."""
    if sys.argv[1:2] and sys.argv[1] in _SERVER_COMMANDS:
        # What imports make stays, and to collect among it is a fifth of the start; `handle` enables it.
        gc.disable()
        processes.raise_file_limit()
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "localai_cluster.settings")
    try:
        from django.core.management import CommandError, execute_from_command_line
    except ModuleNotFoundError as error:
        if error.name != "django":
            raise
        sys.exit("error: only the worker is installed. For the rest: pip install 'localai-cluster[server]'")
    if sys.argv[1:2] == ["serve"]:
        from localai_cluster.management import web_processes

        try:
            web_processes.become_parent(sys.argv[2:])
        except CommandError as error:
            sys.exit(f"CommandError: {error}")
    if (sys.argv[1:2] and sys.argv[1] in _SERVER_COMMANDS) or "--traceback" in sys.argv:
        execute_from_command_line(sys.argv)
    else:
        _run_for_user(execute_from_command_line, sys.argv)


def _run_for_user(run: Callable[[list[str]], None], arguments: Sequence[str]) -> None:
    """Run a command. Exit with one line in place of a stack trace if the cause is not in the product.

    Such a cause is the database, an argument, or the terminal.
    """
    from django.db import InterfaceError, OperationalError

    try:
        run([*arguments])
        sys.stdout.flush()
    except (OperationalError, InterfaceError) as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        sys.exit(f"CommandError: the database cannot be used (DATABASE_URL): {reason}")
    except UnicodeEncodeError as error:
        if error.encoding != "utf-8":  # the output's
            raise
        sys.exit(f"CommandError: an argument is not valid UTF-8: {error.object!r}")
    except EOFError:
        sys.exit("CommandError: the input has ended; nothing was done")
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except BrokenPipeError:  # the reader of the output has ended, such as `head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)
