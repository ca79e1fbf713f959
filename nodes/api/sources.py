"""Models from sources: inspection of a pasted text, import of a model, and the galleries' catalogue."""

from typing import Any

from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from localai_cluster.kit import clock
from localai_cluster.kit.errors import Conflict
from localai_cluster.web.openapi import describe
from localai_cluster.web.rest import Flag, NullIsAbsent, Text, validate_body
from localai_cluster.web.shapes import FLAG, TEXT, TEXTS, Shape, count, field
from nodes.api import base
from nodes.api.catalogue import GALLERY_ERROR_SHAPE, gallery_errors
from nodes.api.models import ModelName
from nodes.definitions.files import MAX_FILE_BYTES
from nodes.downloads.imports import request_import
from nodes.registry.listing import FARTHEST, MAX_SEARCH_LENGTH
from nodes.sources import catalogue, inspection
from nodes.sources.plans import ImportPlan
from operations.api.serializers import JOB_FIELDS, job_fields, requester_of
from operations.ledger.admission import Admission

MAX_PAGE_SIZE, DEFAULT_PAGE_SIZE = 1000, 50
MAX_SIZE = 2**60
IMPORT_STARTED_SHAPE = Shape(
    "ImportStarted",
    "The import was admitted; `statusUrl` tells how it goes.",
    [
        *JOB_FIELDS,
        field("model", TEXT, "The name under which it will be defined."),
        field("deduplicated", FLAG),
    ],
)
CATALOGUE_SHAPE = Shape(
    "ModelCatalogue",
    "A page of what the galleries of models offer.",
    [
        field("models", catalogue.ENTRY.many),
        field("total", count(), "Of those that match.", example=1),
        field("page", count(1), example=1),
        field("items", count(1), example=DEFAULT_PAGE_SIZE),
        field("tasks", TEXTS, "Of all entries.", example=["chat"]),
        field("licences", TEXTS, "Of all entries.", example=["apache-2.0"]),
        field("galleries", TEXTS, example=["localai"]),
        field("gallery_errors", GALLERY_ERROR_SHAPE.many, example=[]),
    ],
)
_SEARCH_SCHEMA = base.text_schema(MAX_SEARCH_LENGTH)
_CATALOGUE = [
    base.query_parameter(
        "term", _SEARCH_SCHEMA, "Only models with this in name, description, tags or gallery."
    ),
    base.query_parameter("task", _SEARCH_SCHEMA, "Only models for this, such as `chat`."),
    base.query_parameter("licence", _SEARCH_SCHEMA, "Only models of this licence."),
    base.query_parameter("gallery", _SEARCH_SCHEMA, "Only models of this gallery."),
    base.query_parameter("size", base.integer_schema(1, MAX_SIZE), "Only models of at most so many bytes."),
    base.query_parameter("fits", base.enum_schema(("true", "false")), "Only those that fit."),
    base.query_parameter("page", base.integer_schema(1, FARTHEST, 1), "Which page."),
    base.query_parameter(
        "items", base.integer_schema(1, MAX_PAGE_SIZE, DEFAULT_PAGE_SIZE), "Models on a page."
    ),
]


class InspectSerializer(NullIsAbsent):
    """A text that identifies a model: a name, an address, a command line, a path or a definition."""

    text = Text(max_length=MAX_FILE_BYTES)


class ChangesSerializer(serializers.Serializer[Any]):
    """Values that replace those of the definition before it is saved, as in the form of definitions."""

    context_size = serializers.JSONField(required=False)
    parallel = serializers.JSONField(required=False)
    gpu_layers = serializers.JSONField(required=False)
    template = serializers.JSONField(required=False)
    options = serializers.JSONField(required=False)
    max_tokens = serializers.JSONField(required=False)


class ImportSerializer(InspectSerializer):
    """The model to import, its variant, and the options of the import."""

    variant = Text(
        max_length=1024,
        required=False,
        help_text="Its id; the best one that fits unless given.",
    )
    name = ModelName(required=False, help_text="The suggested one.")
    changes = ChangesSerializer(required=False)
    load = Flag(required=False, help_text="Load the model when its files are there.")


