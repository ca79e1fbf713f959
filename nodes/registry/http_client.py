"""The HTTP client for the files of one worker: no redirect, no proxy of the environment, no other address."""

import httpx

from nodes.registry.dialling import HttpServer

CONNECT_LIMIT = 10.0


def client_of(server: HttpServer) -> httpx.AsyncClient:
    """A client whose caller bounds the time of everything but a connection."""
    bearer = {"Authorization": f"Bearer {server.contact.token}"} if server.contact.token else {}
    return httpx.AsyncClient(
        base_url=f"http://{server.contact.address}",
        headers=bearer | {"Accept-Encoding": "identity"},
        timeout=httpx.Timeout(None, connect=CONNECT_LIMIT),
        trust_env=False,
        follow_redirects=False,
        # Plain HTTP, so nothing is verified; reading all certificates would hold the event loop for 20 ms.
        verify=False,
    )
