"""Images from registries: credentials, redirects, platforms, resumed layers, and how layers are merged."""

import asyncio
import errno
import gzip
import json
import logging
import os
import stat
import tarfile
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import httpx
import pytest
import pytest_asyncio
import zstandard

from localai_cluster.kit.env import RegistrySetting
from localai_cluster.kit.errors import ClusterError
from localai_cluster.kit.outbound import SourceError
from localai_cluster.kit.tls import context_with_ca
from localai_cluster.messaging.messages import Gallery
from localai_cluster.registries import client, references
from localai_cluster.registries.access import Access
from localai_cluster.registries.client import Registries, this_platform
from localai_cluster.worker import archives, download, source_files
from localai_cluster.worker.backend_store import (
    PARTIAL_PREFIX,
    BackendStore,
    read_metadata,
    remove_old_partials,
)
from localai_cluster.worker.cancellation import Halt
from localai_cluster.worker.config import InvalidSettings, build
from localai_cluster.worker.control_plane import CallFailed
from localai_cluster.worker.installer import Installer, InstallFailed, InstallSource
from localai_cluster.worker.progress import Tick
from localai_cluster.worker.source_files import BadSource, DiskFull, Throttle
from tests.support.certificates import Authority
from tests.wire.registry import INDEX, PASSWORD, USER, Registry, digest_of, entry, layer

RUN = entry("run.sh", b"#!/bin/sh\n")
HERE = str(this_platform())
LINK, HARD, FOLDER = tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE


@pytest.fixture
def registry() -> Iterator[Registry]:
    fake = Registry()
    fake.start()
    yield fake
    fake.stop()


@dataclass
class Setup:
    """An installer with access to a registry."""

    store: BackendStore
    client: httpx.AsyncClient
    registry: Registry
    ticks: list[Tick] = field(default_factory=list)

    async def install(self, image: str = "a/one", access: Access | None = None) -> Path:
        work = Installer(self.store, (), Throttle(0), "default", self.client, _unserved, access=access)
        uri = f"oci://{self.registry.host}/{image}"
        name = await work.install(InstallSource("one", (), uri=uri), self.ticks.append)
        return self.store.backends / name

    def left_over(self) -> list[str]:
        return sorted(path.name for path in self.store.backends.iterdir())


async def _unserved(*_: Any) -> httpx.Response:
    raise CallFailed("no gallery", 404)


@pytest_asyncio.fixture
async def setup(tmp_path: Path, registry: Registry, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Setup]:
    monkeypatch.setattr(download, "RETRY_PAUSES", (0.0, 0.0, 0.0))
    (tmp_path / "backends").mkdir()
    async with httpx.AsyncClient(timeout=10, trust_env=False) as client:
        yield Setup(BackendStore(tmp_path / "backends", tmp_path / "system", "default"), client, registry)


def named(registry: Registry, **more: Any) -> Access:
    """Access with the registry's credential; its token service speaks plain HTTP, so it must be named."""
    realm = more.pop("realm", f"http://{registry.host}/token")
    return Access([RegistrySetting(registry.host, USER, PASSWORD, realm, **more)])


@pytest.mark.rule("worker-18.3")
@pytest.mark.parametrize("tag", ["master-cpu-one", "master-cpu-one-development"])
async def test_a_missing_latest_image_has_those_of_master_in_its_place(setup: Setup, tag: str) -> None:
    """After the mirrors; the entry's own address is recorded, so a later check finds the `latest` image."""
    digest = setup.registry.push("a/images", [layer(RUN)], tag=tag)
    uri = f"oci://{setup.registry.host}/a/images:latest-cpu-one"
    index = setup.store.backends.parent / "index.yaml"
    index.write_text(f"- name: one\n  uri: {uri}\n  mirrors: [oci://{setup.registry.host}/a/mirror:x]\n")
    work = Installer(setup.store, (index.parent,), Throttle(0), "default", setup.client, _unserved)
    await work.install(InstallSource("one", [Gallery(str(index))]), setup.ticks.append)
    metadata = read_metadata(setup.store.backends / "one")
    assert (metadata.digest, metadata.uri) == (digest, uri)
    versions = [request.path.rpartition("/")[2] for request in setup.registry.seen("registry")]
    assert versions[:3] == ["latest-cpu-one", "x", "master-cpu-one"]


