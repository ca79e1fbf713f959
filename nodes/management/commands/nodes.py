"""`manage.py nodes`: nodes and join tokens. Each verb calls the function that REST calls."""

from argparse import ArgumentTypeError
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any
from urllib.parse import urlencode

from django.core.management.base import CommandError
from django.http import QueryDict

from localai_cluster import join_script
from localai_cluster.accounts import command_line
from localai_cluster.accounts.command_line import AddVerb, Argument, Columns, Options, VerbCommand
from localai_cluster.kit import addresses, clock, conf, errors
from localai_cluster.kit.env import parse_duration
from localai_cluster.kit.quantities import human_bytes
from localai_cluster.web.shapes import TIME
from nodes.api import join
from nodes.backends import node_stop
from nodes.management import lookup
from nodes.models import BackendNode, JoinToken, NodeConflict, NodeEvent, NodeModel, NodeStatus, NodeType
from nodes.registry import actions, bulk, joining, lifecycle, listing, node_rows
from nodes.registry.claims import CONFLICT_SHAPE, accept_conflict, refuse_conflict
from nodes.registry.labels import edit_labels
from nodes.registry.shape import (
    DRAIN_SHAPE,
    IDENTITY_SHAPE,
    INVENTORY_SHAPE,
    NODE_DETAIL_SHAPE,
    OVERRIDE_SHAPE,
    ZERO_TIME,
)
from nodes.replicas import unload_requests
from operations.ledger.admission import Requester

_SIZE_SUFFIXES = ("vram", "ram", "disk", "bytes")
_FACT_KEYS = {"at", "by", "reason"}
_TIME_KEYS = {
    name
    for shape in (NODE_DETAIL_SHAPE, DRAIN_SHAPE, IDENTITY_SHAPE, INVENTORY_SHAPE, OVERRIDE_SHAPE)
    for name, field in shape.fields.items()
    if field.schema == TIME
}


def _free_vram(row: Mapping[str, Any]) -> str:
    if not row["total_vram"]:
        return ""
    return f"{human_bytes(row['available_vram'])} of {human_bytes(row['total_vram'])}"


def _node_notes(row: Mapping[str, Any]) -> Iterator[str]:
    yield from (word for word in ("rejected", "revoked") if word in row)
    if row.get("weak_identity"):
        yield "shared token"
    if skew := row.get("version_skew"):
        yield skew
    if claims := row.get("open_conflicts"):
        yield f"conflicts: {claims}"


_LIST_HEADINGS: Columns = {
    "NAME": "name",
    "STATUS": "status",
    "TYPE": "node_type",
    "ADDRESS": "address",
    "GPU": "gpu_vendor",
    "FREE VRAM": _free_vram,
    "MODELS": "model_count",
    "BUSY": "in_flight_count",
    "LAST SEEN": lambda row: command_line.format_age(row["last_heartbeat"], clock.now()),
    "NOTES": lambda row: ", ".join(_node_notes(row)),
    "ID": lambda row: str(row["id"])[: command_line.SHORT_ID_LENGTH],
}


def node_text(row: Mapping[str, Any], events: Sequence[NodeEvent]) -> str:
    """Return the details of a node, then its latest events."""
    labels = sorted(row["labels"].items())
    plain = {name: value for name, value in row.items() if name not in ("labels", "open_conflicts")}
    facts = [(name, text) for name, text in _flatten(plain, "") if text]
    facts += [(f"label {key}", text or command_line.EMPTY_CELL) for key, text in labels]
    width = max(len(name) for name, _ in facts)
    lines = [f"{name.ljust(width)}  {command_line.printable(text)}" for name, text in facts]
    return "\n".join([*lines, "", command_line.format_table(_EVENTS, events)])


