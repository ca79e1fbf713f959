"""`manage.py placement`: explain where a model runs, and plan placements. It changes nothing."""

import json
import math
import re
from argparse import ArgumentTypeError
from base64 import b64encode
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from django.core.management.base import CommandError, CommandParser

from localai_cluster.accounts import command_line
from localai_cluster.accounts.command_line import AddVerb, Columns, Options, VerbCommand
from localai_cluster.kit import clock, errors, untrusted
from localai_cluster.kit.quantities import gib_rounded_up
from nodes.api.placement import MAX_HEADER_BYTES, PlacementPlanRequestSerializer, make_plan
from nodes.definitions import sizes
from nodes.definitions.headers import read_json
from nodes.loading import load_explanation
from nodes.loading.load_explanation import ReplayedDecision
from nodes.models import PlacementRecord
from nodes.placement.sizes import describe_need

GIB = 2**30
_NODES_PATTERN = re.compile(
    r"(?:(?P<count>\d{1,4})x)?(?P<gib>\d{1,7}(?:\.\d+)?)(?:GiB)?(?P<labels>(?:,[^,=]+=[^,]*)*)"
)

_REPLICA_HEADINGS: Columns = {
    "NODE": "node",
    "INDEX": "replica_index",
    "STATE": "state",
    "REQUESTS": "in_flight",
    "SINCE": lambda replica: command_line.format_age(replica["since"], clock.now()),
}
_DECISION: Columns = {"OUTCOME": "outcome", "NODE": "node", "INDEX": "replica_index", "WHY": "reason"}
_RECORD_HEADINGS: Columns = {
    "RECORD": "id",
    "AGE": lambda record: command_line.format_age(record["last_at"], clock.now()),
    "KIND": "kind",
    **_DECISION,
}
_PLAN_HEADINGS: Columns = {"REPLICA": "replica", **_DECISION}
_CHANGE_HEADINGS: Columns = {"DO": "do", "NODE": "node", "WHY": "why"}


class Command(VerbCommand):
    """The command; its subcommands are the questions."""

    help = "Explains where models run, and plans where they would go; changes nothing."

    def add_verbs(self, add: AddVerb) -> None:
        model = ("model", {"metavar": "MODEL"})
        add("explain", explain, "Show where a model runs, why, and what its next request would find.", model)
        _add_plan_arguments(add("plan", plan, "Plan where replicas would go, or what a rule would do."))
        number = {"type": int, "metavar": "RECORD", "help": "number of the decision; explain shows it"}
        add("again", recompute, "Make a stored decision again, from the rows alone.", ("record", number))


def _add_plan_arguments(parser: CommandParser) -> None:
    subject = parser.add_mutually_exclusive_group(required=True)
    subject.add_argument("positional_model", metavar="MODEL", nargs="?", help="a defined model")
    subject.add_argument("--model", help="the same")
    subject.add_argument("--vram", type=_parse_gib, metavar="GIB", help="what a replica needs instead")
    subject.add_argument(
        "--file",
        type=Path,
        help="a model that is not defined: its GGUF file, or the config.json of its folder",
    )
    subject.add_argument(
        "--size", type=_parse_gib, metavar="GIB", help="a model of which only the size is known"
    )
    subject.add_argument(
        "--rule", metavar="JSON", help="a rule: what the replica pass would do now if it were saved"
    )
    parser.add_argument("--disk", type=_parse_gib, metavar="GIB", help="with --vram")
    parser.add_argument("--context", type=int, metavar="TOKENS", help="with --file or --size")
    parser.add_argument("--replicas", type=int, metavar="N", help="1 unless given")
    parser.add_argument(
        "--selector",
        type=_parse_label,
        action="append",
        metavar="KEY=VALUE",
        help="instead of that of the model's rule; repeatable",
    )
    parser.add_argument(
        "--add-nodes",
        "--node",
        dest="node",
        type=_parse_nodes,
        action="append",
        default=[],
        metavar="3x24GiB[,KEY=VALUE]",
        help="nodes to add, by their VRAM and labels; repeatable",
    )


def _parse_gib(gib: str) -> int:
    amount = float(gib) * GIB
    if not math.isfinite(amount):
        raise ArgumentTypeError("use a number of GiB")
    return int(amount)


def _file_field(path: Path | None, size: int | None, context: int | None) -> dict[str, Any]:
    """Return the field `file` of the plan's body."""
    body: dict[str, Any] = {"definition": {} if context is None else {"context_size": context}}
    if path is None:
        return body | {"size": size}
    try:
        if path.suffix == ".json":
            weights = sum(file.stat().st_size for file in path.parent.glob("*.safetensors"))
            config = read_json(path)
            if not weights:
                raise CommandError("--file: there is no file *.safetensors beside it")
            return body | {"size": weights, "config": config}
        with untrusted.open_file(path) as content:
            header = b64encode(content.read(MAX_HEADER_BYTES)).decode()
        return body | {"size": sum(shard.stat().st_size for shard in sizes.shards(path)), "header": header}
    except (OSError, ValueError) as error:
        raise CommandError(f"--file: {error}") from error