def test_which_images_have_others_in_their_place() -> None:
    """Only those that a tag names."""
    for uri in (
        "oci://h.test/latest-x/a:v1",
        "https://h.test/latest-x.tar",
        f"h.test/a@sha256:{'0' * 64}",
        "x",
    ):
        assert references.fallback_images(uri) == ()


@pytest.mark.rule("worker-18.6")
@pytest.mark.parametrize(
    ("uri", "expected"),
    [
        ("oci://images.test/a/b", "images.test/a/b:latest"),
        ("oci://images.test:5000/a/b:v1.2", "images.test:5000/a/b:v1.2"),
        ("quay.io/org/engine:v1", "quay.io/org/engine:v1"),
        ("ghcr.io/org/engine", "ghcr.io/org/engine:latest"),
        ("docker.io/engine", "docker.io/library/engine:latest"),
        ("docker://org/engine", "docker.io/org/engine:latest"),
        ("org/images:latest-cpu-engine", "docker.io/org/images:latest-cpu-engine"),
        (f"images.test/a@sha256:{'0' * 64}", f"images.test/a@sha256:{'0' * 64}"),
        ("localhost:5000/a:1", "localhost:5000/a:1"),
        ("oci://[::1]:5000/a:1", "[::1]:5000/a:1"),
        ("images.test/a/b", None),
        ("archives/one.tar.gz", None),
        ("engine:v1", None),
        ("oci://images.test/../etc", None),
        ("oci://images.test/a/../b", None),
        ("oci://user:secret@images.test/a", None),
        ("oci://images.test/A", None),
        ("oci://images.test/a?x=1", None),
        ("oci://images.test/a@sha256:00", None),
        ("ocifile:///srv/a.tar", None),
        ("https://images.test/a:1", None),
        ("/srv/a:1", None),
        ("oci://" + "a" * 600, None),
    ],
)
def test_which_addresses_name_an_image(uri: str, expected: str | None) -> None:
    reference = references.parse(uri)
    assert (str(reference) if reference else None) == expected


async def test_layers_of_every_kind_make_one_folder(setup: Setup) -> None:
    """Plain, gzip and zstd; whiteouts, opaque folders, replaced files, hard links into a lower layer."""
    lower = layer(
        RUN,
        entry("lib", type=FOLDER),
        entry("lib/keep", b"keep"),
        entry("lib/gone", b"gone"),
        entry("cache/old", b"old"),
        entry("cache/deep/old", b"old"),
        entry("replaced", b"first"),
        entry("was-folder/x", b"x"),
        entry("hidden-but-linked", b"linked"),
    )
    middle = layer(
        entry("lib/.wh.gone"),
        entry("cache/new", b"new"),
        entry("cache/.wh..wh..opq"),
        entry("replaced", b"second"),
        entry("was-folder", b"a file now"),
        entry("twin", type=HARD, linkname="hidden-but-linked"),
        entry("inner", type=LINK, linkname="lib/keep"),
    )
    upper = layer(entry(".wh.hidden-but-linked"), entry("lib/more", b"more"), entry("lib/.wh.nothing"))
    digest = setup.registry.push("a/one", [lower, gzip.compress(middle), zstandard.compress(upper)], HERE)
    folder = await setup.install()
    paths = {str(path.relative_to(folder)) for path in folder.rglob("*")}
    names = "run.sh lib lib/keep lib/more cache cache/new replaced was-folder twin inner metadata.json"
    assert paths == set(names.split())
    assert (folder / "replaced").read_bytes() == b"second"
    assert (folder / "twin").read_bytes() == b"linked"
    assert (folder / "inner").read_bytes() == b"keep"
    metadata = read_metadata(folder)
    assert (metadata.digest, metadata.name) == (digest, "one")
    assert setup.left_over() == ["one"]


async def test_hard_links_share_a_file_and_modes_are_safe(setup: Setup) -> None:
    setup.registry.push(
        "a/one", [layer(RUN, entry("x", b"x", mode=0o4777), entry("y", type=HARD, linkname="x"))]
    )
    folder = await setup.install()
    assert (folder / "x").stat().st_ino == (folder / "y").stat().st_ino
    assert stat.S_IMODE((folder / "x").stat().st_mode) == 0o755


@pytest.mark.rule("worker-18.6")
async def test_the_build_for_this_platform_is_chosen(setup: Setup) -> None:
    setup.registry.push("a/one", [layer(entry("other"))], "plan9/mips")
    setup.registry.push("a/one", [layer(RUN)], HERE)
    assert (await setup.install() / "run.sh").exists()
    setup.registry.push("a/two", [layer(RUN)], "plan9/mips")
    setup.registry.push("a/two", [layer(RUN)], "unknown/unknown")
    with pytest.raises(ClusterError, match=f"no build for {HERE}, only for plan9/mips"):
        await setup.install("a/two")


