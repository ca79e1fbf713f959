"""Placement, explained: where a model runs and why, plans, and the nodes that a model fits. Read-only."""

from base64 import b64decode
from datetime import datetime
from typing import Any

from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from localai_cluster.kit import clock, errors
from localai_cluster.web.openapi import describe, request_example, response_example
from localai_cluster.web.rest import NullIsAbsent, Number, Text, Whole, validate_body
from localai_cluster.web.shapes import Row
from nodes.api.base import MODEL_PATH
from nodes.api.models import MAX_MODEL_LENGTH, MAX_REPLICAS, ModelName, check_model_name
from nodes.api.scheduling import SchedulingRoute, SchedulingRuleRequestSerializer
from nodes.definitions.files import UnusableDefinition, parse_definition
from nodes.definitions.headers import UnreadableHeader, parse_config_json, parse_header
from nodes.definitions.sizes import ModelFiles
from nodes.loading import fit_summaries, load_explanation, load_request, reason_shapes
from nodes.loading.reason_shapes import EXPLAINED, PLAN, RULE_PLAN
from nodes.models import scheduling
from nodes.placement.fit import LARGEST
from nodes.reconcilers import replicas
from nodes.scheduling.rules import Rule

MAX_PLANNED_REPLICAS = 64
MAX_ADDED_NODES = 256
MAX_GIB = 1_000_000
MAX_HEADER_BYTES = 16 * 1024 * 1024
_MAX_BASE64_LENGTH = -(-MAX_HEADER_BYTES // 3) * 4
PLAN_PATH = "/api/placement/plan"
"""Path of the route for plans, whose body may contain the header of a model's file."""
MAX_BODY_BYTES = _MAX_BASE64_LENGTH + 1024 * 1024
"""Maximum bytes of the body of the route for plans."""


class ExplainView(SchedulingRoute):
    """`/api/models/:model/explain`."""

    @describe(
        "models_explain", "Explain where a model runs", EXPLAINED, refused=(404, 503), parameters=[MODEL_PATH]
    )
    def get(self, request: Request, model: str) -> Response:
        """Returns the model's replicas, its latest decisions, and what the next request would find.

        404 for a model that is not defined and has neither replicas nor records.
        """
        return Response(load_explanation.explain_model(model, clock.now()))


class PlanNeedSerializer(NullIsAbsent):
    """The bytes of VRAM and disk that one replica needs; 0 = unknown."""

    vram = Whole(min_value=0, max_value=LARGEST, required=False)
    disk = Whole(min_value=0, max_value=LARGEST, required=False)


class _SelectorLabels(serializers.DictField):
    """The labels of a node selector."""

    child = Text(max_length=scheduling.MAX_VALUE_LENGTH)

    def to_internal_value(self, data: Any) -> dict[str, str]:
        labels: dict[str, str] = super().to_internal_value(data)
        if len(labels) > scheduling.MAX_SELECTOR_LABELS:
            raise serializers.ValidationError(f"must have at most {scheduling.MAX_SELECTOR_LABELS} keys")
        try:
            for key, value in labels.items():
                scheduling.check_label(key, value, self.field_name or "labels")
        except errors.InvalidInput as refusal:
            raise serializers.ValidationError(refusal.message) from None
        return labels


class PlanNodesSerializer(NullIsAbsent):
    """A number of equal, healthy and empty nodes to add, with the registry's automatic labels."""

    count = Whole(min_value=1, max_value=MAX_ADDED_NODES)
    vram_gib = Number(min_value=0, max_value=MAX_GIB, required=False)
    disk_gib = Number(min_value=0, max_value=MAX_GIB, help_text="0 means not reported.", required=False)
    max_replicas_per_model = Whole(min_value=1, max_value=MAX_REPLICAS, required=False)
    labels = _SelectorLabels(required=False)


class PlanFileSerializer(NullIsAbsent):
    """A model that is not defined: the size of its weights and, optionally, the header of its file."""

    size = Whole(min_value=1, max_value=LARGEST, help_text="Bytes of all its weight files.")
    header = Text(
        max_length=_MAX_BASE64_LENGTH,
        help_text="The first bytes of a GGUF file in Base64, at most 16 MiB; the whole header must be there.",
        required=False,
    )
    config = serializers.DictField(help_text="The content of its `config.json`.", required=False)
    definition = serializers.DictField(
        help_text="Settings as in a definition, such as `backend` or `context_size`.", required=False
    )

    def validate_header(self, text: str | None) -> bytes | None:
        try:
            return None if text is None else b64decode(text, validate=True)
        except ValueError:
            raise serializers.ValidationError("is not Base64") from None

    def validate(self, attrs: dict[str, Any]) -> dict[str, Any]:
        """Return the fields with a definition and the sizes of the files."""
        if {"header", "config"} <= attrs.keys():
            raise serializers.ValidationError({"config": "give a header or a config"})
        settings = {"name": "file", "backend": "llama-cpp", "parameters": {"model": "file"}}
        name, size, header = "definition", attrs["size"], None
        try:
            definition = parse_definition({**settings, **attrs.get(name, {})}, "file")
            if (name := "header") in attrs:
                header = parse_header(attrs[name], size)
            elif (name := "config") in attrs:
                header = parse_config_json(attrs[name])
        except (UnusableDefinition, UnreadableHeader) as error:
            raise serializers.ValidationError({name: str(error)}) from None
        return {"definition": definition, "files": ModelFiles(size, size, header)}


class PlacementPlanRequestSerializer(NullIsAbsent):
    """The question of a plan: a defined `model`, a `file`, a `need` or a `rule`.

    A rule yields a `RulePlan`.
    """

    model = ModelName(required=False)
    file = PlanFileSerializer(required=False)
    need = PlanNeedSerializer(required=False)
    selector = _SelectorLabels(help_text="Instead of that of the model's rule.", required=False)
    replicas = Whole(min_value=1, max_value=MAX_PLANNED_REPLICAS, help_text="1 unless given.", required=False)
    rule = SchedulingRuleRequestSerializer(
        help_text="A rule as it would be saved; of the others it goes with `nodes` only.", required=False
    )
    nodes = serializers.ListField(
        child=PlanNodesSerializer(),
        max_length=MAX_ADDED_NODES,
        help_text=f"Nodes to add, at most {MAX_ADDED_NODES} altogether.",
        required=False,
    )

    def validate_nodes(self, groups: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
        if groups and sum(group["count"] for group in groups) > MAX_ADDED_NODES:
            raise serializers.ValidationError(f"must be at most {MAX_ADDED_NODES} altogether")
        return groups

    def validate(self, attrs: dict[str, Any]) -> dict[str, Any]:
        if len({"model", "file", "need", "rule"} & attrs.keys()) != 1:
            raise serializers.ValidationError({"model": ["give a model, a file, a need or a rule"]})
        for name in ("selector", "replicas"):
            if "rule" in attrs and name in attrs:
                raise serializers.ValidationError({name: ["is the rule's to say"]})
        return attrs


class PlanView(SchedulingRoute):
    """`/api/placement/plan`."""

    most_body_bytes = MAX_BODY_BYTES

    @describe(
        "placement_plan",
        "Plan where replicas would go, or what a rule would do",
        {"oneOf": [PLAN.ref, RULE_PLAN.ref]},
        refused=(400, 413, 503),
        body=PlacementPlanRequestSerializer,
        sent={"model": "minilm", "replicas": 2, "nodes": [{"count": 3, "vram_gib": 24}]},
        shown=PLAN.example,
        examples=[
            request_example({"rule": {"model_name": "minilm", "min_replicas": 2}}, name="A rule"),
            response_example(RULE_PLAN.example, name="What the rule would do"),
        ],
    )
    def post(self, request: Request) -> Response:
        """Returns where replicas would go, one after another, on the present fleet and the added nodes.

        Nothing is changed. The plan ends with the first replica that finds no node. For a `rule` it has what
        the replica pass would do if the rule were saved.
        """
        return Response(make_plan(validate_body(PlacementPlanRequestSerializer, request), clock.now()))


def make_plan(body: dict[str, Any], now: datetime) -> Row:
    """Return the plan for a validated body. Raise InvalidInput for an undefined model or an invalid rule."""
    nodes = [load_explanation.NewNodes(**group) for group in body.get("nodes", ())]
    if "rule" in body:
        return replicas.preview(Rule(**({"model_name": ""} | body["rule"])), nodes, now)
    if model := body.get("model", ""):
        needs = load_explanation.needs_of(model)
        if needs is None:
            raise errors.InvalidInput(f"model: {model} is not defined", field="model")
        need, conflicts, backend = needs.need, needs.conflicts, needs.definition.backend
    elif "file" in body:
        definition = body["file"]["definition"]
        need = load_request.estimate_need(definition, body["file"]["files"])
        conflicts, backend = frozenset(), definition.backend
    else:
        sizes = body["need"]
        need = load_explanation.need_for(sizes.get("vram", 0), sizes.get("disk", 0))
        conflicts, backend = frozenset[str](), ""
    plan_request = load_explanation.PlanRequest(
        need, model, conflicts, body.get("selector"), body.get("replicas", 1), nodes, backend
    )
    return load_explanation.plan(plan_request, now)


class FitView(SchedulingRoute):
    """`/api/placement/fit/:model`."""

    @describe(
        "placement_fit",
        "Show where a model fits",
        reason_shapes.FIT,
        refused=(404, 503),
        parameters=[MODEL_PATH],
    )
    def get(self, request: Request, model: str) -> Response:
        """Returns why each node cannot take one more replica, and which node placement would choose.

        404 for a model that is not defined.
        """
        return Response(load_explanation.node_fit(model))


class FitRequestSerializer(NullIsAbsent):
    """The models of one page of a list."""

    models = serializers.ListField(
        child=Text(max_length=MAX_MODEL_LENGTH),
        min_length=1,
        max_length=fit_summaries.MAX_MODELS,
        help_text="Their names; each may contain slashes.",
    )

    def validate_models(self, model_names: list[str]) -> list[str]:
        return list(dict.fromkeys(check_model_name(name) for name in model_names))


class FitsView(SchedulingRoute):
    """`/api/placement/fit`."""

    @describe(
        "placement_fits",
        "Show where many models fit",
        fit_summaries.FIT_SUMMARIES,
        refused=(400, 503),
        body=FitRequestSerializer,
        sent={"models": ["minilm"]},
    )
    def post(self, request: Request) -> Response:
        """Returns how many nodes could take one more replica of each model, for one page of a list."""
        model_names = validate_body(FitRequestSerializer, request)["models"]
        return Response(fit_summaries.read_summaries(model_names, clock.now()))
