"""Backends from archives: what is downloaded, what is resumed, and what is never unpacked."""

import asyncio
import errno
import gzip
import hashlib
import io
import os
import random
import shutil
import stat
import tarfile
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from localai_cluster.kit import clock, outbound
from localai_cluster.kit.errors import ClusterError
from localai_cluster.messaging.messages import Gallery
from localai_cluster.worker import archives, backend_store, download, source_files
from localai_cluster.worker.backend_store import PARTIAL_PREFIX, STAGED_SUFFIX, BackendStore, read_metadata
from localai_cluster.worker.cancellation import Halt
from localai_cluster.worker.control_plane import CallFailed, ControlPlane
from localai_cluster.worker.identity import NodeIdentity
from localai_cluster.worker.installer import Installer, InstallFailed, InstallSource
from localai_cluster.worker.progress import Tick, ignore_tick
from localai_cluster.worker.source_files import BadSource, Throttle, WorkCancelled
from tests.support.effort import EFFORT

SCRIPT = b"#!/bin/sh\nexit 1\n"


def entry(name: str, content: bytes = b"", **more: Any) -> tuple[tarfile.TarInfo, bytes]:
    """One entry of an archive; `more` are attributes of its header."""
    info = tarfile.TarInfo(name)
    info.size, info.mode = len(content), 0o755
    for key, value in more.items():
        setattr(info, key, value)
    return info, content


