"""`GET /api/figures`: figures over time of the cluster, a node or a model."""

from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from rest_framework.request import Request
from rest_framework.response import Response

from localai_cluster.kit import clock, errors
from localai_cluster.web.openapi import describe
from localai_cluster.web.shapes import TEXT, TIME, Row, Shape, column, count, field, text
from localai_cluster.web.shapes import UUID as UUID_SCHEMA
from nodes.api.base import MOMENT, NODE_ID, NodeView, enum_schema, query_parameter, read_query, text_schema
from nodes.api.worker_routes import parse_node_id
from nodes.figures import series, store
from nodes.figures.series import DAY, HOUR, MINUTE, SECOND, Columns
from nodes.figures.store import Span
from nodes.models import BackendNode, NodeEvent, NodeModel

STEP_SECONDS = (10, 60, 300, 600, 3600, 7200, 21600, 86400)
DEFAULT_POINTS, MAX_POINTS = 400, 1500
MAX_EVENTS = 100
FIGURE_SCOPES = ("cluster", "node", "model")
MAX_FIGURE_AGE = 366 * DAY
_RETENTION_BY_STEP = {10: store.SAMPLES_TABLE.kept, 60: store.HOURS_TABLE.kept, 3600: store.DAYS_TABLE.kept}
"""How long stored values are kept, by their step in seconds."""
_RETENTION_SLACK = 10 * MINUTE
"""Time for which values stay stored after their retention has ended."""

_UNIT_BY_FIGURE = {
    "vram_used": "bytes",
    "vram_total": "bytes",
    "ram_used": "bytes",
    "ram_total": "bytes",
    "disk_used": "bytes",
    "disk_total": "bytes",
    "busy": "percent",
    "temperature": "celsius",
    "power": "watts",
    "nodes": "nodes",
    "gpus": "gpus",
    "requests": "requests",
    "errors": "requests",
    "prompt_tokens": "tokens",
    "completion_tokens": "tokens",
    "first_token": "seconds",
}
FIGURE_SHAPE = Shape(
    "Figure",
    "One figure over time.",
    [
        field("name", enum_schema(list(_UNIT_BY_FIGURE))),
        field(
            "gpu",
            count(),
            "The GPU's index; null: the figure is the node's, model's or cluster's.",
            nullable=True,
        ),
        field("unit", enum_schema(sorted(set(_UNIT_BY_FIGURE.values())))),
        field(
            "values",
            {"type": "array", "items": {"type": "number", "nullable": True}},
            "One for each step: sums of requests and tokens, means of all else; null: not known.",
        ),
    ],
)
FIGURE_EVENT_SHAPE = Shape(
    "FigureEvent",
    "What happened to a node.",
    [
        column("at", TIME, example=MOMENT),
        column("kind", enum_schema(NodeEvent.Kind.values), example="drained"),
        column("node_id", UUID_SCHEMA, example=NODE_ID, source=text("node_id")),
        column("node_name", TEXT, example="gpu-a"),
    ],
)
FIGURES_SHAPE = Shape(
    "Figures",
    "Figures on a grid of steps.",
    [
        field("scope", enum_schema(FIGURE_SCOPES), example="node"),
        field("name", TEXT, "Empty for the cluster.", example="gpu-a"),
        field("from", TIME, "The beginning of the first step.", example="2026-08-22T09:00:00+00:00"),
        field("step", {"type": "integer", "enum": list(STEP_SECONDS)}, "Seconds.", example=10),
        field(
            "figures",
            FIGURE_SHAPE.many,
            example=[
                {"name": "ram_used", "gpu": None, "unit": "bytes", "values": [17179869184, None]},
                {"name": "busy", "gpu": 0, "unit": "percent", "values": [87, 91]},
            ],
        ),
        field(
            "events",
            FIGURE_EVENT_SHAPE.many,
            f"The last {MAX_EVENTS} of these nodes in that time, the oldest first.",
        ),
    ],
)
_PARAMETERS = [
    query_parameter("scope", enum_schema(FIGURE_SCOPES), "What they are of.", required=True),
    query_parameter("name", text_schema(255), "The node's id or name, or the model's name."),
    query_parameter("from", TIME, "The beginning; an hour before `to` unless given, a year ago at most."),
    query_parameter("to", TIME, "The end; now unless given."),
    query_parameter(
        "step",
        {"type": "integer", "enum": list(STEP_SECONDS)},
        f"Seconds; at most {MAX_POINTS} steps. Unless given, the least that is kept for the time and"
        f" has at most {DEFAULT_POINTS} steps.",
    ),
]


