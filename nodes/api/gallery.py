"""`GET /api/node/:id/gallery/:file`: a file of the gallery that this server offers to its workers.

A raw ASGI application in front of Django. It authenticates the node by the node's own secret, opens the file,
and sends it in pieces that threads read. So a long archive needs no more memory than a short one and never
blocks the event loop. Only regular files directly in `CLUSTER_GALLERY_DIR` are served. A pending node, or one
that has only the shared token, is refused. A single range is supported, so that a worker can resume a
download.
"""

import asyncio
import re
from dataclasses import dataclass
from typing import Any, BinaryIO
from uuid import UUID

from channels.db import database_sync_to_async

from localai_cluster import gallery_index
from localai_cluster.accounts import principals
from localai_cluster.kit import conf, errors
from localai_cluster.web import wire
from localai_cluster.web.envelopes import envelope_of, flat_refusal, translate_error
from localai_cluster.web.openapi import Operation, json_body
from localai_cluster.web.shapes import reference
from nodes.api import worker_routes
from nodes.api.worker_routes import NO_CREDENTIAL_MESSAGE, parse_node_id
from nodes.models import BackendNode
from nodes.registry import identity

PIECE_BYTES = 256 * 1024
STALL_LIMIT = 60.0
"""Seconds that a client may take to receive one piece."""
_PATH_PATTERN = re.compile(r"/api/node/(?P<node_id>[^/]+)/gallery/(?P<file>[^/]+)\Z")
_RANGE_PATTERN = re.compile(r"bytes=(\d{1,15})-(\d{1,15})?")
_UNKNOWN_FILE_MESSAGE = "there is no such file in the gallery"


@dataclass(frozen=True)
class _OpenFile:
    """An open file with the range to send: `length` bytes from `start`."""

    file: BinaryIO
    size: int
    start: int
    length: int
    partial: bool

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        lines = {
            "content-type": "application/octet-stream",
            "content-length": str(self.length),
            "accept-ranges": "bytes",
            "cache-control": "no-store",
            "x-content-type-options": "nosniff",
        }
        if self.partial:
            last = self.start + self.length - 1
            lines["content-range"] = f"bytes {self.start}-{last}/{self.size}"
        return [(name.encode(), value.encode()) for name, value in lines.items()]


class NoSuchRange(errors.InvalidInput):
    """The requested range is outside the file."""

    status = 416

    def __init__(self, size: int) -> None:
        super().__init__(f"the file has {size} bytes")
        self.size = size


class GalleryApplication:
    """ASGI application that sends the files of the gallery."""

    async def __call__(self, scope: worker_routes.Scope, receive: Any, send: Any) -> None:
        try:
            opened = await self._open_file(scope)
        except Exception as raised:
            error = translate_error(raised)
            if error is None:
                raise
            body = flat_refusal(error) if error.status == 401 else envelope_of(error, "node_error")
            await worker_routes.send_json(send, error.status, body, _headers(error))
            return
        with opened.file:
            await _send(opened, receive, send)

    async def _open_file(self, scope: worker_routes.Scope) -> _OpenFile:
        worker_routes.require_method(scope, "GET")
        headers = worker_routes.headers_of(scope)
        match = _PATH_PATTERN.match(scope["path"])
        try:
            await _require_approved_node(
                parse_node_id(match["node_id"]) if match else None, headers, worker_routes.client_of(scope)
            )
        except errors.NotAuthenticated as refusal:
            raise await worker_routes.refusal_for_caller(refusal, scope) from refusal
        folder = conf.cluster().gallery_dir
        if folder is None or match is None:
            raise errors.NotFound("this server has no gallery of its own (CLUSTER_GALLERY_DIR)")
        try:
            file = await asyncio.to_thread(gallery_index.open_served, folder, match["file"])
        except (ValueError, OSError) as error:
            raise errors.NotFound(_UNKNOWN_FILE_MESSAGE) from error
        return await asyncio.to_thread(_select_range, file, headers.get(b"range", ""))


async def _require_approved_node(node_id: UUID | None, headers: dict[bytes, str], source: str) -> None:
    """Raise the refusal unless the secret belongs to this node and the node is approved."""
    secret = principals.bearer(headers.get(b"authorization", ""))
    if not secret:
        raise errors.NotAuthenticated(NO_CREDENTIAL_MESSAGE)
    instance = headers.get(b"x-localai-node-instance", "")
    await database_sync_to_async(_prove_row)(node_id, secret, instance, source)


def _prove_row(node_id: UUID | None, secret: str, instance: str, source: str) -> None:
    with worker_routes.watch_proof(node_id, secret, instance, source):
        identity.prove_node(node_id, secret, instance)
        assert node_id is not None  # a node without an id is unknown
        node = BackendNode.objects.only("approved_at", "weak_identity").filter(pk=node_id).first()
        if node is None or node.approved_at is None:
            raise errors.Forbidden("this node is not approved")
        if node.weak_identity:
            raise errors.Forbidden("only a node with a secret of its own may read the gallery")


def _select_range(file: BinaryIO, range_header: str) -> _OpenFile:
    """Return the range of a Range header; the whole file without a header or with an unknown unit."""
    size = file.seek(0, 2)
    match = _RANGE_PATTERN.fullmatch(range_header)
    if match is None:
        file.seek(0)
        return _OpenFile(file, size, 0, size, partial=False)
    start = int(match[1])
    end = min(int(match[2]) + 1 if match[2] else size, size)
    if start >= end:
        file.close()
        raise NoSuchRange(size)
    file.seek(start)
    return _OpenFile(file, size, start, end - start, partial=True)


async def _send(opened: _OpenFile, receive: Any, send: Any) -> None:
    """Send the file until it is complete, or the client disconnects or stops reading."""
    disconnection = asyncio.create_task(wire.wait_until_disconnected(receive))
    try:
        status = 206 if opened.partial else 200
        await send({"type": "http.response.start", "status": status, "headers": opened.headers})
        remaining = opened.length
        while remaining and not disconnection.done():
            piece = await asyncio.to_thread(opened.file.read, min(PIECE_BYTES, remaining))
            if not piece:
                raise OSError("a file of the gallery became shorter while it was sent")
            remaining -= len(piece)
            async with asyncio.timeout(STALL_LIMIT):
                await send({"type": "http.response.body", "body": piece, "more_body": remaining > 0})
        if not opened.length:
            await send({"type": "http.response.body", "body": b""})
    except TimeoutError:
        pass  # the answer ends early, which the client sees by its length
    finally:
        disconnection.cancel()


def _headers(error: errors.ClusterError) -> dict[str, str]:
    if isinstance(error, NoSuchRange):
        return {"Content-Range": f"bytes */{error.size}"}
    return wire.refusal_headers(error)


_BYTES_CONTENT: Operation = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
GALLERY: Operation = {
    **worker_routes.describe_node_route(
        "node_gallery",
        "Download a file of the server's gallery",
        "The index or an archive of the gallery in CLUSTER_GALLERY_DIR, for an approved node with a secret of"
        " its own. A Range header with one range gives that part.",
        "node_id",
        "file",
    ),
    "responses": {
        "200": {"description": "The file.", "content": _BYTES_CONTENT},
        "206": {"description": "A part of the file.", "content": _BYTES_CONTENT},
        **worker_routes.WRONG_SECRET_RESPONSE,
        "416": {
            "description": "The file is shorter than the range.",
            "content": json_body(reference("Refusal")),
        },
        **worker_routes.describe_refusals(400, 403, 404, 409, 429),
    },
}
