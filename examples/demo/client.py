"""A client of a running cluster: its address, its key, one request with retries, and one streamed answer."""

import json
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from localai_cluster.embedded.resources import SetupError
from localai_cluster.kit import clock

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


@dataclass(frozen=True)
class Chat:
    """A streamed answer as its client saw it; seconds since the request was sent."""

    pieces: int
    tokens: int
    first: float
    whole: float


def stream(target: Target, request: Mapping[str, Any], show: Callable[[str], None]) -> Chat:
    """Has an answer streamed, each piece shown as it comes. The model must be loaded."""
    began = clock.monotonic()
    try:
        with httpx.stream(
            request["method"],
            target.url + request["path"],
            json=request["body"],
            headers=target.headers,
            timeout=REQUEST_SECONDS,
            trust_env=False,
        ) as reply:
            if reply.status_code != 200:
                reply.read()
                text = " ".join(reply.text.split())[:500]
                raise SetupError(f"The request was answered with {reply.status_code}: {text}.", "")
            return read_chat(reply.iter_lines(), began, show)
    except httpx.HTTPError as error:
        raise SetupError(
            f"The stream broke off: {type(error).__name__} {error}.", "Is the cluster still running?"
        ) from error


def read_chat(lines: Iterable[str], began: float, show: Callable[[str], None]) -> Chat:
    """The answer that these lines of a stream make; SetupError for one that ends with an error."""
    pieces = tokens = 0
    first = 0.0
    for line in lines:
        said = line.removeprefix("data: ")
        if said == line or said == "[DONE]":
            continue
        event = json.loads(said)
        if "error" in event:
            raise SetupError(f"The stream ended with an error: {event['error']['message']}.", "")
        tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
        for choice in event["choices"]:
            if text := choice["delta"].get("content"):
                first = first or clock.monotonic() - began
                pieces += 1
                show(text)
    return Chat(pieces, tokens, first, clock.monotonic() - began)
