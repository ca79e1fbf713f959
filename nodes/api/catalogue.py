"""Catalogue of the galleries' backends, with the nodes that have each (`contract/http-api.md` §4.1 to §4.5).

Responses use stored rows, and galleries that were read at most a minute ago, so no response waits for a
worker. Controllers refresh old inventories in the background.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rest_framework.request import Request
from rest_framework.response import Response

from localai_cluster import gallery_index
from localai_cluster.gallery_index import GalleryEntry, folded
from localai_cluster.kit import clock, errors
from localai_cluster.messaging.messages import Gallery
from localai_cluster.web.openapi import describe
from localai_cluster.web.shapes import FLAG, TEXT, TEXTS, TIME, UUID, Row, Shape, count, field, mapping_schema
from nodes.api import base
from nodes.backends import catalogue, installed, inventory, node_commands, upgrade_state
from nodes.registry.listing import FARTHEST, MAX_SEARCH_LENGTH

INVENTORY_MAX_AGE = 300.0
"""Age in seconds from which a request for the catalogue refreshes a node's inventory."""
MAX_PAGE_SIZE, DEFAULT_PAGE_SIZE = 9999, 9
SORT_KEYS = ("name", "repository", "license", "status")
SORT_DIRECTIONS = ("asc", "desc")

Entry = dict[str, Any]

REPOSITORY_SHAPE = Shape(
    "Repository",
    "A configured gallery.",
    [
        field("url", TEXT, "Without credentials.", example="file:///srv/gallery/index.yaml"),
        field("name", TEXT, example="local"),
    ],
)
GALLERY_ERROR_SHAPE = Shape(
    "GalleryError",
    "A gallery that cannot be read at present: its entries are those of the last good copy, or missing.",
    [
        field("name", TEXT),
        field("error", TEXT),
        field("readAt", TIME, "When the copy was read whose entries are listed.", optional=True),
    ],
)
_KEY_EXAMPLE = f"node:{base.NODE_ID}:minilm"
CATALOGUE_SHAPE = Shape(
    "Catalogue",
    "A page of the catalogue (§4.1).",
    [
        field("backends", catalogue.ENTRY.many),
        field("repositories", REPOSITORY_SHAPE.many),
        field("galleryErrors", GALLERY_ERROR_SHAPE.many, example=[]),
        field("allTags", TEXTS, example=["embeddings"]),
        field(
            "nodesByCapability",
            mapping_schema(count()),
            "Healthy nodes by capability.",
            example={"default": 1},
        ),
        field(
            "processingBackends",
            mapping_schema(UUID),
            "Key of an active operation to its id.",
            example={_KEY_EXAMPLE: base.JOB_ID},
        ),
        field(
            "taskTypes",
            mapping_schema(base.enum_schema(("Installation", "Deletion", "Waiting"))),
            "And to what it does.",
            example={_KEY_EXAMPLE: "Installation"},
        ),
        field("availableBackends", count(), "Entries of all galleries.", example=1),
        field("installedBackends", count(), "Different backends on approved nodes.", example=1),
        field("currentPage", count(1), example=1),
        field("totalPages", count(), example=1),
        field("prevPage", count(1), example=1),
        field("nextPage", count(1), example=1),
        field("systemCapability", TEXT, "Of this server, which runs no backends.", example=""),
        field("preferDevelopmentBackends", FLAG, example=False),
    ],
)
_SEARCH_SCHEMA = base.text_schema(MAX_SEARCH_LENGTH)
_LIST_PARAMETERS = [
    base.query_parameter(
        "term", _SEARCH_SCHEMA, "Only entries with this in name, description, tags or gallery."
    ),
    base.query_parameter("tag", _SEARCH_SCHEMA, "Only entries with this tag."),
    base.query_parameter("page", base.integer_schema(1, FARTHEST, 1), "Which page."),
    base.query_parameter(
        "items", base.integer_schema(1, MAX_PAGE_SIZE, DEFAULT_PAGE_SIZE), "Entries on a page."
    ),
    base.query_parameter(
        "sort", base.enum_schema(SORT_KEYS), "The order; `status` has installed ones first."
    ),
    base.query_parameter("order", base.enum_schema(SORT_DIRECTIONS) | {"default": "asc"}, "Or turned round."),
]


