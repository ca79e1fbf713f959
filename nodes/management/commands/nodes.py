"""`manage.py nodes`: manages nodes at the command line.

Each command calls a verb of `nodes.registry`, as the REST API does; `--json` prints what REST answers. A node
is given by name, id or id prefix. A refused command ends with exit code 1 and one line with a hint.
"""

import sys
from argparse import ArgumentTypeError
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlencode

from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.http import QueryDict

from localai_cluster.accounts import audit
from localai_cluster.kit import clock, errors
from localai_cluster.kit.env import parse_duration
from nodes.backends import node_stop
from nodes.management import join_tokens, lookup, rendering
from nodes.management.verbs import Add, adder
from nodes.models import BackendNode, NodeConflict, NodeEvent, NodeModel, NodeStatus, NodeType
from nodes.registry import listing, node_rows, services
from nodes.registry.shape import CONFLICT
from nodes.replicas import unload_requests

EVENTS_SHOWN = 10
Options = Mapping[str, Any]


class PartlyDone(CommandError):
    """Some of the requested changes failed; `done` lists all outcomes."""

    def __init__(self, done: str, message: str) -> None:
        super().__init__(message)
        self.done = done


class Command(BaseCommand):
    """One subcommand per verb."""

    help = "Manages the nodes of the cluster."

    def add_arguments(self, parser: CommandParser) -> None:
        add = adder(parser)
        _reading(add)
        _deciding(add)
        _identity(add)
        join_tokens.add_to(add)

    def handle(self, *args: Any, **options: Any) -> None:
        """Runs the verb and prints the result; CommandError if it is refused."""
        try:
            with audit.at_command_line(lookup.actor()):
                self.stdout.write(options["act"](options))
        except PartlyDone as partly:
            self.stdout.write(partly.done)
            raise
        except errors.ClusterError as refusal:
            raise CommandError(refusal.message) from refusal


def _reading(add: Add) -> None:
    listed = add("list", list_nodes, "List all nodes, or those that match the filters.")
    listed.add_argument("--status", choices=NodeStatus.values)
    listed.add_argument("--type", choices=NodeType.values)
    listed.add_argument("--vendor", help="GPU vendor")
    listed.add_argument("--label", action="append", default=[], metavar="KEY=VALUE", help="can be repeated")
    listed.add_argument("--search", help="part of the name, address, GPU vendor or a GPU's name")
    listed.add_argument("--sort", metavar="FIELD", help="--sort=-FIELD reverses the order")
    _of_a_node(add("show", show, "Show one node: its facts and its latest events."))
    claims = add("conflicts", list_conflicts, "List the open conflicts, or all conflicts of one node.")
    claims.add_argument("node", nargs="?", metavar="NODE")


def _deciding(add: Add) -> None:
    approved = add("approve", approve, "Approve pending nodes.")
    approved.add_argument("nodes", nargs="+", metavar="NODE", help="name, id or id prefix")
    rejected = _of_a_node(add("reject", reject, "Reject a pending node."))
    rejected.add_argument("--reason", required=True, help="shown in the timeline")
    drained = _with_reason(_of_a_node(add("drain", drain, "Send no new requests to a node.")))
    drained.add_argument(
        "--deadline", type=_duration, metavar="1h", help="time for running requests to finish"
    )
    _with_reason(_of_a_node(add("resume", resume, "Return a node to service.")))
    stopped = _with_reason(_of_a_node(add("stop", stop, "Stop the worker of a node.")))
    stopped.add_argument("--yes", action="store_true", help="do not ask")
    _of_a_node(add("evict", evict, "Unload a node's least recently used idle replica."))
    _of_a_node(add("remove", remove, "Remove a node; its timeline stays."))
    labels = _of_a_node(add("label", label, "Show labels, set KEY=VALUE, remove KEY-."))
    labels.add_argument("labels", nargs="*", metavar="LABEL", help="KEY=VALUE or KEY-")


