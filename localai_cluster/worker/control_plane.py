"""The control plane as the worker sees it: the self-service routes over HTTP (worker.md §5, §6).

Registration authenticates with the shared token and sends the node's own secret; every later call
authenticates with that secret. Every call names its process. Redirects are refused, so a secret never follows
one.

When the control plane requests a new secret it answers 401 with `"rotate": true`. The worker then replaces
the secret and repeats the call. If the secret is refused during a rotation, the worker tries the new one: the
control plane may have accepted it without the worker receiving the answer.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import httpx

from localai_cluster.errors import ClusterError
from localai_cluster.fingerprints import grouped
from localai_cluster.worker.identity import IdentityError, NodeIdentity

log = logging.getLogger(__name__)

CALL_LIMIT = 10.0
LONGEST_WAIT = 30.0
SECRET_HEADER = "X-LocalAI-Node-Secret"
NEW_SECRET_HEADER = "X-LocalAI-Node-New-Secret"
INSTANCE_HEADER = "X-LocalAI-Node-Instance"


class CallFailed(ClusterError):
    """The call failed; `http_status` is 0 when there was no answer.

    `rotate`: the control plane requests a new secret first. `wait`: seconds to pause (429), at most 30.
    """

    code = "control_plane_call_failed"
    permanent = False

    def __init__(
        self, message: str, http_status: int = 0, *, rotate: bool = False, wait: float = 0.0
    ) -> None:
        super().__init__(message)
        self.http_status = http_status
        self.rotate = rotate
        self.wait = wait

    @property
    def refused(self) -> bool:
        """Whether the credential was refused."""
        return self.http_status in (401, 403) and not self.rotate


@dataclass(frozen=True)
class Registered:
    """The answer to a registration."""

    node_id: str
    status: str


class ControlPlane:
    """Calls one control plane for one node and one process (`instance`, 32 hex digits)."""

    def __init__(
        self, base_url: str, token: str, identity: NodeIdentity, instance: str, client: httpx.AsyncClient
    ) -> None:
        self._base = base_url
        self._token = token
        self._identity = identity
        self._instance = instance
        self._client = client

    async def register(self, body: Mapping[str, Any]) -> Registered:
        """Registers, for the first time or again. CallFailed."""
        headers = {"Authorization": f"Bearer {self._token}"} if self._token else {}
        values = {**body, **({"token": self._token} if self._token else {})}
        answer = await self._authenticated(
            lambda secret: self._call("POST", "/api/node/register", headers | {SECRET_HEADER: secret}, values)
        )
        if not isinstance(answer, dict) or not isinstance(answer.get("id"), str) or not answer["id"]:
            raise CallFailed("the control plane answered the registration without a node id")
        return Registered(answer["id"], str(answer.get("status", "")))

    async def heartbeat(self, node_id: str, body: Mapping[str, int]) -> None:
        """Reports that this node is alive, with its figures. CallFailed."""
        await self._call_node("POST", node_id, "heartbeat", body)

    async def drain(self, node_id: str) -> None:
        """Asks the control plane to send no new requests. CallFailed."""
        await self._call_node("POST", node_id, "drain", {})

    async def in_flight(self, node_id: str) -> int:
        """How many requests run on this node. CallFailed."""
        rows = await self._call_node("GET", node_id, "models", None)
        if not isinstance(rows, list):
            return 0
        counts = [row.get("in_flight") for row in rows if isinstance(row, dict)]
        return sum(count for count in counts if isinstance(count, int))

    async def deregister(self, node_id: str) -> None:
        """Reports that this node shuts down. CallFailed."""
        await self._call_node("POST", node_id, "deregister", {})

    async def _call_node(self, method: str, node_id: str, what: str, body: Any) -> Any:
        async def call(secret: str) -> Any:
            return await self._call(method, _path(node_id, what), _bearer(secret), body)

        try:
            return await self._authenticated(call)
        except CallFailed as refusal:
            if not refusal.rotate:
                raise
        await self._rotate(node_id)
        return await call(self._identity.secret)

    async def _authenticated(self, call: Callable[[str], Awaitable[Any]]) -> Any:
        """Calls with the secret, or with the successor left by an interrupted rotation."""
        try:
            return await call(self._identity.secret)
        except CallFailed as refusal:
            # After too many failures from this address a wrong secret gets 429 as well.
            wrong = refusal.refused or refusal.http_status == 429
            if not wrong or not self._identity.successor:
                raise
            answer = await self._with_successor(call, refusal)
        await self._promote()
        return answer

    async def _with_successor(self, call: Callable[[str], Awaitable[Any]], refusal: CallFailed) -> Any:
        try:
            return await call(self._identity.successor)
        except CallFailed as error:
            raise (refusal if error.refused else error) from None

    async def _rotate(self, node_id: str) -> None:
        """Replaces the secret. CallFailed."""
        try:
            successor = await asyncio.to_thread(self._identity.prepare)
        except IdentityError as problem:
            raise CallFailed(f"the control plane requests a new secret: {problem.message}") from problem
        headers = _bearer(self._identity.secret) | {NEW_SECRET_HEADER: successor}
        await self._call("POST", _path(node_id, "rotate"), headers, {})
        await self._promote()

    async def _promote(self) -> None:
        await asyncio.to_thread(self._identity.promote)
        log.info("secret replaced fingerprint=%s", grouped(self._identity.fingerprint))

    async def _call(self, method: str, path: str, headers: Mapping[str, str], body: Any) -> Any:
        headers = {**headers, INSTANCE_HEADER: self._instance}
        try:
            async with asyncio.timeout(CALL_LIMIT):
                answer = await self._client.request(method, self._base + path, headers=headers, json=body)
        except (httpx.HTTPError, TimeoutError) as error:
            raise CallFailed(f"no answer from {self._base}: {error or type(error).__name__}") from error
        content = _json(answer)
        if not answer.is_success:
            raise CallFailed(
                f"{method} {path}: {answer.status_code} {_reason(answer, content)}",
                answer.status_code,
                rotate=answer.status_code == 401
                and isinstance(content, dict)
                and content.get("rotate") is True,
                wait=_wait(answer) if answer.status_code == 429 else 0.0,
            )
        return content


def _path(node_id: str, what: str) -> str:
    return f"/api/node/{quote(node_id, safe='')}/{what}"


def _bearer(secret: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {secret}"}


def _json(answer: httpx.Response) -> Any:
    try:
        return answer.json()
    except ValueError:
        return None


def _reason(answer: httpx.Response, content: Any) -> str:
    """The message of any of the control plane's error envelopes, cut short."""
    if answer.is_redirect:
        return "redirects are not followed; set LOCALAI_REGISTER_TO to the control plane itself"
    error = content.get("error", "") if isinstance(content, dict) else ""
    return str(error.get("message", "") if isinstance(error, dict) else error)[:300]


def _wait(answer: httpx.Response) -> float:
    """Seconds of `Retry-After`, at most 30 so that the node does not go offline; 0 without the header."""
    text = answer.headers.get("retry-after", "").strip()
    return min(float(text), LONGEST_WAIT) if text.isascii() and text.isdigit() else 0.0
