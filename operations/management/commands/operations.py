"""`manage.py operations`: running and failed operations of the cluster, at the command line.

Each command calls the functions that the REST API calls; `--json` prints REST's response. An operation is
given by its id or a prefix of it. A refused command ends with exit code 1 and one line.
"""

from typing import Any
from uuid import UUID

from django.core.management.base import CommandError

from localai_cluster.accounts import command_line
from localai_cluster.accounts.command_line import (
    AddVerb,
    Argument,
    Options,
    VerbCommand,
    require_row_with_prefix,
)
from localai_cluster.kit import clock
from operations import kinds
from operations.api import verbs
from operations.api.history import history_page, undismissed_failures
from operations.api.jobs import as_entry, live_entries
from operations.api.serializers import started_body
from operations.ledger import admission
from operations.ledger.admission import Requester
from operations.management import following, operation_texts
from operations.models import Operation

HISTORY_OPTIONS = {
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
"""Options of `history`, which are the filters of the REST API."""


_ID: Argument = ("operation", {"metavar": "ID", "help": "id or id prefix"})
_NODES: Argument = (
    "--node",
    {"action": "append", "default": [], "metavar": "NODE", "help": "only there; repeatable"},
)
_FOLLOW: Argument = (
    "--follow",
    {"action": "store_true", "help": "print changes until it has ended; exit code 1 if it failed"},
)
_COMMENT: Argument = ("--comment", {"default": "", "help": "why it needs no more attention"})


class Command(VerbCommand):
    """The command; its subcommands are the verbs."""

    help = "Shows operations, ends them, and tries them again."

    def add_verbs(self, add: AddVerb) -> None:
        add("list", list_operations, "List what waits and runs, and failures not dismissed.")
        add("inbox", inbox, "List failures that no one has dismissed.")
        filters = [
            (f"--{name}", {"metavar": value, "help": what}) for name, (value, what) in HISTORY_OPTIONS.items()
        ]
        add("history", history, "List what has ended, the latest first.", *filters)
        add("show", show, "Show one operation and its part on each node.", _ID, _FOLLOW)
        add("cancel", cancel, "End an operation for good.", _ID, _NODES)
        add("retry", retry, "Retry what failed; waiting targets are tried at once.", _ID, _NODES)
        add("dismiss", dismiss, "Take a failure out of the inbox; its record stays.", _ID, _COMMENT)
        continued = "Open the next wave of an upgrade after one that failed."
        add("continue", continue_waves, continued, _ID, following.CONFIRM_LAST)
        add("stop", stop_waves, "End an upgrade in waves after the open wave.", _ID)


def list_operations(options: Options) -> str:
    """Return the text or JSON of `GET /api/operations`."""
    return _list_text(options, live_entries(), "no operations")


def inbox(options: Options) -> str:
    """Return the text or JSON of `GET /api/operations/inbox`."""
    return _list_text(options, undismissed_failures(), "the inbox is empty")


def _list_text(options: Options, entries: list[dict[str, Any]], none: str) -> str:
    if options["json"]:
        return command_line.as_json({"operations": entries})
    return operation_texts.operations_text(entries, none=none)


def history(options: Options) -> str:
    """Return the text or JSON of a page of `GET /api/operations/history`."""
    given = {name: options[name] for name in HISTORY_OPTIONS if options[name] is not None}
    if "node" in given:
        given["node"] = _node_id(given["node"])
    page = history_page(given)
    if options["json"]:
        return command_line.as_json(page)
    return operation_texts.history_text(page["operations"], page.get("nextCursor", ""))


def _node_id(text: str) -> str:
    """Return the id of a node by its name or id. A complete id may belong to a removed node."""
    try:
        return str(UUID(text))
    except ValueError:
        return str(kinds.hooks().find_node(text))


def show(options: Options) -> str:
    """Return one operation, in the form of the list."""
    operation = _find_operation(options["operation"])
    if options["follow"]:
        return following.follow_to_end(operation.id, options["out"], as_json=options["json"])
    entry = as_entry(operation)
    return command_line.as_json(entry) if options["json"] else operation_texts.operation_text(entry)


def cancel(options: Options) -> str:
    """Cancel the operation, or its targets on some nodes."""
    operation, actor = _find_operation(options["operation"]), str(command_line.current_actor())
    nodes = [kinds.hooks().find_node(text) for text in options["node"]]
    if not nodes:
        cancelled = verbs.cancel_operation(operation, actor=actor)
        return _result_text(options, operation, verbs.cancellation_text(cancelled))
    names = [verbs.cancel_target(operation, node, actor=actor) for node in nodes]
    return _result_text(options, operation, f"cancelled on {', '.join(names)}")


def retry(options: Options) -> str:
    """Repeat an operation; the returned text names the new operation."""
    operation = _find_operation(options["operation"])
    nodes = [kinds.hooks().find_node(text) for text in options["node"]]
    result = verbs.retry_operation(operation, nodes, Requester(str(command_line.current_actor())))
    if options["json"]:
        return command_line.as_json(started_body(result, verbs.RETRY_TEXTS))
    if result.operation.id == operation.id:
        return f"operation {operation.id}: {verbs.RETRY_TEXTS.joined}"
    now = result.operation.id
    return f"started again as operation {now}; `manage.py operations show {now} --follow` shows it"


def dismiss(options: Options) -> str:
    """Dismiss a failure; the comment is stored in the history."""
    operation = _find_operation(options["operation"])
    comment = options["comment"]
    if len(comment) > admission.MAX_COMMENT_LENGTH:
        raise CommandError(f"--comment must be at most {admission.MAX_COMMENT_LENGTH} characters long")
    admission.dismiss(operation.id, actor=str(command_line.current_actor()), now=clock.now(), comment=comment)
    return _result_text(options, operation, "operation dismissed")


def continue_waves(options: Options) -> str:
    """Open the next wave, and confirm that targets may stop a model's last replica."""
    return _choose(options, "continue", options["confirm_last"], "goes on")


def stop_waves(options: Options) -> str:
    """Stop an upgrade in waves, also without a failure."""
    return _choose(options, "stop", [], "stopped")


def _choose(options: Options, choice: str, confirmed: list[str], message: str) -> str:
    operation = _find_operation(options["operation"])
    kinds.hooks().choose_waves(
        operation.id,
        choice,
        last_replicas=confirmed,
        actor=str(command_line.current_actor()),
        now=clock.now(),
    )
    return _result_text(options, operation, message)


def _result_text(options: Options, operation: Operation, message: str) -> str:
    if options["json"]:
        return command_line.as_json({"success": True, "message": message})
    return f"operation {operation.id}: {message}"


def _find_operation(text: str) -> Operation:
    """Return the operation with this id or id prefix. Raise CommandError unless exactly one matches."""
    hint = "`manage.py operations list` and `inbox` list their ids"
    return require_row_with_prefix(Operation.objects.order_by("-created_at"), text, "operation", hint)
