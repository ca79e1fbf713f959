"""`manage.py scheduling`: scheduling rules. Each verb calls the function that REST calls."""

from argparse import ArgumentTypeError
from collections.abc import Callable, Mapping
from typing import Any

from django.core.management.base import CommandParser

from localai_cluster.accounts import command_line
from localai_cluster.accounts.command_line import AddVerb, Columns, Options, VerbCommand
from localai_cluster.kit import clock, errors
from nodes.models import ModelSchedulingConfig, RoutePolicy
from nodes.scheduling import store
from nodes.scheduling.rules import Rule

_CLUSTER_POLICY = "default"
"""Word for no policy of the rule's own."""


class Command(VerbCommand):
    """The command; its subcommands are the verbs."""

    help = "Shows, sets and deletes scheduling rules: nodes and replicas of models."

    def add_verbs(self, add: AddVerb) -> None:
        add("list", list_rules, "List the rules, and what the last pass made of each.")
        text = "Set the rule of a model; what is not given is cleared, except for routing."
        _add_rule_arguments(add("set", set_rule, text))
        add("delete", delete_rule, "Delete the rule of a model.", ("model", {"metavar": "MODEL"}))


def _add_rule_arguments(parser: CommandParser) -> None:
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--min", type=int, default=0, metavar="N", help="replicas at least")
    parser.add_argument("--max", type=int, default=0, metavar="N", help="replicas at most; 0: no limit")
    parser.add_argument("--spread", action="store_true", help="one on every node that matches")
    parser.add_argument(
        "--label",
        type=_parse_label,
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="only on nodes with this label; repeatable",
    )
    parser.add_argument(
        "--route-policy",
        choices=[*RoutePolicy.values, _CLUSTER_POLICY],
        help=f"how requests choose among replicas; {_CLUSTER_POLICY}: as the cluster's setting says",
    )


def _parse_label(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals:
        raise ArgumentTypeError(f"{text!r} is not KEY=VALUE")
    return key, value


def _wanted_text(row: Mapping[str, Any]) -> str:
    if row.get("spread_all"):
        return "one a node"
    least, most = row["min_replicas"], row["max_replicas"]
    if not least and not most:
        return ""
    return f"{least} to {most}" if most else f"{least} or more"


def _state(name: str) -> Callable[[Mapping[str, Any]], Any]:
    return lambda row: row.get("state", {}).get(name)


_LIST_HEADINGS: Columns = {
    "MODEL": "model_name",
    "WANTS": _wanted_text,
    "ON": "node_selector",
    "WANTED": _state("wanted"),
    "THERE": _state("current"),
    "LOADING": _state("loading"),
    "STATE": _state("reason"),
}


def list_rules(options: Options) -> str:
    rows = store.serialize_rules(ModelSchedulingConfig.objects.all())
    return command_line.list_rows(options, _LIST_HEADINGS, rows, "no scheduling rules")


def set_rule(options: Options) -> str:
    """Set the rule. Its routing thresholds stay unchanged, and its policy if none is given."""
    policy = options["route_policy"]
    rule = Rule(
        options["model"],
        node_selector=dict(options["label"]),
        min_replicas=options["min"],
        max_replicas=options["max"],
        spread_all=options["spread"],
        route_policy="" if policy == _CLUSTER_POLICY else policy,
    )
    row = store.set_rule(rule, clock.now())
    return command_line.as_json(row) if options["json"] else f"{rule.model_name}: {rule.summary}"


def delete_rule(options: Options) -> str:
    """Delete the rule. Raise NotFound if there is none, because the name may be mistyped."""
    model = options["model"]
    if not store.delete_rule(model, clock.now()):
        message = f"there is no scheduling rule for {model}; `manage.py scheduling list` lists them"
        raise errors.NotFound(message)
    message = "scheduling rule deleted"
    return command_line.as_json({"message": message}) if options["json"] else f"{model}: {message}"