def page_fields(entries: int, page: int, items: int) -> Row:
    """Return the numbers of this page and its neighbours."""
    pages = -(-entries // items)
    return {
        "currentPage": page,
        "totalPages": pages,
        "prevPage": max(page - 1, 1),
        "nextPage": min(page + 1, max(pages, 1)),
    }


def _select(entries: Sequence[Entry], query: Mapping[str, Any]) -> list[Entry]:
    """Return the matching entries in the requested order, by default in the order of the galleries."""
    matches = [entry for entry in entries if _matches(entry, query["term"], query["tag"])]
    if query["sort"]:
        matches.sort(key=_ORDER_BY_SORT_KEY["name"])
        matches.sort(key=_ORDER_BY_SORT_KEY[query["sort"]], reverse=query["order"] == "desc")
    return matches


def _matches(entry: Entry, term: str, tag: str) -> bool:
    text = "\n".join((entry["name"], entry["description"], entry["gallery"], *entry["tags"]))
    tags = {each.casefold() for each in entry["tags"]}
    return term.casefold() in text.casefold() and (not tag or tag.casefold() in tags)


_ORDER_BY_SORT_KEY: dict[str, Callable[[Entry], Any]] = {
    "name": lambda entry: (entry["name"].casefold(), entry["gallery"]),
    "repository": lambda entry: entry["gallery"].casefold(),
    "license": lambda entry: entry["license"].casefold(),
    "status": lambda entry: not entry["installed"],
}


_checked_fingerprint = ""
"""Fingerprint of the galleries for which this process has already requested an upgrade check."""


def _request_upgrade_check(fingerprint: str) -> None:
    """Request an upgrade check because the galleries have changed, once for each of their fingerprints."""
    global _checked_fingerprint
    if fingerprint != _checked_fingerprint:
        _checked_fingerprint = fingerprint
        upgrade_state.request_check()


def read_galleries() -> catalogue.Offer:
    """Read what the galleries offer; one query. Raise Unavailable if no gallery can be read."""
    configured = node_commands.galleries()
    check_state = upgrade_state.read_state()
    offer = catalogue.reader.read(configured, check_state.completed)
    if not offer.problems and offer.fingerprint != check_state.galleries:
        _request_upgrade_check(offer.fingerprint)
    if configured and len(offer.problems) == len(configured) and not offer.copied_at:
        raise errors.Unavailable("; ".join(offer.problems.values()))
    return offer


def repository_row(gallery: Gallery) -> Row:
    return REPOSITORY_SHAPE.of(url=gallery_index.public_url(gallery.url), name=gallery.name)


def gallery_errors(offer: catalogue.Offer) -> list[Entry]:
    """Return the galleries that cannot be read, each with its reason."""
    return [
        GALLERY_ERROR_SHAPE.of(
            name=name, error=why, **({"readAt": offer.copied_at[name]} if name in offer.copied_at else {})
        )
        for name, why in offer.problems.items()
    ]


class BackendsView(base.BackendRoute):
    """`/api/backends`."""

    @describe(
        "backends_list",
        "List available backends",
        CATALOGUE_SHAPE,
        refused=(400,),
        parameters=_LIST_PARAMETERS,
    )
    def get(self, request: Request) -> Response:
        """Returns the backends of the configured galleries, with the nodes that have each one installed.

        503 if no gallery can be read.
        """
        query = base.read_query(request, _LIST_PARAMETERS)
        page, items = query["page"], query["items"]
        offer = read_galleries()
        inventory.wake(older_than=INVENTORY_MAX_AGE, now=clock.now())
        backends, running = installed.read(), catalogue.running()
        nodes_by_capability = catalogue.count_by_capability()
        listed = catalogue.entries(offer.builds, backends, running, nodes_by_capability)
        chosen = _select(listed, query)
        return Response(
            CATALOGUE_SHAPE.of(
                **page_fields(len(chosen), page, items),
                backends=chosen[(page - 1) * items : page * items],
                repositories=[repository_row(gallery) for gallery in node_commands.galleries()],
                nodesByCapability=nodes_by_capability,
                allTags=sorted({tag for build in offer.builds for tag in build.tags}),
                processingBackends={operation.key: str(operation.id) for operation in running},
                taskTypes={operation.key: operation.task_type for operation in running},
                availableBackends=len(offer.builds),
                installedBackends=len({gallery_index.folded(backend.name) for backend in backends}),
                systemCapability="",
                preferDevelopmentBackends=False,
                galleryErrors=gallery_errors(offer),
            )
        )


AVAILABLE_BACKEND_SHAPE = Shape(
    "AvailableBackend",
    "An entry as its gallery has it (§4.5).",
    [
        field("name", TEXT, example="minilm"),
        field("gallery", REPOSITORY_SHAPE.ref),
        field("installed", FLAG, "On any approved node.", example=True, optional=True),
        *(field(name, TEXT, optional=True) for name in ("alias", "description", "icon")),
        field("license", TEXT, example="apache-2.0", optional=True),
        field("uri", TEXT, "Without credentials.", example="/srv/gallery/minilm", optional=True),
        field("version", TEXT, example="1.0.0", optional=True),
        field("sha256", TEXT, optional=True),
        field("urls", TEXTS, optional=True),
        field("tags", TEXTS, example=["embeddings"], optional=True),
        field("mirrors", TEXTS, optional=True),
        field("capabilities", mapping_schema(TEXT), "Capability to the name of a build.", optional=True),
    ],
)
KNOWN_BACKEND_SHAPE = Shape(
    "KnownBackend",
    "A backend that a model may be for (§4.5).",
    [
        field("name", TEXT, example="minilm"),
        field(
            "modality",
            TEXT,
            "What it works on, by its tags; empty if they do not say it.",
            example="embeddings",
        ),
        field(
            "auto_detect",
            FLAG,
            "True if it can be detected from the files of a model: always false here.",
            example=False,
        ),
        field("description", TEXT, optional=True),
        field("installed", FLAG, "On any approved node.", example=True),
    ],
)


class AvailableView(base.BackendRoute):
    """`/backends/available`."""

    @describe("backends_available", "List entries of the galleries", AVAILABLE_BACKEND_SHAPE.many)
    def get(self, request: Request) -> Response:
        """Returns the gallery entries that a healthy node, or a machine without a GPU, can install."""
        names = catalogue.installed_names()
        builds = catalogue.runnable(read_galleries().builds, catalogue.cluster_capabilities())
        return Response([_available_row(build, folded(build.name) in names) for build in builds])


def _available_row(build: GalleryEntry, installed: bool) -> Row:
    return AVAILABLE_BACKEND_SHAPE.of_object(
        build,
        gallery=repository_row(build.gallery),
        installed=installed,
        uri=gallery_index.public_url(build.uri),
        mirrors=[gallery_index.public_url(mirror) for mirror in build.mirrors],
        capabilities=dict(build.capabilities or {}),
    )


class KnownView(base.BackendRoute):
    """`/backends/known`."""

    @describe("backends_known", "List backends that a model may be for", KNOWN_BACKEND_SHAPE.many)
    def get(self, request: Request) -> Response:
        """Returns the galleries' backends without single builds, and other installed ones, by modality."""
        names = catalogue.installed_names()
        offered = catalogue.choices(read_galleries().builds)
        backends = [
            KNOWN_BACKEND_SHAPE.of(
                name=build.name,
                modality=catalogue.modality(build.tags),
                auto_detect=False,
                description=build.description,
                installed=name in names,
            )
            for name, build in offered.items()
        ]
        backends += [
            KNOWN_BACKEND_SHAPE.of(name=name, modality="", auto_detect=False, installed=True)
            for key, name in names.items()
            if key not in offered
        ]
        return Response(sorted(backends, key=lambda backend: (backend["modality"], folded(backend["name"]))))


class GalleriesView(base.BackendRoute):
    """`/backends/galleries`."""

    @describe("backends_galleries", "List galleries", REPOSITORY_SHAPE.many)
    def get(self, request: Request) -> Response:
        """Returns the configured galleries."""
        return Response([repository_row(gallery) for gallery in node_commands.galleries()])


class UseCasesView(base.BackendRoute):
    """`/api/backends/usecases`."""

    @describe(
        "backends_usecases",
        "List what backends are used for",
        mapping_schema(TEXTS),
        shown={"minilm": ["embeddings"]},
    )
    def get(self, request: Request) -> Response:
        """Returns the use cases by the name of a gallery entry, from its tags.

        Entries without such tags are left out.
        """
        use_cases = {build.name: catalogue.use_cases(build.tags) for build in read_galleries().builds}
        return Response({name: cases for name, cases in use_cases.items() if cases})
