"""Scheduling rules: list, show, set, delete (`contract/http-api.md` §2.12).

A model's name in the path may contain slashes and is URL-decoded once. `nodes.scheduling` writes the rows.
"""

from typing import Any

from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from localai_cluster.kit import clock, errors
from localai_cluster.web.openapi import describe
from localai_cluster.web.rest import Described, Flag, NullIsAbsent, Number, Text, Whole, validate_body
from nodes.api.base import MODEL_PATH, NodeView
from nodes.models import ModelSchedulingConfig, scheduling
from nodes.scheduling import store
from nodes.scheduling.rules import MAX_MODEL_LENGTH, MAX_REPLICAS, MAX_THRESHOLD, ROUTE_POLICIES, Rule

_COUNT = {"minimum": 0, "maximum": MAX_REPLICAS, "default": 0}
_THRESHOLD = {"minimum": 0, "maximum": MAX_THRESHOLD}
"""Bounds of fields that `rules.check_rule` checks, for the API document."""


class SchedulingRuleRequestSerializer(Described, NullIsAbsent):
    """The complete rule of a model.

    A routing field (one of the last four) that is left out keeps its stored value; every other omitted field
    is cleared.
    """

    model_name = Text(max_length=MAX_MODEL_LENGTH, required=False, schema={"minLength": 1})
    node_selector = serializers.DictField(
        child=Text(max_length=scheduling.MAX_VALUE_LENGTH),
        help_text="Labels that a node must have.",
        required=False,
    )
    min_replicas = Whole(required=False, schema=_COUNT)
    max_replicas = Whole(help_text="0 means no limit.", required=False, schema=_COUNT)
    spread_all = Flag(
        help_text="One replica on every node that matches; excludes the two counts.",
        required=False,
        schema={"default": False},
    )
    route_policy = Text(
        max_length=32,
        help_text="Empty: cluster default.",
        required=False,
        schema={"enum": [*ROUTE_POLICIES, None]},
    )
    balance_abs_threshold = Whole(help_text="0: cluster default.", required=False, schema=_THRESHOLD)
    balance_rel_threshold = Number(
        help_text="0 (cluster default), or at least 1.", required=False, schema=_THRESHOLD
    )
    min_prefix_match = Number(
        help_text="0: cluster default.", required=False, schema={"minimum": 0, "maximum": 1}
    )

    @classmethod
    def described(cls, schema: dict[str, Any]) -> dict[str, Any]:
        schema["required"] = ["model_name"]
        return schema


class SchedulingRoute(NodeView):
    """Base of routes of scheduling and placement."""

    tag = "scheduling"


class SchedulingRulesView(SchedulingRoute):
    """`/api/nodes/scheduling`."""

    @describe("scheduling_rules", "List scheduling rules", store.RULE_SHAPE.many)
    def get(self, request: Request) -> Response:
        """Returns all scheduling rules by model name."""
        return Response(store.serialize_rules(ModelSchedulingConfig.objects.all()))

    @describe(
        "scheduling_rules_set",
        "Set a model's scheduling rule",
        store.RULE_SHAPE,
        refused=(400, 413),
        body=SchedulingRuleRequestSerializer,
        sent={
            "model_name": "minilm",
            "node_selector": {"tier": "fast"},
            "min_replicas": 1,
            "max_replicas": 2,
        },
    )
    def post(self, request: Request) -> Response:
        """Sets a model's rule and returns it as stored. A cooldown of the rule continues."""
        body = validate_body(SchedulingRuleRequestSerializer, request)
        return Response(store.set_rule(Rule(**({"model_name": ""} | body)), clock.now()))


class SchedulingRuleView(SchedulingRoute):
    """`/api/nodes/scheduling/:model`."""

    @describe(
        "scheduling_rules_show",
        "Show a model's scheduling rule",
        store.RULE_SHAPE,
        refused=(404,),
        parameters=[MODEL_PATH],
    )
    def get(self, request: Request, model: str) -> Response:
        """Returns the model's rule; 404 if the model has none."""
        rule = store.find_rule(model)
        if not rule:
            raise errors.NotFound("there is no scheduling rule for this model")
        return Response(rule)

    @describe(
        "scheduling_rules_delete", "Delete a model's scheduling rule", status=204, parameters=[MODEL_PATH]
    )
    def delete(self, request: Request, model: str) -> Response:
        """Deletes the model's rule; it is a success if the model has none."""
        store.delete_rule(model, clock.now())
        return Response(status=204)
