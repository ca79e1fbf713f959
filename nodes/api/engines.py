"""Engines: load, stop and monitor a model by its name (`contract/http-api.md` §6), and the engines' logs.

`nodes/backends/worker_logs.py` streams the logs (§2.13).
"""

import asyncio
from collections.abc import Sequence
from typing import Any

from asgiref.sync import async_to_sync
from drf_spectacular.utils import OpenApiParameter, OpenApiResponse
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from localai_cluster.accounts.authentication import IsUser, principal
from localai_cluster.kit import clock, errors, transactions
from localai_cluster.rpc.client import BackendClient
from localai_cluster.rpc.errors import BackendError
from localai_cluster.web.envelopes import nested_error
from localai_cluster.web.openapi import describe
from localai_cluster.web.rest import Text, Whole, validate_body
from localai_cluster.web.shapes import BYTES, TEXT, TEXTS, TIME, Shape, count, field, mapping_schema
from localai_cluster.web.shapes import UUID as UUID_SCHEMA
from nodes.api import base, models
from nodes.api.worker_routes import parse_id
from nodes.backends import worker_logs
from nodes.commands.outcomes import CommandFailed
from nodes.definitions import folder
from nodes.gateway import gateway
from nodes.loading import load_request, wait
from nodes.loading.load_attempts import LoadFailed
from nodes.models import NodeModel
from nodes.registry import dial_targets
from nodes.replicas import unload_requests
from operations.api.serializers import requester_of
from operations.models import Operation, Status

STATUS_TIMEOUT = 5.0
"""Seconds that an engine may take to report its status."""
MAX_REPLICAS = 256
"""Maximum number of engines of a model whose status one request reads."""
MAX_REQUESTED_REPLICAS = 64
"""Maximum number of replicas that one request loads."""
MODEL_LOADED_SHAPE = Shape(
    "ModelLoaded",
    "Which model is loaded; `jobID` is the operation that loads it, if one was needed.",
    [
        field("loaded", TEXTS, example=["minilm"]),
        field("message", TEXT, example="model minilm is loaded"),
        field("jobID", UUID_SCHEMA, example=base.JOB_ID, optional=True),
        field("jobIDs", {"type": "array", "items": UUID_SCHEMA}, "Of several loads.", optional=True),
    ],
)
MEMORY_SHAPE = Shape(
    "EngineMemory",
    "What an engine says of its memory.",
    [
        field("total", BYTES, example=4831838208),
        field("breakdown", mapping_schema(BYTES), example={"gpu": 4831838208}),
    ],
)
_STATE_SCHEMA = count(-1, maximum=2) | {"description": "-1 error, 0 not initialised, 1 busy, 2 ready."}
ENGINE_STATUS_SHAPE = Shape(
    "EngineStatus",
    "One replica, and what its engine says of itself, or why it says nothing.",
    [
        field("node_id", UUID_SCHEMA, example=base.NODE_ID),
        field("node_name", TEXT, example="gpu-a"),
        field("replica_index", count(), example=0),
        field("in_flight", count(), example=1),
        field("state", _STATE_SCHEMA, example=2, nullable=True),
        field("memory", MEMORY_SHAPE.ref, nullable=True),
        field("error", TEXT, optional=True),
    ],
)
MONITOR_SHAPE = Shape(
    "ModelMonitor",
    "State and memory of the first replica that answers, and all of them.",
    [
        field("state", _STATE_SCHEMA, example=2),
        field("memory", MEMORY_SHAPE.ref),
        field("replicas", ENGINE_STATUS_SHAPE.many),
    ],
)
_MONITORED = [
    base.query_parameter("model", base.text_schema(models.MAX_MODEL_LENGTH), "Which model.", required=True)
]


class BackendModelSerializer(models.UnloadModelSerializer):
    """The name of a model, in the field that the reference uses."""

    model_name = None  # type: ignore[assignment]
    model = models.ModelName(source="model_name", schema={"minLength": 1})


class LoadModelSerializer(BackendModelSerializer):
    """A model to load, and optionally the number of replicas to add and the node for them.

    Without both, one serving replica is enough.
    """

    replicas = Whole(required=False, min_value=1, max_value=MAX_REQUESTED_REPLICAS)
    node_id = Text(required=False, max_length=64)


