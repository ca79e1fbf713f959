"""Models of galleries under the reference's routes (`contract/http-api.md` §5.4).

Each command starts the same import as our own routes in `sources.py`; only shapes and names differ.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any
from uuid import UUID as Id

from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from localai_cluster import gallery_index
from localai_cluster.gallery_index import GalleryEntry, ModelFile, folded
from localai_cluster.kit import clock, errors
from localai_cluster.kit.quantities import human_bytes
from localai_cluster.web.openapi import describe
from localai_cluster.web.rest import NullIsAbsent, Text, validate_body
from localai_cluster.web.shapes import (
    BYTES,
    FLAG,
    NUMBER,
    TEXT,
    TEXTS,
    UUID,
    Row,
    Shape,
    count,
    field,
    mapping_schema,
)
from nodes.api import base
from nodes.api.catalogue import REPOSITORY_SHAPE, SORT_DIRECTIONS, SORT_KEYS, page_fields, repository_row
from nodes.api.models import MAX_MODEL_LENGTH
from nodes.api.sources import import_message, start_import
from nodes.registry.listing import FARTHEST, MAX_SEARCH_LENGTH
from nodes.sources import catalogue, galleries, inspection
from nodes.sources.references import GalleryRef
from operations.api.serializers import STARTED_SHAPE, job_fields
from operations.ledger.admission import Admission

MAX_PAGE_SIZE, DEFAULT_PAGE_SIZE = 9999, 21
MAX_CONTEXTS = 16
_CONTEXT_EXAMPLE = 8192
AVAILABLE_MODEL_SHAPE = Shape(
    "AvailableModel",
    "An entry of a gallery as the reference lists it.",
    [
        field("name", TEXT),
        field("gallery", REPOSITORY_SHAPE.ref),
        field("installed", FLAG, optional=True),
        *(field(name, TEXT, optional=True) for name in ("url", "description", "license", "icon", "size")),
        *(field(name, TEXTS, optional=True) for name in ("urls", "tags")),
    ],
)
JOB_STARTED_SHAPE = Shape(
    "ModelJobStarted",
    "The operation was admitted.",
    [field("uuid", UUID), field("status", TEXT, "The address that tells how it goes.")],
)
LISTED_MODEL_SHAPE = Shape(
    "ListedModel",
    "An entry of a gallery as the reference's pages list it (§5.4).",
    [
        *(field(name, TEXT) for name in ("id", "name", "description", "icon", "license")),
        field("urls", TEXTS),
        field("tags", TEXTS),
        field("gallery", TEXT),
        field("installed", FLAG),
        field("processing", FLAG),
        field("jobID", TEXT),
        field("isDeletion", FLAG),
        field("trustRemoteCode", FLAG),
        field("additionalFiles", mapping_schema(TEXT) | {"description": "Address by file name."}),
        field("backend", TEXT, "Empty if only the entry's own document names it, not the list."),
        field("voice_cloning", FLAG),
        field("has_variants", FLAG),
    ],
)
LISTED_MODELS_SHAPE = Shape(
    "ListedModels",
    "A page of the galleries' models (§5.4).",
    [
        field("models", LISTED_MODEL_SHAPE.many),
        field("repositories", REPOSITORY_SHAPE.many),
        field("allTags", TEXTS),
        field("allBackends", TEXTS),
        field("processingModels", mapping_schema(UUID)),
        field("taskTypes", mapping_schema(TEXT)),
        field("availableModels", count()),
        field("installedModels", count()),
        field("currentPage", count(1)),
        field("totalPages", count()),
        field("prevPage", count(1)),
        field("nextPage", count(1)),
        *(field(name, NUMBER) for name in ("ramTotal", "ramUsed", "ramUsagePercent")),
    ],
)
MEMORY_AT_CONTEXT_SHAPE = Shape(
    "MemoryAtContext",
    "The GPU memory of one replica with a context.",
    [field("contextLength", count()), field("vramBytes", BYTES), field("vramDisplay", TEXT)],
)
ESTIMATE_SHAPE = Shape(
    "ModelEstimate",
    "Size and memory of a gallery's model; 0 if unknown.",
    [
        field("sizeBytes", BYTES),
        field("sizeDisplay", TEXT),
        field("estimates", mapping_schema(MEMORY_AT_CONTEXT_SHAPE.ref), "By the tokens of context."),
        field("modelMaxContext", count(), optional=True),
    ],
)
_REPOSITORY_EXAMPLE = {"url": "https://example.com/index.yaml", "name": "localai"}


class AvailableModelsView(base.ModelRoute):
    """`/models/available`."""

    @describe("models_available", "List entries of the model galleries", AVAILABLE_MODEL_SHAPE.many)
    def get(self, request: Request) -> Response:
        """Returns the models as their galleries describe them."""
        installed = catalogue.installed_names()
        return Response(
            [
                AVAILABLE_MODEL_SHAPE.of_object(
                    entry,
                    gallery=repository_row(entry.gallery),
                    installed=folded(entry.name) in installed,
                    url=gallery_index.public_url(entry.config_url or entry.uri),
                )
                for entry in catalogue.readable_offer().builds
            ]
        )


class ModelGalleriesView(base.ModelRoute):
    """`/models/galleries`."""

    @describe(
        "models_galleries", "List the model galleries", REPOSITORY_SHAPE.many, shown=[_REPOSITORY_EXAMPLE]
    )
    def get(self, request: Request) -> Response:
        """Returns the configured galleries, without credentials."""
        return Response([repository_row(gallery) for gallery in galleries.configured()])


class ModelFileSerializer(NullIsAbsent):
    """A file to fetch for a model."""

    filename = Text(max_length=1024)
    uri = Text(max_length=4096)
    sha256 = Text(max_length=64, required=False)


class ApplyModelSerializer(NullIsAbsent):
    """A gallery's model by its `id`, or the address of a model's document in `url`."""

    id = Text(max_length=300, required=False)
    url = Text(max_length=2048, required=False)
    config_url = Text(max_length=2048, required=False, help_text="The same as `url`.")
    name = Text(max_length=MAX_MODEL_LENGTH, required=False)
    overrides = serializers.DictField(required=False)
    files = serializers.ListField(
        child=ModelFileSerializer(), required=False, max_length=gallery_index.MAX_TEXTS_PER_FIELD
    )


class PreferencesSerializer(NullIsAbsent):
    """Preferences for an import; unknown ones are ignored."""

    name = Text(max_length=MAX_MODEL_LENGTH, required=False)
    quantizations = Text(max_length=1024, required=False, help_text="With commas; the first counts.")


class ImportUriSerializer(NullIsAbsent):
    """The address of a model to import."""

    uri = Text(max_length=2048)
    preferences = PreferencesSerializer(required=False)


def _job_response(request: Request, operation_id: Id) -> Response:
    job = str(operation_id)
    return Response(JOB_STARTED_SHAPE.of(uuid=job, status=request.build_absolute_uri(f"/models/jobs/{job}")))


_ADMITTED = "It is recorded and will be carried out."
_describe_import = partial(
    describe,
    answer=JOB_STARTED_SHAPE,
    meaning=_ADMITTED,
    refused=(400, 404, 409, 413, 502),
    shown={"uuid": base.JOB_ID, "status": f"https://cluster.example/models/jobs/{base.JOB_ID}"},
)


class ApplyModelView(base.ModelRoute):
    """`/models/apply`."""

    @_describe_import(
        "models_apply",
        "Install a model of a gallery",
        body=ApplyModelSerializer,
        sent={"id": "localai@qwen2.5-1.5b-instruct"},
    )
    def post(self, request: Request) -> Response:
        """Fetches the model's files and defines the model. An existing definition gets a new revision."""
        fields = validate_body(ApplyModelSerializer, request)
        entry = _requested_entry(fields)
        plan = inspection.plan_entry(entry, name=fields.get("name", ""))
        return _job_response(request, start_import(request, plan).operation.id)


