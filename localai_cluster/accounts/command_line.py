"""Base of management commands with subcommands: actor of changes, errors, JSON and aligned text.

A refused command ends with exit code 1 and a message of one line.
"""

import os
import pwd
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, TypeVar

import orjson
from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db.models import CharField, Model, QuerySet
from django.db.models.functions import Cast
from django.utils.timesince import timesince
from rest_framework.exceptions import ValidationError

from localai_cluster.accounts import actors, audit
from localai_cluster.accounts.actors import Actor
from localai_cluster.kit import errors, names
from localai_cluster.web.envelopes import field_message

Options = Mapping[str, Any]
"""Arguments of a subcommand by name; `out` is the output stream."""
Argument = tuple[str, Mapping[str, Any]]
"""An argument of a subcommand: its name, and options of argparse."""
AddVerb = Callable[..., CommandParser]
"""Adds a subcommand with its name, function, help text and arguments. Returns its parser."""
Columns = Mapping[str, str | Callable[[Any], Any]]
"""Columns of a table by their heads: a key, an attribute or a function of the row."""
EMPTY_CELL = "-"
"""Text of a table cell without a value."""
SHORT_ID_LENGTH = 8
"""Number of characters of an id in a table."""
MAX_MATCHES = 5
"""Maximum number of matching rows that an error message lists."""
_ID_PREFIX_PATTERN = re.compile(r"[0-9a-f-]{1,36}\Z")
_YEAR_ONE_PREFIX = "0001-"
_MAX_AGE_IN_SECONDS = 120
_Row = TypeVar("_Row", bound=Model)


class VerbCommand(BaseCommand):
    """Base of management commands with subcommands.

    The function of a subcommand returns the text to print, "" for none.
    """

    def add_verbs(self, add: AddVerb) -> None:
        """Add the subcommands with their arguments."""
        raise NotImplementedError

    def add_arguments(self, parser: CommandParser) -> None:
        self.add_verbs(verb_adder(parser, "verb"))

    def handle(self, *args: Any, **options: Any) -> None:
        """Run the subcommand as the user of the operating system, and print its text."""
        try:
            with audit.attribute_to(current_actor()):
                if text := options["run"](options | {"out": self.stdout}):
                    self.stdout.write(text)
        except errors.ClusterError as refusal:
            raise CommandError(self.explain(refusal)) from refusal
        except ValidationError as wrong:
            raise CommandError(names.to_single_line(field_message(wrong.detail))) from wrong

    def explain(self, refusal: errors.ClusterError) -> str:
        """Return the message that the user sees for a refusal."""
        return refusal.message


def verb_adder(parser: CommandParser, dest: str, metavar: str | None = None) -> AddVerb:
    """Return a function that adds a subcommand to the parser."""
    verbs = parser.add_subparsers(dest=dest, metavar=metavar, required=True)

    def add(
        name: str, run: Callable[[Options], str], description: str, *arguments: Argument
    ) -> CommandParser:
        verb: CommandParser = verbs.add_parser(name, help=description, description=description)
        verb.set_defaults(run=run)
        verb.add_argument("--json", action="store_true", help="print the answer of the REST API")
        for argument, options in arguments:
            verb.add_argument(argument, **options)
        return verb

    return add


def current_actor() -> Actor:
    """Return the actor of the command: the user of the operating system who runs it."""
    try:
        return actors.command(pwd.getpwuid(os.getuid()).pw_name)
    except KeyError:
        return actors.command(f"uid {os.getuid()}")


def rows_with_prefix(rows: QuerySet[_Row], prefix: str) -> list[_Row]:
    """Return rows whose id starts with `prefix`, at most one more than `MAX_MATCHES`."""
    prefix = prefix.lower()
    if not _ID_PREFIX_PATTERN.match(prefix):
        return []
    matches = rows.annotate(id_text=Cast("id", CharField())).filter(id_text__startswith=prefix)
    return list(matches[: MAX_MATCHES + 1])


def require_row_with_prefix(rows: QuerySet[_Row], prefix: str, kind: str, hint: str) -> _Row:
    """Return the only row whose id starts with `prefix`. Raise CommandError for none or several."""
    matches = rows_with_prefix(rows, prefix)
    if not matches:
        raise CommandError(f"there is no {kind} {prefix[:36]!r}; {hint}")
    if len(matches) > 1:
        raise CommandError(f"{prefix!r} is an id prefix of several {kind}s; use a longer prefix")
    return matches[0]


def confirm(action: str, question: str) -> None:
    """Prompt for confirmation. Raise CommandError if the user refuses or there is no terminal."""
    if not sys.stdin.isatty():
        raise CommandError(f"give --yes to {action} without a question")
    if input(f"{printable(question)} Continue? [y/N] ").strip().lower() not in ("y", "yes"):
        raise CommandError("nothing was done")


def as_json(value: Any) -> str:
    """Return a value as indented JSON. Times in UTC end in `Z`."""
    return orjson.dumps(value, option=orjson.OPT_UTC_Z | orjson.OPT_INDENT_2).decode()


def format_table(columns: Columns, rows: Iterable[Any]) -> str:
    """Return the rows as a table with aligned columns."""
    lines = [list(columns), *([_cell(row, column) for column in columns.values()] for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(columns))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def list_rows(options: Options, columns: Columns, rows: Sequence[Any], none: str) -> str:
    """Return the rows as JSON or as a table. Without rows the table is the text `none`."""
    if options["json"]:
        return as_json(rows)
    return format_table(columns, rows) if rows else none


def _cell(row: Any, column: str | Callable[[Any], Any]) -> str:
    if callable(column):
        value = column(row)
    else:
        value = row.get(column) if isinstance(row, Mapping) else getattr(row, column)
    return EMPTY_CELL if value is None else printable(str(value)) or EMPTY_CELL


def printable(text: str) -> str:
    """Replace unprintable characters by `?`, because some texts come from untrusted sources."""
    return "".join(character if character.isprintable() else "?" for character in text)


def format_age(at: str | None, now: datetime) -> str:
    """Format the time from `at` (ISO 8601) to now: in seconds up to two minutes, then in larger units.

    The result is `never` if `at` is None or in the year 1.
    """
    if at is None or at.startswith(_YEAR_ONE_PREFIX):
        return "never"
    then = datetime.fromisoformat(at)
    seconds = max(int((now - then).total_seconds()), 0)
    if seconds < _MAX_AGE_IN_SECONDS:
        return f"{seconds} s ago"
    # Django uses non-breaking spaces.
    return f"{timesince(then, now, depth=1)} ago".replace("\xa0", " ")


def format_time(at: datetime) -> str:
    """Format a time in UTC with seconds."""
    return f"{at:%Y-%m-%d %H:%M:%S}Z"
