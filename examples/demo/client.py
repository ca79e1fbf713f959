"""A client of a running cluster: its address, its key, and one request with retries."""

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from localai_cluster import clock
from localai_cluster.embedded.resources import SetupError

REQUEST_SECONDS = 180.0
ATTEMPTS = 3


@dataclass(frozen=True)
class Target:
    """A running cluster and its admin key."""

    url: str
    key: str

    @property
    def headers(self) -> dict[str, str]:
        """The admin's credentials."""
        return {"Authorization": f"Bearer {self.key}"}


def ask(target: Target, request: Mapping[str, Any]) -> tuple[dict[str, Any], float]:
    """The answer and the seconds it took. Retries a 503 after the time in its Retry-After."""
    last = ""
    for _ in range(ATTEMPTS):
        started = clock.monotonic()
        try:
            reply = httpx.request(
                request["method"],
                target.url + request["path"],
                json=request["body"],
                headers=target.headers,
                timeout=REQUEST_SECONDS,
                trust_env=False,
            )
        except httpx.HTTPError as error:
            raise SetupError(
                f"The request failed: {type(error).__name__} {error}.", "Is the cluster still running?"
            ) from error
        if reply.status_code == 200:
            return reply.json(), clock.monotonic() - started
        last = f"{reply.status_code}: {' '.join(reply.text.split())[:500]}"
        if reply.status_code != 503 or "retry-after" not in reply.headers:
            break
        threading.Event().wait(min(float(reply.headers["retry-after"]), 30))
    raise SetupError(f"The request was answered with {last}.", "See the log of `make run`.")
