"""One file from a source that behaves as real ones do: resumed, verified, and one file."""

import asyncio
import errno
import hashlib
import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from localai_cluster.kit import clock, conf, files
from localai_cluster.kit.errors import ClusterError
from localai_cluster.kit.outbound import SourceBody, SourceBusy, SourceError, SourceMissing, SourceRefused
from nodes.definitions.recorded_files import FileConflict
from nodes.downloads import downloader, partial_files
from nodes.downloads.downloader import Download, DownloadedFile, DownloadMeter
from nodes.downloads.partial_files import FOLDER, BeingDownloaded, DiskFull, FolderFailed, PartialFile
from nodes.models import FileHash
from nodes.sources.opening import SourceFileOpener, SourceOpener
from nodes.sources.plans import SourceFile
from tests.conftest import until
from tests.support.sources import LFS_POINTER, Refusal, Source, WebOpener, sha256_of, started

pytestmark = pytest.mark.django_db(transaction=True)

KIB = 1024
SPAN, PIECE = 64 * KIB, 8 * KIB
DATA = random.Random(25).randbytes(10 * SPAN + 777)
PATH = "hub/m.gguf"


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spans and pieces of a size for tests, and no pauses."""
    for module in (downloader, partial_files):
        monkeypatch.setattr(module, "FIRST_SPAN", SPAN)
        monkeypatch.setattr(module, "CHUNK", PIECE)
    monkeypatch.setattr(downloader, "FIRST_PAUSE", 0.0)
    monkeypatch.setattr(downloader, "POLL_EVERY", 0.02)


@pytest.fixture
def source() -> Iterator[Source]:
    with started(files={"/m.gguf": DATA}) as source:
        yield source


@pytest.fixture
def models(tmp_path: Path) -> Path:
    folder = tmp_path / "models"
    folder.mkdir()
    return folder


class Memory:
    """The files that were fetched, as an import remembers them."""

    def __init__(self) -> None:
        self.hashes: dict[tuple[str, str], str] = {}

    async def hashes_of(self, file: SourceFile) -> list[str]:
        return [sha256 for place, sha256 in self.hashes.items() if place == (file.path, file.url)]

    async def add(self, file: SourceFile, sha256: str) -> None:
        self.hashes[file.path, file.url] = sha256


class CountingOpener(WebOpener):
    """`requested` is the number of bytes that were requested."""

    requested = 0

    def open(
        self, file: SourceFile, offset: int = 0, length: int | None = None
    ) -> AbstractAsyncContextManager[SourceBody]:
        assert length is not None
        self.requested += length
        return super().open(file, offset, length)


class Fetcher:
    """Fetches `/m.gguf` of the source to `PATH`; `meter` has the last progress."""

    def __init__(self, source: Source, models: Path) -> None:
        self.source, self.models = source, models
        self.meter, self.memory = DownloadMeter({}, ""), Memory()

    async def fetch(
        self,
        size: int = 0,
        sha256: str = "",
        connections: int = 4,
        may_replace: bool = False,
        url: str = "",
        opener: SourceOpener | None = None,
    ) -> DownloadedFile:
        file = SourceFile(PATH, url or self.source.url("/m.gguf"), size, sha256)
        self.meter = DownloadMeter({PATH: size}, "the hub")
        download = Download(file, self.models, opener or WebOpener(), self.meter, connections, self.memory)
        return await download.run(may_replace=may_replace)

    @property
    def left_over(self) -> list[str]:
        """The files of the models folder, hidden ones too."""
        return sorted(
            path.relative_to(self.models).as_posix() for path in self.models.rglob("*") if path.is_file()
        )


@pytest.fixture
def fetcher(source: Source, models: Path) -> Fetcher:
    return Fetcher(source, models)


def whole(fetcher: Fetcher, data: bytes = DATA) -> bool:
    """Return True if the file is there, and nothing else."""
    return (fetcher.models / PATH).read_bytes() == data and fetcher.left_over == [PATH]


@pytest.mark.parametrize("connections", [1, 4])
@pytest.mark.parametrize("has_hash", [True, False])
async def test_a_file_comes_over_several_connections(
    source: Source, fetcher: Fetcher, connections: int, has_hash: bool
) -> None:
    sha256 = sha256_of(DATA)
    fetched = await fetcher.fetch(len(DATA), sha256 if has_hash else "", connections)
    assert (fetched.size, fetched.sha256) == (len(DATA), sha256)
    assert whole(fetcher)
    assert (fetcher.meter.current, fetcher.meter.total) == (len(DATA), len(DATA))
    assert sorted(source.sent_to("/m.gguf"))[0] == f"bytes=0-{SPAN - 1}"
    assert len(source.sent_to("/m.gguf")) == 11
    row = FileHash.objects.get
    assert (await asyncio.to_thread(lambda: row(path=PATH).sha256)) == sha256


async def test_an_object_of_a_store_comes_over_several_connections(source: Source, fetcher: Fetcher) -> None:
    source.redirects, source.files["/bucket/m.gguf"] = False, DATA
    opener = SourceFileOpener(replace(conf.cluster(), s3_endpoint=source.url("")))
    fetched = await fetcher.fetch(len(DATA), url="s3://bucket/m.gguf", opener=opener)
    assert fetched.sha256 == sha256_of(DATA)
    assert whole(fetcher)
    assert sorted(source.sent_to("/bucket/m.gguf"))[0] == f"bytes=0-{SPAN - 1}"
    assert len(source.sent_to("/bucket/m.gguf")) == 11
    assert "early" not in fetcher.meter.now


async def test_an_unknown_size_is_learned(fetcher: Fetcher) -> None:
    await fetcher.fetch()
    assert whole(fetcher)
    assert fetcher.meter.total == len(DATA)


@pytest.mark.parametrize("data", [b"", b"x", DATA[:SPAN], DATA[: SPAN + 1]])
async def test_sizes_at_the_edges(source: Source, fetcher: Fetcher, data: bytes) -> None:
    source.files["/m.gguf"] = data
    fetched = await fetcher.fetch(len(data))
    assert fetched.sha256 == sha256_of(data)
    assert whole(fetcher, data)


async def test_a_source_without_ranges_sends_all_of_it(source: Source, fetcher: Fetcher) -> None:
    source.ranges = False
    await fetcher.fetch(len(DATA), sha256_of(DATA))
    assert whole(fetcher)
    assert len(source.sent_to("/m.gguf")) == 1


async def test_a_file_that_is_there_is_only_verified(source: Source, fetcher: Fetcher) -> None:
    await fetcher.fetch(len(DATA), sha256_of(DATA))
    source.requests.clear()
    fetched = await fetcher.fetch(len(DATA), sha256_of(DATA))
    assert (fetched.size, fetched.sha256) == (len(DATA), sha256_of(DATA))
    assert source.requests == []
    with pytest.raises(FileConflict):
        await fetcher.fetch()  # without a hash it may be another file of this size


async def test_a_file_without_a_hash_is_known_by_its_address(source: Source, fetcher: Fetcher) -> None:
    await fetcher.fetch()
    source.requests.clear()
    await fetcher.fetch()
    assert source.sent_to("/m.gguf") == ["bytes=0-0"]  # the source is asked for the size
    source.files["/other.gguf"] = DATA[::-1]
    with pytest.raises(FileConflict):
        await fetcher.fetch(len(DATA), url=source.url("/other.gguf"))
    (fetcher.models / PATH).write_bytes(DATA[::-1])
    await fetcher.fetch(len(DATA), may_replace=True)
    assert whole(fetcher)


async def test_a_file_is_remembered_before_it_has_its_name(
    fetcher: Fetcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill at any line between the two leaves a file that the next attempt knows."""

    class Killed(Exception):
        pass

    def die(self: PartialFile) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(PartialFile, "publish", die)
        with pytest.raises(Killed):
            await fetcher.fetch()
    assert list(fetcher.memory.hashes.values()) == [sha256_of(DATA)]