class FiguresView(NodeView):
    """`/api/figures`."""

    @describe(
        "figures_read",
        "Show figures over time",
        FIGURES_SHAPE,
        refused=(400, 404),
        parameters=_PARAMETERS,
    )
    def get(self, request: Request) -> Response:
        """Returns figures over time.

        10-second values are kept for an hour, minutes for two days, hours for a year.
        """
        query, now = read_query(request, _PARAMETERS), clock.now()
        scope = query["scope"]
        name, node_id, subjects = _subjects(scope, query["name"])
        span = _parse_span(query, now)
        columns: Columns = (
            {} if scope == "node" else {name: [None] * span.count for name in series.COUNTED_FIGURES}
        )
        for of_subject in store.read(subjects, span).values():
            columns |= of_subject
        body = FIGURES_SHAPE.of(
            scope=scope,
            name=name,
            step=span.step // SECOND,
            figures=list(_figure_rows(columns, _first_kept_index(span, now))),
            events=[] if scope == "model" else _event_rows(node_id, span),
        )
        return Response(body | {"from": span.start.isoformat()})


def _subjects(scope: str, name: str) -> tuple[str, UUID | None, list[str]]:
    """Return what the request is about: the displayed name, the node's id, and the subjects of the figures.

    Raises InvalidInput or NotFound.
    """
    if scope not in FIGURE_SCOPES or bool(name) != (scope != "cluster"):
        wrong = "name" if scope in FIGURE_SCOPES else "scope"
        raise errors.InvalidInput(
            f"{wrong}: a scope, and the name of a node or model unless it is cluster", field=wrong
        )
    if scope == "cluster":
        return "", None, [series.CLUSTER_SUBJECT, series.ALL_MODELS_SUBJECT]
    if scope == "model":
        return name, None, [series.MODEL_PREFIX + name]
    node_id = parse_node_id(name)
    known = BackendNode.objects.filter(**({"name": name} if node_id is None else {"pk": node_id}))
    node = known.values_list("pk", "name").first()
    if node is None:
        raise errors.NotFound("node not found")
    return node[1], node[0], [f"{series.NODE_PREFIX}{node[0]}"]


