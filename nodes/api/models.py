"""Models: the list (`contract/http-api.md` §5.4), and commands to unload and delete them (§2.11).

Each command is an operation. The response waits for its end, as clients of the reference expect, for at most
`gateway.MAX_WAIT_SECONDS`; after that, or with `"wait": false`, it is a 202. `GET /v1/models` lists the
defined models by key.
"""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

from asgiref.sync import async_to_sync
from drf_spectacular.utils import OpenApiResponse
from rest_framework import serializers
from rest_framework.fields import empty
from rest_framework.request import Request
from rest_framework.response import Response

from localai_cluster.accounts.authentication import IsUser, principal
from localai_cluster.kit import clock, names, transactions
from localai_cluster.web.openapi import View, describe, response_example
from localai_cluster.web.rest import (
    Flag,
    NullIsAbsent,
    Text,
    Whole,
    validate_body,
)
from localai_cluster.web.shapes import FLAG, TEXT, TEXTS, Row, Shape, field
from localai_cluster.web.shapes import UUID as UUID_SCHEMA
from nodes.api.base import NODE_ID, ModelRoute, NodeView, job_example, require_ready_node
from nodes.commands.outcomes import CommandFailed
from nodes.definitions import files, folder
from nodes.definitions.files import Definition
from nodes.gateway import gateway
from nodes.models import NodeModel
from nodes.registry.shape import NODE_STATUS
from nodes.replicas import unload_requests
from nodes.replicas.shape import REPLICA_STATE
from nodes.replicas.unload_requests import UnloadRequest
from nodes.scheduling import store
from operations.api.serializers import DEDUPLICATED, JOB_FIELDS, job_fields, requester_of
from operations.ledger.admission import Admission
from operations.models import Operation, Status

PLACE_SHAPE = Shape(
    "ModelPlace",
    "A replica of a model.",
    [
        field("node_id", UUID_SCHEMA, example=NODE_ID),
        field("node_name", TEXT, example="gpu-a"),
        field("state", REPLICA_STATE.ref, example="loaded"),
        field("node_status", NODE_STATUS.ref, example="healthy"),
    ],
)
INSTALLED_MODEL_SHAPE = Shape(
    "InstalledModel",
    "A model that is defined, or that a node has.",
    [
        field("id", TEXT, example="minilm"),
        field(
            "capabilities",
            TEXTS,
            "Its use cases, such as `FLAG_CHAT`; without a definition those of its engine.",
            example=["FLAG_EMBEDDINGS"],
        ),
        field("backend", TEXT, example="minilm"),
        field("disabled", FLAG, "Always false.", example=False),
        field("pinned", FLAG, "Its scheduling rule keeps at least one replica.", example=False),
        field("loaded_on", PLACE_SHAPE.many, optional=True),
        field(
            "source",
            {"type": "string", "enum": ["registry-only"]},
            "Of a model that only nodes have: no file defines it.",
            optional=True,
        ),
        field("warnings", TEXTS, "What of the definition is not followed.", optional=True),
    ],
)
DEFINITION_ERROR_SHAPE = Shape(
    "DefinitionError",
    "A file of the models folder that cannot be used.",
    [field("file", TEXT), field("error", TEXT)],
)
MODELS_SHAPE = Shape(
    "InstalledModels",
    "All models, by name.",
    [
        field("data", INSTALLED_MODEL_SHAPE.many),
        field(
            "definitionErrors",
            DEFINITION_ERROR_SHAPE.many,
            "Files whose models do not serve, and why.",
            example=[],
        ),
    ],
)
_REPLICA_COLUMNS = ("model_name", "backend_type", "node_id", "node__name", "state", "node__status")


