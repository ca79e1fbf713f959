"""The worker's identity against a control plane made of one function: rotation, and crashes at every step."""

import hashlib
import json
import logging
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from localai_cluster.kit.nkeys import group_characters
from localai_cluster.worker.control_plane import CallFailed, ControlPlane
from localai_cluster.worker.identity import IdentityError, NodeIdentity

INSTANCE = "1f" * 16


class Crash(BaseException):
    """The worker's end, at any line."""


class Registry:
    """What a control plane knows of one node: its secret, those refused forever, whether one shall go."""

    def __init__(self, secret: str) -> None:
        self.secret = secret
        self.revoked: set[str] = set()
        self.rotating = self.flooded = False
        self.asked: list[httpx.Request] = []
        self.step: Callable[[str], None] = lambda what: None

    def answer(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(request)
        what = request.url.path.rpartition("/")[2]
        self.step(f"{what} arrives")
        response = self._answer(request, what)
        self.step(f"{what} is answered")
        return response

    def _answer(self, request: httpx.Request, what: str) -> httpx.Response:
        if what == "register":
            return self._register(request.headers["x-localai-node-secret"])
        if request.headers["authorization"] != f"Bearer {self.secret}":
            return httpx.Response(429 if self.flooded else 401, json={"error": "invalid node credential"})
        if what == "rotate":
            return self._rotate(request.headers["x-localai-node-new-secret"])
        if self.rotating:
            return httpx.Response(401, json={"error": "an admin wants this secret replaced", "rotate": True})
        return httpx.Response(200, json={})

    def _register(self, secret: str) -> httpx.Response:
        if secret in self.revoked:
            return httpx.Response(
                403, json={"error": {"message": "this secret was revoked; generate a new one"}}
            )
        if secret != self.secret:
            return httpx.Response(409, json={"error": {"message": "another secret"}})
        return httpx.Response(201, json={"id": "n", "status": "healthy"})

    def _rotate(self, secret: str) -> httpx.Response:
        if secret in self.revoked | {self.secret}:
            return httpx.Response(409, json={"error": {"message": "already belongs to a node"}})
        self.revoked.add(self.secret)
        self.secret, self.rotating = secret, False
        return httpx.Response(200, json={})


def control_plane(folder: Path, registry: Registry) -> ControlPlane:
    client = httpx.AsyncClient(transport=httpx.MockTransport(registry.answer))
    return ControlPlane("http://c", "tok", NodeIdentity(folder), INSTANCE, client)


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    """Knows the worker of `tmp_path`."""
    return Registry(NodeIdentity(tmp_path).secret)


def paths(registry: Registry) -> list[str]:
    return [request.url.path.rpartition("/")[2] for request in registry.asked]


def files(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text().strip() for path in folder.iterdir() if "secret" in path.name}


@pytest.mark.rule("worker-5.1", "worker-5.3", "worker-6")
async def test_every_call_names_its_process(tmp_path: Path, registry: Registry) -> None:
    """D-INSTANCE."""
    calls = control_plane(tmp_path, registry)
    await calls.register({})
    registry.rotating = True
    await calls.heartbeat("n", {})
    await calls.drain("n")
    await calls.in_flight("n")
    await calls.deregister("n")
    assert set(paths(registry)) == {"register", "heartbeat", "rotate", "drain", "models", "deregister"}
    assert {request.headers["x-localai-node-instance"] for request in registry.asked} == {INSTANCE}


async def test_a_beat_replaces_the_secret_when_an_admin_wants_it(
    tmp_path: Path, registry: Registry, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    former, registry.rotating = registry.secret, True
    await control_plane(tmp_path, registry).heartbeat("n", {"available_ram": 1})
    assert paths(registry) == ["heartbeat", "rotate", "heartbeat"]
    assert registry.asked[1].headers["authorization"] == f"Bearer {former}"
    assert registry.asked[2].headers["authorization"] == f"Bearer {registry.secret}"
    assert json.loads(registry.asked[2].content) == {"available_ram": 1}
    assert former != registry.secret
    assert files(tmp_path) == {"node-secret": registry.secret}
    assert stat.S_IMODE((tmp_path / "node-secret").stat().st_mode) == 0o600
    assert (
        f"fingerprint={group_characters(hashlib.sha256(registry.secret.encode()).hexdigest())}" in caplog.text
    )
    assert former not in caplog.text
    assert registry.secret not in caplog.text


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What reaches the disk, in order."""
    done: list[str] = []

    def noting(name: str, tell: Callable[..., str]) -> None:
        real = getattr(os, name)

        def act(*arguments: Any, **named: Any) -> Any:
            done.append(f"before {tell(*arguments)}")
            result = real(*arguments, **named)
            done.append(tell(*arguments))
            return result

        monkeypatch.setattr(os, name, act)

    noting("link", lambda source, target: f"link {Path(target).name}")
    noting("rename", lambda source, target: f"rename {Path(source).name}")
    noting("fsync", lambda number: "fsync folder" if stat.S_ISDIR(os.fstat(number).st_mode) else "fsync file")
    return done


async def test_the_new_secret_is_on_disk_before_the_controller_hears_of_it(
    tmp_path: Path, registry: Registry, steps: list[str]
) -> None:
    registry.step, registry.rotating = steps.append, True
    await control_plane(tmp_path, registry).heartbeat("n", {})
    told = [step for step in steps if not step.startswith(("before", "heartbeat"))]
    assert told == [
        "fsync file",
        "link node-secret.next",
        "fsync folder",
        "rotate arrives",
        "rotate is answered",
        "rename node-secret.next",
        "fsync folder",
    ]


class Doom(list[str]):
    """Ends the worker at its `last`-th step."""

    last = 10**6

    def append(self, step: str) -> None:
        super().append(step)
        if len(self) > self.last:
            raise Crash(step)


@pytest.fixture
def doom(monkeypatch: pytest.MonkeyPatch, registry: Registry) -> Doom:
    """A worker whose every step, on disk and on the wire, may be its last."""
    done = Doom()

    def noting(name: str) -> None:
        real = getattr(os, name)

        def act(*arguments: Any, **named: Any) -> Any:
            done.append(f"before {name}")
            result = real(*arguments, **named)
            done.append(f"after {name}")
            return result

        monkeypatch.setattr(os, name, act)

    for name in ("link", "rename", "fsync"):
        noting(name)
    registry.step = done.append
    return done


async def life(folder: Path, registry: Registry) -> None:
    """A worker's start and two beats."""
    calls = control_plane(folder, registry)
    await calls.register({})
    await calls.heartbeat("n", {})
    await calls.heartbeat("n", {})


async def ends_at(step: int, doom: Doom, folder: Path, registry: Registry) -> bool:
    """One life that ends at that step; False if it was longer."""
    doom.clear()
    doom.last = step
    try:
        await life(folder, registry)
    except Crash:
        return True
    finally:
        doom.last = 10**6
    return False


@pytest.mark.parametrize("second", range(0, 22, 3))
async def test_no_two_crashes_lose_the_identity(
    tmp_path: Path, registry: Registry, doom: Doom, second: int
) -> None:
    """A worker may end at any two steps: its third life is the node."""
    first = 0
    crashed = True
    while crashed:
        registry.rotating = True
        crashed = await ends_at(first, doom, tmp_path, registry)
        await ends_at(second, doom, tmp_path, registry)
        await life(tmp_path, registry)
        assert not registry.rotating
        assert files(tmp_path)["node-secret"] == registry.secret
        assert "node-secret.next" not in files(tmp_path)
        first += 1
    assert first > 18, "the rotation has fewer steps than expected"


@pytest.mark.parametrize("flooded", [False, True])
async def test_a_lost_answer_is_found_out_by_the_next_beat(
    tmp_path: Path, registry: Registry, flooded: bool
) -> None:
    """Committed, but the worker does not know: the old secret is refused, the new one works."""
    calls = control_plane(tmp_path, registry)
    registry.flooded = flooded

    def lost(what: str) -> None:
        if what == "rotate is answered":
            raise httpx.ReadTimeout("too late")

    registry.step, registry.rotating = lost, True
    with pytest.raises(CallFailed, match="too late"):
        await calls.heartbeat("n", {})
    assert len(files(tmp_path)) == 2
    await calls.heartbeat("n", {})
    assert files(tmp_path) == {"node-secret": registry.secret}
    await calls.heartbeat("n", {})
    assert paths(registry) == ["heartbeat", "rotate", "heartbeat", "heartbeat", "heartbeat"]


async def test_a_rotation_that_was_not_committed_goes_on_with_the_same_secret(
    tmp_path: Path, registry: Registry
) -> None:
    registry.rotating = True
    successor = NodeIdentity(tmp_path).prepare()
    await life(tmp_path, registry)
    assert registry.secret == successor


async def test_a_successor_that_lost_its_place_takes_it(tmp_path: Path, registry: Registry) -> None:
    successor = NodeIdentity(tmp_path).prepare()
    (tmp_path / "node-secret").unlink()
    assert NodeIdentity(tmp_path).secret == successor
    assert files(tmp_path) == {"node-secret": successor}


async def test_a_folder_that_cannot_be_written_costs_no_identity(
    tmp_path: Path, registry: Registry, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The new secret counts at once; the rename is made up for."""

    def refuse(*paths: Any) -> None:
        raise OSError(30, "Read-only file system")

    calls = control_plane(tmp_path, registry)
    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", refuse)
        registry.rotating = True
        await calls.heartbeat("n", {})
        assert "Read-only file system" in caplog.text
        registry.rotating = True
        with pytest.raises(CallFailed, match="requests a new secret: cannot write"):
            await calls.heartbeat("n", {})
    assert registry.secret == files(tmp_path)["node-secret.next"]
    await calls.heartbeat("n", {})
    assert files(tmp_path) == {"node-secret": registry.secret}
    assert len(registry.revoked) == 2


@pytest.mark.parametrize("name", ["node-secret", "node-secret.next"])
@pytest.mark.parametrize("content", [b"short", b"\xff" * 64, b"G" * 64])
def test_what_is_no_secret_is_refused(tmp_path: Path, name: str, content: bytes) -> None:
    NodeIdentity(tmp_path).prepare()
    (tmp_path / name).write_bytes(content)
    with pytest.raises(IdentityError, match=name):
        NodeIdentity(tmp_path)


async def test_a_successor_that_is_refused_too_does_not_hide_the_first_refusal(
    tmp_path: Path, registry: Registry
) -> None:
    """Both secrets revoked: what is said is about the secret in use."""
    registry.revoked = {registry.secret, NodeIdentity(tmp_path).prepare()}
    registry.secret = "f" * 64
    with pytest.raises(CallFailed, match="revoked") as caught:
        await control_plane(tmp_path, registry).register({})
    assert caught.value.http_status == 403
    assert paths(registry) == ["register", "register"]
    assert len(files(tmp_path)) == 2
