"""Shapes of the messages on our websockets, and descriptions of the handshakes for the API document."""

from typing import Any

from localai_cluster.web.openapi import RawRoute, json_body
from localai_cluster.web.shapes import (
    FLAG,
    TEXT,
    TIME,
    UUID,
    Field,
    Named,
    Row,
    Schema,
    Shape,
    count,
    field,
    mapping_schema,
    reference,
)
from nodes.registry.shape import LIVE_NODE_PATCH_SHAPE, LIVE_NODE_SHAPE
from operations.changes.feed import OPERATION_SHAPE

NOTICE = Shape(
    "Notice",
    "A notice for operators, which every page shows.",
    [
        field("id", TEXT, "Stays the same while it holds."),
        field("level", {"type": "string", "enum": ["warning", "error"]}),
        field("text", TEXT),
        field("hint", TEXT, "What to do about it; names the setting or the page."),
    ],
)
FEED_USER = Shape(
    "FeedUser",
    "The user of this connection.",
    [field("name", TEXT), field("role", {"type": "string", "enum": ["admin"]})],
)


class Message(Shape):
    """The shape of a websocket message; the field `type` has its kind."""

    def __init__(self, name: str, kind: str, meaning: str, *fields: Field) -> None:
        self.kind = kind
        super().__init__(name, meaning, [field("type", {"type": "string", "enum": [kind]}), *fields])

    def of(self, **values: object) -> Row:
        return super().of(type=self.kind, **values)


HELLO = Message(
    "FeedHello",
    "hello",
    "The first message.",
    field("at", TIME),
    field("build", TEXT, "The hash of the built pages; a page with another one is out of date."),
    field("version", TEXT),
    field("user", FEED_USER.ref),
)
OPERATIONS_SNAPSHOT = Message(
    "FeedOperationsSnapshot",
    "operations.snapshot",
    "The live list as it is: what is not in it has ended or was dismissed.",
    field("seq", count(), "The reader's position."),
    field("operations", OPERATION_SHAPE.many),
)
OPERATIONS_DELTA = Message(
    "FeedOperationsDelta",
    "operations.delta",
    "Operations that changed, in the order of their last change; ended and dismissed ones too.",
    field("seq", count(), "The reader's position after this message."),
    field("operations", OPERATION_SHAPE.many),
    field(
        "partial",
        {"type": "array", "items": UUID},
        "The `jobID` of those whose `nodes` has only the parts that changed: the others are as they were. One"
        " that the reader does not know had ended before, and may be left out.",
        optional=True,
    ),
)
NODES_SNAPSHOT = Message(
    "FeedNodesSnapshot",
    "nodes.snapshot",
    "All nodes as they are, by name.",
    field("cursor", TEXT, "The reader's position."),
    field("nodes", LIVE_NODE_SHAPE.many),
)
NODES_DELTA = Message(
    "FeedNodesDelta",
    "nodes.delta",
    "What changed since the last message about nodes.",
    field("cursor", TEXT, "The reader's position after this message."),
    field("changed", LIVE_NODE_PATCH_SHAPE.many),
    field("removed", {"type": "array", "items": UUID}),
)
NOTICES = Message(
    "FeedNotices",
    "notices",
    "All notices that hold, the worst first; the list before is void.",
    field("notices", NOTICE.many),
)
BACKENDS_CHANGED = Message(
    "FeedBackends",
    "backends",
    "Whether what is installed or offered has changed, and how the check for upgrades stands.",
    field("revision", count(), "Moves with every change: read the lists again."),
    field(
        "checked_at", TIME, "When the galleries were compared last; null if they never were.", nullable=True
    ),
    field("checking", FLAG, "A check is under way."),
    field("problems", mapping_schema(TEXT), "Galleries that the check could not read, and why."),
)
RULES_CHANGED = Message(
    "FeedRules",
    "rules",
    "Whether scheduling rules or the results of their last pass have changed.",
    field("revision", TEXT, "Another one with every change: read the rules again."),
)
DEFINITIONS_CHANGED = Message(
    "FeedDefinitions",
    "definitions",
    "Whether stored model definitions have changed.",
    field("revision", TEXT, "Another one with every change: read the definitions again."),
)
ALIVE = Message("FeedAlive", "alive", "A sign of life, every five seconds.", field("at", TIME))