def _requested_entry(fields: dict[str, Any]) -> GalleryEntry:
    """Return the gallery's entry that the request names, with the request's changes."""
    url = fields.get("url") or fields.get("config_url", "")
    if model := fields.get("id", ""):
        entry = galleries.find(parse_entry_reference(model))
    elif url:
        name = fields.get("name") or gallery_index.default_backend_name(url).removesuffix(
            ".yaml"
        ).removesuffix(".yml")
        entry = GalleryEntry(name, config_url=url)
    else:
        raise errors.InvalidInput("id or url is required", field="id")
    files = [
        ModelFile(file["filename"], file["uri"], file.get("sha256", "").lower())
        for file in fields.get("files", ())
    ]
    return replace(
        entry,
        overrides={**entry.overrides, **fields.get("overrides", {})},
        files=(*entry.files, *files),
    )


def parse_entry_reference(text: str) -> GalleryRef:
    """Parse a reference to a gallery's entry: `gallery@name`, or a name without a gallery."""
    gallery, _, name = text.rpartition("@")
    return GalleryRef(gallery, name)


class ImportUriView(base.ModelRoute):
    """`/models/import-uri`."""

    @_describe_import(
        "models_import_uri",
        "Import a model by its address",
        body=ImportUriSerializer,
        sent={"uri": "hf://Qwen/Qwen2.5-1.5B-Instruct-GGUF"},
    )
    def post(self, request: Request) -> Response:
        """Imports the model that the address or text names, as `/api/models/import` does."""
        fields = validate_body(ImportUriSerializer, request)
        wishes = fields.get("preferences", {})
        wanted = wishes.get("quantizations", "").partition(",")[0].strip()
        plan = inspection.plan_import(
            fields["uri"], variant=wanted, name=wishes.get("name", "").strip(), now=clock.now()
        )
        return _job_response(request, start_import(request, plan).operation.id)


