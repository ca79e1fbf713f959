"""The output of a node's engines (`contract/http-api.md` §2.13); `nodes/live/worker_logs.py` has it live."""

from typing import Any

from asgiref.sync import async_to_sync
from django.db import connection
from drf_spectacular.utils import extend_schema
from rest_framework.request import Request
from rest_framework.response import Response

from localai_cluster.kit import errors
from localai_cluster.web.openapi import refusals
from localai_cluster.web.rest import FastJSONRenderer
from localai_cluster.web.shapes import TEXT, TIME, Shape, field
from nodes.api.base import MOMENT, NodeView, answered
from nodes.api.worker_auth import parse_node_id
from nodes.backends import worker_logs
from nodes.registry import dial_targets

LOG_LINE = Shape(
    "LogLine",
    "One line of an engine's output.",
    [
        field("timestamp", TIME, "When the worker read it."),
        field("stream", {"type": "string", "enum": ["stdout", "stderr"]}),
        field("text", TEXT),
    ],
)
_REFUSALS = refusals(401, 403, 404, 409, 502, 504)


class LoggedModelsView(NodeView):
    """`/api/nodes/:id/backend-logs`."""

    renderer_classes = [FastJSONRenderer]

    @extend_schema(
        operation_id="nodes_logs_list",
        summary="List the models that have logs on a node",
        tags=["nodes"],
        responses={200: {"type": "array", "items": TEXT}, **_REFUSALS},
        examples=[answered(["minilm"])],
    )
    def get(self, request: Request, node_id: str) -> Response:
        """The models whose engines the worker keeps output of, those that have ended included."""
        return Response(_asked(node_id, worker_logs.models))


class LogLinesView(NodeView):
    """`/api/nodes/:id/backend-logs/:model`."""

    renderer_classes = [FastJSONRenderer]

    @extend_schema(
        operation_id="nodes_logs_read",
        summary="Show the log of a model on a node",
        tags=["nodes"],
        responses={200: LOG_LINE.many, **refusals(400), **_REFUSALS},
        examples=[answered([{"timestamp": MOMENT, "stream": "stderr", "text": "loading the model"}])],
    )
    def get(self, request: Request, node_id: str, model: str) -> Response:
        """The last lines of a model's engines in order of time; `model#0` is one replica (`%23` in the URL).

        Empty for a model that the worker does not know.
        """
        if len(model) > worker_logs.LONGEST_NAME:
            raise errors.InvalidInput(f"the model's name is over {worker_logs.LONGEST_NAME} characters")
        return Response(_asked(node_id, worker_logs.lines, model))


def _asked(node_id: str, question: Any, *about: str) -> Any:
    """What the worker answers; no connection to the database waits for it."""
    found = parse_node_id(node_id)
    if found is None:
        raise errors.NotFound("node not found")
    server = dial_targets.http_server(found)
    if not connection.in_atomic_block:
        connection.close()
    return async_to_sync(question)(server, *about)