async def test_a_folder_on_another_disk_is_refused_before_the_download(
    source: Source, fetcher: Fetcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    (fetcher.models / "hub").mkdir()
    plain = Path.stat

    def stat(path: Path, **options: Any) -> os.stat_result:
        status = plain(path, **options)
        if path != fetcher.models / "hub":
            return status
        return os.stat_result((*status[:2], status.st_dev + 1, *status[3:10]))

    monkeypatch.setattr(Path, "stat", stat)
    with pytest.raises(FolderFailed, match="is on another disk"):
        await fetcher.fetch(len(DATA), sha256_of(DATA))
    assert source.requests == []


async def test_a_file_that_starts_over_makes_no_progress_at_first(source: Source, fetcher: Fetcher) -> None:
    source.ranges, source.drops = False, [PIECE * 4, *[PIECE * 2] * 20]
    with pytest.raises(SourceError, match="repeatedly"):
        await fetcher.fetch(len(DATA), sha256_of(DATA))
    assert fetcher.meter.moved > fetcher.meter.reached == PIECE * 4


@pytest.mark.parametrize("has_hash", [True, False])
async def test_broken_bodies_are_resumed_at_the_next_byte(
    source: Source, fetcher: Fetcher, has_hash: bool
) -> None:
    source.drops = [3 * PIECE + 5, 0, PIECE, 100]
    await fetcher.fetch(len(DATA), sha256_of(DATA) if has_hash else "", connections=1)
    assert whole(fetcher)
    ranges = source.sent_to("/m.gguf")
    assert ranges[:3] == [f"bytes={at}-{SPAN - 1}" for at in (0, 3 * PIECE + 5, 3 * PIECE + 5)]
    sent = sum(int(last) - int(first) + 1 for first, _, last in (text[6:].partition("-") for text in ranges))
    assert sent > len(DATA)
    assert len(source.seen("files")) == len(ranges)  # a signed address is good for one request


async def test_a_signed_address_that_has_expired_does_not_matter(source: Source, fetcher: Fetcher) -> None:
    source.storage_refusals = [Refusal(403, (), b"<Error/>")] * 3
    await fetcher.fetch(len(DATA), sha256_of(DATA))
    assert whole(fetcher)


@pytest.mark.parametrize("connections", [1, 4])
@pytest.mark.parametrize("has_hash", [True, False])
async def test_another_attempt_continues(
    source: Source, fetcher: Fetcher, connections: int, has_hash: bool
) -> None:
    """The first one is cancelled, as when its controller loses the operation."""
    sha256 = sha256_of(DATA) if has_hash else ""
    source.rate = 40 * PIECE
    attempt = asyncio.create_task(fetcher.fetch(len(DATA), sha256, connections))
    await until(lambda: fetcher.meter.moved > 3 * PIECE)
    attempt.cancel()
    await asyncio.gather(attempt, return_exceptions=True)
    await until(lambda: is_free(fetcher.models))
    there = partial_files.bytes_of_partials(fetcher.models)[PATH]
    source.rate = 0
    assert there >= 3 * PIECE
    # The source may still receive a request of the first attempt, so the opener counts.
    opener = CountingOpener()
    await fetcher.fetch(len(DATA), sha256, connections, opener=opener)
    assert whole(fetcher)
    assert opener.requested == len(DATA) - there


def length_of(range_header: str) -> int:
    first, _, last = range_header.removeprefix("bytes=").partition("-")
    return int(last) - int(first) + 1


def is_free(models: Path) -> bool:
    """Return True if no download writes the file."""
    try:
        partial = PartialFile.open(models, PATH)
    except BeingDownloaded:
        return False
    partial.close()
    return True


def leave_partial(models: Path, source: Source, sha256: str, data: bytes, validator: str = "") -> PartialFile:
    """Leave the beginning of the file as a killed process does."""
    partial = PartialFile.open(models, PATH)
    partial.resume(source.url("/m.gguf"), sha256)
    span = partial_files.ByteSpan(0, -1, 0)
    partial.divide(span, len(DATA), validator or f'"{sha256_of(DATA)}"', with_ranges=True)
    partial.write(span, data)
    return partial


@pytest.mark.parametrize("has_hash", [True, False])
async def test_a_file_that_changed_meanwhile_starts_over(
    source: Source, fetcher: Fetcher, has_hash: bool
) -> None:
    """With a hash the change shows at the end, else by the ETag of the first response."""
    sha256 = sha256_of(DATA) if has_hash else ""
    leave_partial(fetcher.models, source, sha256, b"old" * 100, '"old"').close()
    await fetcher.fetch(len(DATA), sha256)
    assert whole(fetcher)


async def test_without_hash_and_etag_nothing_is_resumed(source: Source, fetcher: Fetcher) -> None:
    source.etags = False
    leave_partial(fetcher.models, source, "", b"old" * 100).close()
    await fetcher.fetch(len(DATA))
    assert whole(fetcher)


async def test_after_a_power_cut_only_a_hash_makes_bytes_usable(
    source: Source, fetcher: Fetcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The journal may count bytes that never reached the disk."""
    with monkeypatch.context() as earlier:
        earlier.setattr(files, "boot_id", lambda: "an earlier boot")
        leave_partial(fetcher.models, source, "", bytes(PIECE)).close()
    await fetcher.fetch(len(DATA))
    assert whole(fetcher)
    (fetcher.models / PATH).unlink()
    with monkeypatch.context() as earlier:
        earlier.setattr(files, "boot_id", lambda: "an earlier boot")
        leave_partial(fetcher.models, source, sha256_of(DATA), DATA[:PIECE]).close()
    source.requests.clear()
    await fetcher.fetch(len(DATA), sha256_of(DATA))
    assert whole(fetcher)
    assert source.sent_to("/m.gguf")[0] == f"bytes={PIECE}-{SPAN - 1}"


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b'{"path": 1}', b"\xff", b" " * 100_000])
async def test_a_journal_that_cannot_be_read_is_no_journal(
    source: Source, fetcher: Fetcher, text: bytes
) -> None:
    leave_partial(fetcher.models, source, sha256_of(DATA), bytes(PIECE)).close()
    (journal,) = (fetcher.models / FOLDER).glob("*.json")
    journal.write_bytes(text)
    await fetcher.fetch(len(DATA), sha256_of(DATA))
    assert whole(fetcher)


async def test_a_wrong_hash_is_an_error_and_leaves_nothing(source: Source, fetcher: Fetcher) -> None:
    with pytest.raises(SourceError, match=f"its sha256 is {sha256_of(DATA)}, the source says {'0' * 64}"):
        await fetcher.fetch(len(DATA), "0" * 64)
    assert fetcher.left_over == []


async def test_a_file_that_changes_all_the_time_is_given_up(source: Source, fetcher: Fetcher) -> None:
    source.drops = [PIECE + number for number in range(40)]
    versions = iter(range(1000))
    plain = source._send

    def send(request: Any, path: str) -> None:
        source.files[path] = next(versions).to_bytes(4, "big") + DATA[4:]
        plain(request, path)

    source._send = send  # type: ignore[method-assign]
    with pytest.raises(SourceError, match="it has changed at its source, repeatedly") as error:
        await fetcher.fetch(len(DATA))
    assert not error.value.permanent
    assert PATH not in fetcher.left_over


@pytest.mark.parametrize(
    ("refusal", "error", "words"),
    [
        (Refusal(401), SourceRefused, "refuses access"),
        (Refusal(404, (), b'{"error": "Entry not found"}'), SourceMissing, "Entry not found"),
        (Refusal(418), SourceError, "HTTP status 418"),
        (Refusal(429, (("Retry-After", "3000"),)), SourceBusy, "HTTP status 429"),
    ],
)
async def test_a_refusal_ends_it_in_the_words_of_the_source(
    source: Source, fetcher: Fetcher, refusal: Refusal, error: type[ClusterError], words: str
) -> None:
    source.refusals = [refusal]
    with pytest.raises(error, match=words):
        await fetcher.fetch(len(DATA))


async def test_a_source_that_is_busy_for_a_moment_is_waited_for(
    source: Source, fetcher: Fetcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []

    async def sleep(seconds: float, plain: Any = asyncio.sleep) -> None:
        pauses.append(seconds)
        await plain(0)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    source.refusals = [Refusal(429, (("Retry-After", "7"),)), Refusal(503), Refusal(500)]
    await fetcher.fetch(len(DATA), connections=1)
    assert whole(fetcher)
    assert pauses == [7.0, 0.0, 0.0]


async def test_a_source_that_never_recovers_is_given_up_for_now(source: Source, fetcher: Fetcher) -> None:
    source.refusals = [Refusal(503)] * 50
    with pytest.raises(SourceBusy) as error:
        await fetcher.fetch(len(DATA), connections=1)
    assert not error.value.permanent
    assert len(source.seen("files")) == downloader.MAX_FAILURES + 1


async def test_a_wrong_length_is_an_error(source: Source, fetcher: Fetcher) -> None:
    with pytest.raises(SourceError, match=rf"it has {len(DATA)} bytes instead of {len(DATA) + 1}"):
        await fetcher.fetch(len(DATA) + 1)
    source.ranges, source.extra_length = False, 10
    with pytest.raises(SourceError, match="the source sends no ranges, repeatedly") as error:
        await fetcher.fetch(len(DATA) + 10, connections=1)
    assert not error.value.permanent
    assert PATH not in fetcher.left_over


async def test_a_pointer_is_not_the_file(source: Source, fetcher: Fetcher) -> None:
    source.files["/m.gguf"] = LFS_POINTER % (b"a" * 64, 10**9)
    with pytest.raises(SourceError, match="pointer of Git LFS"):
        await fetcher.fetch()
    assert PATH not in fetcher.left_over


async def test_a_slow_source_is_asked_again(
    source: Source, fetcher: Fetcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(downloader, "STALL_TIMEOUT", 0.2)
    source.pause_at = 3 * PIECE
    attempt = asyncio.create_task(fetcher.fetch(len(DATA), sha256_of(DATA), connections=1))
    await until(lambda: len(source.sent_to("/m.gguf")) > 1)
    source.release()
    await attempt
    assert whole(fetcher)


async def test_two_operations_share_one_download(source: Source, models: Path) -> None:
    source.rate = PIECE
    first, second = Fetcher(source, models), Fetcher(source, models)
    one = asyncio.create_task(first.fetch(len(DATA), sha256_of(DATA)))
    await until(lambda: first.meter.moved > PIECE)
    two = asyncio.create_task(second.fetch(len(DATA), sha256_of(DATA)))
    await until(lambda: "another operation downloads" in second.meter.now)
    source.rate = 0
    fetched = await asyncio.gather(one, two)
    assert fetched[0].sha256 == fetched[1].sha256 == sha256_of(DATA)
    assert sum(map(length_of, source.sent_to("/m.gguf"))) == len(DATA)
    await until(lambda: whole(first))  # a thread closes the second one's lock


async def test_the_second_takes_over_when_the_first_fails(source: Source, models: Path) -> None:
    source.rate = PIECE
    first, second = Fetcher(source, models), Fetcher(source, models)
    one = asyncio.create_task(first.fetch(len(DATA), sha256_of(DATA)))
    await until(lambda: first.meter.moved > PIECE)
    two = asyncio.create_task(second.fetch(len(DATA), sha256_of(DATA)))
    await until(lambda: "another operation downloads" in second.meter.now)
    one.cancel()
    source.rate = 0
    assert (await two).sha256 == sha256_of(DATA)
    await until(lambda: whole(second))  # a thread closes the second one's lock
    assert isinstance((await asyncio.gather(one, return_exceptions=True))[0], asyncio.CancelledError)


async def test_another_file_of_that_name_stays(fetcher: Fetcher) -> None:
    (fetcher.models / "hub").mkdir()
    (fetcher.models / PATH).write_bytes(b"other")
    with pytest.raises(FileConflict, match=r"another file hub/m\.gguf"):
        await fetcher.fetch(len(DATA), sha256_of(DATA))
    assert (fetcher.models / PATH).read_bytes() == b"other"
    await fetcher.fetch(len(DATA), sha256_of(DATA), may_replace=True)
    assert whole(fetcher)


@pytest.mark.parametrize("cause", ["free", "ENOSPC", "EDQUOT"])
async def test_a_full_disk_is_named(fetcher: Fetcher, monkeypatch: pytest.MonkeyPatch, cause: str) -> None:
    if cause == "free":
        usage = shutil.disk_usage(fetcher.models)._replace(free=1)
        monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    else:
        number = getattr(errno, cause)

        def pwrite(descriptor: int, data: bytes, at: int, plain: Callable[..., int] = os.pwrite) -> int:
            if len(data) >= PIECE:
                raise OSError(number, os.strerror(number))
            return plain(descriptor, data, at)

        monkeypatch.setattr(os, "pwrite", pwrite)
    with pytest.raises(DiskFull, match=r"the disk of the models folder .* is full"):
        await fetcher.fetch(len(DATA))


def test_space_is_checked_first(models: Path) -> None:
    free = shutil.disk_usage(models).free
    partial_files.check_free_space(models, 0)
    with pytest.raises(DiskFull, match="do not fit on the disk of the models folder"):
        partial_files.check_free_space(models, free)


async def test_nothing_is_written_through_a_link(fetcher: Fetcher, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (fetcher.models / "hub").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FolderFailed, match="is no folder of the models folder"):
        await fetcher.fetch(len(DATA))
    assert list((tmp_path / "elsewhere").iterdir()) == []


async def test_old_partial_files_are_removed(source: Source, fetcher: Fetcher) -> None:
    held = leave_partial(fetcher.models, source, "", b"x")
    (data,) = (path for path in (fetcher.models / FOLDER).iterdir() if not path.name.endswith(".json"))
    now = clock.now()
    os.utime(data, (0, 0))
    assert partial_files.remove_old_partials(fetcher.models, now, []) == 0  # it is being written
    held.close()
    assert partial_files.remove_old_partials(fetcher.models, now, [PATH]) == 0
    assert partial_files.remove_old_partials(fetcher.models, now, []) == 1
    assert fetcher.left_over == []


def test_a_process_that_lost_its_lock_writes_nothing(source: Source, models: Path) -> None:
    partial = leave_partial(models, source, "", b"x" * PIECE)
    partial.close()
    partial.write(partial.journal.spans[0], b"y" * PIECE)
    with pytest.raises(FolderFailed):
        partial.publish()
    assert partial_files.bytes_of_partials(models) == {PATH: PIECE}
    assert hashlib.sha256(b"x" * PIECE).digest() == hashlib.sha256(partial_bytes(models)).digest()


def partial_bytes(models: Path) -> bytes:
    (data,) = (path for path in (models / FOLDER).iterdir() if not path.name.endswith(".json"))
    return data.read_bytes()