def _accepted_body(admission: Admission, message: str) -> Row:
    fields = job_fields(admission, message, "/api/models/job")
    return STARTED_SHAPE.of(uuid=fields["jobID"], **fields)


_INSTALLATION = [base.query_parameter("variant", TEXT | {"maxLength": 300}, "A variant of the entry.")]
_ESTIMATE = [base.query_parameter("contexts", TEXT | {"maxLength": 200}, "Numbers with commas.")]


class InstallModelView(base.ModelRoute):
    """`/api/models/install/:id`."""

    @describe(
        "models_install",
        "Install a model of a gallery by its id",
        STARTED_SHAPE,
        meaning=_ADMITTED,
        refused=(400, 404, 409, 502),
        parameters=_INSTALLATION,
    )
    def post(self, request: Request, id: str) -> Response:
        """Fetches the model's files and defines the model. An unknown variant is refused, never replaced."""
        variant = base.read_query(request, _INSTALLATION)["variant"]
        plan = inspection.plan_entry(galleries.find(parse_entry_reference(id)), variant=variant)
        admission = start_import(request, plan)
        return Response(_accepted_body(admission, import_message(admission, plan.name)))


class EstimateView(base.ModelRoute):
    """`/api/models/estimate/:id`."""

    @describe(
        "models_estimate",
        "Estimate the memory of a gallery's model",
        ESTIMATE_SHAPE,
        refused=(400, 404, 502),
        parameters=_ESTIMATE,
    )
    def get(self, request: Request, id: str) -> Response:
        """Returns the size and memory need of a model, from its file's header, on a node with a GPU."""
        contexts = _parse_contexts(base.read_query(request, _ESTIMATE)["contexts"])
        size, memory, trained = inspection.estimate_entry(galleries.find(parse_entry_reference(id)), contexts)
        return Response(
            ESTIMATE_SHAPE.of(
                sizeBytes=size,
                sizeDisplay=human_bytes(size) if size else "",
                estimates={
                    str(context): MEMORY_AT_CONTEXT_SHAPE.of(
                        contextLength=context,
                        vramBytes=needed,
                        vramDisplay=human_bytes(needed) if needed else "",
                    )
                    for context, needed in memory.items()
                },
                modelMaxContext=trained,
            )
        )


def _parse_contexts(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",") if part.strip()] or [str(_CONTEXT_EXAMPLE)]
    if len(parts) > MAX_CONTEXTS or not all(part.isdecimal() and 0 < int(part) < 2**31 for part in parts):
        raise errors.InvalidInput(
            f"contexts must be at most {MAX_CONTEXTS} numbers of tokens", field="contexts"
        )
    return [int(part) for part in parts]


