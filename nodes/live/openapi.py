"""`/ws/feed` for the API document: the handshake as an operation, the messages as components."""

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
        " of an opened socket: 4401 not signed in or the session has ended (looked at every 15 seconds), 4403"
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

ROUTES: list[RawRoute] = [("GET", "/ws/feed", _FEED)]
