"""Methods of libraries that we override or call although they are not their public interface.

An upgrade that changes one of them fails here: read the change, adapt the override if necessary, and replace
the fingerprint by the one that the failure prints.
"""

import hashlib
import inspect
from typing import Any

import pytest
from django.core.handlers.asgi import ASGIHandler
from nats.aio.client import Client
from uvicorn import Server
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from localai_cluster.asgi import OneThreadHandler
from localai_cluster.kit.connections import BoundedHead, WatchingSocket
from localai_cluster.management.commands.serve import OrderedServer
from localai_cluster.messaging import link

OVERRIDES: tuple[tuple[type, type], ...] = (
    (BoundedHead, HttpToolsProtocol),
    (WatchingSocket, WebSocketsSansIOProtocol),
    (OrderedServer, Server),
    (link._Client, Client),
    (OneThreadHandler, ASGIHandler),
)
CALLED: tuple[tuple[type, str], ...] = (
    (Client, "_send_command"),
    (Client, "_flush_pending"),
    (HttpToolsProtocol, "send_400_response"),
    (HttpToolsProtocol, "shutdown"),
    (ASGIHandler, "get_response"),
)
FINGERPRINTS: dict[str, str] = {
    "HttpToolsProtocol.connection_made": "6efb565ff3d36b91",
    "HttpToolsProtocol.connection_lost": "c91a4c9bf2e29c55",
    "HttpToolsProtocol.data_received": "010a7ae59a5d3b1a",
    "HttpToolsProtocol.on_message_begin": "96d377fdc7c2baef",
    "HttpToolsProtocol.on_url": "37be44e962b04ca8",
    "HttpToolsProtocol.on_header": "65d62c044f61fdbd",
    "HttpToolsProtocol.on_headers_complete": "1ea8589acfad92d8",
    "HttpToolsProtocol.on_body": "dba9c32aeba35b6a",
    "HttpToolsProtocol.on_message_complete": "1fbad42dc31fc01f",
    "WebSocketsSansIOProtocol.run_asgi": "662375aa38d9044c",
    "WebSocketsSansIOProtocol.keepalive_timeout": "8e1ceb6ec446de9d",
    "WebSocketsSansIOProtocol.handle_text": "6ae523180cf04a01",
    "WebSocketsSansIOProtocol.handle_bytes": "2b22b21bf8feb4bf",
    "WebSocketsSansIOProtocol.handle_cont": "d96fe1479da61beb",
    "WebSocketsSansIOProtocol.handle_ping": "41bcf345d372c55c",
    "Server.startup": "2aa1d70a244bfcf2",
    "Server.shutdown": "9b33c50562992b1e",
    "Client._send_ping": "d57b2f820443afb4",
    "Client._process_msg": "6cff75947e97717a",
    "Client._process_info": "ecca7bb931308fff",
    "Client._send_command": "ed57e8e86389cf94",
    "Client._flush_pending": "317c8d7ef54b90b7",
    "HttpToolsProtocol.send_400_response": "ae5a4a3782b646fd",
    "HttpToolsProtocol.shutdown": "d7351fa33f00d430",
    "ASGIHandler.load_middleware": "a1fb7ee5f8586195",
    "ASGIHandler.get_response_async": "ad82c920df0cebbb",
    "ASGIHandler.get_response": "3d6a79b124c2cccb",
}


def originals() -> dict[str, Any]:
    """Return the library's versions of the overridden methods, and the methods that the overrides call."""
    overridden = {
        f"{base.__name__}.{name}": getattr(base, name)
        for ours, base in OVERRIDES
        for name, value in vars(ours).items()
        if inspect.isfunction(value) and name != "__init__" and hasattr(base, name)
    }
    return overridden | {f"{base.__name__}.{name}": getattr(base, name) for base, name in CALLED}


def fingerprint(method: Any) -> str:
    return hashlib.sha256(inspect.getsource(method).encode()).hexdigest()[:16]


def test_every_overridden_method_is_listed() -> None:
    assert originals().keys() == FINGERPRINTS.keys()


@pytest.mark.parametrize("name", FINGERPRINTS)
def test_the_library_has_not_changed_it(name: str) -> None:
    assert fingerprint(originals()[name]) == FINGERPRINTS[name]
