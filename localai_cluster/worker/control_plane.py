"""Client of the control plane: the self-service routes over HTTP (worker.md §5, §6).

Registration authenticates with the shared token and sends the node's own secret; LocalAI Cluster accepts
it, and every later call authenticates with it. A stock LocalAI frontend ignores it; there every call
authenticates with the shared token. Every call carries the id of its process. Redirects are refused, so a
secret never follows one.

A worker whose secret a server has accepted does not fall back to the shared token at the same address unless
the operator allows it, because another server at that address may know only the token that all workers share.

When the control plane requests a new secret it responds 401 with `"rotate": true`. The worker then replaces
the secret and repeats the call. If the secret is refused during a rotation, the worker tries the new one: the
control plane may have accepted it without the worker receiving the response.
"""

import asyncio
import json
import logging
import secrets
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any
from urllib.parse import quote

import httpx

from localai_cluster.kit import clock, names, untrusted
from localai_cluster.kit.errors import ClusterError
from localai_cluster.kit.nkeys import group_characters
from localai_cluster.worker.identity import SECRET_BYTES, IdentityError, NodeIdentity

log = logging.getLogger(__name__)

CALL_TIMEOUT = 10.0
MAX_RESPONSE_BYTES = 4 * 1024 * 1024
"""Maximum bytes of a response; a node with thousands of replicas needs less."""
MAX_ID_LENGTH = 255
OPEN_FILE_TIMEOUT = 120.0
"""Maximum seconds until the headers of a file have arrived (worker.md §18.6)."""
MAX_RETRY_AFTER_SECONDS = 30.0
DOWNGRADE_RECHECK_SECONDS = 60.0
"""Seconds between two checks whether a server that was downgraded supports node secrets again."""
SECRET_HEADER = "X-LocalAI-Node-Secret"
NEW_SECRET_HEADER = "X-LocalAI-Node-New-Secret"
INSTANCE_HEADER = "X-LocalAI-Node-Instance"
NODE_ERROR_TYPE = "node_error"
"""Value of `type` in every error of the node routes; a 404 of another server lacks it."""
REGISTER_PATH = "/api/node/register"
UNKNOWN_NODE_ID = "00000000-0000-0000-0000-000000000000"
PENDING_STATUS = "pending"