def tar(*entries: tuple[tarfile.TarInfo, bytes], format: int = tarfile.PAX_FORMAT) -> bytes:
    """A plain archive of a backend with these entries besides."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:", format=format) as file:
        for info, content in (entry("run.sh", SCRIPT), *entries):
            file.addfile(info, io.BytesIO(content))
    return out.getvalue()


def opened(data: bytes, folder: Path, *, stopped: threading.Event | None = None) -> Path:
    """Unpacks these bytes into `folder`/target."""
    (folder / "archive").write_bytes(data)
    target = folder / "target"
    archives.unpack([folder / "archive"], target, Throttle(0), stopped or threading.Event(), lambda *_: None)
    return target


@dataclass
class Site:
    """A web server with files and faults: `drops` answers end after that many bytes."""

    files: dict[str, bytes] = field(default_factory=dict)
    drops: list[int] = field(default_factory=list)
    statuses: list[int] = field(default_factory=list)
    redirects: dict[str, str] = field(default_factory=dict)
    ranges: list[str] = field(default_factory=list)
    credentials: list[str] = field(default_factory=list)
    url: str = ""
    with_ranges: bool = True
    with_length: bool = True

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        self.ranges.append(request.headers.get("Range", ""))
        self.credentials.append(request.headers.get("Authorization", ""))
        if self.statuses:
            request.send_error(self.statuses.pop(0))
            return
        if request.path in self.redirects:
            request.send_response(302)
            request.send_header("Location", self.redirects[request.path])
            request.end_headers()
            return
        whole = self.files.get(request.path.partition("?")[0])
        if whole is None:
            request.send_error(404)
            return
        start = int(self.ranges[-1][6:-1] or 0) if self.with_ranges else 0
        if start and start >= len(whole):
            request.send_response(416)
            request.send_header("Content-Range", f"bytes */{len(whole)}")
            request.end_headers()
            return
        request.send_response(206 if start else 200)
        if start:
            request.send_header("Content-Range", f"bytes {start}-{len(whole) - 1}/{len(whole)}")
        if self.with_length:
            request.send_header("Content-Length", str(len(whole) - start))
        request.end_headers()
        most = self.drops.pop(0) if self.drops else len(whole)
        request.wfile.write(whole[start : start + most])


@pytest.fixture
def site() -> Iterator[Site]:
    made = Site()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            made.answer(self)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    made.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield made
    server.shutdown()
    server.server_close()


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BackendStore:
    monkeypatch.setattr(download, "RETRY_PAUSES", (0.0, 0.0, 0.0))
    (tmp_path / "backends").mkdir()
    return BackendStore(tmp_path / "backends", tmp_path / "system", "default")


async def unserved(file: str, headers: Mapping[str, str]) -> httpx.Response:
    raise CallFailed("no gallery", 404)


async def install(
    store: BackendStore, site: Site, *, sha256: str | None = None, file: str = "/one.tar", **more: Any
) -> list[Tick]:
    """Installs the backend `one` from a gallery on the site, which gives the hash of the file; the ticks."""
    right = hashlib.sha256(site.files.get(file, b"")).hexdigest()
    listed = f"sha256: '{right if sha256 is None else sha256}'\n" if sha256 != "" else ""
    site.files["/g/index.yaml"] = f"- name: one\n  uri: {more.pop('uri', '..' + file)}\n  {listed}".encode()
    ticks: list[Tick] = []
    async with httpx.AsyncClient(timeout=10) as client:
        work = Installer(store, (), Throttle(more.pop("rate", 0)), "default", client, unserved)
        gallery = Gallery(f"{site.url}/g/index.yaml", "web")
        await work.install(InstallSource("one", [gallery]), ticks.append)
    return ticks


def left_over(store: BackendStore) -> list[str]:
    return sorted(path.name for path in store.backends.iterdir())


@pytest.mark.rule("worker-18.3", "worker-18.6")
async def test_an_archive_is_installed_with_its_bytes_as_progress(store: BackendStore, site: Site) -> None:
    """A relative `uri` starts at the index; the ticks count the bytes of the archive up to all of them."""
    site.files["/one.tar"] = tar(entry("lib/data", os.urandom(3_000_000)))
    ticks = [tick for tick in await install(store, site) if tick.phase == "downloading"]
    assert (store.backends / "one" / "run.sh").read_bytes() == SCRIPT
    assert (store.backends / "one" / "lib" / "data").stat().st_size == 3_000_000
    assert [tick.current for tick in ticks] == sorted(tick.current for tick in ticks)
    assert {tick.total for tick in ticks} == {len(site.files["/one.tar"])}
    assert ticks[-1].current == ticks[-1].total
    assert read_metadata(store.backends / "one").uri == "../one.tar"
    assert left_over(store) == ["one"]


@pytest.mark.parametrize("suffix", ["tar.gz", "tgz"])
async def test_packed_archives(store: BackendStore, site: Site, suffix: str) -> None:
    site.files[f"/one.{suffix}"] = gzip.compress(tar(entry("data", bytes(100_000))))
    await install(store, site, file=f"/one.{suffix}")
    assert (store.backends / "one" / "data").stat().st_size == 100_000


async def test_a_lost_connection_is_continued_where_it_broke_off(store: BackendStore, site: Site) -> None:
    """worker.md §18.6: a `.partial` file with Range resume; tries that bring something do not add up."""
    site.files["/one.tar"] = tar(entry("data", os.urandom(8_000_000)))
    site.drops = [0, 0, 1_500_000, 1_500_000, 1_500_000, 1_500_000]  # the index is the first
    site.drops[0] = 10**9
    await install(store, site)
    starts = [int(asked[6:-1] or 0) for asked in site.ranges[1:]]
    assert starts == sorted(starts)
    assert len(starts) == 6
    assert starts[-1] >= 5_000_000
    assert left_over(store) == ["one"]


async def test_a_source_that_starts_over_each_time_is_given_up(store: BackendStore, site: Site) -> None:
    """Without ranges only bytes beyond the furthest ones are progress, else it would be tried for ever."""
    site.files["/one.tar"] = tar(entry("data", os.urandom(8_000_000)))
    site.with_ranges = False
    site.drops = [10**9, *[1_500_000, 3_000_000] * 10]  # the index is the first
    with pytest.raises(InstallFailed, match="connection lost"):
        await install(store, site)
    assert len(site.ranges) < 10


async def test_no_source_waits_while_received_bytes_are_hashed(
    store: BackendStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would drop the connection while tens of gigabytes are read, at each retry again."""
    data, is_open, hashed = os.urandom(5_000_000), False, list[tuple[bool, int]]()
    sha256 = hashlib.sha256(data).hexdigest()

    async def send(start: int) -> AsyncIterator[bytes]:
        yield data[start : start + 2_000_000]
        if start < 3_000_000:
            raise httpx.ReadError("dropped")

    @asynccontextmanager
    async def open_part(headers: Mapping[str, str]) -> AsyncIterator[httpx.Response]:
        nonlocal is_open
        start = int(headers["Range"][6:-1])
        is_open = True
        content_range = {"Content-Range": f"bytes {start}-{len(data) - 1}/{len(data)}"}
        yield httpx.Response(206, headers=content_range, content=send(start))
        is_open = False

    def hash_of(file: Any, stopped: Any, size: int | None = None) -> Any:
        hashed.append((is_open, size or 0))
        return source_files.hash_of(file, stopped, size)

    monkeypatch.setattr(download, "hash_of", hash_of)
    partial = download.partial_path(tmp_path, "one", "web", sha256)
    partial.write_bytes(data[:1_000_000])
    archive = download.Archive("web", sha256, partial, open_part, len(data))
    async with httpx.AsyncClient() as client:
        await download.Downloads(client, unserved, Throttle(0)).fetch(archive, lambda *_: None, Halt())
    assert partial.read_bytes() == data
    assert hashed == [(False, 1_000_000)]


