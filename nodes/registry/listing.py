"""Filters, order and pages of lists, parsed from the parameters of a request.

A list without parameters is complete and sorted by name. Every parameter has bounds; an unknown or repeated
parameter, or one out of bounds, causes a 400 with its name. `X-Total-Count` is the number of entries on all
pages, `Link` has the addresses of the neighbouring pages (RFC 8288).
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from urllib.parse import quote

from django.db.models import F, Func, Q, TextField
from django.db.models.expressions import OrderBy
from django.db.models.lookups import IContains
from django.http import QueryDict
from rest_framework.request import Request

from localai_cluster.kit import errors, names
from nodes.models import BackendNode, NodeStatus, NodeType, scheduling
from nodes.models.node import BackendNodeQuerySet

MAX_PAGE_SIZE = 1000
FARTHEST = 1_000_000
MAX_LABELS = 16
MAX_SEARCH_LENGTH = 255
MAX_VENDOR_LENGTH = 32
SORT_FIELDS = (
    "name",
    "status",
    "node_type",
    "gpu_vendor",
    "last_heartbeat",
    "available_vram",
    "total_vram",
    "available_ram",
    "available_disk",
    "created_at",
    "updated_at",
)
SORT_ORDERS = tuple(sign + name for name in SORT_FIELDS for sign in ("", "-"))
_NUMBER_PATTERN = re.compile(r"[0-9]{1,19}\Z", re.ASCII)


class _GpuNames(Func):
    """The names of a node's GPUs, one per line."""

    template = "(SELECT string_agg(gpu->>'name', E'\\n') FROM jsonb_array_elements(%(expressions)s) AS gpu)"
    output_field = TextField()


class Parameters:
    """The query parameters of a request for a list.

    Raises InvalidInput for a parameter that is not among `allowed`.
    """

    def __init__(self, query: QueryDict, *allowed: str) -> None:
        unknown = next((name for name in query if name not in allowed), None)
        if unknown is not None:
            raise _invalid(unknown[:64], "is not a parameter of this list")
        self._query = query

    def repeated_values(self, name: str) -> list[str]:
        """Return all values of a parameter that may be repeated."""
        return self._query.getlist(name)

    def text(self, name: str, longest: int) -> str:
        """Return a printable text, "" if the parameter is absent."""
        values = self._query.getlist(name)
        if not values:
            return ""
        if len(values) > 1:
            raise _invalid(name, "is given more than once")
        if not 1 <= len(values[0]) <= longest:
            raise _invalid(name, f"must have 1 to {longest} characters")
        names.check_text(values[0], name)
        return values[0]

    def choice(self, name: str, choices: Collection[str]) -> str:
        """Return one of the choices, "" if the parameter is absent."""
        value = self.text(name, 64)
        if value and value not in choices:
            raise _invalid(name, f"must be one of {', '.join(choices)}")
        return value

    def number(self, name: str, least: int, most: int) -> int | None:
        """Return a whole number, None if the parameter is absent."""
        text = self.text(name, 32)
        if not text:
            return None
        if not _NUMBER_PATTERN.match(text) or not least <= int(text) <= most:
            raise _invalid(name, f"must be a whole number from {least} to {most}")
        return int(text)

    def moment(self, name: str) -> datetime | None:
        """Return a time with its zone, None if the parameter is absent."""
        text = self.text(name, 40)
        if not text:
            return None
        at: datetime | None
        try:
            at = datetime.fromisoformat(text)
        except ValueError:
            at = None
        if at is None or at.tzinfo is None or not 1970 < at.year < 9000:
            raise _invalid(name, "must be a time such as 2026-01-31T12:00:00Z")
        return at.astimezone(UTC)  # PostgreSQL knows no offset of 16 hours or more


def _invalid(name: str, complaint: str) -> errors.InvalidInput:
    return errors.InvalidInput(f"{name} {complaint}", field=name)