def _identity(add: Add) -> None:
    for name, act, says in (
        ("accept", accept, "Accept a conflict: the claimant becomes the node."),
        ("refuse", refuse, "Refuse a conflict: the node stays as it is, and the claimant stays refused."),
    ):
        add(name, act, says).add_argument("conflict", metavar="CONFLICT", help="id or id prefix")
    _of_a_node(add("rotate", rotate, "Have the worker replace its secret at its next call."))
    _with_reason(_of_a_node(add("revoke", revoke, "Reject the worker's secret permanently.")))


def _of_a_node(parser: CommandParser) -> CommandParser:
    parser.add_argument("node", metavar="NODE", help="name, id or id prefix")
    return parser


def _with_reason(parser: CommandParser) -> CommandParser:
    parser.add_argument("--reason", default="", help="shown in the timeline")
    return parser


def _duration(text: str) -> float:
    try:
        return parse_duration(text)
    except ValueError as error:
        raise ArgumentTypeError(str(error)) from error


def list_nodes(options: Options) -> str:
    """The list, filtered like `GET /api/nodes`."""
    filters = ("status", "type", "vendor", "search", "sort", "label")
    given = {name: options[name] for name in filters if options[name] is not None}
    rows = node_rows.elements(listing.wanted_nodes(QueryDict(urlencode(given, doseq=True))).nodes)
    return rendering.as_json(rows) if options["json"] else rendering.nodes(rows, clock.now())


def show(options: Options) -> str:
    """One node; the text output includes its latest events."""
    node = lookup.node(options["node"])
    row = node_rows.detail(node.id)
    if row is None:
        raise errors.NotFound(f"the node {node.name!r} has just been removed")
    if options["json"]:
        return rendering.as_json(row)
    events = NodeEvent.objects.filter(node_id=node.id).order_by("-id")[:EVENTS_SHOWN]
    return rendering.detail(row, list(events))


def list_conflicts(options: Options) -> str:
    """Conflicts, latest first."""
    rows = NodeConflict.objects.order_by("-last_at", "id")
    if options["node"]:
        rows = rows.filter(node=lookup.node(options["node"]))
    else:
        rows = rows.filter(state=NodeConflict.State.OPEN)
    found = CONFLICT.rows(rows)
    return rendering.as_json(found) if options["json"] else rendering.conflicts(found, clock.now())


def approve(options: Options) -> str:
    """Approves one node, or several independently of each other."""
    found = [lookup.node(text) for text in options["nodes"]]
    if len(found) > 1:
        return _approve_many(options, found)
    with lookup.hint_on_refusal("approve", found[0]):
        approved = services.approve(found[0].id, actor=lookup.actor(), now=clock.now())
    if options["json"]:
        return rendering.as_json(node_rows.approved(approved))
    shown_once = f"; API token (shown only once): {approved.api_token}" if approved.api_token else ""
    return _summary(approved.node, "node approved") + shown_once


def _approve_many(options: Options, found: list[BackendNode]) -> str:
    ids = list(dict.fromkeys(node.id for node in found))
    results = services.approve_many(ids, actor=lookup.actor(), now=clock.now())
    failed = sum(bool(one.error) for one in results)
    if options["json"]:
        text = rendering.as_json(node_rows.outcomes(results))
    else:
        names = {node.id: node.name for node in found}
        text = "\n".join(f"{names[one.id]}: {one.error or 'node approved'}" for one in results)
    if failed:
        raise PartlyDone(text, f"{failed} of {len(results)} could not be approved")
    return text


def reject(options: Options) -> str:
    """The rejection and its reason stay, even if the node registers again."""
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
    """Ends a drain (also a worker's own) and the unhealthy state."""
    return _act(options, services.resume, "node resumed", reason=options["reason"])


def stop(options: Options) -> str:
    """Asks first: the worker comes back only if its machine starts it again."""
    node = lookup.node(options["node"])
    if text := node_stop.refusal(node):
        raise CommandError(f"{node.name} cannot be stopped: {text}")
    if not options["yes"]:
        _confirm_stop(node)
    asked = node_stop.request_stop(
        node, actor=lookup.actor().name, now=clock.now(), reason=options["reason"]
    ).operation
    if options["json"]:
        return rendering.as_json({"message": "the worker is being stopped", "operation": str(asked.id)})
    return f"{node.name}: the worker is being stopped (operation {asked.id})"