_SEARCH = base.text_schema(MAX_SEARCH_LENGTH)
_LIST = [
    base.query_parameter("term", _SEARCH, "Only entries with this in name, description, tags or gallery."),
    base.query_parameter("tag", _SEARCH, "Only entries with this tag."),
    base.query_parameter("backend", _SEARCH, "Only entries that state this backend."),
    base.query_parameter("page", base.integer_schema(1, FARTHEST), "Which page."),
    base.query_parameter("items", base.integer_schema(1, MAX_PAGE_SIZE), "On a page."),
    base.query_parameter("sort", base.enum_schema(SORT_KEYS), "The order."),
    base.query_parameter("order", base.enum_schema(SORT_DIRECTIONS), "The direction of the order."),
]


class ModelsView(base.ModelRoute):
    """`/api/models`."""

    @describe(
        "models_gallery_list",
        "List models of the galleries as the reference's pages do",
        LISTED_MODELS_SHAPE,
        refused=(400,),
        parameters=_LIST,
    )
    def get(self, request: Request) -> Response:
        """Returns the models of the galleries. `/api/catalogue` also tells which of them fit."""
        query = base.read_query(request, _LIST)
        wanted = {name: query[name].casefold() for name in ("term", "tag", "backend")}
        page, items, sort = query["page"] or 1, query["items"] or DEFAULT_PAGE_SIZE, query["sort"]
        entries, installed = catalogue.readable_offer().builds, catalogue.installed_names()
        jobs = catalogue.active_imports()
        chosen = [entry for entry in entries if _is_wanted(entry, **wanted)]
        if sort:
            chosen.sort(key=lambda entry: entry.name.casefold())
            chosen.sort(
                key=lambda entry: _ORDER_BY_SORT_KEY[sort](entry, installed), reverse=query["order"] == "desc"
            )
        busy = {catalogue.entry_id(entry): job for entry in entries if (job := jobs.get(folded(entry.name)))}
        rows = [_listed_row(entry, installed, jobs) for entry in chosen[(page - 1) * items : page * items]]
        return Response(
            LISTED_MODELS_SHAPE.of(
                models=rows,
                repositories=[repository_row(gallery) for gallery in galleries.configured()],
                allTags=sorted({tag for entry in entries for tag in entry.tags}),
                allBackends=sorted({backend for entry in entries if (backend := _backend_of(entry))}),
                processingModels=busy,
                taskTypes=dict.fromkeys(busy, "Installation"),
                availableModels=len(entries),
                installedModels=len(installed),
                **page_fields(len(chosen), page, items),
                ramTotal=0,
                ramUsed=0,
                ramUsagePercent=0,
            )
        )


_ORDER_BY_SORT_KEY: dict[str, Callable[[GalleryEntry, set[str]], Any]] = {
    "name": lambda entry, _: (entry.name.casefold(), entry.gallery.name),
    "repository": lambda entry, _: entry.gallery.name.casefold(),
    "license": lambda entry, _: entry.license.casefold(),
    "status": lambda entry, installed: folded(entry.name) not in installed,
}


def _is_wanted(entry: GalleryEntry, *, term: str, tag: str, backend: str) -> bool:
    return (
        (not term or term in catalogue.searchable_text(entry))
        and (not tag or tag in {text.casefold() for text in entry.tags})
        and (not backend or backend == _backend_of(entry).casefold())
    )


def _backend_of(entry: GalleryEntry) -> str:
    stated = entry.overrides.get("backend") or entry.config.get("backend")
    return stated if isinstance(stated, str) else ""


def _listed_row(entry: GalleryEntry, installed: set[str], jobs: dict[str, str]) -> Row:
    job = jobs.get(folded(entry.name), "")
    return LISTED_MODEL_SHAPE.of_object(
        entry,
        id=catalogue.entry_id(entry),
        gallery=entry.gallery.name,
        installed=folded(entry.name) in installed,
        processing=bool(job),
        jobID=job,
        isDeletion=False,
        trustRemoteCode=entry.overrides.get("trust_remote_code") is True,
        additionalFiles={file.name: gallery_index.public_url(file.uri) for file in entry.files},
        backend=_backend_of(entry),
        voice_cloning=False,
        has_variants=False,
    )
