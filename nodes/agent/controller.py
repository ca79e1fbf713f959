"""The controller as the worker sees it: the self-service routes over HTTP (worker.md §5, §6).

Registration proves itself by the shared token and shows the node's own secret; every later call proves
itself by that secret. Redirects are refused, so a secret never follows one.
"""

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import httpx

from localai_cluster.errors import ClusterError

log = logging.getLogger(__name__)

CALL_LIMIT = 10.0
SECRET_HEADER = "X-LocalAI-Node-Secret"


class CallFailed(ClusterError):
    """The controller did not do as it was asked; `http_status` is 0 when it did not answer."""

    code = "controller_call_failed"
    permanent = False

    def __init__(self, message: str, http_status: int = 0) -> None:
        super().__init__(message)
        self.http_status = http_status


@dataclass(frozen=True)
class Registered:
    """What registration answered."""

    node_id: str
    status: str


class Controller:
    """Calls one controller for one node."""

    def __init__(self, base_url: str, token: str, secret: str, client: httpx.AsyncClient) -> None:
        self._base = base_url
        self._token = token
        self._secret = secret
        self._client = client

    async def register(self, body: Mapping[str, Any]) -> Registered:
        """Registers, or registers again. CallFailed."""
        headers = {SECRET_HEADER: self._secret}
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        answer = await self._call("POST", "/api/node/register", headers, {**body, **self._token_field()})
        if not isinstance(answer, dict) or not isinstance(answer.get("id"), str) or not answer["id"]:
            raise CallFailed("the controller's answer to the registration names no node id")
        return Registered(answer["id"], str(answer.get("status", "")))

    async def heartbeat(self, node_id: str, body: Mapping[str, int]) -> None:
        """Tells that this node lives. CallFailed."""
        await self._own("POST", node_id, "heartbeat", body)

    async def drain(self, node_id: str) -> None:
        """Asks for no further requests. CallFailed."""
        await self._own("POST", node_id, "drain", {})

    async def in_flight(self, node_id: str) -> int:
        """How many requests run on this node. CallFailed."""
        rows = await self._own("GET", node_id, "models", None)
        if not isinstance(rows, list):
            return 0
        counts = [row.get("in_flight") for row in rows if isinstance(row, dict)]
        return sum(count for count in counts if isinstance(count, int))

    async def deregister(self, node_id: str) -> None:
        """Says goodbye. CallFailed."""
        await self._own("POST", node_id, "deregister", {})

    def _token_field(self) -> dict[str, str]:
        return {"token": self._token} if self._token else {}

    async def _own(self, method: str, node_id: str, what: str, body: Any) -> Any:
        path = f"/api/node/{quote(node_id, safe='')}/{what}"
        return await self._call(method, path, {"Authorization": f"Bearer {self._secret}"}, body)

    async def _call(self, method: str, path: str, headers: Mapping[str, str], body: Any) -> Any:
        try:
            async with asyncio.timeout(CALL_LIMIT):
                answer = await self._client.request(method, self._base + path, headers=headers, json=body)
        except (httpx.HTTPError, TimeoutError) as error:
            raise CallFailed(f"{self._base} does not answer: {error or type(error).__name__}") from error
        if not answer.is_success:
            raise CallFailed(f"{method} {path}: {answer.status_code} {_reason(answer)}", answer.status_code)
        try:
            return answer.json()
        except ValueError:
            return None


def _reason(answer: httpx.Response) -> str:
    """The text of any of the controller's error envelopes, cut short."""
    if answer.is_redirect:
        return "redirects are refused; LOCALAI_REGISTER_TO must name the controller itself"
    try:
        error = answer.json().get("error", "")
    except (ValueError, AttributeError):
        return ""
    return str(error.get("message", "") if isinstance(error, dict) else error)[:300]