def _flatten(row: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, str]]:
    for name, value in row.items():
        label = f"{prefix}{name.replace('_', ' ')}"
        if isinstance(value, Mapping) and value.keys() == _FACT_KEYS:
            yield label, _format_fact(value)
        elif isinstance(value, Mapping):
            yield from _flatten(value, f"{label}: ")
        elif name == "gpus":
            for gpu in value:
                figures = {name: figure for name, figure in gpu.items() if name != "index"}
                yield from _flatten(figures, f"GPU {gpu['index']}: ")
        else:
            yield label, _format_value(name, value)


def _format_fact(value: Mapping[str, Any]) -> str:
    reason = f": {value['reason']}" if value["reason"] else ""
    at = command_line.format_time(datetime.fromisoformat(value["at"]))
    return f"{at} by {value['by'] or 'unknown'}{reason}"


def _format_value(name: str, value: Any) -> str:
    if value is None or value == ZERO_TIME:
        return ""
    if name in _TIME_KEYS:
        return command_line.format_time(datetime.fromisoformat(value))
    if isinstance(value, bool):
        return "yes" if value else ""
    if isinstance(value, int):
        measured = name.rpartition("_")[2] in _SIZE_SUFFIXES
        return (human_bytes(value) if value else "") if measured else str(value)
    return str(value)


def _status_change(event: NodeEvent) -> str:
    if event.status_before == event.status_after:
        return event.status_after
    return f"{event.status_before} -> {event.status_after}"


_EVENTS: Columns = {
    "TIME": lambda event: command_line.format_time(event.at),
    "EVENT": "kind",
    "STATUS": _status_change,
    "ACTOR": "actor",
    "REASON": "cause",
}


def _claimed_proof(row: Mapping[str, Any]) -> str | None:
    return row.get("claimed_name") if row["kind"] == "name" else row.get("fingerprint", row.get("instance"))


_CONFLICT_HEADINGS: Columns = {
    "CONFLICT": lambda row: str(row["id"])[: command_line.SHORT_ID_LENGTH],
    "NODE": "node_name",
    "STATE": "state",
    "WHAT": "kind",
    "FROM": "source_address",
    "ADVERTISES": "advertised_address",
    "NODE ADDRESS": "node_source_address",
    "ATTEMPTS": "count",
    "LAST": lambda row: command_line.format_age(row["last_at"], clock.now()),
    "CLAIMS": _claimed_proof,
}
MAX_SHOWN_EVENTS = 10
MAX_SHOWN_TOKENS = 100
_TOKENS: Columns = {
    "ID": lambda row: str(row["id"])[: command_line.SHORT_ID_LENGTH],
    "STATE": "state",
    "USES": lambda row: f"{row['uses']} of {row['max_uses']}",
    "EXPIRES": lambda row: command_line.format_time(row["expires_at"]),
    "MADE BY": "created_by",
    "LAST USED BY": "last_used_by",
    "NOTE": "note",
}


class PartialFailure(CommandError):
    """Some changes of a command failed; `done` is the text with all outcomes."""

    def __init__(self, done: str, message: str) -> None:
        super().__init__(message)
        self.done = done


class Command(VerbCommand):
    """The command; its subcommands are the verbs."""

    help = "Manages the nodes of the cluster."

    def add_verbs(self, add: AddVerb) -> None:
        _add_read_verbs(add)
        _add_write_verbs(add)
        _add_join_token_verbs(add)

    def handle(self, *args: Any, **options: Any) -> None:
        """Run the command. After a partial failure print all outcomes before the error."""
        try:
            super().handle(*args, **options)
        except PartialFailure as partly:
            self.stdout.write(partly.done)
            raise


_NODE: Argument = ("node", {"metavar": "NODE", "help": "name, id or id prefix"})