class CapabilitiesView(ModelRoute):
    """`/api/models/capabilities`."""

    permission_classes = [IsUser]

    @describe("models_capabilities", "List models", MODELS_SHAPE, tag="nodes")
    def get(self, request: Request) -> Response:
        """Returns all usable definitions, all models that nodes have, and unusable files with the reason.

        Only administrators see nodes and files. 503 while the models folder does not answer.
        """
        is_admin = principal(request).is_admin
        defined = {definition.name: definition for definition in async_to_sync(folder.folder().all)()}
        places: dict[str, list[Row]] = defaultdict(list)
        backends: dict[str, str] = {}
        rows = NodeModel.objects.order_by("model_name", "node__name", "replica_index")
        for model, backend, node, name, state, status in rows.values_list(*_REPLICA_COLUMNS):
            places[model].append(
                PLACE_SHAPE.of(node_id=str(node), node_name=name, state=state, node_status=status)
            )
            backends.setdefault(model, backend)
        names = sorted(defined.keys() | places.keys())
        pinned = store.pinned_models()
        models = [
            _model_row(
                name,
                defined.get(name),
                backends.get(name, ""),
                places.get(name, []) if is_admin else [],
                is_pinned=name in pinned,
            )
            for name in names
        ]
        broken = async_to_sync(folder.folder().problems)().files if is_admin else {}
        errors = [DEFINITION_ERROR_SHAPE.of(file=file, error=reason) for file, reason in broken.items()]
        return Response(MODELS_SHAPE.of(data=models, definitionErrors=errors))


def _model_row(
    name: str, definition: Definition | None, backend: str, places: list[Row], *, is_pinned: bool
) -> Row:
    cases = definition.use_cases if definition is not None else files.engine_use_cases(backend, {})
    return INSTALLED_MODEL_SHAPE.of(
        id=name,
        capabilities=files.to_flags(cases),
        backend=definition.backend if definition is not None else backend,
        disabled=False,
        pinned=is_pinned,
        loaded_on=places,
        source="" if definition is not None else "registry-only",
        warnings=list(definition.generation.warnings) if definition is not None else [],
    )


MAX_MODEL_LENGTH = 255
MAX_REPLICAS = 10_000
_MODEL_NAME_PATTERN = r"^[^\x00-\x1f\x7f]+$"

MODEL_DONE_SHAPE = Shape(
    "ModelDone",
    "What was done, by which operation; `statusUrl` tells how it went.",
    [*JOB_FIELDS, DEDUPLICATED],
)
Messages = tuple[str, str]
"""Two messages: for an operation that has ended, and for one that is still running."""
NODE_UNLOAD_MESSAGES: Messages = "model unloaded from node", "the model is being unloaded from the node"
NODE_DELETE_MESSAGES: Messages = "model deleted from node", "the model is being deleted from the node"
UNLOAD_MESSAGES: Messages = "model unloaded", "the model is being unloaded"
DELETE_MESSAGES: Messages = "model deleted", "the model is being deleted"


def describe_waiting_command(
    operation_id: str,
    summary: str,
    body: type[serializers.Serializer[Any]],
    messages: Messages,
    *,
    key: str = "model_name",
) -> Callable[[View], View]:
    """Describe a command whose response waits for the operation's end; `key` is the field of the model."""
    ended_message, running_message = messages
    return describe(
        operation_id,
        summary,
        MODEL_DONE_SHAPE,
        meaning="It is done.",
        others={202: OpenApiResponse(MODEL_DONE_SHAPE.ref, "The operation is recorded and goes on.")},
        refused=(400, 404, 409, 413, 502),
        body=body,
        sent={key: "minilm"},
        shown=job_example(ended_message),
        examples=[response_example(job_example(running_message), "202", "accepted")],
        tag="nodes",
    )


def check_model_name(name: str) -> str:
    """Return the name. Raise ValidationError if it is not a valid model name."""
    if not name or name != name.strip():
        raise serializers.ValidationError("must be a name without blanks around it")
    if any(names.find_unprintable(character) for character in name):
        raise serializers.ValidationError("must not contain control characters")
    return name


class ModelName(Text):
    """The name of a model."""

    def __init__(self, **options: Any) -> None:
        super().__init__(max_length=MAX_MODEL_LENGTH, **options)

    def run_validation(self, data: Any = empty) -> str | None:
        """Return the name, None if it is absent. DRF runs no validators for a blank text."""
        name = super().run_validation(data)
        return None if name is None else check_model_name(name)


class UnloadModelSerializer(NullIsAbsent):
    """The model to unload, the time for its running requests, and whether the response waits for the end."""

    model_name = ModelName(schema={"pattern": _MODEL_NAME_PATTERN, "minLength": 1})
    deadline_seconds = Whole(required=False, min_value=0, max_value=unload_requests.MAX_GRACE)
    wait = Flag(required=False)