async def test_a_digest_pins_an_image(setup: Setup) -> None:
    digest = setup.registry.push("a/one", [layer(RUN)])
    folder = await setup.install(f"a/one@{digest}")
    assert read_metadata(folder).digest == digest
    setup.registry.manifests["a/one", digest] = setup.registry.manifests[
        "a/one", setup.registry.push("a/one", [layer()])
    ]
    with pytest.raises(SourceError, match="sent another manifest"):
        await setup.install(f"a/one@{digest}")


async def test_a_layer_is_continued_with_a_fresh_address(setup: Setup) -> None:
    """Every signed address is good for one request: each attempt asks the registry again."""
    data = layer(RUN, entry("data", os.urandom(6_000_000)))
    setup.registry.push("a/one", [data])
    setup.registry.drops = [1_500_000, 1_500_000]
    setup.registry.statuses = [403]
    assert (await setup.install() / "data").stat().st_size == 6_000_000
    starts = [int(request.range[6:-1] or 0) for request in setup.registry.seen("storage")]
    assert starts == sorted(starts)
    assert starts[-1] >= 2_900_000
    assert len({request.query for request in setup.registry.seen("storage")}) == len(starts)
    downloading = [tick.current for tick in setup.ticks if tick.phase == "downloading"]
    assert downloading == sorted(downloading)
    assert downloading[-1] == len(data)


async def test_parts_of_a_killed_install_are_used(setup: Setup) -> None:
    first, second = layer(RUN, entry("a", os.urandom(100_000))), layer(entry("b", os.urandom(2_000_000)))
    setup.registry.push("a/one", [first, second])
    for data, length in ((first, len(first)), (second, 1_000_000)):
        name = f"{setup.registry.host}/a/one@{digest_of(data)}"
        hexadecimal = digest_of(data).removeprefix("sha256:")
        part = download.partial_path(setup.store.backends, "one", name, hexadecimal)
        part.write_bytes(data[:length])
    setup.store.recover()
    await setup.install()
    ranges = [request.range for request in setup.registry.seen("storage")]
    assert ranges == [f"bytes={len(first)}-", "bytes=1000000-"]
    assert setup.left_over() == ["one"]


