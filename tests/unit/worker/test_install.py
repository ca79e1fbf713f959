"""Installing: names that must not become folders, sources that must not be read, swaps that must not lose a
version."""

import os
import stat
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from localai_cluster import gallery_index
from localai_cluster.gallery_index import GalleryEntry, GalleryUnreadable, choose
from localai_cluster.kit.errors import ClusterError, InvalidInput
from localai_cluster.messaging.messages import Gallery, InstallRequest, decode_galleries, encode
from localai_cluster.worker import download, source_files
from localai_cluster.worker.backend_store import (
    BackendStore,
    Metadata,
    discard,
    folder_name,
    read_metadata,
    strip_gallery,
)
from localai_cluster.worker.control_plane import CallFailed
from localai_cluster.worker.install_commands import requested_name
from localai_cluster.worker.installer import Installer, InstallFailed, InstallSource, replace_folder
from localai_cluster.worker.progress import Tick, ignore_tick
from localai_cluster.worker.source_files import BadSource, Throttle, WorkCancelled, copy_tree


def backend(folder: Path, version: str = "1", **metadata: Any) -> Path:
    """A minimal backend folder."""
    folder.mkdir(parents=True)
    (folder / "run.sh").write_text(f"#!/bin/sh\n# {version}\n")
    if metadata:
        (folder / "metadata.json").write_bytes(encode(Metadata(**metadata)))
    return folder


@pytest.fixture
def store(tmp_path: Path) -> BackendStore:
    (tmp_path / "backends").mkdir()
    return BackendStore(tmp_path / "backends", tmp_path / "system", "default")


async def unserved(file: str, headers: Mapping[str, str]) -> httpx.Response:
    """A control plane without a gallery."""
    raise CallFailed("no gallery", 404)


def installer(store: BackendStore, *roots: Path, rate: int = 0) -> Installer:
    return Installer(store, roots, Throttle(rate), "default", httpx.AsyncClient(), unserved)


@given(st.text(max_size=30))
def test_any_name_is_one_harmless_folder_or_refused(name: str) -> None:
    try:
        folder = folder_name(strip_gallery(name))
    except InvalidInput:
        return
    assert "/" not in folder
    assert not folder.startswith(".")
    assert Path("/base", folder).resolve().parent == Path("/base")


@pytest.mark.parametrize(
    "name", ["", ".", "..", ".x", "a\\b", "a\nb", "a\0", "x.install-tmp", "X.INSTALL-BACKUP", "é" * 101]
)
def test_names_that_are_refused(name: str) -> None:
    with pytest.raises(InvalidInput):
        folder_name(name)


def test_a_gallery_prefix_is_stripped_and_a_slash_flattened() -> None:
    """nats.md §4.1, worker.md §18.3."""
    assert strip_gallery("local@mock") == "mock"
    assert folder_name("org/mock") == "org__mock"


@pytest.mark.parametrize(
    ("uri", "name"),
    [
        ("/srv/engine", "engine"),
        ("/srv/engine.tar", "engine"),
        ("https://example.com/g/engine.tar.gz?key=1#x", "engine"),
        ("https://example.com/g/engine.TGZ", "engine"),
        ("cluster:engine.tar", "engine"),
        ("file:///srv/engine/", "engine"),
    ],
)
def test_a_backend_without_a_name_is_called_like_its_source(uri: str, name: str) -> None:
    """worker.md §18.5: the last part of the path, of an archive without its suffix."""
    assert requested_name(InstallRequest("", uri=uri)) == name
    assert requested_name(InstallRequest("", uri=uri, name="local@other")) == "other"


def test_copying_keeps_modes_links_and_bytes(tmp_path: Path) -> None:
    """Links are copied as links, never followed; absolute ones into the source become relative."""
    source = backend(tmp_path / "source")
    (source / "run.sh").chmod(0o4755)
    (source / "lib").mkdir(mode=0o500)
    (source / "python").symlink_to("/usr/bin/python3")
    (source / "inner").symlink_to(source / "run.sh")
    (source / "secret").symlink_to("/etc/shadow")
    (source / "data").write_bytes(os.urandom(3_000_000))
    moved: list[tuple[int, int, str]] = []
    target = tmp_path / "target"
    copy_tree(source, target, Throttle(0), threading.Event(), lambda *m: moved.append(m))
    assert os.readlink(target / "python") == "/usr/bin/python3"
    assert os.readlink(target / "secret") == "/etc/shadow"
    assert os.readlink(target / "inner") == "run.sh"
    assert stat.S_IMODE((target / "run.sh").stat().st_mode) == 0o755
    assert (target / "data").read_bytes() == (source / "data").read_bytes()
    assert [done for done, _, _ in moved] == sorted(done for done, _, _ in moved)
    assert moved[-1][0] == moved[-1][1] == 3_000_000 + (source / "run.sh").stat().st_size


