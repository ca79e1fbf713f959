"""The models that are defined, for the pages (`contract/operations-and-ui.md` §2.11).

`GET /v1/models` lists the same names for clients, by key; this one also serves a signed-in person.
"""

from asgiref.sync import async_to_sync
from drf_spectacular.utils import extend_schema
from rest_framework.request import Request
from rest_framework.response import Response

from localai_cluster.web.openapi import refusals
from localai_cluster.web.shapes import TEXT, Shape, field
from nodes.api.base import NodeView, answered
from nodes.definitions import folder

DEFINED = Shape(
    "DefinedModel",
    "A model that a file of the models folder defines.",
    [
        field("name", TEXT),
        field("backend", TEXT),
        field("model", TEXT, "The file or repository that the engine loads."),
        field("source", TEXT, "Name of the defining file."),
    ],
)
_EXAMPLE = {"name": "minilm", "backend": "minilm", "model": "all-minilm-l6-v2", "source": "minilm.yaml"}


class DefinitionsView(NodeView):
    """`/api/models`."""

    @extend_schema(
        operation_id="models_defined",
        summary="List defined models",
        tags=["nodes"],
        responses={200: DEFINED.many, **refusals(401, 403, 503)},
        examples=[answered([_EXAMPLE])],
    )
    def get(self, request: Request) -> Response:
        """Every usable definition, by name, loaded or not; 503 while the models folder does not answer."""
        found = async_to_sync(folder.every)()
        return Response(
            [DEFINED.of(name=one.name, backend=one.backend, model=one.model, source=one.source) for one in found]
        )
