"""Installed backends and the catalogue for the API document: what `backend_views.py` takes and answers."""

from typing import Any

from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import OpenApiExample, OpenApiParameter, OpenApiResponse
from rest_framework import serializers

from localai_cluster.web.openapi import FlatRefusalSerializer, refusals
from nodes.models import NodeStatus
from nodes.registry import listing

MOST_ITEMS, USUAL_ITEMS = 9999, 9
SORTS, DIRECTIONS = ("name", "repository", "license", "status"), ("asc", "desc")


def _text(meaning: str = "", **options: Any) -> serializers.CharField:
    return serializers.CharField(allow_blank=True, help_text=meaning or None, **options)


def _texts() -> serializers.ListField:
    return serializers.ListField(child=serializers.CharField(allow_blank=True))


def _count(meaning: str = "", least: int = 0) -> serializers.IntegerField:
    return serializers.IntegerField(min_value=least, help_text=meaning or None)


class NodeBackendSerializer(serializers.Serializer[Any]):
    """One backend on a node (§2.10)."""

    name = serializers.CharField()
    is_system = serializers.BooleanField(help_text="It came with the machine and is not removed.")
    is_meta = serializers.BooleanField(help_text="It stands for the build that fits the machine.")
    installed_at = _text("As the worker wrote it, RFC 3339.", required=False)
    gallery_url = _text(required=False)
    version = _text(required=False)
    uri = _text(required=False)
    digest = _text(required=False)


class WhereSerializer(serializers.Serializer[Any]):
    """A node on which a backend is installed."""

    node_id = serializers.UUIDField()
    node_name = serializers.CharField()
    node_status = serializers.ChoiceField(choices=NodeStatus.choices)
    version = _text(required=False)
    digest = _text(required=False)
    uri = _text(required=False)
    installed_at = _text(required=False)


class CatalogueEntrySerializer(serializers.Serializer[Any]):
    """One entry of a gallery (§4.1)."""

    id = _text("`gallery@name`.")
    name = serializers.CharField()
    description = _text("Markdown.")
    icon = _text()
    license = _text()
    urls, tags = _texts(), _texts()
    gallery = _text()
    version = _text("The gallery's.")
    installed = serializers.BooleanField(help_text="On any approved node.")
    nodes = WhereSerializer(many=True)
    processing = serializers.BooleanField(help_text="An operation on it waits or runs.")
    jobID = _text("That operation; empty if there is none.")
    isDeletion = serializers.BooleanField()
    isMeta = serializers.BooleanField(help_text="It chooses the build that fits a node.")
    isAlias = serializers.BooleanField(help_text="A build that such an entry may choose.")
    isDevelopment = serializers.BooleanField()
    capabilities = serializers.DictField(
        child=serializers.CharField(), allow_null=True, help_text="Capability to the name of a build."
    )
    metaBackendFor = _text("The entry that may choose this one.")


class RepositorySerializer(serializers.Serializer[Any]):
    """A configured gallery."""

    url = _text("Without credentials.")
    name = _text()


class GalleryErrorSerializer(serializers.Serializer[Any]):
    """A gallery that cannot be read at present: its entries are missing."""

    name = _text()
    error = serializers.CharField()


class CatalogueSerializer(serializers.Serializer[Any]):
    """A page of the catalogue (§4.1)."""

    backends = CatalogueEntrySerializer(many=True)
    repositories = RepositorySerializer(many=True)
    galleryErrors = GalleryErrorSerializer(many=True)
    allTags = _texts()
    processingBackends = serializers.DictField(
        child=serializers.UUIDField(), help_text="Key of an active operation to its id."
    )
    taskTypes = serializers.DictField(
        child=serializers.ChoiceField(choices=["Installation", "Deletion", "Waiting"]),
        help_text="Key of an active operation to what it does.",
    )
    availableBackends = _count("Entries of all galleries.")
    installedBackends = _count("Different backends on approved nodes.")
    currentPage, totalPages = _count(least=1), _count()
    prevPage, nextPage = _count(least=1), _count(least=1)
    systemCapability = _text("Of this server, which runs no backends.")
    preferDevelopmentBackends = serializers.BooleanField()