async def test_a_part_of_an_earlier_install_is_used_if_its_hash_is_right(
    store: BackendStore, site: Site
) -> None:
    """The worker was killed in the middle: what is there is not downloaded again, and the hash decides."""
    data = site.files["/one.tar"] = tar(entry("data", os.urandom(2_000_000)))
    sha256 = hashlib.sha256(data).hexdigest()
    part = download.partial_path(store.backends, "one", f"{site.url}/one.tar", sha256)
    for begin in (data[:1_000_000], data, data + b"more", bytes(1_000_000)):
        part.write_bytes(begin)
        store.recover()
        site.ranges.clear()
        await install(store, site)
        assert f"bytes={len(begin)}-" in site.ranges
        assert (store.backends / "one" / "run.sh").exists()
        assert left_over(store) == ["one"]


async def test_an_old_part_is_removed_at_the_start(store: BackendStore) -> None:
    for name, age in (("old", backend_store.PARTIAL_KEEP_SECONDS + 60), ("new", 60)):
        (store.backends / f"{PARTIAL_PREFIX}{name}").touch()
        then = (store.backends / f"{PARTIAL_PREFIX}{name}").stat().st_mtime - age
        os.utime(store.backends / f"{PARTIAL_PREFIX}{name}", (then, then))
    (store.backends / f"x{STAGED_SUFFIX}").mkdir()
    store.recover()
    assert left_over(store) == [f"{PARTIAL_PREFIX}new"]


