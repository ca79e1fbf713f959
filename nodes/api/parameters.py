"""Query parameters, path parameters and headers of the lists, for the API document."""

from typing import Any

from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import OpenApiParameter

from nodes.models import NodeEvent, NodeStatus, NodeType, selectors
from nodes.registry import listing
from nodes.registry.heartbeats import LARGEST

Schema = dict[str, Any]


def _query(name: str, schema: Schema, meaning: str, **options: Any) -> OpenApiParameter:
    return OpenApiParameter(name, schema, OpenApiParameter.QUERY, description=meaning, **options)


def _one_of(values: list[str] | tuple[str, ...]) -> Schema:
    return {"type": "string", "enum": list(values)}


def _text(longest: int) -> Schema:
    return {"type": "string", "minLength": 1, "maxLength": longest}


def _whole(least: int, most: int, usual: int | None = None) -> Schema:
    schema: Schema = {"type": "integer", "minimum": least, "maximum": most}
    return schema if usual is None else schema | {"default": usual}


def _header(name: str, kind: Any, meaning: str, **options: Any) -> OpenApiParameter:
    return OpenApiParameter(
        name, kind, OpenApiParameter.HEADER, description=meaning, response=[200], **options
    )


_PAIR: Schema = {
    "type": "string",
    "pattern": rf"^[^=]{{1,{selectors.LONGEST_KEY}}}=[\s\S]{{0,{selectors.LONGEST_VALUE}}}$",
}
MOST_REVISION = 2**31 - 1
PAGE_PARAMETERS = [
    _query("limit", _whole(1, listing.MOST_A_PAGE), "How many at most."),
    _query("offset", _whole(0, listing.FARTHEST), "How many to leave out at the beginning."),
]
PAGE_HEADERS = [
    _header("X-Total-Count", OpenApiTypes.INT, "How many there are on all pages.", required=True),
    _header("Link", OpenApiTypes.STR, "The first, previous, next and last page (RFC 8288)."),
]
NODE_PARAMETERS = [
    _query("status", _one_of(NodeStatus.values), "Only nodes of this status."),
    _query("type", _one_of(NodeType.values), "Only nodes of this type."),
    _query("vendor", _text(listing.LONGEST_VENDOR), "Only nodes with GPUs of this vendor."),
    _query("search", _text(listing.LONGEST_SEARCH), "Only nodes with this in their name or address."),
    _query(
        "label",
        {"type": "array", "items": _PAIR, "minItems": 1, "maxItems": listing.MOST_LABELS},
        "`key=value`: only nodes with this label; repeated, with all of them.",
        explode=True,
    ),
    _query("sort", _one_of(listing.ORDERS) | {"default": "name"}, "The order; `-` turns it round."),
    *PAGE_PARAMETERS,
]
EVENT_PARAMETERS = [
    _query("limit", _whole(1, 500, 50), "How many at most."),
    _query("cursor", _whole(1, LARGEST), "`next_cursor` of the page before: only older events."),
    _query("kind", _one_of(NodeEvent.Kind.values), "Only events of this kind."),
]
REVISION = _query(
    "revision",
    _whole(0, MOST_REVISION),
    "The node's revision that the caller has seen: 409 (field `revision`) if it has moved since.",
)
LABEL_KEY = OpenApiParameter(
    "key",
    {"type": "string", "minLength": 1},
    OpenApiParameter.PATH,
    description="The label's key; everything after `labels/`, slashes too.",
)
LABELS: Schema = {
    "type": "object",
    "maxProperties": 64,
    "additionalProperties": {"type": "string", "maxLength": selectors.LONGEST_VALUE},
    "description": "Key to value; keys have 1 to 128 characters.",
}
