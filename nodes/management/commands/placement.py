"""`manage.py placement`: where a model runs and why, and what would go where.

Each command calls what the REST API calls; `--json` prints what REST answers. A refused command ends with
exit code 1 and one line.
"""

import json
import math
import re
from argparse import ArgumentTypeError
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser
from rest_framework.exceptions import ValidationError

from localai_cluster.kit import clock, errors
from localai_cluster.web.envelopes import translated
from nodes.api.placement import PlacementPlanRequestSerializer, plan_of
from nodes.loading import load_explanation
from nodes.management import placement_texts, rendering
from nodes.management.verbs import adder
from nodes.models import PlacementRecord
from nodes.reconcilers import decision_replay

Options = Mapping[str, Any]
GIB = 2**30
_NODES = re.compile(
    r"(?:(?P<count>\d{1,4})x)?(?P<gib>\d{1,7}(?:\.\d+)?)(?:GiB)?(?P<labels>(?:,[^,=]+=[^,]*)*)"
)


class Command(BaseCommand):
    """One subcommand per question."""

    help = "Explains where models run, and plans where they would go; changes nothing."

    def add_arguments(self, parser: CommandParser) -> None:
        add = adder(parser)
        add(
            "explain", explain, "Show where a model runs, why, and what its next request would find."
        ).add_argument("model", metavar="MODEL")
        _plan_arguments(add("plan", plan, "Plan where replicas would go, or what a rule would do."))
        add("again", again, "Make a stored decision again, from the rows alone.").add_argument(
            "record", type=int, metavar="RECORD", help="its number, as explain shows it"
        )

    def handle(self, *args: Any, **options: Any) -> None:
        """Answers the question; CommandError if it cannot be answered."""
        try:
            self.stdout.write(options["act"](options))
        except ValidationError as wrong:
            refusal = translated(wrong)
            raise CommandError(refusal.message if refusal else str(wrong)) from wrong
        except errors.ClusterError as refusal:
            raise CommandError(refusal.message) from refusal


def _plan_arguments(parser: CommandParser) -> None:
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--model", help="a defined model")
    what.add_argument("--vram", type=_bytes, metavar="GIB", help="what a replica needs instead")
    what.add_argument(
        "--rule", metavar="JSON", help="a rule: what the replica pass would do now if it were saved"
    )
    parser.add_argument("--disk", type=_bytes, metavar="GIB", default=0, help="with --vram")
    parser.add_argument("--replicas", type=int, metavar="N", help="1 unless given")
    parser.add_argument(
        "--selector",
        type=_label,
        action="append",
        metavar="KEY=VALUE",
        help="instead of that of the model's rule; repeatable",
    )
    parser.add_argument(
        "--add-nodes",
        "--node",
        dest="node",
        type=_nodes,
        action="append",
        default=[],
        metavar="3x24GiB[,KEY=VALUE]",
        help="nodes to add, by their VRAM and labels; repeatable",
    )


def _bytes(gib: str) -> int:
    amount = float(gib)
    if not math.isfinite(amount):
        raise ArgumentTypeError("use a number of GiB")
    return int(amount * GIB)


def _label(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals:
        raise ArgumentTypeError("use KEY=VALUE")
    return key, value


def _nodes(text: str) -> dict[str, Any]:
    found = _NODES.fullmatch(text)
    if found is None:
        raise ArgumentTypeError("use 24GiB, or 3x24GiB for three of them, with ,KEY=VALUE for labels")
    labels = dict(_label(pair) for pair in found["labels"].split(",") if pair)
    added: dict[str, Any] = {"count": int(found["count"] or 1), "vram_gib": float(found["gib"])}
    return added | ({"labels": labels} if labels else {})


def _rule(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        raise CommandError(
            '--rule: give a JSON object such as {"model_name": "m", "min_replicas": 2}'
        ) from None


def explain(options: Options) -> str:
    """As `GET /api/models/:model/explain`."""
    row = load_explanation.explain_model(options["model"], clock.now())
    return rendering.as_json(row) if options["json"] else placement_texts.explained(row, clock.now())


def plan(options: Options) -> str:
    """As `POST /api/placement/plan`."""
    body: dict[str, Any] = {"replicas": options["replicas"], "nodes": options["node"]}
    if options["rule"] is not None:
        body["rule"] = _rule(options["rule"])
    elif options["model"] is not None:
        body["model"] = options["model"]
    else:
        body["need"] = {"vram": options["vram"], "disk": options["disk"]}
    if options["selector"]:
        body["selector"] = dict(options["selector"])
    checked = PlacementPlanRequestSerializer(data=body)
    checked.is_valid(raise_exception=True)
    row = plan_of(checked.validated_data, clock.now())
    if options["json"]:
        return rendering.as_json(row)
    return placement_texts.ruled(row) if "rule" in row else placement_texts.planned(row)


def again(options: Options) -> str:
    """Whether the decision follows from the rows alone, in another process and at another time."""
    record = PlacementRecord.objects.filter(pk=options["record"]).first()
    if record is None:
        raise errors.NotFound("there is no record of this number")
    said, found = decision_replay.said(record), decision_replay.recomputed(record)
    if options["json"]:
        same = None if found is None else found == said
        return rendering.as_json({"said": asdict(said), "found": found and asdict(found), "same": same})
    return placement_texts.again(said, found)
