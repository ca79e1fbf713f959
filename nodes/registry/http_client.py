"""HTTP client for the files of one worker: no redirects, no proxy of the environment, no other address."""

import os

import httpx

from nodes.registry.dial_targets import HttpServer

CONNECT_LIMIT = 10.0


def client_of(server: HttpServer) -> httpx.AsyncClient:
    """Return a client with a connect timeout only: the caller limits everything else."""
    bearer = {"Authorization": f"Bearer {server.contact.token}"} if server.contact.token else {}
    return httpx.AsyncClient(
        base_url=f"http://{server.contact.address}",
        headers=bearer | {"Accept-Encoding": "identity"},
        timeout=httpx.Timeout(None, connect=CONNECT_LIMIT),
        trust_env=False,
        follow_redirects=False,
        # Plain HTTP, so nothing is verified; reading all certificates would block the event loop for 20 ms.
        verify=False,
    )


def reason_of(error: Exception) -> str:
    """Return the reason why a connection failed, in the operating system's words where it has any."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno and cause.errno > 0:
            return os.strerror(cause.errno).lower()
        cause = cause.__cause__ or cause.__context__
    if isinstance(error, httpx.ConnectTimeout):
        return f"no connection within {CONNECT_LIMIT:.0f} s"
    return str(error)[:200] or type(error).__name__
