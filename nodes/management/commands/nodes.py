"""`manage.py nodes`: who is a node, and what an operator says about it, at the command line.

Each verb here is one of `nodes.registry`, as over REST; `--json` prints what the REST route answers. A node
is named by its name, its id or the beginning of its id. Whatever is refused ends with exit code 1 and one
line that says what to do instead.
"""

from argparse import ArgumentTypeError
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlencode

from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.http import HttpRequest, QueryDict
from rest_framework.request import Request

from localai_cluster import clock, errors
from localai_cluster.env import parse_duration
from nodes.api.identity_views import conflict_row
from nodes.management import finding, shown
from nodes.models import BackendNode, NodeConflict, NodeEvent, NodeStatus, NodeType
from nodes.registry import listing, node_rows, services

EVENTS_SHOWN = 10
Options = Mapping[str, Any]


class PartlyDone(CommandError):
    """Some of what was asked for failed; `done` tells each outcome."""

    def __init__(self, done: str, message: str) -> None:
        super().__init__(message)
        self.done = done


class Command(BaseCommand):
    """One subcommand for each verb."""

    help = "Shows the nodes and does to them what an admin can do."

    def add_arguments(self, parser: CommandParser) -> None:
        verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")

        def add(name: str, act: Callable[[Options], str], says: str) -> CommandParser:
            found: CommandParser = verbs.add_parser(name, help=says, description=says)
            found.set_defaults(act=act)
            found.add_argument("--json", action="store_true", help="what the REST API answers")
            return found

        _reading(add)
        _deciding(add)
        _identity(add)

    def handle(self, *args: Any, **options: Any) -> None:
        """Does the verb and prints what came of it; CommandError for whatever is refused."""
        try:
            self.stdout.write(options["act"](options))
        except PartlyDone as partly:
            self.stdout.write(partly.done)
            raise
        except errors.ClusterError as refusal:
            raise CommandError(refusal.message) from refusal


def _reading(add: Callable[..., CommandParser]) -> None:
    listed = add("list", list_nodes, "All nodes by name, or those that the filters leave.")
    listed.add_argument("--status", choices=NodeStatus.values)
    listed.add_argument("--type", choices=NodeType.values)
    listed.add_argument("--vendor", help="of the GPU")
    listed.add_argument("--label", action="append", default=[], metavar="KEY=VALUE", help="may be repeated")
    listed.add_argument("--search", help="part of the name or of the address")
    listed.add_argument("--sort", metavar="FIELD", help="--sort=-FIELD turns the order round")
    _of_a_node(add("show", show, "One node: what lies behind its status, and what happened to it last."))
    claims = add("conflicts", list_conflicts, "The open conflicts, or all those of one node.")
    claims.add_argument("node", nargs="?", metavar="NODE")


def _deciding(add: Callable[..., CommandParser]) -> None:
    approved = add("approve", approve, "Lets pending nodes in.")
    approved.add_argument("nodes", nargs="+", metavar="NODE", help="name, id or beginning of the id")
    rejected = _of_a_node(add("reject", reject, "Says no to a pending node."))
    rejected.add_argument("--reason", required=True, help="for whoever asks")
    drained = _with_reason(_of_a_node(add("drain", drain, "Sends nothing new there.")))
    drained.add_argument("--deadline", type=_duration, metavar="1h", help="for what still runs")
    _with_reason(_of_a_node(add("resume", resume, "Takes a node into service again.")))
    _of_a_node(add("remove", remove, "Removes the record; the timeline stays."))
    labels = _of_a_node(add("label", label, "Shows labels, sets KEY=VALUE, removes KEY-."))
    labels.add_argument("labels", nargs="*", metavar="LABEL", help="KEY=VALUE or KEY-")


def _identity(add: Callable[..., CommandParser]) -> None:
    for name, act, says in (
        ("accept", accept, "The claimant of a conflict is the node from now on."),
        ("refuse", refuse, "The node stays who it is; the claimant goes on being refused."),
    ):
        add(name, act, says).add_argument("conflict", metavar="CONFLICT", help="id or beginning of the id")
    _of_a_node(add("rotate", rotate, "Has the worker replace its secret at its next call."))
    _with_reason(_of_a_node(add("revoke", revoke, "Refuses the worker's secret for ever.")))


def _of_a_node(parser: CommandParser) -> CommandParser:
    parser.add_argument("node", metavar="NODE", help="name, id or beginning of the id")
    return parser


def _with_reason(parser: CommandParser) -> CommandParser:
    parser.add_argument("--reason", default="", help="for the timeline")
    return parser


def _duration(text: str) -> float:
    try:
        return parse_duration(text)
    except ValueError as error:
        raise ArgumentTypeError(str(error)) from error


def list_nodes(options: Options) -> str:
    """The list, filtered as `GET /api/nodes` is."""
    filters = ("status", "type", "vendor", "search", "sort", "label")
    given = {name: options[name] for name in filters if options[name] is not None}
    request = HttpRequest()
    request.GET = QueryDict(urlencode(given, doseq=True))
    rows = node_rows.elements(listing.wanted_nodes(Request(request)).nodes)
    return shown.as_json(rows) if options["json"] else shown.nodes(rows, clock.now())


def show(options: Options) -> str:
    """One node; the text has its last events too."""
    node = finding.node(options["node"])
    row = node_rows.detail(node.id)
    if row is None:
        raise errors.NotFound(f"the node {node.name!r} has just been removed")
    if options["json"]:
        return shown.as_json(row)
    events = NodeEvent.objects.filter(node_id=node.id).order_by("-id")[:EVENTS_SHOWN]
    return shown.detail(row, list(events))


