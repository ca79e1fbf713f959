"""The program that forks processes of the control plane (`nursery.py`).

It takes one request a line (JSON: the arguments of `manage.py`, environment, log) and answers with the
process id. It imports nothing of the tests, which would bring their environment along.
"""

import json
import os
import signal
import sys
from collections.abc import Mapping

CALL = "call"
"""In place of a management command: calls the function that the next argument names."""


def main() -> None:
    """Imports what controllers need and forks until its input ends."""
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "localai_cluster.settings")
    import django

    django.setup()
    import nodes.reconcilers.tasks  # noqa: F401

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no parent waits for them
    for line in sys.stdin:
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _become(request["argv"], request["env"], request["log"])
        print(pid, flush=True)


def _become(argv: list[str], env: Mapping[str, str], log: str) -> None:
    from django.core.management import execute_from_command_line
    from django.utils.module_loading import import_string

    from localai_cluster.kit import failpoints

    os.setsid()
    target = os.open(log, os.O_WRONLY | os.O_APPEND)
    for number in (1, 2):
        os.dup2(target, number)
    os.environ.update(env)
    code = 0
    try:
        failpoints.arm()
        if argv[0] == CALL:
            import_string(argv[1])()
        else:
            execute_from_command_line(["manage.py", *argv])
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        import traceback

        traceback.print_exc()
        code = 1
    os._exit(code)


if __name__ == "__main__":
    main()