class _SourceView(base.ModelRoute):
    most_body_bytes = 4 * MAX_FILE_BYTES


class InspectView(_SourceView):
    """`/api/sources/inspect`."""

    @describe(
        "sources_inspect",
        "Show what a text means, and where its model fits",
        inspection.INSPECTION,
        refused=(400, 404, 413, 502),
        body=InspectSerializer,
        sent={"text": "Qwen/Qwen2.5-1.5B-Instruct-GGUF"},
    )
    def post(self, request: Request) -> Response:
        """Finds the model that the text identifies, and reads at most 16 MiB of its file; nothing is saved.

        The answer to a name has `candidates`, to every other text `variants`. If the source refuses, the
        response is a 4xx that quotes it.
        """
        text = validate_body(InspectSerializer, request)["text"]
        return Response(inspection.inspect(text, clock.now()))


class ImportView(_SourceView):
    """`/api/models/import`."""

    @describe(
        "models_import",
        "Import a model",
        IMPORT_STARTED_SHAPE,
        status=202,
        meaning="The import is recorded and goes on.",
        refused=(400, 404, 409, 413, 502),
        body=ImportSerializer,
        sent={"text": "Qwen/Qwen2.5-1.5B-Instruct-GGUF", "variant": "Q4_K_M", "load": True},
        shown=base.job_example("the import of Qwen2.5-1.5B-Instruct has begun", "/api/models/job")
        | {"model": "Qwen2.5-1.5B-Instruct", "deduplicated": False},
    )
    def post(self, request: Request) -> Response:
        """Fetches the files of a variant, then defines the model. A second request joins the import.

        409 if a model of this name is defined.
        """
        fields = validate_body(ImportSerializer, request)
        plan = inspection.plan_import(
            fields["text"],
            variant=fields.get("variant", ""),
            name=fields.get("name", ""),
            changes=fields.get("changes"),
            now=clock.now(),
        )
        refuse_defined(plan)
        admission = start_import(request, plan, load_after_import=fields.get("load", False))
        return Response(import_body(admission, plan.name), status=202)


def refuse_defined(plan: ImportPlan) -> None:
    """Raise Conflict if a model has the name of the plan."""
    if inspection.is_defined(plan.name):
        raise Conflict(f"a model {plan.name} is defined: choose another name, or edit it", field="name")


def start_import(request: Request, plan: ImportPlan, *, load_after_import: bool = False) -> Admission:
    """Start the import in the name of the request's user, or join the running one."""
    return request_import(
        plan,
        by=requester_of(request),
        now=clock.now(),
        load_after_import=load_after_import,
    )


def import_message(admission: Admission, model: str) -> str:
    return f"the import of {model} {'has begun' if admission.created else 'is under way'}"


def import_body(admission: Admission, model: str) -> dict[str, Any]:
    fields = job_fields(admission, import_message(admission, model), "/api/models/job")
    return IMPORT_STARTED_SHAPE.of(model=model, **fields)


class CatalogueView(_SourceView):
    """`/api/catalogue`."""

    @describe(
        "catalogue_list",
        "List models of the galleries",
        CATALOGUE_SHAPE,
        refused=(400,),
        parameters=_CATALOGUE,
    )
    def get(self, request: Request) -> Response:
        """Returns the models of the galleries, read at most once a minute; 503 if none can be read."""
        query = _catalogue_query(request)
        page = catalogue.read(query, clock.now())
        return Response(
            CATALOGUE_SHAPE.of_object(
                page,
                models=page.rows,
                page=query.page,
                items=query.items,
                gallery_errors=gallery_errors(page.offer),
            )
        )


def _catalogue_query(request: Request) -> catalogue.Query:
    query = base.read_query(request, _CATALOGUE)
    texts = {name: query[name].casefold() for name in ("term", "task", "licence", "gallery")}
    return catalogue.Query(
        **texts,
        most_bytes=query["size"] or 0,
        fits=query["fits"] == "true",
        page=query["page"],
        items=query["items"],
    )