def list_conflicts(options: Options) -> str:
    """Claims, latest first."""
    rows = NodeConflict.objects.select_related("node").order_by("-last_at", "id")
    if options["node"]:
        rows = rows.filter(node=finding.node(options["node"]))
    else:
        rows = rows.filter(state=NodeConflict.State.OPEN)
    found = [conflict_row(row) for row in rows]
    return shown.as_json(found) if options["json"] else shown.conflicts(found, clock.now())


def approve(options: Options) -> str:
    """One, or several each on its own: what is wrong with one does not stop the others."""
    found = [finding.node(text) for text in options["nodes"]]
    if len(found) > 1:
        return _approve_many(options, found)
    with finding.mended("approve", found[0]):
        approved = services.approve(found[0].id, actor=finding.actor(), now=clock.now())
    token = {"api_token": approved.api_token} if approved.api_token else {}
    if options["json"]:
        names = ("id", "name", "node_type", "status")
        row = {name: getattr(approved.node, name) for name in names}
        return shown.as_json(row | {"message": "node approved"} | token)
    shown_once = f"; its API token, shown this once: {approved.api_token}" if token else ""
    return _said(approved.node, "node approved") + shown_once


def _approve_many(options: Options, found: list[BackendNode]) -> str:
    ids = list(dict.fromkeys(node.id for node in found))
    outcomes = services.approve_many(ids, actor=finding.actor(), now=clock.now())
    failed = [outcome for outcome in outcomes if outcome.error]
    if options["json"]:
        results = [
            {"id": one.id, "error": one.error}
            if one.error
            else {"id": one.id, "name": one.name, "status": one.status}
            for one in outcomes
        ]
        text = shown.as_json({"approved": len(outcomes) - len(failed), "results": results})
    else:
        names = {node.id: node.name for node in found}
        text = "\n".join(f"{names[one.id]}: {one.error or 'node approved'}" for one in outcomes)
    if failed:
        raise PartlyDone(text, f"{len(failed)} of {len(outcomes)} could not be approved")
    return text


def reject(options: Options) -> str:
    """The reason is the node's from now on, whenever it registers again."""
    return _act(options, services.reject, "node rejected", reason=options["reason"])


def drain(options: Options) -> str:
    """An admin's drain lasts until an admin resumes it."""
    return _act(
        options,
        services.drain,
        "node set to draining",
        reason=options["reason"],
        deadline=options["deadline"],
    )


def resume(options: Options) -> str:
    """Ends a drain, also a worker's own, and takes "unhealthy" back."""
    return _act(options, services.resume, "node resumed", reason=options["reason"])


def remove(options: Options) -> str:
    """A worker that still runs registers again, as a new node."""
    return _act(options, services.deregister, "node deregistered")


def rotate(options: Options) -> str:
    """Until then the old secret is good for registering only."""
    return _act(options, services.request_rotation, "rotation requested")


def revoke(options: Options) -> str:
    """The node is pending again and without an identity."""
    return _act(options, services.revoke, "identity revoked", reason=options["reason"])


def _act(options: Options, verb: Callable[..., Any], says: str, **more: Any) -> str:
    node = finding.node(options["node"])
    with finding.mended(options["verb"], node):
        verb(node.id, actor=finding.actor(), now=clock.now(), **more)
    return shown.as_json({"message": says}) if options["json"] else _said(node, says)


def _said(node: BackendNode, says: str) -> str:
    """What was done, and what has become of the node."""
    now = BackendNode.objects.filter(pk=node.pk).first()
    return f"{node.name}: {says}" + (f"; it is {now.status}" if now else "")


def label(options: Options) -> str:
    """All that is asked for as one change; without labels it only shows them."""
    node = finding.node(options["node"])
    wanted, dropped = _labels(options["labels"])
    if wanted or dropped:
        now, actor = clock.now(), finding.actor()
        labels = services.edit_labels(node.id, wanted, drop=dropped, actor=actor, now=now)
    else:
        labels = dict(node.label_set.order_by("key").values_list("key", "value"))
    if options["json"]:
        return shown.as_json(labels)
    return "\n".join(f"{key}={value}" for key, value in labels.items()) or f"{node.name} has no labels"


def _labels(texts: list[str]) -> tuple[dict[str, str], list[str]]:
    """What to set and what to remove; the first `=` ends a key."""
    pairs = [text.partition("=") for text in texts]
    bare = [key for key, equals, _ in pairs if not equals]
    if wrong := next((text for text in bare if len(text) < 2 or not text.endswith("-")), None):
        raise CommandError(f"{wrong!r} is neither KEY=VALUE, which sets a label, nor KEY-, which removes one")
    return {key: value for key, equals, value in pairs if equals}, [text[:-1] for text in bare]


def accept(options: Options) -> str:
    """The former secret is refused for ever."""
    return _decide(options, services.accept_conflict, "conflict accepted")


def refuse(options: Options) -> str:
    """A refused conflict may still be accepted later."""
    return _decide(options, services.refuse_conflict, "conflict refused")


def _decide(options: Options, verb: Callable[..., BackendNode], says: str) -> str:
    conflict = finding.conflict(options["conflict"])
    node = verb(conflict.id, actor=finding.actor(), now=clock.now())
    return shown.as_json({"message": says}) if options["json"] else _said(node, says)