def _union(name: str, *messages: Message) -> Named:
    """Return the schema of a message that is one of these; its `type` says which."""
    mapping = {message.kind: message.ref["$ref"] for message in messages}
    discriminator = {"propertyName": "type", "mapping": mapping}
    return Named(name, {"oneOf": [message.ref for message in messages], "discriminator": discriminator})


FEED_MESSAGE = _union(
    "FeedMessage",
    HELLO,
    OPERATIONS_SNAPSHOT,
    OPERATIONS_DELTA,
    NODES_SNAPSHOT,
    NODES_DELTA,
    NOTICES,
    BACKENDS_CHANGED,
    RULES_CHANGED,
    DEFINITIONS_CHANGED,
    ALIVE,
)
_LOG_LINE_SCHEMA: Schema = reference("LogLine")
LOG_INITIAL = Message(
    "LogInitial",
    "initial",
    "The first message of a log: the lines there are.",
    field("lines", {"type": "array", "items": _LOG_LINE_SCHEMA}),
)
LOG_NEW_LINE = Message("LogNewLine", "line", "One more line of a log.", field("line", _LOG_LINE_SCHEMA))
LOG_MESSAGE = _union("LogMessage", LOG_INITIAL, LOG_NEW_LINE)


_FEED_OPERATION: dict[str, Any] = {
    "operationId": "ws_feed",
    "tags": ["operations"],
    "summary": "Subscribe to nodes, operations and notices (WebSocket)",
    "description": (
        "Every message is a `FeedMessage`; nothing is read from the client. `hello` comes first, then for"
        " operations and for nodes a snapshot, or with `?operations=` and `?nodes=` what changed since, if"
        " that is still known. Admins only. A page of this host is told why it is refused by the close code"
        " of an opened socket: 4401 not signed in or the session or key has ended (within 2 seconds), 4403"
        " not an admin; anybody else's handshake is refused. 1012: this web process stops, connect again."
    ),
    "security": [{"apiKey": []}, {"session": []}],
    "parameters": [
        {
            "name": "operations",
            "in": "query",
            "required": False,
            "schema": {"type": "integer", "format": "int64", "minimum": 0},
            "description": "The last `seq` seen.",
        },
        {
            "name": "nodes",
            "in": "query",
            "required": False,
            "schema": {"type": "string"},
            "description": "The last `cursor` seen.",
        },
    ],
    "responses": {
        "101": {
            "description": "The stream begins; each message has this shape.",
            "content": json_body({"$ref": "#/components/schemas/FeedMessage"}),
        },
        "403": {"description": "Refused."},
        "404": {
            "description": "Not a websocket's handshake: over plain HTTP nothing is here.",
            "content": json_body({"$ref": "#/components/schemas/Refusal"}),
        },
    },
}

_LOGS_OPERATION: dict[str, Any] = {
    "operationId": "ws_nodes_logs",
    "tags": ["nodes"],
    "summary": "Follow the log of a model on a node (WebSocket)",
    "description": (
        "The worker's messages, each a `LogMessage`: `initial` with the lines there are, then `line` for each"
        " new one. `model#0` (`%23` in the URL) is one replica; a model's name means all of its replicas."
        " Nothing is read from the client. Admins only. Closed with 1011 and the reason when the worker"
        " cannot be reached or ends the stream. A page of this host is told why it is refused by the close"
        " code of an opened socket: 4401 or 4403, as for `/ws/feed`."
    ),
    "security": [{"apiKey": []}, {"session": []}],
    "parameters": [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in ("node_id", "model")
    ],
    "responses": {
        "101": {
            "description": "The stream begins; each message has this shape.",
            "content": json_body({"$ref": "#/components/schemas/LogMessage"}),
        },
        "403": {"description": "Refused."},
        "404": {
            "description": "There is no such node, or this is no websocket's handshake.",
            "content": json_body({"$ref": "#/components/schemas/Refusal"}),
        },
    },
}
ROUTES: list[RawRoute] = [
    ("GET", "/ws/feed", _FEED_OPERATION),
    ("GET", "/ws/nodes/{node_id}/backend-logs/{model}", _LOGS_OPERATION),
]
