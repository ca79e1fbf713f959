"""Our websockets for the API document: the handshakes as operations, the messages as components."""

from typing import Any

from localai_cluster.web.openapi import RawRoute, json_body

_FEED: dict[str, Any] = {
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

_LOGS: dict[str, Any] = {
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
    ("GET", "/ws/feed", _FEED),
    ("GET", "/ws/nodes/{node_id}/backend-logs/{model}", _LOGS),
]