def _add_read_verbs(add: AddVerb) -> None:
    listed = add("list", list_nodes, "List all nodes, or those that match the filters.")
    listed.add_argument("--status", choices=NodeStatus.values)
    listed.add_argument("--type", choices=NodeType.values)
    listed.add_argument("--vendor", help="GPU vendor")
    listed.add_argument("--label", action="append", default=[], metavar="KEY=VALUE", help="can be repeated")
    listed.add_argument("--search", help="part of the name, address, GPU vendor or a GPU's name")
    listed.add_argument("--sort", metavar="FIELD", help="--sort=-FIELD reverses the order")
    add("show", show, "Show one node: its facts and its latest events.", _NODE)
    of_node = ("node", {"nargs": "?", "metavar": "NODE"})
    add("conflicts", list_conflicts, "List the open conflicts, or all conflicts of one node.", of_node)


def _add_write_verbs(add: AddVerb) -> None:
    nodes = ("nodes", {"nargs": "+", "metavar": "NODE", "help": "name, id or id prefix"})
    add(actions.APPROVE.name, approve, actions.APPROVE.help, nodes)
    for action in actions.NODE_ACTIONS.values():
        if action is actions.APPROVE:
            continue
        parser = add(action.name, stop if action is actions.STOP else change_node, action.help, _NODE)
        if action.reason != "none":
            required = action.reason == "required"
            parser.add_argument("--reason", required=required, default="", help="shown in the timeline")
        if action is actions.DRAIN:
            parser.add_argument(
                "--deadline",
                dest="deadline_seconds",
                type=_parse_duration,
                metavar="1h",
                help="time for running requests to finish",
            )
        if action is actions.STOP:
            parser.add_argument("--yes", action="store_true", help="do not ask")
    add("evict", evict, "Unload a node's least recently used idle replica.", _NODE)
    labels = ("labels", {"nargs": "*", "metavar": "LABEL", "help": "KEY=VALUE or KEY-"})
    add("label", label, "Show labels, set KEY=VALUE, remove KEY-.", _NODE, labels)
    conflict = ("conflict", {"metavar": "CONFLICT", "help": "id or id prefix"})
    for action in (actions.ACCEPT, actions.REFUSE):
        add(action.name, decide_conflict, action.help, conflict)


def _add_join_token_verbs(add: AddVerb) -> None:
    parser = add(
        "join-token", list_join_tokens, "Make, list or revoke the tokens that other machines join with."
    )
    add_verb = command_line.verb_adder(parser, "token_verb", "make|list|revoke")
    maker = add_verb(
        "make", make_join_token, "Make a join token and print the line to run on the other machine."
    )
    maker.add_argument(
        "--lifetime", type=_parse_lifetime, default=joining.DEFAULT_LIFETIME, metavar="1h", help="1m to 168h"
    )
    maker.add_argument("--uses", type=int, default=1, metavar="N", help="how many machines may join with it")
    maker.add_argument("--note", default="", help="shown when a machine joins with it")
    maker.add_argument("--url", default="", help="base URL of the server; default: CLUSTER_PUBLIC_URL")
    add_verb("list", list_join_tokens, f"List the latest {MAX_SHOWN_TOKENS} join tokens.")
    token = ("token", {"metavar": "ID", "help": "id or id prefix"})
    add_verb("revoke", revoke_join_token, "Revoke a join token.", token)


def _parse_duration(text: str) -> float:
    try:
        return parse_duration(text)
    except ValueError as error:
        raise ArgumentTypeError(str(error)) from error


def _parse_lifetime(text: str) -> int:
    return int(_parse_duration(text))


def list_nodes(options: Options) -> str:
    filters = ("status", "type", "vendor", "search", "sort", "label")
    query = {name: options[name] for name in filters if options[name] is not None}
    rows = node_rows.list_rows(listing.parse_node_query(QueryDict(urlencode(query, doseq=True))).nodes)
    return command_line.list_rows(options, _LIST_HEADINGS, rows, "no nodes")


def show(options: Options) -> str:
    node = lookup.find_node(options["node"])
    row = node_rows.detail_row(node.id)
    if row is None:
        raise errors.NotFound(f"the node {node.name!r} has just been removed")
    if options["json"]:
        return command_line.as_json(row)
    events = NodeEvent.objects.filter(node_id=node.id).order_by("-id")[:MAX_SHOWN_EVENTS]
    return node_text(row, list(events))