class UnloadReplicaSerializer(UnloadModelSerializer):
    """A model to unload on one node: one replica or all of them."""

    replica_index = Whole(required=False, min_value=0, max_value=MAX_REPLICAS)


class DeleteModelSerializer(UnloadModelSerializer):
    """A model to unload and delete. Its name becomes a path on the worker."""

    def validate_model_name(self, name: str) -> str:
        """Require a name that stays inside the models folder of a worker."""
        if any(part in ("", ".", "..") for part in name.split("/")):
            raise serializers.ValidationError("must be a path inside the models folder")
        return name


def run_and_respond(
    request: Request,
    admit_unload: Callable[..., Admission],
    shape: type[UnloadModelSerializer],
    messages: Messages,
    node_id: str | None = None,
) -> Response:
    """Create or join the operation, wait for its end, and return the response.

    The status is 200 if the operation has ended, 202 if it is still running. Raises CommandFailed with the
    reasons of a failure.
    """
    fields = validate_body(shape, request)
    node = require_ready_node(node_id) if node_id is not None else None
    unload_request = UnloadRequest(
        fields["model_name"],
        requester_of(request),
        node,
        fields.get("replica_index"),
        fields.get("deadline_seconds"),
    )
    admission = admit_unload(unload_request, now=clock.now())
    operation = (
        wait_for_end(admission.operation, gateway.MAX_WAIT_SECONDS)
        if fields.get("wait", True)
        else admission.operation
    )
    if operation.status == Status.FAILED:
        raise CommandFailed(operation.error)
    if operation.status == Status.CANCELLED:
        raise CommandFailed(f"cancelled: {operation.message}")
    finished = operation.status == Status.COMPLETED
    body = MODEL_DONE_SHAPE.of(**job_fields(admission, messages[0] if finished else messages[1]))
    return Response(body, status=200 if finished else 202)


def wait_for_end(operation: Operation, seconds: float) -> Operation:
    """Wait up to `seconds` for the operation's end; return the operation as it was read last.

    Raises CommandFailed if its record has been deleted meanwhile.
    """
    transactions.release_connection()
    ended = async_to_sync(gateway.wait_for_end)(operation.id, seconds)
    if ended is None:
        raise CommandFailed("the record of the operation was cleared")
    return ended


class NodeModelUnloadView(NodeView):
    """`/api/nodes/:id/models/unload`."""

    @describe_waiting_command(
        "nodes_models_unload", "Unload a model from a node", UnloadReplicaSerializer, NODE_UNLOAD_MESSAGES
    )
    def post(self, request: Request, node_id: str) -> Response:
        """Stops the model's engines on the node, or one of them.

        Running requests may continue until the deadline; new requests use other replicas at once. 502 lists
        the failures.
        """
        return run_and_respond(
            request, unload_requests.unload, UnloadReplicaSerializer, NODE_UNLOAD_MESSAGES, node_id
        )


class NodeModelDeleteView(NodeView):
    """`/api/nodes/:id/models/delete`."""

    @describe_waiting_command(
        "nodes_models_delete",
        "Delete a model's files from a node",
        DeleteModelSerializer,
        NODE_DELETE_MESSAGES,
    )
    def post(self, request: Request, node_id: str) -> Response:
        """Unloads the model from the node and deletes its files there.

        It is a success if there are no files.
        """
        return run_and_respond(
            request, unload_requests.delete, DeleteModelSerializer, NODE_DELETE_MESSAGES, node_id
        )


class ModelUnloadView(NodeView):
    """`/api/nodes/models/unload`."""

    @describe_waiting_command(
        "models_unload", "Unload a model from all nodes", UnloadModelSerializer, UNLOAD_MESSAGES
    )
    def post(self, request: Request) -> Response:
        """Stops all engines of the model (R6.11). The operation has a part for each node with an engine."""
        return run_and_respond(request, unload_requests.unload, UnloadModelSerializer, UNLOAD_MESSAGES)


class ModelDeleteView(NodeView):
    """`/api/nodes/models/delete`."""

    @describe_waiting_command(
        "models_delete", "Delete a model's files from all nodes", DeleteModelSerializer, DELETE_MESSAGES
    )
    def post(self, request: Request) -> Response:
        """Unloads the model and deletes its files on every approved node (R6.13); its definition stays."""
        return run_and_respond(request, unload_requests.delete, DeleteModelSerializer, DELETE_MESSAGES)
