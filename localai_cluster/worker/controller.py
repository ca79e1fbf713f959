"""The controller as the worker sees it: the self-service routes over HTTP (worker.md §5, §6).

Registration proves itself by the shared token and shows the node's own secret; every later call proves
itself by that secret. Every call names the process it comes from. Redirects are refused, so a secret never
follows one.

A controller that wants the secret replaced answers 401 with `"rotate": true`: the call then replaces it and
is made again. Where the secret is refused and a rotation has not ended, its successor is tried: the
controller may have taken it without the worker having heard so.
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
from localai_cluster.worker.identity import Identity, IdentityProblem

log = logging.getLogger(__name__)

CALL_LIMIT = 10.0
LONGEST_WAIT = 30.0
SECRET_HEADER = "X-LocalAI-Node-Secret"
NEW_SECRET_HEADER = "X-LocalAI-Node-New-Secret"
INSTANCE_HEADER = "X-LocalAI-Node-Instance"


class CallFailed(ClusterError):
    """The controller did not do as it was asked; `http_status` is 0 when it did not answer.

    `rotate`: it wants another secret first. `wait`: seconds to stay away (429), at most 30.
    """

    code = "controller_call_failed"
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
        """Whether the credential was not accepted."""
        return self.http_status in (401, 403) and not self.rotate


@dataclass(frozen=True)
class Registered:
    """What registration answered."""

    node_id: str
    status: str


class Controller:
    """Calls one controller for one node, in the name of one process (`instance`, 32 hex digits)."""

    def __init__(
        self, base_url: str, token: str, identity: Identity, instance: str, client: httpx.AsyncClient
    ) -> None:
        self._base = base_url
        self._token = token
        self._identity = identity
        self._instance = instance
        self._client = client

    async def register(self, body: Mapping[str, Any]) -> Registered:
        """Registers, or registers again. CallFailed."""
        headers = {"Authorization": f"Bearer {self._token}"} if self._token else {}
        told = {**body, **self._token_field()}
        answer = await self._proved(
            lambda secret: self._call("POST", "/api/node/register", headers | {SECRET_HEADER: secret}, told)
        )
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
        async def call(secret: str) -> Any:
            return await self._call(method, _path(node_id, what), _bearer(secret), body)

        try:
            return await self._proved(call)
        except CallFailed as refusal:
            if not refusal.rotate:
                raise
        await self._rotate(node_id)
        return await call(self._identity.secret)

    async def _proved(self, call: Callable[[str], Awaitable[Any]]) -> Any:
        """Calls with the secret, or with the successor that an interrupted rotation has left."""
        try:
            return await call(self._identity.secret)
        except CallFailed as refusal:
            # After too many wrong ones from this address a wrong secret is answered 429 too.
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
        except IdentityProblem as problem:
            raise CallFailed(f"the controller wants a new secret: {problem.message}") from problem
        headers = _bearer(self._identity.secret) | {NEW_SECRET_HEADER: successor}
        await self._call("POST", _path(node_id, "rotate"), headers, {})
        await self._promote()

    async def _promote(self) -> None:
        await asyncio.to_thread(self._identity.promote)
        log.info("this node has a new secret fingerprint=%s", grouped(self._identity.fingerprint))

    async def _call(self, method: str, path: str, headers: Mapping[str, str], body: Any) -> Any:
        headers = {**headers, INSTANCE_HEADER: self._instance}
        try:
            async with asyncio.timeout(CALL_LIMIT):
                answer = await self._client.request(method, self._base + path, headers=headers, json=body)
        except (httpx.HTTPError, TimeoutError) as error:
            raise CallFailed(f"{self._base} does not answer: {error or type(error).__name__}") from error
        told = _json(answer)
        if not answer.is_success:
            raise CallFailed(
                f"{method} {path}: {answer.status_code} {_reason(answer, told)}",
                answer.status_code,
                rotate=answer.status_code == 401 and isinstance(told, dict) and told.get("rotate") is True,
                wait=_wait(answer) if answer.status_code == 429 else 0.0,
            )
        return told


def _path(node_id: str, what: str) -> str:
    return f"/api/node/{quote(node_id, safe='')}/{what}"


def _bearer(secret: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {secret}"}


def _json(answer: httpx.Response) -> Any:
    try:
        return answer.json()
    except ValueError:
        return None


def _reason(answer: httpx.Response, told: Any) -> str:
    """The text of any of the controller's error envelopes, cut short."""
    if answer.is_redirect:
        return "redirects are refused; LOCALAI_REGISTER_TO must name the controller itself"
    error = told.get("error", "") if isinstance(told, dict) else ""
    return str(error.get("message", "") if isinstance(error, dict) else error)[:300]


def _wait(answer: httpx.Response) -> float:
    """Seconds of `Retry-After`, at most 30 so that a node does not seem gone; 0 if it names none."""
    text = answer.headers.get("retry-after", "").strip()
    return min(float(text), LONGEST_WAIT) if text.isascii() and text.isdigit() else 0.0
