"""Prepares the database: `check`, `migrate` and `bootstrap` of `manage.py`.

All three run in one process, since starting Django takes a second. The settings are checked at once; then it
prints `CHECKED` and waits for a line on standard input, by when the servers run. A failure is one line on
standard output and exit code 1.
"""

import io
import sys

import django
from django.core.management import call_command
from django.core.management.base import CommandError
from django.db import Error as DatabaseError

from localai_cluster.embedded.preparation import CHECKED


def complaint(said: str) -> str:
    """The line of a command's output that says what is wrong: a failed check, else the last line."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    for index, line in enumerate(lines):
        if "(cluster.E" in line:
            hint = "".join(following for following in lines[index + 1 : index + 2] if "HINT" in following)
            return f"{line} {hint}".strip()
    # PostgreSQL adds the whole row that it refused, secrets and all.
    facts = [line for line in lines if not line.startswith(("DETAIL:", "CONTEXT:"))]
    return facts[-1] if facts else "no output"


def main() -> int:
    """Runs the steps in order; returns the exit code."""
    name = "check"
    try:
        django.setup()
        call_command("check", stdout=io.StringIO())
        call_command("bootstrap", "--check")
        sys.stdout.write(f"{CHECKED}\n")
        sys.stdout.flush()
        if not sys.stdin.readline():
            return 1  # the start was given up
        name = "migrate"
        call_command("migrate", verbosity=0, interactive=False)
        name = "bootstrap"
        call_command("bootstrap")
    except (CommandError, DatabaseError, OSError) as error:
        sys.stdout.write(f"`manage.py {name}` failed: {complaint(str(error))}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
