"""The galleries' entries in the reference's other shapes (`contract/http-api.md` §4.2, §4.5).

Answered like the catalogue: from what was read at most a minute ago, and from rows.
"""

from drf_spectacular.utils import extend_schema
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from localai_cluster import gallery_index
from localai_cluster.gallery_index import GalleryEntry, folded
from localai_cluster.web.openapi import flat_refusals
from localai_cluster.web.renderers import FastJSONRenderer
from localai_cluster.web.shapes import FLAG, TEXT, TEXTS, Row, Shape, field, mapping
from nodes.api.base import answered
from nodes.api.catalogue import REPOSITORY, read_galleries, repositories
from nodes.backends import catalogue

AVAILABLE = Shape(
    "AvailableBackend",
    "An entry as its gallery has it (§4.5).",
    [
        field("name", TEXT),
        field("gallery", REPOSITORY.ref),
        field("installed", FLAG, "On any approved node.", optional=True),
        *(field(name, TEXT, optional=True) for name in ("alias", "description", "icon", "license")),
        field("uri", TEXT, "Without credentials.", optional=True),
        *(field(name, TEXT, optional=True) for name in ("version", "sha256")),
        *(field(name, TEXTS, optional=True) for name in ("urls", "tags", "mirrors")),
        field("capabilities", mapping(TEXT), "Capability to the name of a build.", optional=True),
    ],
)
KNOWN = Shape(
    "KnownBackend",
    "A backend that a model may be for (§4.5).",
    [
        field("name", TEXT),
        field("modality", TEXT, "What it works on, by its tags; empty if they do not say it."),
        field("auto_detect", FLAG, "Whether it is found by looking at a model: here none is."),
        field("description", TEXT, optional=True),
        field("installed", FLAG, "On any approved node."),
    ],
)
COMPONENTS = (AVAILABLE, KNOWN)
_REPOSITORY = {"url": "file:///srv/gallery/index.yaml", "name": "local"}
_AVAILABLE = {
    "name": "minilm",
    "gallery": _REPOSITORY,
    "installed": True,
    "license": "apache-2.0",
    "uri": "/srv/gallery/minilm",
    "version": "1.0.0",
    "tags": ["embeddings"],
}


class _List(APIView):
    envelope = "flat"
    renderer_classes = [FastJSONRenderer]


class AvailableView(_List):
    """`/backends/available`."""

    @extend_schema(
        operation_id="backends_available",
        summary="List entries of the galleries",
        tags=["backends"],
        responses={200: AVAILABLE.many, **flat_refusals()},
        examples=[answered([_AVAILABLE])],
    )
    def get(self, request: Request) -> Response:
        """The entries that a healthy node, or a machine without a GPU, can install."""
        installed = catalogue.installed_names()
        builds = catalogue.runnable(read_galleries().builds, catalogue.machines())
        return Response([_available(build, folded(build.name) in installed) for build in builds])


def _available(build: GalleryEntry, installed: bool) -> Row:
    return AVAILABLE.of(
        name=build.name,
        gallery=REPOSITORY.of(url=gallery_index.public_url(build.gallery.url), name=build.gallery.name),
        installed=installed,
        alias=build.alias,
        description=build.description,
        icon=build.icon,
        license=build.license,
        uri=gallery_index.public_url(build.uri),
        version=build.version,
        sha256=build.sha256,
        urls=list(build.urls),
        tags=list(build.tags),
        mirrors=[gallery_index.public_url(mirror) for mirror in build.mirrors],
        capabilities=dict(build.capabilities or {}),
    )


class KnownView(_List):
    """`/backends/known`."""

    @extend_schema(
        operation_id="backends_known",
        summary="List backends that a model may be for",
        tags=["backends"],
        responses={200: KNOWN.many, **flat_refusals()},
        examples=[
            answered([{"name": "minilm", "modality": "embeddings", "auto_detect": False, "installed": True}])
        ],
    )
    def get(self, request: Request) -> Response:
        """What the galleries offer, without single builds, and what is installed besides; by modality."""
        installed = catalogue.installed_names()
        offered = catalogue.choices(read_galleries().builds)
        found = [
            KNOWN.of(
                name=build.name,
                modality=catalogue.modality(build.tags),
                auto_detect=False,
                description=build.description,
                installed=name in installed,
            )
            for name, build in offered.items()
        ]
        found += [
            KNOWN.of(name=name, modality="", auto_detect=False, installed=True)
            for key, name in installed.items()
            if key not in offered
        ]
        return Response(sorted(found, key=lambda one: (one["modality"], folded(one["name"]))))


class GalleriesView(_List):
    """`/backends/galleries`."""

    @extend_schema(
        operation_id="backends_galleries",
        summary="List galleries",
        tags=["backends"],
        responses={200: REPOSITORY.many, **flat_refusals()},
        examples=[answered([_REPOSITORY])],
    )
    def get(self, request: Request) -> Response:
        """The galleries of this cluster."""
        return Response(repositories())


class UseCasesView(_List):
    """`/api/backends/usecases`."""

    @extend_schema(
        operation_id="backends_usecases",
        summary="List what backends are used for",
        tags=["backends"],
        responses={200: mapping(TEXTS), **flat_refusals()},
        examples=[answered({"minilm": ["embeddings"]})],
    )
    def get(self, request: Request) -> Response:
        """By the name of an entry, what its tags say it is used for; others are left out."""
        told = {build.name: catalogue.use_cases(build.tags) for build in read_galleries().builds}
        return Response({name: cases for name, cases in told.items() if cases})