def test_odd_things_in_the_source_are_refused(tmp_path: Path) -> None:
    source = backend(tmp_path / "source")
    os.mkfifo(source / "pipe")
    with pytest.raises(BadSource, match="pipe"):
        copy_tree(source, tmp_path / "target", Throttle(0), threading.Event(), lambda *_: None)


def test_a_source_is_not_copied_deeper_than_it_could_be_removed(tmp_path: Path) -> None:
    source = backend(tmp_path / "source")
    (source / "/".join(["d"] * 200)).mkdir(parents=True)
    with pytest.raises(BadSource, match="128 folders below each other"):
        copy_tree(source, tmp_path / "target", Throttle(0), threading.Event(), lambda *_: None)
    assert not (tmp_path / "target").exists()


@pytest.mark.parametrize("error", [PermissionError(1, "no"), RecursionError("too deep")])
def test_a_leftover_that_cannot_be_removed_does_not_keep_the_worker_from_starting(
    store: BackendStore, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Files of another user, or a tree of an earlier version that is too deep."""

    def refuse(_: Path) -> None:
        raise error

    base = store.backends
    for name in (".leaving-abc", "a.install-tmp", "b", "b.install-backup", "c.install-backup"):
        backend(base / name, name)
    monkeypatch.setattr("shutil.rmtree", refuse)
    store.recover()
    assert {path.name for path in base.iterdir() if not path.name.startswith(".leaving-")} == {"b", "c"}
    assert "c.install-backup" in (base / "c" / "run.sh").read_text()


def test_a_full_disk_is_told_before_a_byte_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_files, "HEADROOM_BYTES", 2**62)
    with pytest.raises(BadSource, match="Free up space"):
        copy_tree(backend(tmp_path / "s"), tmp_path / "t", Throttle(0), threading.Event(), lambda *_: None)
    assert not (tmp_path / "t").exists()


def test_a_copy_stops_in_the_middle(tmp_path: Path) -> None:
    source = backend(tmp_path / "source")
    (source / "data").write_bytes(bytes(5_000_000))
    stopped = threading.Event()

    def stop_midway(done: int, total: int, name: str) -> None:
        if done:
            stopped.set()

    with pytest.raises(WorkCancelled):
        copy_tree(source, tmp_path / "t", Throttle(0), stopped, stop_midway)
    assert (tmp_path / "t" / "data").stat().st_size < 5_000_000


@given(st.lists(st.integers(1, 100_000), min_size=1, max_size=30), st.integers(1_000, 1_000_000))
def test_the_cap_holds_over_any_pieces(pieces: list[int], rate: int) -> None:
    """The bandwidth cap: bytes are let through no faster than `rate`, and no slower."""
    now = [5.0]
    throttle = Throttle(rate, now=lambda: now[0])
    for piece in pieces:
        now[0] += throttle.pause(piece)
    assert now[0] - 5.0 == pytest.approx(sum(pieces) / rate)


def test_no_cap_never_waits() -> None:
    assert Throttle(0).pause(10**9) == 0


@pytest.mark.parametrize("failing", [1, 2])
def test_a_swap_that_fails_leaves_the_old_version(tmp_path: Path, failing: int) -> None:
    """worker.md §18.3: roll back on failure."""
    target, staged = backend(tmp_path / "b", "old"), backend(tmp_path / "b.install-tmp", "new")
    calls = 0

    def rename(old: Path, new: Path) -> None:
        nonlocal calls
        calls += 1
        if calls == failing:
            raise OSError(5, "no")
        os.rename(old, new)

    with pytest.raises(OSError, match="no"):
        replace_folder(staged, target, rename)
    assert "old" in (target / "run.sh").read_text()
    assert not (tmp_path / "b.install-backup").exists()


def test_a_swap_succeeds_although_the_old_version_cannot_be_removed(
    store: BackendStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new version is in place; the next start removes the rest of the old one."""
    base = store.backends
    target, staged = backend(base / "b", "old"), backend(base / "b.install-tmp", "new")
    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", refuse)
        replace_folder(staged, target)
    assert "new" in (target / "run.sh").read_text()
    store.recover()
    assert [path.name for path in base.iterdir()] == ["b"]


def refuse(path: Path) -> None:
    """Remove nothing, as where a file is immutable or a network file system has an error."""
    raise OSError(5, "Input/output error", str(path))


@pytest.mark.parametrize("cut_after", range(4))
def test_after_a_kill_at_any_moment_a_whole_version_comes_back(store: BackendStore, cut_after: int) -> None:
    """Killed between any two steps of a swap: `recover` gives the old or the new version, whole, and no
    leftovers."""
    base = store.backends
    target, staged = backend(base / "b", "old"), backend(base / "b.install-tmp", "new")
    steps: list[Callable[[], None]] = [
        lambda: os.rename(target, base / "b.install-backup"),
        lambda: os.rename(staged, target),
        lambda: discard(base / "b.install-backup"),
    ]
    for step in steps[:cut_after]:
        step()
    (base / ".leaving-abc").mkdir()
    store.recover()
    assert ("new" if cut_after >= 2 else "old") in (target / "run.sh").read_text()
    assert [path.name for path in base.iterdir()] == ["b"]


async def test_a_source_is_read_only_inside_the_roots(tmp_path: Path, store: BackendStore) -> None:
    """Sources are judged by their real path: neither `..` nor a link leads out of the allowed folders."""
    roots, outside = tmp_path / "roots", backend(tmp_path / "outside")
    roots.mkdir()
    (roots / "link").symlink_to(outside)
    for uri in (outside, roots / "link", roots / ".." / "outside", outside.as_uri()):
        with pytest.raises(InstallFailed, match="LOCALAI_WORKER_SOURCE_ROOTS"):
            await installer(store, roots).install(InstallSource("x", (), uri=str(uri)), ignore_tick)
    assert list(store.backends.iterdir()) == []
    inside = backend(roots / "inside")
    ticks: list[Tick] = []
    assert (
        await installer(store, roots).install(InstallSource("x", (), uri=inside.as_uri()), ticks.append)
        == "x"
    )
    assert [tick.phase for tick in ticks][:2] == ["resolving", "downloading"]
    installed = read_metadata(store.backends / "x")
    assert (installed.uri, installed.size) == (inside.as_uri(), (inside / "run.sh").stat().st_size)


async def test_what_is_no_backend_is_not_put_in_place(tmp_path: Path, store: BackendStore) -> None:
    """`run.sh` must be a file of the folder itself; the installed folder and what holds it are no sources."""
    old = backend(store.backends / "x", "old")
    empty = tmp_path / "empty"
    empty.mkdir()
    linked = tmp_path / "linked"
    linked.mkdir()
    (linked / "run.sh").symlink_to("/bin/sh")
    for source in (empty, linked, old, tmp_path):
        with pytest.raises(InstallFailed):
            await installer(store, tmp_path).install(InstallSource("x", (), uri=str(source)), ignore_tick)
    assert [path.name for path in store.backends.iterdir()] == ["x"]
    assert "old" in (old / "run.sh").read_text()


@pytest.mark.parametrize(
    "url",
    [
        "http://[::",
        "file://[::",
        "file:///%00",
        "http://127.0.0.1:99999/x",
        "http://127.0.0.1:port/x",
        "http://127.0.0.1/x\0",
        "http://exa mple/\n",
        "file:///" + "x" * 5000,
    ],
)
async def test_malformed_sources_are_named_not_crashed_on(
    url: str, tmp_path: Path, store: BackendStore
) -> None:
    """O37: galleries and sources come with the command to install."""
    with pytest.raises(InstallFailed, match="gallery odd cannot be read"):
        await installer(store, tmp_path).install(InstallSource("d", [Gallery(url, "odd")]), ignore_tick)
    with pytest.raises(InstallFailed):
        await installer(store, tmp_path).install(InstallSource("d", [], url), ignore_tick)


async def test_mirrors_and_unreadable_galleries(tmp_path: Path, store: BackendStore) -> None:
    """worker.md §18.3: sources in turn; a gallery that cannot be read is named when nothing is found."""
    backend(tmp_path / "second")
    index = tmp_path / "index.yaml"
    index.write_text(
        "- &a\n  name: A/b\n  uri: first\n  mirrors: [second]\n- !!merge <<: *a\n  name: c\n- 5\n- {}\n"
    )
    good = Gallery(url=index.as_uri(), name="good")
    bad = Gallery(url=(tmp_path / "none.yaml").as_uri(), name="bad", mirrors=("ftp://x/y",))
    work = installer(store, tmp_path)
    assert await work.install(InstallSource("good@a/B", (bad, good)), ignore_tick) == "A__b"
    assert await work.install(InstallSource("c", (good,)), ignore_tick) == "c"
    with pytest.raises(InstallFailed, match=r"no backend called \"d\".*gallery bad cannot be read"):
        await work.install(InstallSource("d", (bad, good)), ignore_tick)
    with pytest.raises(InstallFailed, match="no gallery is configured"):
        await work.install(InstallSource("d", ()), ignore_tick)


BUILDS = [
    GalleryEntry("engine", capabilities={"nvidia-cuda-12": "cuda12-engine", "default": "cpu-engine"}),
    GalleryEntry("cpu-engine", uri="u", capabilities={"default": "cpu-engine"}),
    GalleryEntry("cuda12-engine", uri="u"),
    GalleryEntry("metal-engine", uri="u"),
]


@pytest.mark.parametrize(
    ("name", "capability", "build"),
    [
        ("engine", "nvidia-cuda-12", "cuda12-engine"),
        ("ENGINE", "amd", "cpu-engine"),
        ("cpu-engine", "metal", "cpu-engine"),
        ("cuda12-engine", "nvidia", "cuda12-engine"),
        ("cuda12-engine", "amd", None),
        ("metal-engine", "default", None),
        ("metal-engine", "disable", "metal-engine"),
        ("other@engine", "default", None),
        ("nothing", "default", None),
    ],
)
def test_the_choice_of_a_build(name: str, capability: str, build: str | None) -> None:
    """worker.md §18.3, §18.4: meta by the map (exact, default, cpu), concrete by the words in its name."""
    if build is None:
        with pytest.raises(ClusterError):
            choose(name, BUILDS, capability)
    else:
        assert choose(name, BUILDS, capability).build.name == build


@pytest.mark.parametrize(
    "text", [b"{}", b"- [", b"\xff\xfe\x00", b"5", b"!!python/object/apply:os.system [ls]"]
)
def test_what_is_no_index(text: bytes) -> None:
    with pytest.raises(GalleryUnreadable):
        gallery_index.parse(text, Gallery())


@pytest.mark.rule("worker-10.1")
def test_the_file_that_starts_a_backend(store: BackendStore) -> None:
    """The listed one; else a file called like its folder, the user's before the system's."""
    base, system = store.backends, store.backends.parent / "system"
    listed = backend(base / "listed") / "run.sh"
    (base / "meta").mkdir()
    (base / "meta" / "metadata.json").write_bytes(encode(Metadata(name="meta", meta_backend_for="listed")))
    assert store.start_file("listed") == store.start_file("meta") == listed
    assert store.start_file("given") is None
    for file in (system / "given" / "given", base / "given" / "given"):
        file.parent.mkdir(parents=True)
        file.touch()
        assert store.start_file("given") == file
    (base / "alone").touch()
    assert store.start_file("alone") is None, "D-WORKER-START: a backend is a folder"


@pytest.mark.rule("worker-18.1", "worker-18.2")
def test_the_listing(store: BackendStore) -> None:
    """worker.md §18.2: concrete, system, meta and alias rows; broken metadata is just a name."""
    base = store.backends
    backend(base / "cpu-x", name="cpu-x", alias="x")
    backend(base / "vulkan-x", name="vulkan-x", alias="x")
    backend(base / "plain")
    (backend(base / "broken") / "metadata.json").write_text("{")
    backend(base.parent / "system" / "plain")
    backend(base.parent / "system" / "sys")
    (base / "x").mkdir()
    (base / "x" / "metadata.json").write_bytes(encode(Metadata(name="x", meta_backend_for="cpu-x")))
    (base / "lost").mkdir()
    (base / "lost" / "metadata.json").write_bytes(encode(Metadata(name="lost", meta_backend_for="../../etc")))
    entries = store.scan()
    assert set(entries) == {"cpu-x", "vulkan-x", "plain", "broken", "sys", "x"}
    assert entries["x"].is_alias
    assert entries["x"].folder == base / "cpu-x"
    assert entries["sys"].is_system
    assert not entries["plain"].is_system
    assert store.identity("cpu-x") == {"cpu-x", "x"}
    assert store.start_file("nothing") is None
    store.remove("x")
    assert not (base / "x").exists()
    assert not (base / "cpu-x").exists()
    for name in ("sys", "..", "", "nothing"):
        with pytest.raises(ClusterError):
            store.remove(name)


@pytest.mark.rule("worker-18.3")
@pytest.mark.parametrize(
    ("uri", "sha256", "reason"),
    [
        ("http://127.0.0.1:1/engine.tar.gz", "", "no sha256 in its gallery"),
        ("oci://127.0.0.1:1/engine:v1", "0" * 64, "no digest in its reference"),
        ("http://127.0.0.1:1/engine.tar.gz", "0" * 64, ""),
        (f"oci://127.0.0.1:1/engine@sha256:{'0' * 64}", "", ""),
    ],
)
async def test_what_cannot_be_verified_is_refused_where_integrity_is_required(
    store: BackendStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uri: str, sha256: str, reason: str
) -> None:
    """LOCALAI_REQUIRE_BACKEND_INTEGRITY; what a hash or digest names goes on, here to a dead address."""
    monkeypatch.setattr(download, "RETRY_PAUSES", (0.0,))
    (tmp_path / "index.yaml").write_text(f"- name: engine\n  uri: {uri}\n  sha256: '{sha256}'\n")
    gallery = Gallery(name="g", url=f"file://{tmp_path}/index.yaml")
    async with httpx.AsyncClient(trust_env=False) as client:
        strict = Installer(
            store, (tmp_path,), Throttle(0), "default", client, unserved, require_integrity=True
        )
        with pytest.raises(InstallFailed) as failed:
            await strict.install(InstallSource("engine", (gallery,)), ignore_tick)
    assert ("LOCALAI_REQUIRE_BACKEND_INTEGRITY" in str(failed.value)) is bool(reason)
    assert reason in str(failed.value)


@pytest.mark.rule("worker-18.3")
@pytest.mark.parametrize("is_strict", [True, False])
async def test_signatures_that_a_gallery_demands_are_not_passed_over(
    store: BackendStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any, is_strict: bool
) -> None:
    """D-SIGNATURES: refused where integrity is required, also if a digest names the image."""
    monkeypatch.setattr(download, "RETRY_PAUSES", (0.0,))
    (tmp_path / "index.yaml").write_text(f"- name: one\n  uri: oci://127.0.0.1:1/a@sha256:{'0' * 64}\n")
    (gallery,) = decode_galleries(
        f'[{{"url": "file://{tmp_path}/index.yaml", "verification": {{"issuer": "https://issuer.test"}}}}]'
    )
    async with httpx.AsyncClient(trust_env=False) as client:
        work = Installer(
            store, (tmp_path,), Throttle(0), "default", client, unserved, require_integrity=is_strict
        )
        with pytest.raises(InstallFailed) as failed:
            await work.install(InstallSource("one", (gallery,)), ignore_tick)
    assert ("LOCALAI_REQUIRE_BACKEND_INTEGRITY" in str(failed.value)) is is_strict
    assert ("demands signatures" in caplog.text) is not is_strict


@pytest.mark.rule("worker-18.3")
async def test_folders_need_no_hash(store: BackendStore, tmp_path: Path) -> None:
    source = backend(tmp_path / "sources" / "engine")
    strict = Installer(
        store, (tmp_path,), Throttle(0), "default", httpx.AsyncClient(), unserved, require_integrity=True
    )
    await strict.install(InstallSource("engine", (), str(source)), ignore_tick)
    assert (store.backends / "engine" / "run.sh").exists()