def list_conflicts(options: Options) -> str:
    """Return all open conflicts, or all conflicts of one node, latest first."""
    rows = NodeConflict.objects.order_by("-last_at", "id")
    if options["node"]:
        rows = rows.filter(node=lookup.find_node(options["node"]))
    else:
        rows = rows.filter(state=NodeConflict.State.OPEN)
    return command_line.list_rows(options, _CONFLICT_HEADINGS, CONFLICT_SHAPE.rows(rows), "no conflicts")


def approve(options: Options) -> str:
    """Approve one node, or several nodes independently of each other."""
    nodes = [lookup.find_node(text) for text in options["nodes"]]
    if len(nodes) > 1:
        return _approve_many(options, nodes)
    with lookup.hint_on_refusal("approve", nodes[0]):
        approved = lifecycle.approve(nodes[0].id, actor=command_line.current_actor(), now=clock.now())
    if options["json"]:
        return command_line.as_json(node_rows.approval_body(approved))
    shown_once = f"; API token (shown only once): {approved.api_token}" if approved.api_token else ""
    return _status_message(approved.node, actions.APPROVE.message) + shown_once


def _approve_many(options: Options, nodes: list[BackendNode]) -> str:
    ids = list(dict.fromkeys(node.id for node in nodes))
    results = lifecycle.approve_many(ids, actor=command_line.current_actor(), now=clock.now())
    failed = sum(bool(result.error) for result in results)
    if options["json"]:
        text = command_line.as_json(node_rows.approvals_body(results))
    else:
        names = {node.id: node.name for node in nodes}
        text = "\n".join(
            f"{names[result.id]}: {result.error or actions.APPROVE.message}" for result in results
        )
    if failed:
        raise PartialFailure(text, f"{failed} of {len(results)} could not be approved")
    return text


def change_node(options: Options) -> str:
    node = lookup.find_node(options["node"])
    with lookup.hint_on_refusal(options["verb"], node):
        bulk.perform(options["verb"], node.id, command_line.current_actor(), clock.now(), options)
    return _respond(options, node, actions.NODE_ACTIONS[options["verb"]].message)


def _respond(options: Options, node: BackendNode, message: str) -> str:
    return command_line.as_json({"message": message}) if options["json"] else _status_message(node, message)


def stop(options: Options) -> str:
    """Stop the worker after a confirmation. It starts again only if its machine restarts it."""
    node = lookup.find_node(options["node"])
    if text := actions.refusal(actions.STOP, node):
        raise CommandError(f"{node.name} cannot be stopped: {text}")
    if not options["yes"]:
        _confirm_stop(node)
    operation = node_stop.request_stop(
        node, by=Requester(command_line.current_actor().name), now=clock.now(), reason=options["reason"]
    ).operation
    if options["json"]:
        return command_line.as_json({"message": actions.STOP.message, "operation": str(operation.id)})
    return f"{node.name}: {actions.STOP.message} (operation {operation.id})"


def _confirm_stop(node: BackendNode) -> None:
    loaded = NodeModel.objects.loaded().filter(node=node).order_by("model_name", "replica_index")
    replicas = ", ".join(f"{row.model_name}#{row.replica_index}" for row in loaded)
    question = f"Stop the worker of {node.name}." + (f" This stops {replicas}." if replicas else "")
    question += " It comes back only if its machine starts it again."
    command_line.confirm(f"stop the worker of {node.name}", question)


def evict(options: Options) -> str:
    node = lookup.find_node(options["node"])
    operation = unload_requests.evict(node, command_line.current_actor().name, now=clock.now()).operation
    index = operation.payload["replica_index"]
    if options["json"]:
        return command_line.as_json(
            {"model": operation.element, "replica_index": index, "operation": str(operation.id)}
        )
    return f"{node.name}: {operation.element}#{index} is unloaded (operation {operation.id})"


