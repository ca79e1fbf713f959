"""The steps between the servers and the product, in one process because starting Django takes a second.

`check`, `migrate`, `bootstrap`, each exactly the command of `manage.py`. A failure is one line on standard
output and exit code 1.
"""

import io
import sys

import django
from django.core.management import call_command
from django.core.management.base import CommandError
from django.db import Error as DatabaseError


def complaint(said: str) -> str:
    """The line of a command's complaint that says what is wrong: a check's finding, else the last line."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    for index, line in enumerate(lines):
        if "(cluster.E" in line:
            hint = "".join(following for following in lines[index + 1 : index + 2] if "HINT" in following)
            return f"{line} {hint}".strip()
    return lines[-1] if lines else "it said nothing"


def main() -> int:
    """Runs the steps in order; returns the exit code."""
    name = "check"
    try:
        django.setup()
        call_command("check", stdout=io.StringIO())
        name = "migrate"
        call_command("migrate", verbosity=0, interactive=False)
        name = "bootstrap"
        call_command("bootstrap")
    except (CommandError, DatabaseError, OSError) as error:
        sys.stdout.write(f"`manage.py {name}` fails: {complaint(str(error))}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
