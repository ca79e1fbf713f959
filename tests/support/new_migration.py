"""Write a migration without a running cluster: `python -m tests.support.new_migration APP NAME`.

It compares the models of the app with its migrations, as `manage.py makemigrations` does, which needs all
settings of a server. No database is contacted.
"""

import sys
import warnings

import django
from django.core.management import call_command

from tests.support import environment


def main(app: str, name: str) -> None:
    """Write the migration `name` of `app`, if a model has changed."""
    assert environment.HOME.exists()  # its import has set the settings
    warnings.filterwarnings("ignore", "Got an error checking a consistent migration history")
    django.setup()
    call_command("makemigrations", app, name=name, skip_checks=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
