"""Galleries as a worker reads them: copies of indexes, sources that are skipped, and what they may name."""

import os
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from localai_cluster.gallery_index import GITHUB_URL
from localai_cluster.kit import clock
from localai_cluster.kit.errors import NotFound
from localai_cluster.messaging.messages import Gallery
from localai_cluster.worker import galleries
from localai_cluster.worker.backend_store import PARTIAL_KEEP_SECONDS, PARTIAL_PREFIX, remove_old_partials
from localai_cluster.worker.control_plane import CallFailed
from localai_cluster.worker.galleries import Galleries

WEB = Gallery("https://gallery.test/index.yaml", "web", mirrors=("https://mirror.test/index.yaml",))


async def unserved(file: str, headers: Mapping[str, str]) -> httpx.Response:
    raise CallFailed("no gallery", 404)


class Site:
    """The addresses of the gallery: each is `up` or fails, slowly if the test's clock says so."""

    def __init__(self, folder: Path) -> None:
        self.up = {"gallery.test"}
        self.requests: list[str] = []
        self.names = "one"
        transport = httpx.MockTransport(self._answer)
        client = httpx.AsyncClient(transport=transport)
        self.galleries = Galleries(client, unserved, (), GITHUB_URL, folder / "copies")

    def _answer(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request.url.host)
        index = "".join(f"- name: {name}\n  uri: x\n" for name in self.names.split())
        return httpx.Response(200 if request.url.host in self.up else 503, content=index.encode())

    async def choose(self, name: str) -> list[str]:
        """Read the gallery for `name`; the addresses that were asked."""
        self.requests.clear()
        assert (await self.galleries.choose(name, [WEB], "default")).build.name == name
        return self.requests


@pytest.mark.rule("worker-18.3")
def test_installs_side_by_side_never_read_half_of_a_copy(tmp_path: Path) -> None:
    copies, text = tmp_path / "copies", b"- name: one\n  uri: two\n" + b"# filler\n" * 50_000
    work = Galleries(httpx.AsyncClient(), unserved, (), GITHUB_URL, copies)
    seen: set[bytes] = set()
    is_done = threading.Event()

    def read() -> None:
        while not is_done.is_set():
            seen.update(path.read_bytes() for path in copies.glob("*.yaml"))

    with ThreadPoolExecutor() as pool:
        reading = pool.submit(read)
        for writing in [pool.submit(work._store_copy, WEB, text) for _ in range(200)]:
            writing.result()
        is_done.set()
        reading.result()
    assert seen == {text}
    assert [path.suffix for path in copies.iterdir()] == [".yaml"]


def test_a_file_that_another_install_completes_is_no_old_partial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the listing of the folder and the look at a file, that file may have gone."""
    old = tmp_path / f"{PARTIAL_PREFIX}old"
    old.touch()
    os.utime(old, (then := clock.now().timestamp() - PARTIAL_KEEP_SECONDS - 60, then))
    monkeypatch.setattr(Path, "glob", lambda *_: [tmp_path / f"{PARTIAL_PREFIX}gone", old])
    remove_old_partials(tmp_path)
    assert not old.exists()


@pytest.mark.rule("worker-18.3")
async def test_the_last_good_copy_is_used_while_the_gallery_is_away(tmp_path: Path) -> None:
    site = Site(tmp_path)
    await site.choose("one")
    site.up.clear()
    await site.choose("one")
    with pytest.raises(
        NotFound, match=r'"two" in any gallery; gallery web cannot be read: .*HTTP status 503'
    ):
        await site.choose("two")


@pytest.mark.rule("worker-18.3")
async def test_a_source_that_failed_slowly_is_skipped_for_ten_minutes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mirror, or else the copy, is used at once; a backend that it lacks is worth the wait."""
    now = [1000.0]
    monkeypatch.setattr(clock, "monotonic", lambda: now[0])
    site = Site(tmp_path)
    assert await site.choose("one") == ["gallery.test"]
    site.up = {"mirror.test"}
    assert await site.choose("one") == ["gallery.test", "mirror.test"]
    assert await site.choose("one") == ["gallery.test", "mirror.test"], "it failed at once"
    monkeypatch.setattr(galleries, "SLOW_FAILURE_SECONDS", 0.0)
    await site.choose("one")
    assert await site.choose("one") == ["mirror.test"]
    site.up.clear()
    await site.choose("one")
    assert await site.choose("one") == [], "from the copy"
    site.up, site.names = {"gallery.test"}, "one two"
    assert await site.choose("two") == ["gallery.test"]
    now[0] += galleries.SKIP_ADDRESS_SECONDS
    assert await site.choose("one") == ["gallery.test"]
