#!/usr/bin/env python
"""Django's command line for this project."""

import os
import sys


def main() -> None:
    """Runs the command named in the arguments."""
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "localai_cluster.settings")
    from django.core.management import execute_from_command_line

    execute_from_command_line(sys.argv)


if __name__ == "__main__":
    main()