class CallFailed(ClusterError):
    """The call failed; `http_status` is 0 without a response.

    `rotate` is True if the control plane first requests a new secret. `wait` are the seconds to pause after a
    429, at most 30. `kind` is the `type` of a nested error.
    """

    code = "control_plane_call_failed"
    permanent = False

    def __init__(
        self, message: str, http_status: int = 0, *, rotate: bool = False, wait: float = 0.0, kind: str = ""
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.http_status = http_status
        self.rotate = rotate
        self.wait = wait

    @property
    def is_credential_refused(self) -> bool:
        """True if the control plane refused the credential."""
        return self.http_status in (401, 403) and not self.rotate


class DowngradeRefused(CallFailed):
    """The server accepted the node's secret before and ignores it now, so the worker refuses the server."""

    code = "downgrade_refused"

    def __init__(self, base_url: str) -> None:
        super().__init__(
            f"the server at {base_url} has accepted this node's secret before, and now it is a stock LocalAI "
            "frontend, which knows no secrets. This worker waits until LocalAI Cluster is back."
            " If the server was replaced on purpose, start the worker with --allow-stock-frontend "
            "(LOCALAI_WORKER_ALLOW_STOCK_FRONTEND=true)",
            wait=DOWNGRADE_RECHECK_SECONDS,
        )


class ServerKind(StrEnum):
    """The kinds of server that a worker serves."""

    CLUSTER = "LocalAI Cluster"
    STOCK = "stock LocalAI"


@dataclass(frozen=True)
class Registered:
    """The response to a registration.

    An approved node gets credentials for the bus, and the bus's address in `nats_url`. A stock frontend may
    give no credentials.
    """

    node_id: str
    status: str
    kind: ServerKind
    nats_jwt: str = field(default="", repr=False)
    nats_user_seed: str = field(default="", repr=False)
    nats_url: str = ""


@dataclass(eq=False, repr=False)
class ControlPlane:
    """Client of one control plane for one node and one process (`instance`, 32 hex digits).

    With `allow_stock`, the server may be a stock frontend even if it has accepted the node's secret before.
    """

    base_url: str
    token: str
    identity: NodeIdentity
    instance: str
    client: httpx.AsyncClient
    allow_stock: bool = field(default=False, kw_only=True)
    kind: ServerKind = field(default=ServerKind.CLUSTER, init=False)
    """The kind of server that is served; it decides which credential calls carry."""
    registered_at: float = field(default=0.0, init=False)
    """Time of the last accepted registration, by the monotonic clock."""

    async def register(self, body: Mapping[str, Any]) -> Registered:
        """Register, for the first time or again. Raise CallFailed."""
        if self._must_know_secrets and not await self.knows_secrets():
            # A registration would make the node healthy there, and requests would be sent to it.
            raise DowngradeRefused(self.base_url)
        headers = _bearer_header(self.token)
        values = {**body, **({"token": self.token} if self.token else {})}
        response = await self._call_with_secret(
            lambda secret: self._send_call("POST", REGISTER_PATH, headers | {SECRET_HEADER: secret}, values)
        )
        node_id = _text_or_empty(response.get("id")) if isinstance(response, dict) else ""
        if not 0 < len(node_id) <= MAX_ID_LENGTH:
            raise CallFailed("the control plane answered the registration without a node id")
        await self._refuse_downgrade(kind := await self._detect_kind(response))
        bus = {
            name: _text_or_empty(response.get(name)) for name in ("nats_jwt", "nats_user_seed", "nats_url")
        }
        self.registered_at = clock.monotonic()
        return Registered(node_id, _text_or_empty(response.get("status")), kind, **bus)

    @property
    def _must_know_secrets(self) -> bool:
        """True if the server has accepted this worker's secret and therefore must know it."""
        return not self.allow_stock and self.identity.is_accepted_by(self.base_url)

    async def _detect_kind(self, response: Mapping[str, Any]) -> ServerKind:
        # Only LocalAI Cluster answers with the secret's fingerprint; older versions said where the bus is,
        # but not to a node that awaits its approval.
        is_cluster = response.get("fingerprint") == self.identity.fingerprint or response.get("nats_url")
        if not is_cluster and response.get("status") == PENDING_STATUS:
            is_cluster = await self.knows_secrets()
        return ServerKind.CLUSTER if is_cluster else ServerKind.STOCK

    async def _refuse_downgrade(self, kind: ServerKind) -> None:
        if kind is ServerKind.CLUSTER:
            await asyncio.to_thread(self.identity.record_acceptance, self.base_url)
        elif self._must_know_secrets:
            raise DowngradeRefused(self.base_url)

    async def knows_secrets(self) -> bool:
        """Return True if the server identifies nodes by their secrets, as LocalAI Cluster does.

        The call requests the replicas of a node that does not exist, with a random secret. LocalAI Cluster
        responds that it does not know the node. A stock frontend responds 401, or 200 if it has no token. The
        node's own secret is not sent, because the server may be an unknown one. Raise CallFailed for any
        other response.
        """
        try:
            path = _node_path(UNKNOWN_NODE_ID, "models")
            await self._send_call("GET", path, _bearer_header(secrets.token_hex(SECRET_BYTES)), None)
        except CallFailed as error:
            if error.http_status == 404 and error.kind != NODE_ERROR_TYPE:
                raise CallFailed(f"the server at {self.base_url} is not LocalAI: {error}", 404) from error
            if error.http_status not in (401, 403, 404):
                raise
            return error.http_status == 404
        return False

    async def accepts_token(self, kind: ServerKind) -> bool:
        """Return True if the server, of this kind, accepts the registration token.

        The call registers without a name. Every server refuses that, but it checks the token first (worker.md
        §5.1). Raise CallFailed.
        """
        headers = _bearer_header(self.token)
        if kind is ServerKind.CLUSTER:  # a known node goes on when the token is replaced
            headers |= {SECRET_HEADER: self.identity.secret}
        try:
            await self._send_call("POST", REGISTER_PATH, headers, {"name": "", "token": self.token})
        except CallFailed as error:
            if error.http_status not in (400, 401, 403):
                raise
            return error.http_status == 400
        raise CallFailed(f"the server at {self.base_url} has accepted a registration without a name")

    async def heartbeat(self, node_id: str, body: Mapping[str, Any]) -> None:
        """Send a heartbeat with the node's figures and ended engines. Raise CallFailed."""
        await self._call_node("POST", node_id, "heartbeat", body)

    async def drain(self, node_id: str) -> None:
        """Request that no new requests are routed to this node. Raise CallFailed."""
        await self._call_node("POST", node_id, "drain", {})

    async def in_flight(self, node_id: str) -> int:
        """Return the number of requests that are running on this node. Raise CallFailed."""
        rows = await self._call_node("GET", node_id, "models", None)
        if not isinstance(rows, list):
            return 0
        counts = [row.get("in_flight") for row in rows if isinstance(row, dict)]
        return sum(count for count in counts if isinstance(count, int))

    async def deregister(self, node_id: str) -> None:
        """Report that this node is shutting down. Raise CallFailed."""
        await self._call_node("POST", node_id, "deregister", {})

    async def open_gallery(self, node_id: str, file: str, headers: Mapping[str, str]) -> httpx.Response:
        """Open a file of the control plane's gallery: status 200, 206 or 416. Raise CallFailed.

        `headers` may request a part of the file. The caller closes the response.
        """
        path = _node_path(node_id, f"gallery/{quote(file, safe='')}")

        async def call(secret: str) -> httpx.Response:
            return await self._open_stream(path, {**headers, **_bearer_header(secret)})

        response: httpx.Response = await self._call_rotating_secret(node_id, call)
        return response

    async def _call_node(self, method: str, node_id: str, action: str, body: Any) -> Any:
        async def call(secret: str) -> Any:
            return await self._send_call(method, _node_path(node_id, action), _bearer_header(secret), body)

        return await self._call_rotating_secret(node_id, call)

    async def _call_rotating_secret(self, node_id: str, call: Callable[[str], Awaitable[Any]]) -> Any:
        """Send a call with the node's secret. If the server requests a new secret, replace it and repeat.

        A stock frontend gets the registration token instead of the secret.
        """
        if self.kind is ServerKind.STOCK:
            return await call(self.token)
        try:
            return await self._call_with_secret(call)
        except CallFailed as refusal:
            if not refusal.rotate:
                raise
        await self._rotate_secret(node_id)
        return await call(self.identity.secret)

    async def _call_with_secret(self, call: Callable[[str], Awaitable[Any]]) -> Any:
        """Send a call with the secret. During an unfinished rotation, also try the next secret."""
        try:
            return await call(self.identity.secret)
        except CallFailed as refusal:
            # After too many failures from this address a wrong secret gets 429 as well.
            is_rejected = refusal.is_credential_refused or refusal.http_status == 429
            if not is_rejected or not self.identity.successor:
                raise
            response = await self._call_with_successor(call, refusal)
        await self._promote_secret()
        return response

    async def _call_with_successor(self, call: Callable[[str], Awaitable[Any]], refusal: CallFailed) -> Any:
        try:
            return await call(self.identity.successor)
        except CallFailed as error:
            raise (refusal if error.is_credential_refused else error) from None

    async def _rotate_secret(self, node_id: str) -> None:
        """Replace the secret. Raise CallFailed."""
        try:
            successor = await asyncio.to_thread(self.identity.prepare)
        except IdentityError as problem:
            raise CallFailed(f"the control plane requests a new secret: {problem.message}") from problem
        headers = _bearer_header(self.identity.secret) | {NEW_SECRET_HEADER: successor}
        await self._send_call("POST", _node_path(node_id, "rotate"), headers, {})
        await self._promote_secret()

    async def _promote_secret(self) -> None:
        await asyncio.to_thread(self.identity.promote)
        log.info("secret replaced fingerprint=%s", group_characters(self.identity.fingerprint))

    async def _send_call(self, method: str, path: str, headers: Mapping[str, str], body: Any) -> Any:
        headers = {**headers, INSTANCE_HEADER: self.instance}
        try:
            async with asyncio.timeout(CALL_TIMEOUT):
                url = self.base_url + path
                async with self.client.stream(method, url, headers=headers, json=body) as response:
                    content = _decode_json(await self._read_body(response))
        except (httpx.HTTPError, TimeoutError) as error:
            raise self._no_response_error(error) from error
        if not response.is_success:
            raise _refusal_error(response, content)
        return content

    async def _read_body(self, response: httpx.Response) -> bytes:
        body = await untrusted.read_at_most(response.aiter_bytes(), MAX_RESPONSE_BYTES)
        if len(body) > MAX_RESPONSE_BYTES:
            raise CallFailed(f"{self.base_url} answers with more than {MAX_RESPONSE_BYTES} bytes")
        return body

    async def _open_stream(self, path: str, headers: Mapping[str, str]) -> httpx.Response:
        headers = {**headers, INSTANCE_HEADER: self.instance}
        request = self.client.build_request("GET", self.base_url + path, headers=headers, timeout=None)
        try:
            async with asyncio.timeout(OPEN_FILE_TIMEOUT):
                response = await self.client.send(request, stream=True, follow_redirects=False)
                if response.status_code in (200, 206, 416):
                    return response
                try:
                    raise _refusal_error(response, _decode_json(await self._read_body(response)))
                finally:
                    await response.aclose()
        except (httpx.HTTPError, TimeoutError) as error:
            raise self._no_response_error(error) from error

    def _no_response_error(self, error: Exception) -> CallFailed:
        return CallFailed(f"no answer from {self.base_url}: {error or type(error).__name__}")


def _text_or_empty(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _node_path(node_id: str, action: str) -> str:
    return f"/api/node/{quote(node_id, safe='')}/{action}"


def _bearer_header(secret: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {secret}"} if secret else {}


def _decode_json(body: bytes) -> Any:
    """Return the JSON value of a body; None if the body is not JSON."""
    try:
        return None if untrusted.json_problem(body) else json.loads(body)
    except ValueError:
        return None


def _refusal_error(response: httpx.Response, content: Any) -> CallFailed:
    """Return the error for an unsuccessful response; `content` is the JSON value of its body."""
    status = response.status_code
    return CallFailed(
        f"{response.request.method} {response.request.url.path}: {status} {_error_text(response, content)}",
        status,
        rotate=status == 401 and isinstance(content, dict) and content.get("rotate") is True,
        wait=_retry_after(response) if status == 429 else 0.0,
        kind=_error_type(content),
    )


def _error_text(response: httpx.Response, content: Any) -> str:
    """Return the error message of a response, shortened. The control plane has several formats of errors."""
    if response.is_redirect:
        return "redirects are not followed; set LOCALAI_REGISTER_TO to the control plane itself"
    error = content.get("error", "") if isinstance(content, dict) else ""
    return names.to_single_line(str(error.get("message", "") if isinstance(error, dict) else error)[:300])


def _error_type(content: Any) -> str:
    error = content.get("error") if isinstance(content, dict) else None
    return _text_or_empty(error.get("type")) if isinstance(error, dict) else ""


def _retry_after(response: httpx.Response) -> float:
    """Return the seconds of `Retry-After`, 0 without the header.

    The result is at most 30 s, so that the node does not go offline.
    """
    text = response.headers.get("retry-after", "").strip()
    return min(float(text), MAX_RETRY_AFTER_SECONDS) if text.isascii() and text.isdigit() else 0.0
