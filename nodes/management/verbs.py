"""Verbs of a `manage.py` command: a subcommand each, with `--json`."""

from collections.abc import Callable

from django.core.management.base import CommandParser

Add = Callable[[str, Callable[..., str], str], CommandParser]


def adder(parser: CommandParser) -> Add:
    """Adds a verb to this command: its name, what carries it out (`options["act"]`), and its help."""
    verbs = parser.add_subparsers(dest="verb", required=True)

    def add(name: str, act: Callable[..., str], description: str) -> CommandParser:
        found: CommandParser = verbs.add_parser(name, help=description, description=description)
        found.set_defaults(act=act)
        found.add_argument("--json", action="store_true", help="print the answer of the REST API")
        return found

    return add