async def test_a_wrong_hash_is_refused_before_anything_is_unpacked(
    store: BackendStore, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names both hashes, the installed version stays, nothing is left over."""
    site.files["/one.tar"] = tar()
    await install(store, site)
    monkeypatch.setattr(archives, "_open_tar", lambda *_: pytest.fail("the archive was read"))
    with pytest.raises(InstallFailed, match=f"says {'0' * 64}"):
        await install(store, site, sha256="0" * 64)
    with pytest.raises(InstallFailed, match="says nonsense"):
        await install(store, site, sha256="nonsense")
    assert left_over(store) == ["one"]


async def test_without_a_hash_it_is_installed_with_a_warning(
    store: BackendStore, site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing that an earlier try left is trusted, and no part is asked for."""
    data = site.files["/one.tar"] = tar(entry("data", os.urandom(2_000_000)))
    download.partial_path(store.backends, "one", f"{site.url}/one.tar", "").write_bytes(bytes(5_000_000))
    site.drops = [10**9, 1_500_000]
    await install(store, site, sha256="")
    assert "has no sha256" in caplog.text
    assert set(site.ranges) == {""}
    assert (store.backends / "one" / "data").read_bytes() in data


async def test_passing_errors_are_tried_again_and_others_are_not(
    store: BackendStore, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.files["/one.tar"] = tar()
    site.files["/g/index.yaml"] = b""
    await install(store, site)
    before = len(site.ranges)
    site.files.pop("/one.tar")
    with pytest.raises(InstallFailed, match="HTTP status 404"):
        await install(store, site)
    assert len(site.ranges) == before + 2
    site.files["/one.tar"] = tar()
    work_around = [200, 503, 429]

    def answer(request: BaseHTTPRequestHandler, plain: Any = site.answer) -> None:
        if request.path == "/one.tar" and work_around and (status := work_around.pop()) != 200:
            request.send_error(status)
        else:
            plain(request)

    monkeypatch.setattr(site, "answer", answer)
    await install(store, site)
    assert work_around == []


async def test_a_server_that_hangs_is_given_up(
    store: BackendStore, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """worker.md §18.6: so many seconds to the headers, so many without a byte."""
    monkeypatch.setattr(download, "STALL_TIMEOUT", 0.2)
    release = threading.Event()
    data = site.files["/one.tar"] = tar(entry("data", bytes(500_000)))

    def hang(request: BaseHTTPRequestHandler, plain: Any = site.answer) -> None:
        if request.path != "/one.tar":
            plain(request)
            return
        request.send_response(200)
        request.send_header("Content-Length", str(len(data)))
        request.end_headers()
        request.wfile.write(data[:1000])
        release.wait(60)

    monkeypatch.setattr(site, "answer", hang)
    with pytest.raises(InstallFailed, match="no answer in time"):
        await install(store, site)
    release.set()


async def test_a_byte_now_and_then_does_not_keep_a_download_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """The missing bytes count as waiting; a server that sends enough may pause in between."""
    now = [0.0]
    monkeypatch.setattr(clock, "monotonic", lambda: now[0])

    async def received(pause: float, size: int, count: int) -> int:
        class Drip(httpx.AsyncByteStream):
            async def __aiter__(self) -> AsyncIterator[bytes]:
                for _ in range(count):
                    now[0] += pause
                    await asyncio.sleep(0)
                    yield bytes(size)

        pieces = outbound.read_pieces(httpx.Response(200, stream=Drip()).aiter_raw(), 1024)
        return sum([len(piece) async for piece in pieces])

    assert (
        await received(50.0, 50 * outbound.MIN_BYTES_PER_SECOND, 20) == 1000 * outbound.MIN_BYTES_PER_SECOND
    )
    with pytest.raises(TimeoutError):
        await received(50.0, 1, 20)


async def test_the_mirrors_come_after_the_address(store: BackendStore, site: Site) -> None:
    site.files["/two.tar"] = tar()
    sha256 = hashlib.sha256(site.files["/two.tar"]).hexdigest()
    await install(store, site, sha256=sha256, uri="/gone.tar\n  mirrors: [ocifile://x/y, ../two.tar]")
    assert (store.backends / "one" / "run.sh").exists()


async def test_a_mirror_is_tried_after_an_archive_that_cannot_be_unpacked(
    store: BackendStore, site: Site
) -> None:
    """Without a hash the damage shows only then. If every archive is damaged, the installed version stays."""
    good = tar(entry("version", b"new"))
    site.files |= {"/one.tar": good[:700], "/two.tar": good}
    await install(store, site, sha256="", uri="../one.tar\n  mirrors: [../two.tar]")
    assert (store.backends / "one" / "version").read_bytes() == b"new"
    site.files["/two.tar"] = b"<html>not found</html>"
    with pytest.raises(InstallFailed, match=r"damaged.*damaged"):
        await install(store, site, sha256="", uri="../one.tar\n  mirrors: [../two.tar]")
    assert (store.backends / "one" / "version").read_bytes() == b"new"
    assert left_over(store) == ["one"]


async def test_a_redirect_of_a_public_address_is_followed(store: BackendStore, site: Site) -> None:
    site.files["/real.tar"] = tar()
    site.redirects["/one.tar"] = "/real.tar"
    sha256 = hashlib.sha256(site.files["/real.tar"]).hexdigest()
    await install(store, site, sha256=sha256)
    assert (store.backends / "one" / "run.sh").exists()


def control_plane(site: Site, folder: Path, client: httpx.AsyncClient) -> ControlPlane:
    folder.mkdir(mode=0o700)
    return ControlPlane(site.url, "", NodeIdentity(folder), "1" * 32, client)


async def test_the_gallery_of_the_control_plane_is_read_with_the_nodes_secret(
    tmp_path: Path, store: BackendStore, site: Site
) -> None:
    """`cluster:` URLs: the index and, relative to it, the archives, in parts if the connection breaks."""
    site.files["/api/node/n-1/gallery/one.tar"] = tar(entry("data", os.urandom(3_000_000)))
    sha256 = hashlib.sha256(site.files["/api/node/n-1/gallery/one.tar"]).hexdigest()
    index = f"- name: one\n  uri: one.tar\n  sha256: '{sha256}'\n"
    site.files["/api/node/n-1/gallery/index.yaml"] = index.encode()
    site.drops = [10**9, 1_500_000]
    async with httpx.AsyncClient(timeout=10) as client:
        plane = control_plane(site, tmp_path / "identity", client)
        work = Installer(
            store, (), Throttle(0), "default", client, lambda f, h: plane.open_gallery("n-1", f, h)
        )
        await work.install(InstallSource("one", [Gallery("cluster:index.yaml", "local")]), ignore_tick)
        secret = NodeIdentity(tmp_path / "identity").secret
    assert (store.backends / "one" / "data").stat().st_size == 3_000_000
    assert set(site.credentials) == {f"Bearer {secret}"}
    assert [bool(asked) for asked in site.ranges] == [False, False, True]


async def test_a_redirect_is_never_followed_with_the_nodes_secret(tmp_path: Path, site: Site) -> None:
    site.files["/elsewhere"] = tar()
    site.redirects["/api/node/n-1/gallery/one.tar"] = "/elsewhere"
    async with httpx.AsyncClient(timeout=10, follow_redirects=True) as client:
        plane = control_plane(site, tmp_path / "identity", client)
        with pytest.raises(CallFailed, match="redirects are not followed"):
            await plane.open_gallery("n-1", "one.tar", {})
    assert len(site.credentials) == 1


async def test_the_bandwidth_limit_holds_for_downloads(store: BackendStore, site: Site) -> None:
    """LOCALAI_WORKER_DOWNLOAD_RATE: the throttle is asked for every byte of the archive."""
    waited: list[int] = []

    class Counting(Throttle):
        def pause(self, size: int) -> float:
            waited.append(size)
            return 0.0

    site.files["/one.tar"] = tar(entry("data", bytes(500_000)))
    async with httpx.AsyncClient() as client:
        downloads = download.Downloads(client, unserved, Counting(200_000))
        url = f"{site.url}/one.tar"
        target = download.Archive(url, "", store.backends / f"{PARTIAL_PREFIX}x")
        await downloads.fetch(target, lambda *_: None, Halt())
    assert sum(waited) == len(site.files["/one.tar"])
    assert max(waited) <= 10_000


@pytest.mark.parametrize("known", [True, False], ids=["length", "no length"])
async def test_an_archive_that_is_too_long_is_refused(
    store: BackendStore, site: Site, monkeypatch: pytest.MonkeyPatch, known: bool
) -> None:
    site.files["/one.tar"] = tar(entry("data", bytes(500_000)))
    site.with_length = known
    monkeypatch.setattr(download, "MAX_ARCHIVE_BYTES", 100_000)
    with pytest.raises(ClusterError, match="100000"):
        await install(store, site)


async def test_a_full_disk_is_told_before_the_download(
    store: BackendStore, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.files["/one.tar"] = tar()
    monkeypatch.setattr(source_files, "HEADROOM_BYTES", 2**62)
    with pytest.raises(InstallFailed, match="Free up space"):
        await install(store, site)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
async def test_a_disk_that_fills_up_is_not_kept_full(
    store: BackendStore, site: Site, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """In mid-stream, also of what could be resumed; the mirror would fill the disk as well."""

    class Full(io.FileIO):
        def write(self, piece: Any) -> int:
            if self.tell() > 1_000_000:
                raise OSError(code, os.strerror(code))
            return super().write(piece)

    monkeypatch.setattr(download, "open", lambda path, mode: Full(path, mode), raising=False)
    site.files["/one.tar"] = tar(entry("data", os.urandom(3_000_000)))
    with pytest.raises(InstallFailed, match="Free up space"):
        await install(store, site, uri="../one.tar\n  mirrors: [../two.tar]")
    assert len(site.ranges) == 2
    assert left_over(store) == []


async def test_an_archive_of_unknown_length_cannot_fill_the_disk(
    store: BackendStore, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The headroom stays free."""
    disk, site.with_length = 5_000_000, False
    most = [0]

    def usage(folder: Path) -> Any:
        used = sum(path.stat().st_size for path in store.backends.iterdir())
        most[0] = max(most[0], used)
        return shutil._ntuple_diskusage(disk, used, disk - used)

    site.files["/one.tar"] = tar(entry("data", os.urandom(8_000_000)))
    monkeypatch.setattr(source_files, "HEADROOM_BYTES", 1_000_000)
    monkeypatch.setattr(shutil, "disk_usage", usage)
    with pytest.raises(InstallFailed, match="Free up space"):
        await install(store, site)
    assert 0 < most[0] <= 4_000_000
    assert left_over(store) == []


async def test_a_disk_that_fills_up_while_it_unpacks(
    store: BackendStore, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    site.files["/one.tar"] = tar(entry("data", bytes(1000)))
    monkeypatch.setattr(archives._TreeWriter, "_write", full)
    with pytest.raises(InstallFailed, match="Free up space"):
        await install(store, site, uri="../one.tar\n  mirrors: [../two.tar]")
    assert left_over(store) == []


async def test_what_is_no_archive_is_named(tmp_path: Path, store: BackendStore, site: Site) -> None:
    """Schemes that this worker does not know, and files with another suffix."""
    work = Installer(store, (tmp_path,), Throttle(0), "default", httpx.AsyncClient(), unserved)
    (tmp_path / "x.zip").touch()
    for uri in (
        "oci://quay.io/X/y",
        f"{site.url}/x.zip",
        "ftp://x/y.tar",
        str(tmp_path / "x.zip"),
        "http://[/x.tar",
    ):
        with pytest.raises(InstallFailed, match=r"archive|source that this worker knows"):
            await work.install(InstallSource("one", (), uri=uri), ignore_tick)
    for uri in (
        "http://127.0.0.1:99999/x.tar",
        "http://exa mple/x.tar",
        "cluster:../x.tar",
        "cluster:.x.tar",
    ):
        with pytest.raises(ClusterError):
            await work.install(InstallSource("one", (), uri=uri), ignore_tick)
    assert left_over(store) == []


async def test_credentials_in_an_address_are_neither_shown_nor_kept(
    store: BackendStore, site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    site.files["/one.tar"] = tar()
    url = site.url.replace("//", "//user:hidden-word@")
    work = Installer(store, (), Throttle(0), "default", httpx.AsyncClient(), unserved)
    await work.install(InstallSource("one", (), uri=f"{url}/one.tar?key=hidden-word"), ignore_tick)
    assert "hidden-word" not in read_metadata(store.backends / "one").uri
    with pytest.raises(ClusterError) as refused:
        await work.install(InstallSource("one", (), uri=f"{url}/gone.tar?key=hidden-word"), ignore_tick)
    assert "hidden-word" not in refused.value.message
    assert "hidden-word" not in caplog.text


async def test_an_archive_of_this_machine_needs_no_download(tmp_path: Path, store: BackendStore) -> None:
    """Read inside the allowed folders only, its hash checked, the unpacked bytes as progress."""
    data = tar(entry("data", bytes(100_000)))
    (tmp_path / "sources").mkdir()
    (tmp_path / "sources" / "one.tar").write_bytes(data)
    (tmp_path / "outside.tar").write_bytes(data)
    index = tmp_path / "sources" / "index.yaml"
    right = hashlib.sha256(data).hexdigest()
    work = Installer(store, (tmp_path / "sources",), Throttle(0), "default", httpx.AsyncClient(), unserved)
    ticks: list[Tick] = []
    for uri, sha256, problem in (
        ("one.tar", right, ""),
        ("one.tar", "0" * 64, "sha256"),
        ("../outside.tar", right, "LOCALAI_WORKER_SOURCE_ROOTS"),
    ):
        index.write_text(f"- name: one\n  uri: {uri}\n  sha256: '{sha256}'\n")
        source = InstallSource("one", [Gallery(index.as_uri(), "disk")])
        if problem:
            with pytest.raises(InstallFailed, match=problem):
                await work.install(source, ticks.append)
        else:
            await work.install(source, ticks.append)
    assert {(tick.current, tick.total) for tick in ticks} >= {(100_000 + len(SCRIPT),) * 2}


def test_unpacking_keeps_files_folders_modes_and_inner_links(tmp_path: Path) -> None:
    target = opened(
        tar(
            entry("./lib", type=tarfile.DIRTYPE, mode=0o500),
            entry("lib/big", bytes(2_500_000), mode=0o4777),
            entry("lib/inner", type=tarfile.SYMTYPE, linkname="../run.sh"),
            entry("again", type=tarfile.LNKTYPE, linkname="run.sh"),
            entry("a/b/c", b"deep", mode=0o200),
            entry("lib64", type=tarfile.SYMTYPE, linkname="lib"),
        ),
        tmp_path,
    )
    assert (target / "lib" / "inner").resolve() == target / "run.sh"
    assert (target / "again").read_bytes() == SCRIPT
    assert (target / "a" / "b" / "c").read_bytes() == b"deep"
    assert stat.S_IMODE((target / "lib" / "big").stat().st_mode) == 0o755
    assert stat.S_IMODE((target / "lib").stat().st_mode) == 0o700
    assert (target / "lib64" / "big").stat().st_size == 2_500_000


LINK, HARD = tarfile.SYMTYPE, tarfile.LNKTYPE


@pytest.mark.parametrize(
    "entries",
    [
        [entry("/etc/cron.d/x", b"x")],
        [entry("../outside", b"x")],
        [entry("a/../../outside", b"x")],
        [entry("x", type=LINK, linkname="/etc/passwd")],
        [entry("x", type=LINK, linkname="../outside")],
        [entry("a/x", type=LINK, linkname="../../outside")],
        [entry("x", type=HARD, linkname="../outside")],
        [entry("x", type=HARD, linkname="/etc/passwd")],
        [entry("x", type=HARD, linkname="nothing")],
        [entry("x", type=LINK, linkname="."), entry("x/y", b"through a link")],
        [entry("x", type=LINK, linkname="run.sh"), entry("x", b"twice")],
        [entry("x", b"twice"), entry("x", b"twice")],
        [
            entry("s", type=tarfile.DIRTYPE),
            entry("s/up", type=LINK, linkname=".."),
            entry("x", type=LINK, linkname="s/up/../outside"),
        ],
        [entry("x", type=HARD, linkname="y"), entry("y", type=LINK, linkname="run.sh")],
        [entry("dev", type=tarfile.CHRTYPE)],
        [entry("disk", type=tarfile.BLKTYPE)],
        [entry("pipe", type=tarfile.FIFOTYPE)],
        [entry("x", type=b"Z")],
        [entry("run.sh/x", b"below a file")],
    ],
    ids=lambda entries: ", ".join(f"{one.name} {one.type!r} {one.linkname}" for one, _ in entries),
)
def test_what_has_no_place_in_a_backend_is_refused(
    tmp_path: Path, entries: list[tuple[tarfile.TarInfo, bytes]]
) -> None:
    """Absolute paths, `..`, links that leave, devices, pipes, names that occur twice."""
    outside = tmp_path / "outside"
    with pytest.raises((BadSource, OSError)):
        opened(tar(*entries), tmp_path)
    assert not outside.exists()


PLAIN = st.sampled_from(["a", "b", "c", "a/b", "c/d"])
PARTS = ["a", "b", "run.sh", "..", ".", "", "outside", ".wh.a", ".wh..wh..opq", "\udcff", "x" * 300]
NAMES = PLAIN | PLAIN | st.lists(st.sampled_from(PARTS), min_size=1, max_size=3).map("/".join)
TYPES = st.sampled_from(
    [
        *[tarfile.REGTYPE, tarfile.REGTYPE, tarfile.DIRTYPE, LINK, LINK, LINK, HARD],
        *[tarfile.CHRTYPE, tarfile.FIFOTYPE, b"Z"],
    ]
)
ENTRIES = st.builds(
    lambda name, kind, target, mode: entry(
        name, b"content" if kind == tarfile.REGTYPE else b"", type=kind, linkname=target, mode=mode
    ),
    NAMES,
    TYPES,
    st.sampled_from(["a", "c/d", "run.sh", "..", "../outside", "../../outside", "/etc/passwd", "nowhere"]),
    st.sampled_from([0o644, 0o4777, 0o7777, 0]),
)


@pytest.mark.rule("worker-18.6")
@given(layers=st.lists(st.lists(ENTRIES, max_size=3), min_size=1, max_size=2), is_image=st.booleans())
@settings(
    max_examples=150 * EFFORT, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_whatever_layers_hold_nothing_is_written_outside(
    tmp_path: Path, layers: list[list[tuple[tarfile.TarInfo, bytes]]], is_image: bool
) -> None:
    """A refusal, or plain files, folders and links inside, of which no other user may change any."""
    shutil.rmtree(tmp_path)
    home = tmp_path / "home"
    home.mkdir(parents=True)
    (tmp_path / "outside").write_bytes(b"mine")
    paths = [home / f"layer{number}" for number in range(len(layers))]
    for path, entries in zip(paths, layers, strict=True):
        path.write_bytes(tar(*entries))
    target = home / "target"
    try:
        archives.unpack(paths, target, Throttle(0), threading.Event(), lambda *_: None, is_image=is_image)
        links = [path for path in target.rglob("*") if path.is_symlink()]
        to_machine = [path for path in links if os.readlink(path).startswith("/")]
        assert is_image or not to_machine
        for path in to_machine:
            path.unlink()
        ends = [os.path.realpath(path) for path in target.rglob("*")]
        assert all(Path(end).is_relative_to(target) for end in ends)
    except (BadSource, OSError):
        pass
    assert sorted(os.listdir(tmp_path)) == ["home", "outside"]
    assert (tmp_path / "outside").read_bytes() == b"mine"
    assert {*os.listdir(home)} - {"target"} == {path.name for path in paths}
    for folder, folders, files in os.walk(target):
        for name in (*folders, *files):
            status = os.lstat(os.path.join(folder, name))
            assert stat.S_IFMT(status.st_mode) in (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK)
            assert stat.S_ISLNK(status.st_mode) or not status.st_mode & 0o7022


def test_sizes_and_counts_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of what says little and unpacks to much, and of headers, which are read into memory."""
    bomb = gzip.compress(tar(entry("zeros", bytes(5_000_000))))
    assert len(bomb) < 10_000
    header = tar(entry("x", pax_headers={"comment": "c" * 2_000_000}))
    for name, limit, data in (
        ("MAX_UNPACKED_BYTES", 1_000_000, bomb),
        ("MAX_ENTRIES", 2, tar(entry("a"), entry("b"))),
        ("MAX_ENTRIES", 9, header),
        ("MAX_ENTRIES", 9, gzip.compress(header)),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(archives, name, limit)
            with pytest.raises(BadSource, match=r"more than|too long"):
                opened(data, tmp_path)
    monkeypatch.setattr(source_files, "HEADROOM_BYTES", 2**62)
    with pytest.raises(BadSource, match="Free up space"):
        opened(tar(), tmp_path)
    assert not (tmp_path / "target").exists()


def test_copies_in_place_of_hard_links_cannot_fill_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file has at most so many names on a file system, and the total of an archive counts it once."""

    def refuse(*_: Any) -> None:
        raise OSError(errno.EMLINK, os.strerror(errno.EMLINK))

    def usage(folder: Path) -> Any:
        used = sum(path.stat().st_size for path in tmp_path.rglob("file*"))
        return shutil._ntuple_diskusage(2500, used, 2500 - used)

    monkeypatch.setattr(source_files, "HEADROOM_BYTES", 0)
    monkeypatch.setattr(shutil, "disk_usage", usage)
    monkeypatch.setattr(os, "link", refuse)
    links = [entry(f"file{number}", type=tarfile.LNKTYPE, linkname="file") for number in range(9)]
    with pytest.raises(BadSource, match="Free up space"):
        opened(tar(entry("file", bytes(1000)), *links), tmp_path)
    assert sum(path.stat().st_size for path in tmp_path.rglob("file*")) <= 2500


DEEP = "/".join(["d"] * 200)


@pytest.mark.parametrize("entries", [[entry(f"{DEEP}/x", b"x")], [entry(DEEP, type=tarfile.DIRTYPE)]])
def test_folders_below_each_other_are_bounded(
    tmp_path: Path, entries: list[tuple[tarfile.TarInfo, bytes]]
) -> None:
    """Such a tree could not be removed again, and the cleanup at each start would end the worker."""
    with pytest.raises(BadSource, match="128 folders below each other"):
        opened(tar(*entries), tmp_path)
    assert not (tmp_path / "target").exists()
    usual = "/".join(["d"] * source_files.MAX_FOLDER_DEPTH)
    assert (opened(tar(entry(f"{usual}/x", b"x")), tmp_path) / usual / "x").read_bytes() == b"x"


def test_sparse_files_and_negative_sizes_are_refused(tmp_path: Path) -> None:
    sparse = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.name": "x"}
    sparse["GNU.sparse.realsize"] = str(2**50)
    with pytest.raises(BadSource):
        opened(tar(entry("x", b"1\n0\n10\n".ljust(512, b"\0"), pax_headers=sparse)), tmp_path)
    with pytest.raises(BadSource):
        opened(tar(entry("x", pax_headers={"size": "-512"})), tmp_path)


def test_headers_that_fill_the_memory_are_refused(tmp_path: Path) -> None:
    """A map of a sparse file that does not end, and headers for all later entries."""
    sparse = tarfile.TarInfo("x")
    sparse.type = tarfile.GNUTYPE_SPARSE
    head = bytearray(sparse.tobuf(tarfile.GNU_FORMAT))
    head[482] = 1  # the map goes on in the next block
    head[148:156] = b" " * 8
    head[148:156] = b"%06o\0 " % sum(head)
    block = b"".join(b"%011o\0" % number for number in range(42)) + b"\1" + bytes(7)
    count = 3 * archives.MAX_HEADER_LENGTH // len(block)
    with pytest.raises(BadSource, match="headers of an entry"):
        opened(gzip.compress(bytes(head) + block * count), tmp_path)
    with pytest.raises(BadSource, match="cannot be read"):
        opened(bytes(head) + block, tmp_path)
    (tmp_path / "archive").unlink()
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w", format=tarfile.PAX_FORMAT) as writer:
        for number in range(20):
            values = {f"k{number}.{each}": "v" for each in range(1000)}
            archive.write(tarfile.TarInfo.create_pax_global_header(values))
            writer.offset = archive.tell()
            writer.addfile(tarfile.TarInfo(f"f{number}"))
    with pytest.raises(BadSource, match="global headers"):
        opened(archive.getvalue(), tmp_path)


@pytest.mark.parametrize("packed", [False, True], ids=["tar", "gzip"])
def test_damaged_archives_are_errors_not_crashes(tmp_path: Path, packed: bool) -> None:
    """Bytes changed, cut off, or no archive at all: BadSource or a refusal of the system, nothing else."""
    whole = tar(entry("a/b", os.urandom(3000)), entry("l", type=LINK, linkname="run.sh"))
    whole = gzip.compress(whole) if packed else whole
    chance = random.Random(7)
    damaged = [b"", b"x" * 2000, whole[:700], whole[: len(whole) // 2]]
    for _ in range(150 * EFFORT):
        spoilt = bytearray(whole)
        for _ in range(chance.randint(1, 20)):
            spoilt[chance.randrange(len(spoilt))] = chance.randrange(256)
        damaged.append(bytes(spoilt))
    for number, data in enumerate(damaged):
        folder = tmp_path / str(number)
        folder.mkdir()
        try:
            opened(data, folder)
        except (BadSource, OSError):
            continue
        assert (folder / "target").exists()
    assert {path.name for path in tmp_path.iterdir()} == {str(number) for number in range(len(damaged))}


def test_unpacking_stops_in_the_middle(tmp_path: Path) -> None:
    stopped = threading.Event()
    (tmp_path / "archive").write_bytes(tar(entry("data", bytes(5_000_000))))

    def stop_midway(done: int, total: int, name: str) -> None:
        stopped.set()

    with pytest.raises(WorkCancelled):
        archives.unpack([tmp_path / "archive"], tmp_path / "t", Throttle(0), stopped, stop_midway)
    assert not (tmp_path / "t" / "data").exists()


def test_an_archive_is_not_opened_through_a_link_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "pipe")
    for name in ("pipe", "link"):
        with pytest.raises((BadSource, OSError)):
            archives.unpack(
                [tmp_path / name], tmp_path / "t", Throttle(0), threading.Event(), lambda *_: None
            )


def test_the_limit_of_a_piece_is_what_tarfile_may_ask_for() -> None:
    assert archives.MAX_HEADER_LENGTH >= source_files.CHUNK_BYTES
