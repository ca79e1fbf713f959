"""`manage.py operations`: what is done in the cluster, and what failed, at the command line.

Each command calls what the REST API calls; `--json` prints what REST answers. An operation is given by its id
or the beginning of it. A refused command ends with exit code 1 and one line.
"""

from typing import Any
from uuid import UUID

from django.core.management.base import CommandError, CommandParser

from localai_cluster.accounts import command_line
from localai_cluster.accounts.command_line import AddVerb, Options, VerbCommand, only_with_prefix
from localai_cluster.kit import clock, errors
from operations import kinds
from operations.api import verbs
from operations.api.history import record, undecided
from operations.api.jobs import entry_of, live
from operations.api.serializers import started_body
from operations.ledger import admission
from operations.ledger.admission import Requester
from operations.management import following, operation_texts
from operations.models import Operation

FILTERS = {
    "node": ("NODE", "for this node: name or id"),
    "backend": ("NAME", "of this backend or model"),
    "kind": ("KIND", "such as backend_install or model_load"),
    "outcome": ("OUTCOME", "completed, failed or cancelled"),
    "actor": ("NAME", "requested by this user"),
    "from": ("TIME", "ended at this time or later, such as 2026-08-22T09:00:00Z"),
    "to": ("TIME", "ended at this time or earlier"),
    "limit": ("N", "how many; 50 unless given"),
    "cursor": ("CURSOR", "goes on where a list ended that printed it"),
}
"""Options of `history`: those of the REST API."""


class Command(VerbCommand):
    """One subcommand per verb."""

    help = "Shows operations, ends them, and tries them again."

    def add_verbs(self, add: AddVerb) -> None:
        add("list", list_operations, "List what waits and runs, and failures not dismissed.")
        add("inbox", inbox, "List failures that no one has dismissed.")
        ended = add("history", history, "List what has ended, the latest first.")
        for name, (metavar, what) in FILTERS.items():
            ended.add_argument(f"--{name}", metavar=metavar, help=what)
        shown = _of_one(add("show", show, "Show one operation and its part on each node."))
        shown.add_argument(
            "--follow", action="store_true", help="print changes until it has ended; exit code 1 if it failed"
        )
        _of_one(add("cancel", cancel, "End an operation for good.")).add_argument(
            "--node", action="append", default=[], metavar="NODE", help="only there; repeatable"
        )
        tried = _of_one(add("retry", retry, "Retry what failed; waiting targets are tried at once."))
        tried.add_argument(
            "--node", action="append", default=[], metavar="NODE", help="only there; repeatable"
        )
        _of_one(add("dismiss", dismiss, "Take a failure out of the inbox; its record stays.")).add_argument(
            "--comment", default="", help="why it needs no more attention"
        )
        continued = _of_one(add("continue", go_on, "Open the next wave of an upgrade after one that failed."))
        continued.add_argument(
            "--confirm-last",
            action="append",
            default=[],
            metavar="MODEL",
            help="the last replica of this model may stop; repeatable",
        )
        _of_one(add("stop", stop, "End an upgrade in waves after the open wave."))


def _of_one(parser: CommandParser) -> CommandParser:
    parser.add_argument("operation", metavar="ID", help="id or id prefix")
    return parser


def list_operations(options: Options) -> str:
    """Return the list, as `GET /api/operations` has it."""
    return _listed(options, live(), "no operations")


def inbox(options: Options) -> str:
    """Return the failures, as `GET /api/operations/inbox` has them."""
    return _listed(options, undecided(), "the inbox is empty")


def _listed(options: Options, entries: list[dict[str, Any]], none: str) -> str:
    if options["json"]:
        return command_line.as_json({"operations": entries})
    return operation_texts.operations(entries, clock.now(), none=none)


def history(options: Options) -> str:
    """Return a page of the history, as `GET /api/operations/history` has it."""
    given = {name: options[name] for name in FILTERS if options[name] is not None}
    if "node" in given:
        given["node"] = _node_id(given["node"])
    page = record(given)
    if options["json"]:
        return command_line.as_json(page)
    return operation_texts.record(page["operations"], page.get("nextCursor", ""))


def _node_id(text: str) -> str:
    """Return the id of a node; a complete id may be that of a removed node."""
    try:
        return str(UUID(text))
    except ValueError:
        return str(kinds.hooks().find_node(text))


def show(options: Options) -> str:
    """Return one operation, as the list has it."""
    id = _operation(options["operation"]).id
    if options["follow"]:
        return following.to_its_end(id, options["out"], as_json=options["json"])
    entry = entry_of(id)
    if entry is None:
        raise errors.NotFound(f"the record of operation {id} has just been cleared")
    return command_line.as_json(entry) if options["json"] else operation_texts.detail(entry)


def cancel(options: Options) -> str:
    """Cancel the operation, or its targets on some nodes."""
    operation, actor = _operation(options["operation"]), str(command_line.current_actor())
    nodes = [kinds.hooks().find_node(text) for text in options["node"]]
    if not nodes:
        cancelled = verbs.cancel_operation(operation, actor=actor)
        return _done(options, operation, verbs.cancelled_words(cancelled))
    names = [verbs.cancel_target(operation, node, actor=actor) for node in nodes]
    return _done(options, operation, f"cancelled on {', '.join(names)}")


def retry(options: Options) -> str:
    """Repeat the operation; the text names the new one."""
    operation = _operation(options["operation"])
    nodes = [kinds.hooks().find_node(text) for text in options["node"]]
    result = verbs.retry_operation(operation, nodes, Requester(str(command_line.current_actor())))
    if options["json"]:
        return command_line.as_json(started_body(result, verbs.AGAIN))
    if result.operation.id == operation.id:
        return f"operation {operation.id}: {verbs.AGAIN.joined}"
    now = result.operation.id
    return f"started again as operation {now}; `manage.py operations show {now} --follow` shows it"


def dismiss(options: Options) -> str:
    """Dismiss a failure; the comment stays in the history."""
    operation = _operation(options["operation"])
    comment = options["comment"]
    if len(comment) > admission.LONGEST_COMMENT:
        raise CommandError(f"--comment must be at most {admission.LONGEST_COMMENT} characters long")
    admission.dismiss(operation.id, actor=str(command_line.current_actor()), now=clock.now(), comment=comment)
    return _done(options, operation, "operation dismissed")


def go_on(options: Options) -> str:
    """Open the next wave; confirmations let targets with a last replica go on."""
    return _choose(options, "continue", options["confirm_last"], "goes on")


def stop(options: Options) -> str:
    """Stop an upgrade in waves, also before anything has failed."""
    return _choose(options, "stop", [], "stopped")


def _choose(options: Options, choice: str, confirmed: list[str], message: str) -> str:
    operation = _operation(options["operation"])
    kinds.hooks().choose_waves(
        operation.id,
        choice,
        last_replicas=confirmed,
        actor=str(command_line.current_actor()),
        now=clock.now(),
    )
    return _done(options, operation, message)


def _done(options: Options, operation: Operation, message: str) -> str:
    if options["json"]:
        return command_line.as_json({"success": True, "message": message})
    return f"operation {operation.id}: {message}"


def _operation(text: str) -> Operation:
    """Return the operation with that id or id prefix. Raise CommandError unless exactly one matches."""
    hint = "`manage.py operations list` and `inbox` list their ids"
    return only_with_prefix(Operation.objects.order_by("-created_at"), text, "operation", hint)