def _parse_span(query: Mapping[str, Any], now: datetime) -> Span:
    """Return the requested steps. Raise InvalidInput with the name of an invalid parameter."""
    until, since = query["to"], query["from"]
    end = now if until is None or until > now else until
    start = end - HOUR if since is None else since
    if not now - MAX_FIGURE_AGE <= start < end:
        raise errors.InvalidInput("from must be before to and now, and at most a year ago", field="from")
    seconds = query["step"] or _default_step(end - start, now - start)
    if seconds not in STEP_SECONDS:
        raise errors.InvalidInput(f"step must be one of {', '.join(map(str, STEP_SECONDS))}", field="step")
    step = timedelta(seconds=seconds)
    first = series.floor_to_step(start, step)
    span = Span(first, step, -((first - end) // step))
    if span.count > MAX_POINTS:
        raise errors.InvalidInput(f"step: more than {MAX_POINTS} steps; choose a longer one", field="step")
    return span


def _retention_of(step: int) -> timedelta:
    """Return how long values with this step are kept at least."""
    return _RETENTION_BY_STEP[max(least for least in _RETENTION_BY_STEP if least <= step)] + _RETENTION_SLACK


def _default_step(length: timedelta, age: timedelta) -> int:
    usual = (
        step
        for step in STEP_SECONDS
        if length <= DEFAULT_POINTS * step * SECOND and age <= _retention_of(step)
    )
    return next(usual, STEP_SECONDS[-1])


def _first_kept_index(span: Span, now: datetime) -> int:
    """Return the index of the first step whose values are still kept."""
    return max(-((span.start - now + _retention_of(span.step // SECOND)) // span.step), 0)


def _figure_rows(columns: Columns, first_kept: int) -> Iterator[Row]:
    """Yield the figures. A count without a sample is zero in steps whose values are kept."""
    counts: Columns = {
        name: [
            0 if value is None and index >= first_kept else value for index, value in enumerate(columns[name])
        ]
        for name in series.COUNTED_FIGURES & columns.keys()
    }
    names = {series.split_name(name): name for name in columns if not name.startswith("first_token")}
    for gpu, figure in sorted(names, key=lambda key: (-1 if key[0] is None else key[0], key[1])):
        values: list[Any] = counts.get(figure) or columns[names[gpu, figure]]
        if _UNIT_BY_FIGURE[figure] == "bytes":
            values = [None if value is None else value << 20 for value in values]
        yield FIGURE_SHAPE.of(name=figure, gpu=gpu, unit=_UNIT_BY_FIGURE[figure], values=values)
    if counts:
        yield FIGURE_SHAPE.of(
            name="first_token", gpu=None, unit="seconds", values=first_token_seconds(counts)
        )


def first_token_seconds(counts: Columns) -> list[float | None]:
    """Return the mean seconds to the first token for each step; None for a step without tokens."""
    pairs = zip(counts["first_token_ms"], counts["first_tokens"], strict=True)
    return [round((total or 0) / number / 1000, 3) if number else None for total, number in pairs]


def _event_rows(node_id: UUID | None, span: Span) -> list[Row]:
    rows = NodeEvent.objects.filter(at__gte=span.start, at__lt=span.end).order_by("-id")
    if node_id is not None:
        rows = rows.filter(node_id=node_id)
    return FIGURE_EVENT_SHAPE.rows(rows[:MAX_EVENTS])[::-1]


def last_complete_minute(now: datetime) -> Span:
    """Return the minute that ended ten seconds ago; counts of later seconds may not be stored yet."""
    return Span(series.floor_to_step(now, series.SAMPLE_EVERY) - series.SAMPLE_EVERY - MINUTE, MINUTE, 1)


def rate_fields(columns: Columns) -> dict[str, Any]:
    """Return the rates per second, from the counts of one minute."""
    counts = {name: columns.get(name, [0]) for name in series.COUNTED_FIGURES}
    rates = {name: round((values[0] or 0) / 60, 2) for name, values in counts.items()}
    return {
        "requests_per_second": rates["requests"],
        "errors_per_second": rates["errors"],
        "tokens_per_second": rates["completion_tokens"],
        "first_token_seconds": first_token_seconds(counts)[0],
    }


_RATE_FIELDS = [
    field("requests_per_second", {"type": "number"}, example=3.5),
    field("errors_per_second", {"type": "number"}, example=0.0),
    field("tokens_per_second", {"type": "number"}, "Of answers.", example=812.4),
    field(
        "first_token_seconds", {"type": "number"}, "The mean; null without any.", example=0.21, nullable=True
    ),
]
TRAFFIC_SHAPE = Shape(
    "OverviewTraffic",
    "Requests for inference in the last minute that all web processes have reported.",
    _RATE_FIELDS,
)
MAX_RATED_MODELS = 2000
"""Maximum number of models in one response."""
RATE_SHAPE = Shape(
    "ModelRate",
    "Requests for a model in the last minute that all web processes have reported.",
    [field("name", TEXT, example="minilm"), *_RATE_FIELDS],
)
RATES_SHAPE = Shape(
    "ModelRates",
    "The models that have replicas.",
    [field("models", RATE_SHAPE.many, f"At most {MAX_RATED_MODELS}.")],
)


class ModelRatesView(NodeView):
    """`/api/figures/models`."""

    @describe(
        "figures_models",
        "Show the requests of all models",
        RATES_SHAPE,
    )
    def get(self, request: Request) -> Response:
        """Returns the request rates of each model that has a replica, over the last minute; a few queries."""
        names = NodeModel.objects.order_by("model_name").values_list("model_name", flat=True).distinct()
        subjects = {series.MODEL_PREFIX + name: name for name in names[:MAX_RATED_MODELS]}
        columns = store.read(list(subjects), last_complete_minute(clock.now())) if subjects else {}
        models = [
            RATE_SHAPE.of(name=subjects[subject], **rate_fields(columns[subject])) for subject in columns
        ]
        return Response(RATES_SHAPE.of(models=models))