class LoadView(APIView):
    """`/backend/load`."""

    @describe(
        "backend_load",
        "Load a model",
        MODEL_LOADED_SHAPE,
        meaning="A replica serves.",
        others={202: OpenApiResponse(MODEL_LOADED_SHAPE.ref, "The loads are recorded and go on.")},
        refused=(400, 404, 409, 413),
        body=LoadModelSerializer,
        sent={"model": "minilm"},
        tag="nodes",
    )
    def post(self, request: Request) -> Response:
        """Loads one replica of the model unless one serves. Errors carry `loaded` and `message` as well.

        With `replicas` or `node_id` (which the reference lacks) every call loads that many further replicas,
        on that node or on any node, as a load each.
        """
        try:
            return self._load(request)
        except errors.ClusterError as error:
            body = nested_error(error.status, error.message, field=error.field)
            return Response({"loaded": [], "message": error.message} | body, status=error.status)

    def _load(self, request: Request) -> Response:
        fields = validate_body(LoadModelSerializer, request)
        model: str = fields["model_name"]
        if async_to_sync(folder.folder().find)(model) is None:
            raise errors.NotFound(f"model {model} is not defined")
        if fields.get("replicas") or fields.get("node_id"):
            return self._load_more(request, fields)
        operation = load_request.request_load(model, requester_of(request))
        if operation is None:
            return Response(MODEL_LOADED_SHAPE.of(loaded=[model], message=f"model {model} is loaded"))
        return _load_response(model, [operation], wait=fields.get("wait", True))

    def _load_more(self, request: Request, fields: dict[str, Any]) -> Response:
        node = base.require_ready_node(fields["node_id"]) if fields.get("node_id") else None
        operations = load_request.request_replicas(
            fields["model_name"],
            fields.get("replicas") or 1,
            node_id=None if node is None else node.pk,
            by=requester_of(request),
        )
        return _load_response(fields["model_name"], operations, wait=fields.get("wait", True))


def _load_response(model: str, operations: Sequence[Operation], *, wait: bool) -> Response:
    """Return 200 if all loads have ended, 202 if one is still running. Raise LoadFailed."""
    if wait:
        until = clock.monotonic() + gateway.MAX_WAIT_SECONDS
        operations = [
            models.wait_for_end(operation, max(until - clock.monotonic(), 0.0)) for operation in operations
        ]
    for operation in operations:
        if operation.status in (Status.FAILED, Status.CANCELLED):
            raise LoadFailed(f"loading model {model} failed: {operation.error or operation.message}")
    finished = all(operation.status == Status.COMPLETED for operation in operations)
    body = MODEL_LOADED_SHAPE.of(
        loaded=[model] if finished else [],
        message=f"model {model} is {'loaded' if finished else 'being loaded'}",
        jobID=str(operations[0].id),
        jobIDs=[str(operation.id) for operation in operations] if len(operations) > 1 else [],
    )
    return Response(body, status=200 if finished else 202)


class ShutdownView(APIView):
    """`/backend/shutdown`."""

    @models.describe_waiting_command(
        "backend_shutdown", "Stop a model", BackendModelSerializer, models.UNLOAD_MESSAGES, key="model"
    )
    def post(self, request: Request) -> Response:
        """Unloads the model from every node (R6.11). 404 if it is not loaded; 502 lists the failures."""
        return models.run_and_respond(
            request, unload_requests.unload, BackendModelSerializer, models.UNLOAD_MESSAGES
        )


class MonitorView(APIView):
    """`/backend/monitor`."""

    @describe(
        "backend_monitor",
        "Show a model's engines",
        MONITOR_SHAPE,
        refused=(400, 404, 502),
        parameters=_MONITORED,
        tag="nodes",
    )
    def get(self, request: Request) -> Response:
        """Returns the status that the engines of the model's replicas report. 404 if none is loaded."""
        model = base.read_query(request, _MONITORED)["model"]
        if not model:
            raise errors.InvalidInput("model is required", field="model")
        engines = _find_engines(model)
        if not engines:
            raise errors.NotFound(f"model {model} is not loaded on any node")
        transactions.release_connection()
        statuses = async_to_sync(_read_statuses)(engines)
        first = next((status for status in statuses if status["state"] is not None), None)
        if first is None:
            raise CommandFailed(f"no engine of model {model} answers: {statuses[0]['error']}")
        return Response(MONITOR_SHAPE.of(state=first["state"], memory=first["memory"], replicas=statuses))


def _find_engines(model: str) -> list[NodeModel]:
    replicas = NodeModel.objects.of(model).loaded().select_related("node")
    return list(replicas.order_by("node__name", "replica_index")[:MAX_REPLICAS])