def _confirm_stop(node: BackendNode) -> None:
    if not sys.stdin.isatty():
        raise CommandError(f"give --yes to stop the worker of {node.name} without a question")
    loaded = NodeModel.objects.loaded().filter(node=node).order_by("model_name", "replica_index")
    replicas = ", ".join(f"{row.model_name}#{row.replica_index}" for row in loaded)
    said = f"Stop the worker of {node.name}." + (f" This stops {replicas}." if replicas else "")
    said += " It comes back only if its machine starts it again."
    if input(f"{rendering.printable(said)} Go on? [y/N] ").strip().lower() not in ("y", "yes"):
        raise CommandError("nothing was stopped")


def evict(options: Options) -> str:
    """The operation does the work; `manage.py operations show` follows it."""
    node = lookup.node(options["node"])
    asked = unload_requests.evict(node, lookup.actor().name, now=clock.now()).operation
    found = {
        "model": asked.element,
        "replica_index": asked.payload["replica_index"],
        "operation": str(asked.id),
    }
    if options["json"]:
        return rendering.as_json(found)
    return f"{node.name}: {asked.element}#{found['replica_index']} is unloaded (operation {asked.id})"


def remove(options: Options) -> str:
    """A worker that is still running registers again as a new node."""
    return _act(options, services.deregister, "node deregistered")


def rotate(options: Options) -> str:
    """Until then the old secret is only valid for registration and rotation."""
    return _act(options, services.request_rotation, "rotation requested")


def revoke(options: Options) -> str:
    """The node becomes pending and has no identity."""
    return _act(options, services.revoke, "identity revoked", reason=options["reason"])


def _act(options: Options, verb: Callable[..., Any], message: str, **more: Any) -> str:
    node = lookup.node(options["node"])
    with lookup.hint_on_refusal(options["verb"], node):
        verb(node.id, actor=lookup.actor(), now=clock.now(), **more)
    return rendering.as_json({"message": message}) if options["json"] else _summary(node, message)


def _summary(node: BackendNode, message: str) -> str:
    """What was done, and the new status of the node."""
    now = BackendNode.objects.filter(pk=node.pk).first()
    return f"{node.name}: {message}" + (f"; it is {now.status}" if now else "")


def label(options: Options) -> str:
    """Applies all labels as one change; without arguments it only shows them."""
    node = lookup.node(options["node"])
    wanted, dropped = _labels(options["labels"])
    if wanted or dropped:
        now, actor = clock.now(), lookup.actor()
        labels = services.edit_labels(node.id, wanted, drop=dropped, actor=actor, now=now)
    else:
        labels = dict(node.label_set.order_by("key").values_list("key", "value"))
    if options["json"]:
        return rendering.as_json(labels)
    return "\n".join(f"{key}={value}" for key, value in labels.items()) or f"{node.name} has no labels"


def _labels(texts: list[str]) -> tuple[dict[str, str], list[str]]:
    """The labels to set and the keys to remove; the first `=` ends a key."""
    pairs = [text.partition("=") for text in texts]
    bare = [key for key, equals, _ in pairs if not equals]
    if wrong := next((text for text in bare if len(text) < 2 or not text.endswith("-")), None):
        raise CommandError(f"{wrong!r} is neither KEY=VALUE (to set a label) nor KEY- (to remove one)")
    return {key: value for key, equals, value in pairs if equals}, [text[:-1] for text in bare]


def accept(options: Options) -> str:
    """The previous secret is permanently rejected."""
    return _decide(options, services.accept_conflict, "conflict accepted")


def refuse(options: Options) -> str:
    """A refused conflict can still be accepted later."""
    return _decide(options, services.refuse_conflict, "conflict refused")


def _decide(options: Options, verb: Callable[..., BackendNode], message: str) -> str:
    conflict = lookup.conflict(options["conflict"])
    node = verb(conflict.id, actor=lookup.actor(), now=clock.now())
    return rendering.as_json({"message": message}) if options["json"] else _summary(node, message)