def _parse_label(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals:
        raise ArgumentTypeError("use KEY=VALUE")
    return key, value


def _parse_nodes(text: str) -> dict[str, Any]:
    match = _NODES_PATTERN.fullmatch(text)
    if match is None:
        raise ArgumentTypeError("use 24GiB, or 3x24GiB for three of them, with ,KEY=VALUE for labels")
    labels = dict(_parse_label(pair) for pair in match["labels"].split(",") if pair)
    added: dict[str, Any] = {"count": int(match["count"] or 1), "vram_gib": float(match["gib"])}
    return added | ({"labels": labels} if labels else {})


def _parse_rule(text: str) -> Any:
    try:
        if problem := untrusted.json_problem(text.encode("utf-8", "replace")):
            raise CommandError(f"--rule: it is {problem}")
        return json.loads(text)
    except ValueError:
        raise CommandError(
            '--rule: give a JSON object such as {"model_name": "m", "min_replicas": 2}'
        ) from None


def explain(options: Options) -> str:
    row = load_explanation.explain_model(options["model"], clock.now())
    return command_line.as_json(row) if options["json"] else _explanation_text(row)


def _check_plan_options(options: Options) -> None:
    if options["disk"] is not None and options["vram"] is None:
        raise CommandError("--disk: only with --vram")
    if options["context"] is not None and options["file"] is None and options["size"] is None:
        raise CommandError("--context: only with --file or --size; a defined model has a context size")


def plan(options: Options) -> str:
    _check_plan_options(options)
    body: dict[str, Any] = {"replicas": options["replicas"], "nodes": options["node"]}
    if options["rule"] is not None:
        body["rule"] = _parse_rule(options["rule"])
    elif (model := options["positional_model"] or options["model"]) is not None:
        body["model"] = model
    elif options["file"] is not None or options["size"] is not None:
        body["file"] = _file_field(options["file"], options["size"], options["context"])
    else:
        body["need"] = {"vram": options["vram"], "disk": options["disk"] or 0}
    if options["selector"]:
        body["selector"] = dict(options["selector"])
    checked = PlacementPlanRequestSerializer(data=body)
    checked.is_valid(raise_exception=True)
    row = make_plan(checked.validated_data, clock.now())
    if options["json"]:
        return command_line.as_json(row)
    return _rule_text(row) if "rule" in row else _plan_text(row)


def recompute(options: Options) -> str:
    """Compare a stored decision with the one that the present code takes from the same snapshot."""
    record = PlacementRecord.objects.filter(pk=options["record"]).first()
    if record is None:
        raise errors.NotFound("there is no record of this number")
    stored, recomputed = load_explanation.recorded_decision(record), load_explanation.replay(record)
    if options["json"]:
        same = None if recomputed is None else recomputed == stored
        return command_line.as_json(
            {"said": asdict(stored), "found": recomputed and asdict(recomputed), "same": same}
        )
    return _comparison_text(stored, recomputed)


def _explanation_text(row: Mapping[str, Any]) -> str:
    parts = [f"next request: {command_line.printable(row['next']['says'])}"]
    if row["replicas"]:
        parts.append(command_line.format_table(_REPLICA_HEADINGS, row["replicas"]))
    if row["records"]:
        parts.append(command_line.format_table(_RECORD_HEADINGS, row["records"]))
    if (placement := row["next"]["placement"]) is not None:
        parts.append("\n".join(["one more replica now:", *_node_lines(placement)]))
        parts.append(_memory_text(row["next"]["memory"]))
    return "\n\n".join(parts)


def _plan_text(row: Mapping[str, Any]) -> str:
    """Return the decisions of a plan, and the near misses among the nodes of the last decision."""
    decisions = row["decisions"]
    parts = [
        f"{row['placed']} of {row['wanted']} replicas placed",
        command_line.format_table(_PLAN_HEADINGS, decisions),
    ]
    if near := list(_node_lines(decisions[-1])):
        parts.append("\n".join([f"replica {decisions[-1]['replica']}:", *near]))
    parts.append(_memory_text(row["memory"]))
    return "\n\n".join(parts)


def _memory_text(memory: Mapping[str, Any]) -> str:
    """Format the memory check: first the need with its terms, then one line for each node."""
    terms = tuple(memory["terms"].items())
    need = describe_need(gib_rounded_up(sum(size for _, size in terms)), terms, ": ")
    head = f"memory ({need}):" if terms else "memory:"
    rest = memory["considered"] - len(memory["nodes"])
    lines = [command_line.printable(f"  {node['says']}") for node in memory["nodes"]]
    return "\n".join([head, *lines, *([f"  and {rest} more"] if rest else [])])


def _rule_text(row: Mapping[str, Any]) -> str:
    figures = f"{row['replicas_now']} running, {row['loading']} loading, {row['wanted']} wanted"
    parts = [f"{figures}: {command_line.printable(row['says'])}"]
    if row["waits_until"]:
        parts.append(f"cooling down until {row['waits_until']}")
    changes = [{"do": "load", **load} for load in row["loads"]]
    changes += [{"do": "retire", **replica} for replica in row["retires"]]
    if changes:
        parts.append(command_line.format_table(_CHANGE_HEADINGS, changes))
    if row["left_out"]:
        parts.append(f"and {row['left_out']} loads more")
    if row["unsatisfiable"]:
        missed = [command_line.printable(f"  not {miss['node']}: {miss['reason']}") for miss in row["misses"]]
        parts.append(
            "\n".join([f"not possible: {command_line.printable(row['unsatisfiable']['reason'])}", *missed])
        )
    return "\n\n".join(parts)


def _comparison_text(stored: ReplayedDecision, recomputed: ReplayedDecision | None) -> str:
    if recomputed is None:
        return "the snapshot of this decision has been deleted"
    if recomputed == stored:
        return f"the same decision: {stored.outcome}: {command_line.printable(stored.reason)}"
    return command_line.printable(
        f"ANOTHER decision: {recomputed.outcome}: {recomputed.reason}\n"
        f"instead of: {stored.outcome}: {stored.reason}"
    )


def _node_lines(placement: Mapping[str, Any]) -> Iterator[str]:
    for node in placement["best"]:
        yield command_line.printable(f"  {node['node']}: {node.get('against') or placement['reason']}")
    for node in placement["misses"]:
        yield command_line.printable(f"  not {node['node']}: {node['reason']}")