async def _read_statuses(engines: Sequence[NodeModel]) -> list[dict[str, Any]]:
    return list(await asyncio.gather(*(_read_status(engine) for engine in engines)))


async def _read_status(engine: NodeModel) -> dict[str, Any]:
    node = engine.node
    client = BackendClient(engine.address, dial_targets.bearer_token(node.engine_token, node.weak_identity))
    state, memory, problem = None, None, ""
    try:
        status = await client.status(STATUS_TIMEOUT)
        state = int(status.state)
        memory = MEMORY_SHAPE.of(total=status.memory.total, breakdown=dict(status.memory.breakdown))
    except BackendError as error:
        problem = error.message
    finally:
        await client.close()
    return ENGINE_STATUS_SHAPE.of_object(
        engine,
        node_id=str(engine.node_id),
        node_name=node.name,
        state=state,
        memory=memory,
        error=problem,
    )


LOADING_SHAPE = Shape(
    "ModelLoading",
    "A load that goes on, or the failure that stands for a moment.",
    [
        field("model", TEXT, example="minilm"),
        field(
            "state",
            {"type": "string", "enum": ["pending", "installing", "staging", "loading", "failed"]},
            example="loading",
        ),
        field(
            "progress",
            {"type": "number"},
            "Percent of the whole load. It falls only when a new attempt begins.",
            example=40.0,
        ),
        field("bytes_sent", BYTES, example=419430400),
        field("total_bytes", BYTES, example=1073741824),
        field("file_index", count(), example=0),
        field("total_files", count(), example=0),
        field(
            "node",
            TEXT,
            "The name of the node, once it is chosen; for administrators.",
            example="gpu-a",
            optional=True,
        ),
        field("eta_seconds", count(), "Seconds that are left, once bytes move.", example=12, optional=True),
    ],
)


class LoadStatusView(APIView):
    """`/api/models/:model/load-status`."""

    permission_classes = [IsUser]
    error_type = "not_found_error"

    @describe(
        "models_load_status",
        "Show how far the load of a model is",
        LOADING_SHAPE,
        refused=(404,),
        parameters=[OpenApiParameter("model", str, OpenApiParameter.PATH)],
        tag="nodes",
    )
    def get(self, request: Request, model: str) -> Response:
        """Returns the progress of the model's load.

        404 when no load is running: the model may be ready, so send the request to it again.
        """
        now = clock.now()
        operation = wait.status(model, now)
        if operation is None:
            raise errors.NotFound(f"no load is running for model {model}")
        shows_node = wait.may_see_nodes(principal(request))
        return Response(LOADING_SHAPE.of(**wait.loading_body(model, operation, now, shows_node=shows_node)))


LOG_LINE_SHAPE = Shape(
    "LogLine",
    "One line of an engine's output.",
    [
        field("timestamp", TIME, "When the worker read it.", example=base.MOMENT),
        field("stream", {"type": "string", "enum": ["stdout", "stderr"]}, example="stderr"),
        field("text", TEXT, example="loading the model"),
    ],
)


class LoggedModelsView(base.NodeView):
    """`/api/nodes/:id/backend-logs`."""

    @describe(
        "nodes_logs_list",
        "List the models that have logs on a node",
        TEXTS,
        refused=(404, 409, 502, 504),
        shown=["minilm"],
    )
    def get(self, request: Request, node_id: str) -> Response:
        """Returns the models whose engine output the worker keeps, including engines that have ended."""
        return Response(_read_from_worker(node_id, worker_logs.models))


class LogLinesView(base.NodeView):
    """`/api/nodes/:id/backend-logs/:model`."""

    @describe(
        "nodes_logs_read",
        "Show the log of a model on a node",
        LOG_LINE_SHAPE.many,
        refused=(400, 404, 409, 502, 504),
    )
    def get(self, request: Request, node_id: str, model: str) -> Response:
        """Returns the last lines of a model's engines in order of time.

        `model#0` is one replica (`%23` in the URL). The list is empty for a model that the worker does not
        know.
        """
        if len(model) > worker_logs.MAX_NAME_LENGTH:
            raise errors.InvalidInput(f"the model's name is over {worker_logs.MAX_NAME_LENGTH} characters")
        return Response(_read_from_worker(node_id, worker_logs.lines, model))


def _read_from_worker(node_id: str, question: Any, *about: str) -> Any:
    """Send a request to the node's worker and return its response, without holding a database connection."""
    server = dial_targets.http_server(parse_id(node_id))
    transactions.release_connection()
    return async_to_sync(question)(server, *about)