@dataclass(frozen=True)
class Page:
    """The part of a list that a request asks for; without a limit it extends to the end of the list."""

    limit: int | None = None
    offset: int = 0

    @property
    def whole(self) -> bool:
        """True if the page is the complete list."""
        return self.limit is None and not self.offset

    @property
    def part(self) -> slice:
        """The slice of a sequence or queryset."""
        return slice(self.offset, None if self.limit is None else self.offset + self.limit)

    def headers(self, request: Request, total: int) -> dict[str, str]:
        """Return `X-Total-Count`, and `Link` if there are neighbouring pages."""
        links = [
            f'<{_page_address(request, self.limit, offset)}>; rel="{name}"'
            for name, offset in self._neighbours(total).items()
        ]
        return {"X-Total-Count": str(total)} | ({"Link": ", ".join(links)} if links else {})

    def _neighbours(self, total: int) -> Mapping[str, int]:
        if self.limit is None:
            return {}
        after, before = self.offset + self.limit, max(self.offset - self.limit, 0)
        last = max(total - 1, 0) // self.limit * self.limit
        offsets = {"first": 0, "prev": before, "next": after, "last": last}
        absent = {"prev"} if not self.offset else set()
        absent |= {"next"} if after >= total else set()
        return {name: offset for name, offset in offsets.items() if name not in absent}


def _page_address(request: Request, limit: int | None, offset: int) -> str:
    query = request.query_params.copy()
    query["limit"], query["offset"] = str(limit), str(offset)
    return f"{quote(request.path)}?{query.urlencode()}"


def parse_page(parameters: Parameters, usual: int | None = None) -> Page:
    """Return the page of the parameters `limit` and `offset`."""
    limit = parameters.number("limit", 1, MAX_PAGE_SIZE)
    return Page(usual if limit is None else limit, parameters.number("offset", 0, FARTHEST) or 0)


@dataclass(frozen=True)
class NodeQuery:
    """A request for the list of nodes: the matching nodes in the requested order, and the page."""

    nodes: BackendNodeQuerySet
    page: Page
    filtered: bool


NODE_PARAMETERS = ("status", "type", "vendor", "search", "label", "sort", "limit", "offset")


def parse_node_query(query: QueryDict) -> NodeQuery:
    """Parse a request for the list of nodes; raise InvalidInput with the name of the parameter."""
    parameters = Parameters(query, *NODE_PARAMETERS)
    condition = _node_filter(parameters)
    labels = _parse_labels(parameters)
    nodes = BackendNode.objects.filter(condition)
    for key, value in labels:
        nodes = nodes.with_labels({key: value})
    order = _order(parameters.choice("sort", SORT_ORDERS) or "name")
    return NodeQuery(nodes.order_by(*order), parse_page(parameters), bool(condition) or bool(labels))


def _node_filter(parameters: Parameters) -> Q:
    condition = Q()
    if status := parameters.choice("status", NodeStatus.values):
        condition &= Q(status=status)
    if node_type := parameters.choice("type", NodeType.values):
        condition &= Q(node_type=node_type)
    if vendor := parameters.text("vendor", MAX_VENDOR_LENGTH):
        condition &= Q(gpu_vendor__iexact=vendor)
    if search := parameters.text("search", MAX_SEARCH_LENGTH):
        hardware = Q(gpu_vendor__icontains=search) | Q(IContains(_GpuNames("gpus"), search))
        condition &= Q(name__icontains=search) | Q(address__icontains=search) | hardware
    return condition


def _parse_labels(parameters: Parameters) -> list[tuple[str, str]]:
    """Parse the pairs of `label=key=value`; the first `=` ends the key."""
    texts = parameters.repeated_values("label")
    if len(texts) > MAX_LABELS:
        raise _invalid("label", f"is given more than {MAX_LABELS} times")
    pairs = []
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals:
            raise _invalid("label", "must be key=value")
        scheduling.check_label(key, value, "label")
        pairs.append((key, value))
    return pairs


def _order(sort: str) -> list[OrderBy]:
    """Return the order of the nodes: by the column of `sort`, then by name.

    A node without a heartbeat counts as the longest silent.
    """
    column = F(sort.removeprefix("-"))
    first = column.desc(nulls_last=True) if sort.startswith("-") else column.asc(nulls_first=True)
    return [first, F("name").asc()]
