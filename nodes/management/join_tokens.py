"""`manage.py nodes join-token`: makes, lists and revokes join tokens."""

from argparse import ArgumentTypeError
from collections.abc import Callable, Mapping
from typing import Any

from django.core.management.base import CommandError, CommandParser

from localai_cluster import join_script
from localai_cluster.kit import clock, conf, env
from localai_cluster.kit.env import parse_duration
from nodes.api.join import rows
from nodes.management import lookup, rendering
from nodes.management.verbs import Add
from nodes.models import JoinToken
from nodes.registry import joining

Options = Mapping[str, Any]
SHOWN = 100
_LIST = ("ID", "STATE", "USES", "EXPIRES", "MADE BY", "LAST USED BY", "NOTE")


def add_to(add: Add) -> None:
    """Adds the verb with its own verbs."""
    parser = add("join-token", listed, "Make, list or revoke the tokens that other machines join with.")
    verbs = parser.add_subparsers(dest="token_verb", metavar="make|list|revoke", required=True)

    def own(name: str, act: Callable[[Options], str], description: str) -> CommandParser:
        found: CommandParser = verbs.add_parser(name, help=description, description=description)
        found.set_defaults(act=act)
        found.add_argument("--json", action="store_true", help="print the answer of the REST API")
        return found

    made = own("make", make, "Make a join token and print the line to run on the other machine.")
    made.add_argument("--lifetime", type=_seconds, default=joining.USUAL, metavar="1h", help="1m to 168h")
    made.add_argument("--uses", type=int, default=1, metavar="N", help="how many machines may join with it")
    made.add_argument("--note", default="", help="shown when a machine joins with it")
    made.add_argument("--url", default="", help="base URL of the server; default: CLUSTER_PUBLIC_URL")
    own("list", listed, f"List the latest {SHOWN} join tokens.")
    own("revoke", revoke, "Revoke a join token.").add_argument("token", metavar="ID", help="id or id prefix")


def _seconds(text: str) -> int:
    try:
        return int(parse_duration(text))
    except ValueError as error:
        raise ArgumentTypeError(str(error)) from error


def make(options: Options) -> str:
    """Prints the line, which holds the token and is shown this once."""
    url = options["url"] or conf.cluster().public_url
    if not url:
        raise CommandError("the server's URL is unknown: set CLUSTER_PUBLIC_URL, or give --url")
    try:
        url = env.parse_base_url(url)
    except ValueError as error:
        raise CommandError(f"--url is {error}") from error
    token, plain = joining.make(
        actor=lookup.actor(),
        now=clock.now(),
        note=options["note"],
        lifetime=options["lifetime"],
        uses=options["uses"],
    )
    wheel = join_script.find_wheel(conf.cluster().wheel_dir)
    command = join_script.command(url, plain, wheel)
    warnings = join_script.warnings(url, host=conf.cluster().host, wheel=wheel)
    if options["json"]:
        (row,) = rows([token], clock.now())
        return rendering.as_json(row | {"token": plain, "command": command, "url": url, "warnings": warnings})
    expires = rendering.moment(token.expires_at)
    shown = "".join(f"warning: {warning}\n" for warning in warnings)
    return (
        f"{shown}valid until {expires} for {token.max_uses} new node(s); run on the other machine:\n{command}"
    )


def listed(options: Options) -> str:
    """Newest first."""
    found = rows(JoinToken.objects.all()[:SHOWN], clock.now())
    if options["json"]:
        return rendering.as_json(found)
    lines = [
        (
            str(row["id"])[: rendering.SHORT_ID],
            row["state"],
            f"{row['uses']} of {row['max_uses']}",
            rendering.moment(row["expires_at"]),
            row["created_by"],
            row.get("last_used_by", ""),
            row["note"],
        )
        for row in found
    ]
    return rendering.table(_LIST, lines) if lines else "no join tokens"


def revoke(options: Options) -> str:
    """Nodes that joined with it stay."""
    token = lookup.join_token(options["token"])
    joining.revoke(token.pk, actor=lookup.actor(), now=clock.now())
    said = "join token revoked"
    return rendering.as_json({"message": said}) if options["json"] else f"{str(token.pk)[:8]}: {said}"
