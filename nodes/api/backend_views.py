"""Backends as pages see them: those of a node, and the catalogue (`contract/http-api.md` §2.10, §4.1).

Both answer from rows at once, however slow a worker is, and say how old they are; what is old is asked for
anew by a controller meanwhile.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from drf_spectacular.utils import extend_schema
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from localai_cluster import clock, errors, gallery_index, names
from localai_cluster.web.openapi import refusals
from localai_cluster.web.renderers import FastJSONRenderer
from nodes.api import backend_shapes as shapes
from nodes.api.views import NodeView
from nodes.api.worker_auth import parse_node_id
from nodes.backends import catalogue, install, inventory
from nodes.models import BackendNode, NodeBackend, NodeType
from nodes.registry.listing import FARTHEST, LONGEST_SEARCH, Parameters

NODE_LIST_OLD, CATALOGUE_OLD = 60.0, 300.0
"""Seconds after which a list that somebody looks at is asked for anew."""

Entry = dict[str, Any]


class NodeBackendsView(NodeView):
    """`/api/nodes/:id/backends`."""

    renderer_classes = [FastJSONRenderer]

    @extend_schema(
        operation_id="nodes_backends",
        tags=["backends"],
        parameters=shapes.INVENTORY_HEADERS,
        responses={200: shapes.NodeBackendSerializer(many=True), **refusals(401, 403, 404)},
        examples=[shapes.NODE_BACKEND],
    )
    def get(self, request: Request, node_id: str) -> Response:
        """What the node's worker listed last; `X-As-Of` says when. An old list is asked for anew."""
        found = parse_node_id(node_id)
        node = BackendNode.objects.filter(pk=found).first() if found else None
        if node is None:
            raise errors.NotFound("node not found")
        if node.node_type == NodeType.AGENT:
            return Response([])
        inventory.wake([node.id], older_than=NODE_LIST_OLD, now=clock.now())
        rows = NodeBackend.objects.filter(node=node).order_by("name").values(*inventory.COLUMNS)
        return Response([_listed(row) for row in rows], headers=_age(node))


def _listed(row: Entry) -> Entry:
    return {name: value for name, value in row.items() if value or name in ("name", "is_system", "is_meta")}


def _age(node: BackendNode) -> dict[str, str]:
    """As of when the list is true, and why there is no newer one."""
    known = {"X-As-Of": node.inventory_at.isoformat()} if node.inventory_at else {}
    problem = names.plain(node.inventory_error).encode("ascii", "replace").decode()
    return known | ({"X-Inventory-Error": problem} if problem else {})


@dataclass(frozen=True)
class CatalogueQuery:
    """Which entries of the catalogue, in which order, and which page of them."""

    term: str
    tag: str
    page: int
    items: int
    sort: str
    descending: bool

    def chosen(self, entries: Sequence[Entry]) -> list[Entry]:
        """All that fit; without an order they stay as the galleries list them."""
        found = [entry for entry in entries if self._fits(entry)]
        if self.sort:
            found.sort(key=_ORDERS["name"])
            found.sort(key=_ORDERS[self.sort], reverse=self.descending)
        return found

    def _fits(self, entry: Entry) -> bool:
        text = "\n".join((entry["name"], entry["description"], entry["gallery"], *entry["tags"]))
        tags = {tag.casefold() for tag in entry["tags"]}
        return self.term in text.casefold() and (not self.tag or self.tag in tags)

    def page_of(self, entries: Sequence[Entry]) -> Entry:
        """The page, and its neighbours; a neighbour that is not there is the nearest page that is."""
        pages = -(-len(entries) // self.items)
        first = (self.page - 1) * self.items
        return {
            "backends": entries[first : first + self.items],
            "currentPage": self.page,
            "totalPages": pages,
            "prevPage": max(self.page - 1, 1),
            "nextPage": min(self.page + 1, max(pages, 1)),
        }


_ORDERS: dict[str, Callable[[Entry], Any]] = {
    "name": lambda entry: (entry["name"].casefold(), entry["gallery"]),
    "repository": lambda entry: entry["gallery"].casefold(),
    "license": lambda entry: entry["license"].casefold(),
    "status": lambda entry: not entry["installed"],
}


def wanted_of(request: Request) -> CatalogueQuery:
    """What a request for the catalogue asks for; raises InvalidInput naming the parameter."""
    given = Parameters(request.query_params, "term", "tag", "page", "items", "sort", "order")
    return CatalogueQuery(
        term=given.text("term", LONGEST_SEARCH).casefold(),
        tag=given.text("tag", LONGEST_SEARCH).casefold(),
        page=given.number("page", 1, FARTHEST) or 1,
        items=given.number("items", 1, shapes.MOST_ITEMS) or shapes.USUAL_ITEMS,
        sort=given.choice("sort", shapes.SORTS),
        descending=given.choice("order", shapes.DIRECTIONS) == "desc",
    )


class BackendsView(APIView):
    """`/api/backends`."""

    envelope = "flat"
    renderer_classes = [FastJSONRenderer]

    @extend_schema(
        operation_id="backends_list",
        tags=["backends"],
        parameters=shapes.CATALOGUE_PARAMETERS,
        responses={200: shapes.CatalogueSerializer, **shapes.CATALOGUE_REFUSALS},
        examples=[shapes.CATALOGUE],
    )
    def get(self, request: Request) -> Response:
        """What the configured galleries offer, and on which nodes it is installed."""
        wanted = wanted_of(request)
        configured = install.galleries()
        offer = catalogue.reader.read(configured)
        if configured and len(offer.problems) == len(configured):
            raise errors.Unavailable("; ".join(offer.problems.values()))
        inventory.wake(older_than=CATALOGUE_OLD, now=clock.now())
        installed, running = catalogue.installed(), catalogue.running()
        chosen = wanted.chosen(catalogue.entries(offer.builds, installed, running))
        return Response(
            wanted.page_of(chosen)
            | {
                "repositories": [
                    {"url": gallery_index.public_url(g.url), "name": g.name} for g in configured
                ],
                "allTags": sorted({tag for build in offer.builds for tag in build.tags}),
                "processingBackends": {one.key: str(one.id) for one in running},
                "taskTypes": {one.key: one.task_type for one in running},
                "availableBackends": len(offer.builds),
                "installedBackends": len({gallery_index.folded(one.name) for one in installed}),
                "systemCapability": "",
                "preferDevelopmentBackends": False,
                "galleryErrors": [{"name": n, "error": why} for n, why in offer.problems.items()],
            }
        )
