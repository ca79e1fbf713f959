"""The command `localai-cluster-manage`, also `manage.py`: Django's command line for this project."""

import gc
import os
import sys

_SERVER_COMMANDS = ("serve", "controller", "qcluster")


def main() -> None:
    """Run the command named in the arguments."""
    if sys.argv[1:2] and sys.argv[1] in _SERVER_COMMANDS:
        # What imports make stays, and to collect among it is a fifth of the start; `handle` enables it.
        gc.disable()
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
    execute_from_command_line(sys.argv)