def _status_message(node: BackendNode, message: str) -> str:
    now = BackendNode.objects.filter(pk=node.pk).first()
    return f"{node.name}: {message}" + (f"; it is {now.status}" if now else "")


def label(options: Options) -> str:
    """Set and remove labels in one transaction; without arguments, show the labels."""
    node = lookup.find_node(options["node"])
    labels_to_set, dropped = _parse_labels(options["labels"])
    if labels_to_set or dropped:
        now, actor = clock.now(), command_line.current_actor()
        labels = edit_labels(node.id, labels_to_set, drop=dropped, actor=actor, now=now)
    else:
        labels = dict(node.label_set.order_by("key").values_list("key", "value"))
    if options["json"]:
        return command_line.as_json(labels)
    return "\n".join(f"{key}={value}" for key, value in labels.items()) or f"{node.name} has no labels"


def _parse_labels(texts: list[str]) -> tuple[dict[str, str], list[str]]:
    """Return the labels to set and the keys to remove; the first `=` ends a key."""
    pairs = [text.partition("=") for text in texts]
    bare = [key for key, equals, _ in pairs if not equals]
    if wrong := next((text for text in bare if len(text) < 2 or not text.endswith("-")), None):
        raise CommandError(f"{wrong!r} is neither KEY=VALUE (to set a label) nor KEY- (to remove one)")
    return {key: value for key, equals, value in pairs if equals}, [text[:-1] for text in bare]


def decide_conflict(options: Options) -> str:
    """Accept or refuse another machine's claim to be the node."""
    action, decide = {
        "accept": (actions.ACCEPT, accept_conflict),
        "refuse": (actions.REFUSE, refuse_conflict),
    }[options["verb"]]
    node = decide(
        lookup.find_conflict(options["conflict"]).id, actor=command_line.current_actor(), now=clock.now()
    )
    return _respond(options, node, action.message)


def make_join_token(options: Options) -> str:
    """Create a join token; return the command line with it for the new machine, which is shown only once."""
    url = options["url"] or conf.cluster().public_url
    if not url:
        raise CommandError("the server's URL is unknown: set CLUSTER_PUBLIC_URL, or give --url")
    try:
        url = addresses.parse_base_url(url)
    except ValueError as error:
        raise CommandError(f"--url is {error}") from error
    token, plain = joining.make(
        actor=command_line.current_actor(),
        now=clock.now(),
        note=options["note"],
        lifetime=options["lifetime"],
        uses=options["uses"],
    )
    wheel = join_script.find_wheel(conf.cluster().wheel_dir)
    command = join_script.join_command(url, plain, wheel)
    warnings = join_script.join_warnings(url, host=conf.cluster().host, wheel=wheel)
    if options["json"]:
        (row,) = join.token_rows([token], clock.now())
        return command_line.as_json(
            row | {"token": plain, "command": command, "url": url, "warnings": warnings}
        )
    expires = command_line.format_time(token.expires_at)
    shown = "".join(f"warning: {warning}\n" for warning in warnings)
    return (
        f"{shown}valid until {expires} for {token.max_uses} new node(s); run on the other machine:\n{command}"
    )


def list_join_tokens(options: Options) -> str:
    tokens = join.token_rows(JoinToken.objects.all()[:MAX_SHOWN_TOKENS], clock.now())
    return command_line.list_rows(options, _TOKENS, tokens, "no join tokens")


def revoke_join_token(options: Options) -> str:
    token = lookup.find_join_token(options["token"])
    joining.revoke(token.pk, actor=command_line.current_actor(), now=clock.now())
    message = "join token revoked"
    return (
        command_line.as_json({"message": message})
        if options["json"]
        else f"{str(token.pk)[: command_line.SHORT_ID_LENGTH]}: {message}"
    )
