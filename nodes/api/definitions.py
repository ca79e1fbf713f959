"""The models there are, defined or found on nodes (`contract/http-api.md` §5.4, `/api/models/capabilities`).

`GET /v1/models` lists the defined ones for clients, by key; this one also serves a signed-in person.
"""

from collections import defaultdict

from asgiref.sync import async_to_sync
from drf_spectacular.utils import extend_schema
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from localai_cluster.web.openapi import flat_refusals
from localai_cluster.web.renderers import FastJSONRenderer
from localai_cluster.web.shapes import FLAG, TEXT, TEXTS, UUID, Row, Shape, field
from nodes.api.base import NODE_ID, answered
from nodes.definitions import folder
from nodes.definitions.files import Definition
from nodes.models import NodeModel
from nodes.registry.shape import NODE_STATUS, REPLICA_STATE

PLACE = Shape(
    "ModelPlace",
    "A replica of a model.",
    [
        field("node_id", UUID),
        field("node_name", TEXT),
        field("state", REPLICA_STATE.ref),
        field("node_status", NODE_STATUS.ref),
    ],
)
MODEL = Shape(
    "InstalledModel",
    "A model that is defined, or that a node has.",
    [
        field("id", TEXT),
        field("capabilities", TEXTS, "`FLAG_EMBEDDINGS`, or nothing."),
        field("backend", TEXT),
        field("disabled", FLAG, "Always false."),
        field("pinned", FLAG, "Always false."),
        field("loaded_on", PLACE.many, optional=True),
        field(
            "source",
            {"type": "string", "enum": ["registry-only"]},
            "Of a model that only nodes have: no file defines it.",
            optional=True,
        ),
        field("warnings", TEXTS, "What of the definition is not followed.", optional=True),
    ],
)
DEFINITION_ERROR = Shape(
    "DefinitionError",
    "A file of the models folder that cannot be used.",
    [field("file", TEXT), field("error", TEXT)],
)
MODELS = Shape(
    "InstalledModels",
    "All models, by name.",
    [
        field("data", MODEL.many),
        field("definitionErrors", DEFINITION_ERROR.many, "Files whose models do not serve, and why."),
    ],
)
COMPONENTS = (PLACE, MODEL, DEFINITION_ERROR, MODELS)
_PLACE = {"node_id": NODE_ID, "node_name": "gpu-a", "state": "loaded", "node_status": "healthy"}
_EXAMPLE = {
    "id": "minilm",
    "capabilities": ["FLAG_EMBEDDINGS"],
    "backend": "minilm",
    "disabled": False,
    "pinned": False,
    "loaded_on": [_PLACE],
}
_COLUMNS = ("model_name", "backend_type", "node_id", "node__name", "state", "node__status")


class CapabilitiesView(APIView):
    """`/api/models/capabilities`."""

    envelope = "flat"
    renderer_classes = [FastJSONRenderer]

    @extend_schema(
        operation_id="models_capabilities",
        summary="List models",
        tags=["nodes"],
        responses={200: MODELS.ref, **flat_refusals()},
        examples=[answered({"data": [_EXAMPLE], "definitionErrors": []})],
    )
    def get(self, request: Request) -> Response:
        """Every usable definition and every model of a node; files that cannot be used with their reason.

        503 while the models folder does not answer.
        """
        defined = {one.name: one for one in async_to_sync(folder.list_definitions)()}
        places: dict[str, list[Row]] = defaultdict(list)
        backends: dict[str, str] = {}
        rows = NodeModel.objects.order_by("model_name", "node__name", "replica_index")
        for model, backend, node, name, state, status in rows.values_list(*_COLUMNS):
            places[model].append(PLACE.of(node_id=str(node), node_name=name, state=state, node_status=status))
            backends.setdefault(model, backend)
        names = sorted(defined.keys() | places.keys())
        found = [
            _told(name, defined.get(name), backends.get(name, ""), places.get(name, [])) for name in names
        ]
        broken = async_to_sync(folder.list_problems)().files
        errors = [DEFINITION_ERROR.of(file=file, error=reason) for file, reason in broken.items()]
        return Response(MODELS.of(data=found, definitionErrors=errors))


def _told(name: str, definition: Definition | None, backend: str, places: list[Row]) -> Row:
    embeds = definition is not None and bool(definition.options.get("Embeddings"))
    return MODEL.of(
        id=name,
        capabilities=["FLAG_EMBEDDINGS"] if embeds else [],
        backend=definition.backend if definition is not None else backend,
        disabled=False,
        pinned=False,
        loaded_on=places,
        source="" if definition is not None else "registry-only",
        warnings=list(definition.generation.warnings) if definition is not None else [],
    )