def _query(name: str, schema: dict[str, Any], meaning: str) -> OpenApiParameter:
    return OpenApiParameter(name, schema, OpenApiParameter.QUERY, description=meaning)


def _whole(most: int, usual: int) -> dict[str, Any]:
    return {"type": "integer", "minimum": 1, "maximum": most, "default": usual}


_SEARCH = {"type": "string", "minLength": 1, "maxLength": listing.LONGEST_SEARCH}
CATALOGUE_PARAMETERS = [
    _query("term", _SEARCH, "Only entries with this in name, description, tags or gallery."),
    _query("tag", _SEARCH, "Only entries with this tag."),
    _query(
        "page", {"type": "integer", "minimum": 1, "maximum": listing.FARTHEST, "default": 1}, "Which page."
    ),
    _query(
        "items",
        {"type": "integer", "minimum": 1, "maximum": MOST_ITEMS, "default": USUAL_ITEMS},
        "Entries on a page.",
    ),
    _query("sort", {"type": "string", "enum": list(SORTS)}, "The order; `status` has installed ones first."),
    _query("order", {"type": "string", "enum": list(DIRECTIONS), "default": "asc"}, "Or turned round."),
]


def _header(name: str, kind: Any, meaning: str) -> OpenApiParameter:
    return OpenApiParameter(name, kind, OpenApiParameter.HEADER, description=meaning, response=[200])


INVENTORY_HEADERS = [
    _header("X-As-Of", OpenApiTypes.DATETIME, "When the worker listed this; absent if it never did."),
    _header("X-Inventory-Error", OpenApiTypes.STR, "Why there is no newer list."),
]


_ADMINS = refusals(401, 403)
CATALOGUE_REFUSALS = {
    400: OpenApiResponse(FlatRefusalSerializer, "A parameter is not valid; the message names it."),
    401: _ADMINS[401],
    403: _ADMINS[403],
    503: OpenApiResponse(
        FlatRefusalSerializer, "No gallery can be read; Retry-After says when to come back."
    ),
}


def _answer(value: Any) -> OpenApiExample:
    return OpenApiExample("answer", value, response_only=True, status_codes=["200"])


_AT = "2026-08-20T09:12:44Z"
NODE_BACKEND = _answer(
    {
        "name": "minilm",
        "is_system": False,
        "is_meta": False,
        "installed_at": _AT,
        "gallery_url": "file:///srv/gallery/index.yaml",
        "version": "1.0.0",
        "uri": "/srv/gallery/minilm",
    }
)
_JOB = "e63fad81-e53f-4e5f-a2a5-0eb06c5b5af7"
_NODE = "5b1d1f1e-8a58-4f2f-9d0b-2f1f6a9f7c11"
CATALOGUE = _answer(
    {
        "backends": [
            {
                "id": "local@minilm",
                "name": "minilm",
                "description": "Sentence embeddings.",
                "icon": "",
                "license": "MIT",
                "urls": [],
                "tags": ["embeddings"],
                "gallery": "local",
                "version": "1.0.0",
                "installed": True,
                "nodes": [
                    {
                        "node_id": _NODE,
                        "node_name": "gpu-a",
                        "node_status": "healthy",
                        "version": "1.0.0",
                        "installed_at": _AT,
                    }
                ],
                "processing": True,
                "jobID": _JOB,
                "isDeletion": False,
                "isMeta": False,
                "isAlias": False,
                "isDevelopment": False,
                "capabilities": None,
                "metaBackendFor": "",
            }
        ],
        "repositories": [{"url": "file:///srv/gallery/index.yaml", "name": "local"}],
        "galleryErrors": [],
        "allTags": ["embeddings"],
        "processingBackends": {f"node:{_NODE}:minilm": _JOB},
        "taskTypes": {f"node:{_NODE}:minilm": "Installation"},
        "availableBackends": 1,
        "installedBackends": 1,
        "currentPage": 1,
        "totalPages": 1,
        "prevPage": 1,
        "nextPage": 1,
        "systemCapability": "",
        "preferDevelopmentBackends": False,
    }
)