async def test_a_download_of_days_keeps_its_layers(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    """The download of each further layer removes partial files that are older than a day."""
    setup.registry.push("a/one", [layer(RUN), layer(entry("b")), layer(entry("c"))])
    fetch = download.Downloads.fetch

    async def fetch_for_days(self: download.Downloads, archive: download.Archive, *others: Any) -> None:
        await fetch(self, archive, *others)
        for path in setup.store.backends.glob(f"{PARTIAL_PREFIX}*"):
            os.utime(path, (0, 0))

    monkeypatch.setattr(download.Downloads, "fetch", fetch_for_days)
    unpack = archives.unpack

    def unpack_beside_another_install(layers: Any, *others: Any, **more: Any) -> None:
        remove_old_partials(setup.store.backends)
        unpack(layers, *others, **more)

    monkeypatch.setattr("localai_cluster.worker.installer.unpack", unpack_beside_another_install)
    assert {path.name for path in (await setup.install()).iterdir()} >= {"run.sh", "b", "c"}


async def test_a_layer_that_takes_days_keeps_those_before_it(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another install of the worker begins meanwhile, which removes partial files older than a day."""
    setup.registry.push("a/one", [layer(RUN), layer(entry("b"))])
    setup.registry.push("a/two", [layer(RUN)])
    work = Installer(setup.store, (), Throttle(0), "default", setup.client, _unserved)
    receive = download.Downloads._receive_body
    others: list[str] = []

    async def install(name: str) -> None:
        uri = f"oci://{setup.registry.host}/a/{name}"
        await work.install(InstallSource(name, (), uri=uri), setup.ticks.append)

    async def receive_for_days(self: download.Downloads, *arguments: Any) -> None:
        parts = list(setup.store.backends.glob(f"{PARTIAL_PREFIX}*"))
        if parts and not others:
            others.append("two")
            for path in parts:
                os.utime(path, (0, 0))
            await install("two")
        await receive(self, *arguments)

    monkeypatch.setattr(download.Downloads, "_receive_body", receive_for_days)
    await install("one")
    assert {path.name for path in (setup.store.backends / "one").iterdir()} >= {"run.sh", "b"}
    assert setup.left_over() == ["one", "two"]


async def test_a_full_disk_is_told_before_the_first_layer(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup.registry.push("a/one", [layer(RUN)])
    monkeypatch.setattr(source_files, "HEADROOM_BYTES", 2**62)
    with pytest.raises(DiskFull, match="Free up space"):
        await setup.install()
    assert setup.registry.seen("storage") == []


async def test_a_disk_that_fills_up_keeps_no_layer(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the one that was being written nor those that were complete."""

    write_piece: Any = download._write_piece

    def fill_up(archive: Any, file: BinaryIO, received: Any, piece: bytes) -> None:
        if file.tell() > 1_000_000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write_piece(archive, file, received, piece)

    setup.registry.push("a/one", [layer(RUN), layer(entry("b", os.urandom(3_000_000)))])
    monkeypatch.setattr(download, "_write_piece", fill_up)
    with pytest.raises(DiskFull, match="Free up space"):
        await setup.install()
    assert len(setup.registry.seen("storage")) == 2
    assert setup.left_over() == []


async def test_a_cancelled_install_leaves_no_layer(setup: Setup) -> None:
    """Also not those that were complete."""
    halt = Halt()
    setup.registry.push("a/one", [layer(RUN), layer(entry("b", os.urandom(3_000_000)))])
    work = Installer(setup.store, (), Throttle(0), "default", setup.client, _unserved)

    def cancel_in_the_second(tick: Tick) -> None:
        if tick.file_name.startswith("2/2") and not halt.cancelled:
            halt.cancel()
            task.cancel()

    source = InstallSource("one", (), uri=f"oci://{setup.registry.host}/a/one")
    task = asyncio.ensure_future(work.install(source, cancel_in_the_second, halt))
    with pytest.raises(asyncio.CancelledError):
        await task
    assert setup.left_over() == []


async def test_a_layer_with_another_digest_is_never_unpacked(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup.registry.push("a/one", [layer(RUN)])
    [digest] = [digest for digest in setup.registry.blobs if setup.registry.blobs[digest] != b"{}"]
    setup.registry.blobs[digest] = layer(RUN, entry("more"))
    monkeypatch.setattr(archives, "_open_tar", lambda *_: pytest.fail("the layer was read"))
    with pytest.raises(ClusterError, match="the image says"):
        await setup.install()
    assert setup.left_over() == []


async def test_a_token_is_fetched_once_and_again_when_it_is_refused(setup: Setup) -> None:
    setup.registry.with_tokens = True
    setup.registry.push("a/one", [layer(RUN), layer(entry("b"))])
    await setup.install()
    [request] = setup.registry.seen("token")
    assert "service=test" in request.query
    assert "repository%3Aa%2Fone%3Apull" in request.query or "repository:a/one:pull" in request.query
    registries = Registries(setup.client, Access())
    reference = references.parse(f"oci://{setup.registry.host}/a/one")
    assert reference is not None
    await registries.image(reference)
    setup.registry.tokens.clear()
    await registries.image(reference)
    assert len(setup.registry.seen("token")) == 3


async def test_credentials_go_to_the_registry_and_its_named_token_service_only(
    setup: Setup, caplog: pytest.LogCaptureFixture
) -> None:
    """Not to the storage that it redirects to, and into no log, event or metadata."""
    caplog.set_level(logging.DEBUG)
    setup.registry.with_tokens = setup.registry.private = True
    setup.registry.push("a/one", [layer(RUN)])
    folder = await setup.install(access=named(setup.registry))
    assert {request.authorization for request in setup.registry.seen("storage")} == {""}
    assert not any(request.authorization.startswith("Basic") for request in setup.registry.seen("registry"))
    assert PASSWORD not in caplog.text + repr(setup.ticks) + (folder / "metadata.json").read_text()
    assert PASSWORD not in repr(named(setup.registry)) + repr(RegistrySetting("h", "u", PASSWORD))


@pytest.mark.parametrize(
    "realm", ["https://elsewhere.test/token", "http://elsewhere.test/token", "https://[", ""]
)
async def test_a_token_service_elsewhere_gets_no_credential(setup: Setup, realm: str) -> None:
    """Not even on the same host without HTTPS; the message names the setting."""
    setup.registry.with_tokens = True
    setup.registry.realm = realm
    setup.registry.push("a/one", [layer(RUN)])
    with pytest.raises(SourceError, match="name it as its realm in LOCALAI_REGISTRIES"):
        await setup.install(access=named(setup.registry, realm=""))
    assert setup.registry.seen("token") == []


async def test_a_token_service_without_https_is_not_asked(setup: Setup) -> None:
    setup.registry.with_tokens = True
    setup.registry.realm = "http://elsewhere.test/token"
    setup.registry.push("a/one", [layer(RUN)])
    with pytest.raises(SourceError, match="not HTTPS"):
        await setup.install()


async def test_a_registry_with_a_ca_of_its_own(setup: Setup, tmp_path: Path) -> None:
    """The password goes to the token service on its host without being named; no way leads to plain HTTP."""
    authority = Authority(tmp_path / "ca")
    secure = Registry(with_tokens=True, private=True, certificate=authority.issue("registry"))
    secure.start()
    try:
        secure.push("a/one", [layer(RUN)])
        setup.registry = secure
        access = Access([RegistrySetting(secure.host, USER, PASSWORD, plain_http=False)])
        with pytest.raises(SourceError, match="certificate"):
            await setup.install(access=access)
        context = context_with_ca(str(authority.file))
        assert context is not None
        async with httpx.AsyncClient(timeout=10, trust_env=False, verify=context) as setup.client:
            assert (await setup.install(access=access) / "run.sh").exists()
            secure.location = f"http://{secure.storage}/x"
            with pytest.raises(ClusterError, match="redirects from HTTPS to http"):
                await setup.install(access=access)
        assert {request.authorization for request in secure.seen("storage")} == {""}
    finally:
        secure.stop()


async def test_the_proxy_of_the_environment_is_used(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    """HTTP_PROXY and NO_PROXY, as every client reads them: nothing listens at this proxy."""
    setup.registry.push("a/one", [layer(RUN)])
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    for excluded, problem in (("", "cannot reach"), ("127.0.0.1", "")):
        monkeypatch.setenv("NO_PROXY", excluded)
        async with httpx.AsyncClient(timeout=10) as setup.client:
            if problem:
                with pytest.raises(ClusterError, match=problem):
                    await setup.install()
            else:
                await setup.install()


async def test_basic_authentication(setup: Setup) -> None:
    setup.registry.basic = True
    setup.registry.push("a/one", [layer(RUN)])
    with pytest.raises(SourceError, match=r"add .* to LOCALAI_REGISTRIES"):
        await setup.install()
    await setup.install(access=named(setup.registry))
    assert {request.authorization for request in setup.registry.seen("storage")} == {""}


async def test_a_wrong_password_is_named(setup: Setup) -> None:
    setup.registry.with_tokens = setup.registry.private = True
    setup.registry.push("a/one", [layer(RUN)])
    with pytest.raises(SourceError, match="the credential is wrong"):
        await setup.install()


@pytest.mark.parametrize("location", ["ftp://elsewhere.test/x", ""])
async def test_odd_redirects_are_refused(setup: Setup, location: str) -> None:
    setup.registry.push("a/one", [layer(RUN)])
    setup.registry.location = (
        location or f"http://{setup.registry.host}/v2/a/one/blobs/{digest_of(layer(RUN))}"
    )
    with pytest.raises(ClusterError, match=r"redirects|storage"):
        await setup.install()


@pytest.mark.parametrize(
    ("manifest", "problem"),
    [
        (b"<html>", "cannot be read"),
        (b"[" * 100, "levels deep"),
        (b'{"layers": "x"}', "cannot be read"),
        (b"{}", "no layers"),
        (json.dumps({"layers": [{"digest": "sha256:../../x", "size": 1}]}).encode(), "without a sha256"),
        (json.dumps({"layers": [{"digest": digest_of(b""), "size": -1}]}).encode(), "without a sha256"),
        (json.dumps({"layers": [{"digest": digest_of(b""), "size": 2**48}]}).encode(), "more than"),
        (json.dumps({"layers": [{"digest": digest_of(b""), "size": 2**60}]}).encode(), "a possible size"),
        (json.dumps({"layers": [{"digest": digest_of(b"")}] * 600}).encode(), "more than 512 layers"),
        (b" " * 5_000_000, "longer than"),
        (json.dumps({"manifests": [{"digest": "x", "platform": {"os": 1}}]}).encode(), "cannot be read"),
    ],
)
async def test_hostile_manifests_are_refused(setup: Setup, manifest: bytes, problem: str) -> None:
    setup.registry.put("a/one", INDEX, manifest, "latest")
    with pytest.raises(ClusterError, match=problem):
        await setup.install()
    assert setup.left_over() == []


async def test_a_layer_that_is_longer_than_declared_is_not_kept(setup: Setup) -> None:
    data = layer(RUN, entry("a", os.urandom(2_000_000)))
    setup.registry.push("a/one", [data])
    manifest = {"layers": [{"digest": digest_of(data), "size": 10}]}
    setup.registry.put("a/one", INDEX, json.dumps(manifest).encode(), "latest")
    with pytest.raises(ClusterError, match="longer than 10 bytes"):
        await setup.install()
    assert setup.left_over() == []


def test_a_long_challenge_is_read_at_once() -> None:
    """It took minutes, in which the worker sent no heartbeat."""
    assert client._parse_challenge("Bearer " + "a" * 10_000_000) == ("bearer", {})
    assert client._parse_challenge('Bearer realm="https://r/t",scope="x"')[1]["realm"] == "https://r/t"


async def test_a_reply_of_a_token_service_that_nests_deeply_is_refused() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/token":
            return httpx.Response(200, stream=httpx.ByteStream(b'{"token":' + b"[" * 5000))
        return httpx.Response(401, headers={"www-authenticate": 'Bearer realm="https://r.test/token"'})

    reference = references.parse("r.test/a:1")
    assert reference is not None
    async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as http:
        with pytest.raises(SourceError, match="levels deep"):
            await Registries(http, Access()).image(reference)


async def test_an_unknown_image_and_one_without_a_start_file(setup: Setup) -> None:
    with pytest.raises(SourceError, match="has no a/gone with latest"):
        await setup.install("a/gone")
    setup.registry.push("a/one", [layer(entry("bin/run.sh", b""))])
    with pytest.raises(InstallFailed, match=r"no run\.sh at its top"):
        await setup.install()
    assert setup.left_over() == []


def test_credentials_of_a_config_file(tmp_path: Path) -> None:
    """As `docker login` writes them; Docker Hub has a name of its own there."""
    path = tmp_path / "config.json"
    encoded = "cmVhZGVyOndvcmQ="
    path.write_text(
        json.dumps(
            {
                "auths": {
                    "https://index.docker.io/v1/": {"auth": encoded},
                    "images.test:5000": {"username": "u", "password": "p"},
                    "kept.test": {},
                    "odd.test": {"auth": "%%%"},
                    "token.test": {"identitytoken": "t"},
                },
                "credHelpers": {"helped.test": "ecr-login"},
                "credsStore": "desktop",
            }
        )
    )
    access = Access(config=path)
    hub, local = access.credential("docker.io"), access.credential("images.test:5000")
    assert hub is not None
    assert local is not None
    assert (hub.username, hub.password, local.username, local.password) == ("reader", "word", "u", "p")
    assert access.credential("other.test") is None
    for host in ("helped.test", "kept.test"):
        with pytest.raises(SourceError, match="helpers are not run"):
            access.credential(host)
    for host in ("odd.test", "token.test"):
        with pytest.raises(SourceError, match=host):
            access.credential(host)
    for text in ("nonsense", "[" * 1000, "\0"):
        path.write_text(text)
        with pytest.raises(SourceError, match="not JSON"):
            access.credential("x.test")
    path.unlink()
    assert access.credential("x.test") is None


@pytest.mark.parametrize(
    "text",
    [
        "x",
        '{"host": "a"}',
        '[{"host": 1}]',
        '[{"password": "hidden-word"}]',
        '[{"host": "https://a", "password": "hidden-word"}]',
        '[{"host": "a", "realm": "b", "password": "hidden-word"}]',
        '[{"host": "a", "user": "hidden-word"}]',
    ],
)
def test_a_wrong_list_of_registries_is_refused_and_not_quoted(text: str) -> None:
    with pytest.raises(InvalidSettings, match=r"LOCALAI_REGISTRIES.* is not ") as refused:
        build({"register_to": "http://h"}, {"LOCALAI_REGISTRIES": text})
    assert "hidden-word" not in str(refused.value)


def test_which_registries_are_read_over_plain_http() -> None:
    settings = [
        RegistrySetting("plain.test", plain_http=True),
        RegistrySetting("secure.test", "u", "p"),
        RegistrySetting("localhost:7000", plain_http=False),
    ]
    access = Access(settings)
    assert access.base_url("plain.test") == "http://plain.test"
    assert access.base_url("secure.test") == access.base_url("secure.test") == "https://secure.test"
    assert access.base_url("localhost:7000") == "https://localhost:7000"
    assert access.base_url("localhost:5000") == "http://localhost:5000"
    assert access.base_url("docker.io") == "https://registry-1.docker.io"
    assert access.may_authenticate_at("docker.io", "https://auth.docker.io/token")
    assert access.may_authenticate_at("secure.test", "https://secure.test/token")
    assert not access.may_authenticate_at("secure.test", "https://secure.test:8443/token")
    assert not access.may_authenticate_at("secure.test", "https://secure.test@elsewhere.test/token")


def unpacked(folder: Path, *layers: bytes) -> Path:
    paths = []
    for number, data in enumerate(layers):
        paths.append(folder / f"layer{number}")
        paths[-1].write_bytes(data)
    target = folder / "target"
    archives.unpack(paths, target, Throttle(0), threading.Event(), lambda *_: None, is_image=True)
    return target


@pytest.mark.parametrize(
    "layers",
    [
        [layer(entry("../outside", b"x"))],
        [layer(entry("/outside", b"x"))],
        [layer(entry("x", type=LINK, linkname="..")), layer(entry("x/outside", b"x"))],
        [layer(entry("x", type=LINK, linkname="y"), entry("y", type=LINK, linkname="x"), entry("x/z"))],
        [
            layer(
                entry("a", type=LINK, linkname="/b/../.."), entry("b", type=LINK, linkname=".."), entry("b/x")
            )
        ],
        [layer(entry("x", type=LINK, linkname="/" + "a/" * 3000))],
        [layer(entry("d/x"), entry("y", type=HARD, linkname="d"))],
        [layer(entry("s", type=LINK, linkname="/usr"), entry("x", type=LINK, linkname="s/../../outside"))],
        [layer(entry("x", type=LINK, linkname="y")), layer(entry("y", type=LINK, linkname="../outside"))],
        [layer(entry("a/.wh...", b""), entry("x", type=HARD, linkname="../outside"))],
        [layer(entry("x", type=HARD, linkname="y")), layer(entry("y", b"later"))],
        [layer(entry("dev", type=tarfile.CHRTYPE))],
        [layer(entry("x", b"1")), layer(entry("x/y", b"below a file"))],
        [zstandard.compress(layer(entry("x", bytes(100_000))))[:-20]],
        [gzip.compress(layer(entry("x", os.urandom(100_000))))[:-20]],
    ],
)
def test_layers_that_are_refused(tmp_path: Path, layers: list[bytes]) -> None:
    with pytest.raises((BadSource, OSError)):
        unpacked(tmp_path, *layers)
    assert not (tmp_path / "outside").exists()


def contents(folder: Path) -> dict[str, str]:
    """The target of each link, the content of each file, by path."""
    paths = sorted(path for path in folder.rglob("*") if path.is_symlink() or path.is_file())
    return {
        str(path.relative_to(folder)): f"-> {os.readlink(path)}" if path.is_symlink() else path.read_text()
        for path in paths
    }


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        (
            [
                layer(entry("usr/lib/x", b"x"), entry("lib64", type=LINK, linkname="/lib")),
                layer(entry("lib", type=LINK, linkname="usr/lib")),
            ],
            {"usr/lib/x": "x", "lib": "-> usr/lib", "lib64": "-> lib"},
        ),
        (
            [layer(entry("v/bin/python", type=LINK, linkname="/usr/bin/python3"))],
            {"v/bin/python": "-> /usr/bin/python3"},
        ),
        (
            [
                layer(entry("v/bin/python", type=LINK, linkname="/usr/bin/py"), entry("usr/bin/py", b"own")),
                layer(entry("root", type=LINK, linkname="/"), entry("usr/bin/up", type=LINK, linkname="/")),
            ],
            {
                "v/bin/python": "-> ../../usr/bin/py",
                "usr/bin/py": "own",
                "root": "-> .",
                "usr/bin/up": "-> ../..",
            },
        ),
        (
            [layer(entry("lib", type=LINK, linkname="usr/lib")), layer(entry("lib/a/b", b"below a link"))],
            {"lib": "-> usr/lib", "usr/lib/a/b": "below a link"},
        ),
        (
            [layer(entry("x", type=LINK, linkname="/etc")), layer(entry("x/passwd", b"mine"))],
            {"x": "-> etc", "etc/passwd": "mine"},
        ),
        (
            [layer(entry("x", type=LINK, linkname=".")), layer(entry("x/y", b"through a link"))],
            {"x": "-> .", "y": "through a link"},
        ),
        (
            [
                layer(entry("lib", type=LINK, linkname="usr/lib"), entry("usr/lib/a", b"a")),
                layer(entry("lib", type=FOLDER), entry("lib/b", b"b")),
            ],
            {"lib/b": "b", "usr/lib/a": "a"},
        ),
        (
            [
                layer(entry("lib", type=LINK, linkname="usr/lib"), entry("usr/lib/a", b"a")),
                layer(entry("lib/.wh.a")),
            ],
            {"lib": "-> usr/lib"},
        ),
        (
            [
                layer(
                    entry("l", type=LINK, linkname="x"),
                    entry("d/m", type=HARD, linkname="l"),
                    entry("x", b"x"),
                )
            ],
            {"l": "-> x", "d/m": "-> x", "x": "x"},
        ),
        ([layer(entry("x", b"1"), entry("x", b"2"))], {"x": "2"}),
        (
            [layer(entry("x", b"1"), entry("x", type=LINK, linkname="y"), entry("y/z", b"2"))],
            {"x": "-> y", "y/z": "2"},
        ),
        ([layer(entry("x/y", b"1"), entry("x", b"2"))], {"x": "2"}),
        (
            [layer(entry("x", b"1")), layer(entry("d/y", type=HARD, linkname="x"), entry("d/.wh..wh..opq"))],
            {"x": "1", "d/y": "1"},
        ),
    ],
)
@pytest.mark.rule("worker-18.6")
def test_layers_as_other_builders_write_them(
    tmp_path: Path, layers: list[bytes], expected: dict[str, str]
) -> None:
    """D-ARCHIVES: links from the root of the image, files below a folder's link, a path that occurs twice."""
    assert contents(unpacked(tmp_path, *layers)) == expected
    assert sorted(os.listdir(tmp_path)) == [*(f"layer{number}" for number in range(len(layers))), "target"]


def test_nothing_follows_a_link_to_the_machine(tmp_path: Path) -> None:
    """Its files are neither read nor written, also if a path of the image runs through it."""
    outside = tmp_path / "outside"
    outside.mkdir()
    unpacked(
        tmp_path,
        layer(entry("x", type=LINK, linkname=str(outside)), entry("y", type=LINK, linkname="x/secret")),
        layer(entry("x/.wh.secret"), entry("z", type=LINK, linkname=f"{outside}/secret")),
        layer(entry("x/new", b"new", mode=0o777)),
    )
    assert list(outside.iterdir()) == []


def test_bombs_of_all_layers_together_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By size, by entries, by folders that only paths name; nothing is written."""
    deep = "/".join("d" * 1 for _ in range(500))
    for name, limit, layers in (
        (
            "MAX_UNPACKED_BYTES",
            1_000_000,
            [zstandard.compress(layer(entry(f"x{n}", bytes(600_000)))) for n in "ab"],
        ),
        ("MAX_ENTRIES", 3, [layer(entry("a"), entry("b")), layer(entry("c"), entry("d"))]),
        ("MAX_ENTRIES", 400, [layer(entry(deep))]),
        (
            "MAX_ENTRIES",
            30,
            [layer(*(entry(f"l{n}", type=LINK, linkname=f"l{n + 1}") for n in range(20)), entry("l0/x"))],
        ),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(archives, name, limit)
            with pytest.raises(BadSource, match="more than"):
                unpacked(tmp_path, *layers)
    assert not (tmp_path / "target").exists()


def test_a_whiteout_spares_its_own_layer(tmp_path: Path) -> None:
    target = unpacked(
        tmp_path,
        layer(entry("d/old"), entry("e/old")),
        layer(
            entry("d/new"), entry(".wh.d"), entry(".wh.e"), entry("x"), entry(".wh.x"), entry(".wh..wh..opq")
        ),
    )
    assert {str(path.relative_to(target)) for path in target.rglob("*")} == {"d", "d/new", "x"}


def test_an_ordinary_archive_may_have_such_names(tmp_path: Path) -> None:
    (tmp_path / "archive").write_bytes(layer(entry("x", b"x"), entry(".wh.x", b"y")))
    archives.unpack([tmp_path / "archive"], tmp_path / "t", Throttle(0), threading.Event(), lambda *_: None)
    assert sorted(os.listdir(tmp_path / "t")) == [".wh.x", "x"]
