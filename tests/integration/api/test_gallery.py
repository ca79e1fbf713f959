"""The gallery that a server offers to its nodes: who may read it, which files, and which part of them."""

import asyncio
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from asgiref.sync import sync_to_async
from django.conf import settings

from localai_cluster.accounts.actors import Actor, ActorKind
from localai_cluster.kit import clock
from nodes.api import gallery
from nodes.api.gallery import GalleryApplication
from nodes.models import BackendNode, NodeConflict
from nodes.registry import claims
from tests.support import api
from tests.support.environment import API_KEY, REGISTRATION_TOKEN

pytestmark = pytest.mark.django_db(transaction=True)

ROOT = Actor(ActorKind.USER, "root")
CONTENT = os.urandom(700_000)


@dataclass
class Answered:
    """What came back."""

    status: int
    headers: dict[str, str]
    pieces: list[bytes]

    @property
    def body(self) -> bytes:
        """All of it."""
        return b"".join(self.pieces)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A gallery with one archive."""
    made = tmp_path / "gallery"
    made.mkdir()
    (made / "echo.tar").write_bytes(CONTENT)
    monkeypatch.setattr(settings, "CLUSTER", replace(settings.CLUSTER, gallery_dir=made))
    return made


async def fetch(
    node_id: Any,
    file: str = "echo.tar",
    *,
    secret: str = api.SECRET,
    method: str = "GET",
    gone: bool = False,
    stuck: bool = False,
    **headers: str,
) -> Answered:
    """One request of a worker; `gone`: it has left, `stuck`: it stops reading."""
    sent: list[dict[str, Any]] = []
    lines = {"authorization": f"Bearer {secret}", **headers} if secret else headers

    async def receive() -> dict[str, Any]:
        if not gone:
            await asyncio.Event().wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        if stuck and len(sent) > 2:
            await asyncio.Event().wait()
        sent.append(message)

    scope = {
        "type": "http",
        "method": method,
        "path": f"/api/node/{node_id}/gallery/{file}",
        "headers": [(k.replace("_", "-").encode(), v.encode("latin-1")) for k, v in lines.items()],
        "client": ["192.0.2.9", 40000],
    }
    await GalleryApplication()(scope, receive, send)
    found = {name.decode().lower(): value.decode() for name, value in sent[0]["headers"]}
    return Answered(sent[0]["status"], found, [message.get("body", b"") for message in sent[1:]])


make_node = sync_to_async(api.make_node)


async def test_a_node_reads_the_files_of_the_gallery(folder: Path) -> None:
    """The whole file, and the part that a broken download still needs."""
    node = await make_node()
    whole = await fetch(node.id)
    assert (whole.status, whole.body) == (200, CONTENT)
    assert whole.headers["content-length"] == str(len(CONTENT))
    assert (whole.headers["cache-control"], whole.headers["x-content-type-options"]) == (
        "no-store",
        "nosniff",
    )
    for asked, first, last in (
        ("bytes=5-", 5, 699_999),
        ("bytes=5-9", 5, 9),
        ("bytes=9-9999999", 9, 699_999),
    ):
        part = await fetch(node.id, range=asked)
        assert part.status == 206
        assert part.body == CONTENT[first : last + 1]
        assert part.headers["content-range"] == f"bytes {first}-{last}/700000"
    for odd in ("bytes=-5", "bytes=1-2,4-5", "lines=1-2", "bytes=x"):
        assert (await fetch(node.id, range=odd)).body == CONTENT
    for behind in ("bytes=700000-", "bytes=9-5"):
        refused = await fetch(node.id, range=behind)
        assert (refused.status, refused.headers["content-range"]) == (416, "bytes */700000")
    (folder / "empty").touch()
    assert (await fetch(node.id, "empty")).body == b""


async def test_only_files_of_the_folder_itself_exist(folder: Path, tmp_path: Path) -> None:
    """No link, pipe, folder, hidden file or path out of it; a pipe is not waited for."""
    node = await make_node()
    (tmp_path / "secret").write_text("secret")
    (folder / "link").symlink_to(tmp_path / "secret")
    (folder / "sub").mkdir()
    (folder / "sub" / "file").touch()
    (folder / ".hidden").touch()
    os.mkfifo(folder / "pipe")
    for name in (
        "link",
        "sub",
        "pipe",
        ".hidden",
        "..",
        ".",
        "nothing",
        "a\0b",
        "sub\\file",
        "x" * 5000,
        "é",
    ):
        assert (await fetch(node.id, name)).status == 404, name


async def test_only_the_node_itself_is_served(folder: Path) -> None:
    """Its own secret, approved, and not known by the shared token alone."""
    node = await make_node()
    await make_node("w2", secret=api.OTHER_SECRET)
    pending = await make_node("w3", approved=False)
    for node_id, secret, status in (
        (node.id, "", 401),
        (node.id, "x", 401),
        (node.id, REGISTRATION_TOKEN, 401),
        (node.id, api.OTHER_SECRET, 403),
        (node.id, API_KEY, 403),
        (pending.id, api.secret_of("w3"), 403),
        (uuid4(), api.SECRET, 404),
        ("nope", api.SECRET, 404),
    ):
        refused = await fetch(node_id, secret=secret)
        assert refused.status == status, (node_id, secret)
        assert CONTENT[:20] not in refused.body
    assert (await fetch(node.id, method="POST")).status == 405


async def test_a_stock_worker_is_not_served(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shared token is no identity: everyone who has it would read the gallery."""
    allowing = replace(settings.CLUSTER, allow_shared_token_nodes=True)
    monkeypatch.setattr(settings, "CLUSTER", allowing)
    weak = await make_node(secret="")
    assert (await fetch(weak.id, secret=REGISTRATION_TOKEN)).status == 403


async def test_a_revoked_and_a_rotating_node_are_not_served(folder: Path) -> None:
    node = await make_node()
    await sync_to_async(claims.request_rotation)(node.id, actor=ROOT, now=clock.now())
    told = await fetch(node.id)
    assert (told.status, b'"rotate":true' in told.body) == (401, True)
    await sync_to_async(claims.revoke)(node.id, reason="", actor=ROOT, now=clock.now())
    assert (await fetch(node.id)).status in (401, 403)


async def test_a_copied_data_folder_is_noted(folder: Path) -> None:
    node = await make_node()
    await BackendNode.objects.filter(pk=node.id).aupdate(instance="1" * 32)
    refused = await fetch(node.id, x_localai_node_instance="2" * 32)
    assert refused.status == 409
    assert await NodeConflict.objects.filter(node=node).aexists()


async def test_nothing_is_read_for_a_client_that_has_left(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A web server drops what it cannot deliver; the file would be read to its end for nothing."""
    monkeypatch.setattr(gallery, "PIECE_BYTES", 1000)
    node = await make_node()
    assert len((await fetch(node.id, gone=True)).body) < len(CONTENT)


async def test_it_is_sent_in_pieces_and_not_for_ever(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No more than a piece is in memory at a time; a client that stops reading ends the answer."""
    node = await make_node()
    whole = await fetch(node.id)
    assert max(len(piece) for piece in whole.pieces) == gallery.PIECE_BYTES < len(CONTENT)
    monkeypatch.setattr(gallery, "STALL_LIMIT", 0.05)
    cut = await fetch(node.id, stuck=True)
    assert (cut.status, len(cut.pieces)) == (200, 2)


async def test_a_server_without_a_gallery_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "CLUSTER", replace(settings.CLUSTER, gallery_dir=None))
    refused = await fetch((await make_node()).id)
    assert (refused.status, b"CLUSTER_GALLERY_DIR" in refused.body) == (404, True)
