"""Files on their way to a worker, over real connections: resumed, refused, stalled, and nothing twice."""

import asyncio
import hashlib
import json
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest

from nodes.loading import source_files, transfer
from nodes.loading.source_files import FileChanged, FilePlan, LocalFile, OpenedFile, plan_files
from nodes.loading.staging import (
    MAX_TRANSFERS,
    MAX_TRANSFERS_PER_NODE,
    ModelTransfer,
    StagingResult,
    TransferLimits,
)
from nodes.loading.transfer import FileRefused, Stalled, Transfer, Unreachable, UploadMeter
from nodes.models import FileHash
from nodes.registry.dial_targets import client_of
from operations.executor.work import in_thread, retry_delay
from tests.conftest import until
from tests.support.backends import ROOT
from tests.support.file_server import TOKEN, Cut, FileServer, Hangs, Says, file_server

pytestmark = pytest.mark.django_db(transaction=True)

SIZE = 4_000_000
KEY = "models/m/a.gguf"
RECORDED = ROOT / "tests" / "data" / "worker-http"


class Site:
    """A models folder, a worker's file server, and what is sent."""

    def __init__(self, folder: Path, worker: FileServer) -> None:
        self.folder, self.worker = folder, worker
        self.lanes = TransferLimits()
        self.stall = 20.0

    @property
    def file(self) -> Path:
        return self.folder / "a.gguf"

    @property
    def there(self) -> Path:
        return self.worker.file(KEY)

    def planned(self, **options: Any) -> FilePlan:
        return plan_files(self.folder, "m", {"Model": "a.gguf", **options})

    @asynccontextmanager
    async def sending(
        self, planned: FilePlan | None = None, node: Any = None
    ) -> AsyncIterator[ModelTransfer]:
        made = planned or self.planned()
        meter = UploadMeter({file.relative: file.size for file in made.files.values()}, "gpu")
        async with client_of(self.worker.server) as client:
            yield ModelTransfer("m", made, client, node or uuid4(), self.lanes, meter, self.stall)

    async def sent(self, planned: FilePlan | None = None, node: Any = None) -> StagingResult:
        async with self.sending(planned, node) as sending:
            await sending.check()
            return await sending.send()

    def ranges(self) -> list[str]:
        return [one.headers.get("content-range", "") for one in self.worker.asked if one.method == "PUT"]


@asynccontextmanager
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    folder = tmp_path / "models"
    folder.mkdir()
    (folder / "a.gguf").write_bytes(os.urandom(SIZE))
    async with file_server(tmp_path / "worker") as worker:
        yield Site(folder, worker)


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses between attempts, none of which is waited for."""
    kept: list[float] = []

    def none(attempts: int) -> float:
        kept.append(retry_delay(attempts))
        return 0.0

    monkeypatch.setattr(transfer, "retry_delay", none)
    return kept


async def test_a_file_goes_there_whole_and_is_verified(tmp_path: Path) -> None:
    async with site(tmp_path) as one:
        sent = await one.sent()
        assert sent == StagingResult(str(one.worker.folder / "models/m"), {})
        assert one.there.read_bytes() == one.file.read_bytes()


@pytest.mark.rule("worker-13", "T-FTS-26", "T-FTS-24")
async def test_the_requests_are_those_of_the_recording(tmp_path: Path) -> None:
    """A new file: HEAD, PUT with its range and hash. An unchanged one: exactly one HEAD.

    D-ONE-HEAD (review L5): the reference asks twice before the first upload.
    """
    recorded = [json.loads(line) for line in (RECORDED / "staging.jsonl").read_text().splitlines()]
    async with site(tmp_path) as one:
        await one.sent()
        assert one.worker.steps == [(line["method"], line["status"]) for line in recorded[1:]]
        ours, theirs = one.worker.asked[-1].headers, recorded[-1]["request_headers"]
        assert {name.lower() for name in theirs} <= ours.keys()
        assert ours["content-range"] == f"bytes 0-{SIZE - 1}/{SIZE}"
        assert ours["x-content-sha256"] == hashlib.sha256(one.file.read_bytes()).hexdigest()
        assert (ours["content-type"], ours["authorization"]) == (theirs["Content-Type"], f"Bearer {TOKEN}")
        one.worker.asked.clear()
        await one.sent()
        assert one.worker.steps == [("HEAD", 200)]


@pytest.mark.rule("worker-13", "T-FTS-35", "T-FTS-36")
@pytest.mark.parametrize("after", [1, 65_536, 1_500_000, SIZE - 1])
async def test_an_upload_that_was_cut_goes_on_where_it_broke_off(
    tmp_path: Path, pauses: list[float], after: int
) -> None:
    async with site(tmp_path) as one:
        one.worker.faults = [Cut(after)]
        await one.sent()
        assert one.there.read_bytes() == one.file.read_bytes()
        assert one.ranges() == [f"bytes 0-{SIZE - 1}/{SIZE}", f"bytes {after}-{SIZE - 1}/{SIZE}"]
        assert pauses == [1.0]
        assert [method for method, _ in one.worker.steps] == ["HEAD", "PUT", "HEAD", "PUT"]


@pytest.mark.rule("worker-13", "R2.59")
async def test_another_controller_goes_on_where_one_was_killed(tmp_path: Path) -> None:
    """Nothing of an attempt is kept here: what the worker has is all there is to know."""
    async with site(tmp_path) as one:
        one.worker.faults = [Hangs(1_000_000)]
        killed = asyncio.create_task(one.sent())

        await until(lambda: one.there.exists() and one.there.stat().st_size >= 1_000_000)
        killed.cancel()
        await asyncio.gather(killed, return_exceptions=True)
        one.lanes = TransferLimits()
        await one.sent()
        assert one.ranges()[-1] == f"bytes 1000000-{SIZE - 1}/{SIZE}"
        assert one.there.read_bytes() == one.file.read_bytes()


@pytest.mark.rule("worker-13", "T-FTS-25")
async def test_a_changed_file_goes_again_as_a_whole(tmp_path: Path) -> None:
    """Also one that became shorter, and one in place of which an older file was put."""
    async with site(tmp_path) as one:
        await one.sent()
        for content in (os.urandom(SIZE), os.urandom(SIZE // 2)):
            one.worker.asked.clear()
            new = one.folder / "new"
            new.write_bytes(content)
            os.utime(new, (1, 1))
            new.replace(one.file)
            await one.sent()
            assert one.there.read_bytes() == content
            assert one.ranges() == [f"bytes 0-{len(content) - 1}/{len(content)}"]


@pytest.mark.rule("worker-13")
async def test_a_part_of_another_file_is_replaced(tmp_path: Path, pauses: list[float]) -> None:
    async with site(tmp_path) as one:
        one.worker.faults = [Cut(2_000_000), Says(500, "broken")]
        with pytest.raises(FileRefused):
            await one.sent()
        one.file.write_bytes(os.urandom(SIZE))
        await one.sent()
        assert one.there.read_bytes() == one.file.read_bytes()
        assert one.ranges()[-1] == f"bytes 0-{SIZE - 1}/{SIZE}"


@pytest.mark.rule("worker-13")
async def test_a_part_with_wrong_bytes_fails_once_and_the_next_attempt_starts_clean(
    tmp_path: Path, pauses: list[float]
) -> None:
    async with site(tmp_path) as one:
        one.worker.faults = [Cut(1_000_000), Says(500)]
        with pytest.raises(FileRefused):
            await one.sent()
        one.there.write_bytes(bytes(1_000_000))
        with pytest.raises(FileRefused, match="sha256 mismatch"):
            await one.sent()
        await one.sent()
        assert one.there.read_bytes() == one.file.read_bytes()


@pytest.mark.rule("worker-13")
@pytest.mark.parametrize(
    "hidden",
    [("X-Content-SHA256",), ("X-Local-Path",), ("X-File-Size",), ("X-Content-SHA256", "X-File-Size")],
    ids="+".join,
)
async def test_a_proxy_that_drops_headers_costs_one_more_upload_and_no_loop(
    tmp_path: Path, pauses: list[float], hidden: tuple[str, ...]
) -> None:
    """The recording of the reference repeats the refused request; ours sends the file without a range."""
    recorded = [json.loads(line) for line in (RECORDED / "staging-416.jsonl").read_text().splitlines()]
    assert [line["status"] for line in recorded if line["method"] == "PUT"] == [416, 416]
    async with site(tmp_path) as one:
        await one.sent()
        one.worker.asked.clear()
        one.worker.hides = frozenset(hidden)
        await one.sent()
        statuses = [status for method, status in one.worker.steps if method == "PUT"]
        assert statuses in ([416, 200], []), "a size that is hidden does not hide the hash"
        if statuses:
            assert one.ranges()[-1] == ""
        assert one.there.read_bytes() == one.file.read_bytes()


@pytest.mark.rule("worker-13")
async def test_what_may_pass_is_tried_again_after_longer_and_longer_pauses(
    tmp_path: Path, pauses: list[float]
) -> None:
    async with site(tmp_path) as one:
        elsewhere = Says(416, "elsewhere", ("X-File-Size: 7",))
        one.worker.faults = [Says(308), elsewhere, *[Cut(0)] * 5]
        await one.sent()
        assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]


@pytest.mark.rule("worker-13", "worker-12.3")
async def test_a_file_above_the_largest_body_goes_in_several_parts(
    tmp_path: Path, pauses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a pause between them, also on from a cut."""
    monkeypatch.setattr(transfer, "MAX_PART_BYTES", 1_500_000)
    async with site(tmp_path) as one:
        one.worker.faults = [Cut(1_000_000)]
        await one.sent()
        assert one.there.read_bytes() == one.file.read_bytes()
        assert one.ranges() == [
            f"bytes {part}/{SIZE}" for part in ("0-1499999", "1000000-2499999", f"2500000-{SIZE - 1}")
        ]
        assert pauses == [1.0]
        assert await one.sent() == StagingResult(str(one.worker.folder / "models/m"), {})


@pytest.mark.rule("worker-13")
@pytest.mark.parametrize("status", [408, 503])
async def test_a_pause_on_the_way_is_no_refusal(tmp_path: Path, pauses: list[float], status: int) -> None:
    """Our worker says 408 when no bytes came for 20 s, and 503 at its end or with too many connections."""
    async with site(tmp_path) as one:
        one.worker.faults = [Says(status, "too slow")]
        await one.sent()
        assert (pauses, one.there.read_bytes()) == ([1.0], one.file.read_bytes())


@pytest.mark.rule("worker-13")
@pytest.mark.parametrize("status", [400, 409, 500, 502, 301, 507])
async def test_any_other_status_ends_it_with_the_workers_words(
    tmp_path: Path, pauses: list[float], status: int
) -> None:
    async with site(tmp_path) as one:
        one.worker.faults = [Says(status, "these words", ("Location: http://127.0.0.1:1/",))]
        with pytest.raises(FileRefused, match="these words") as refusal:
            await one.sent()
        assert (refusal.value.affects_node, pauses) == (status == 507, [])


@pytest.mark.rule("worker-13")
async def test_words_that_repeat_our_token_are_kept_without_it(tmp_path: Path) -> None:
    """They stand in the operation, in its log and on a page; a stock worker's token opens the cluster."""
    async with site(tmp_path) as one:
        one.worker.faults = [Says(400, f"no such header: Bearer {TOKEN}, sorry")]
        with pytest.raises(FileRefused, match=r"Bearer …, sorry") as refusal:
            await one.sent()
        assert TOKEN not in str(refusal.value)


@pytest.mark.rule("worker-13")
async def test_a_token_that_is_refused_ends_it_before_any_byte(tmp_path: Path) -> None:
    async with site(tmp_path) as one:
        async with one.sending() as sending:
            sending.client.headers["Authorization"] = "Bearer x"
            with pytest.raises(FileRefused, match="does not accept our token"):
                await sending.check()
        assert [status for _, status in one.worker.steps] == [401]


@pytest.mark.rule("C30", "R2.24", "worker-13")
@pytest.mark.parametrize("after", [0, 1_000_000], ids=["at once", "after a part"])
async def test_a_worker_that_takes_no_more_bytes_stalls_it(tmp_path: Path, after: int) -> None:
    async with site(tmp_path) as one:
        (one.folder / "a.gguf").write_bytes(os.urandom(30_000_000))
        one.stall, one.worker.faults = 0.6, [Hangs(after)]
        with pytest.raises(Stalled, match="got no further"):
            await one.sent()


@pytest.mark.rule("C30", "worker-13")
async def test_a_connection_that_always_breaks_at_one_place_stalls_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes that were sent before are no progress."""
    monkeypatch.setattr(transfer, "retry_delay", lambda attempts: 0.05)
    async with site(tmp_path) as one:
        one.stall, one.worker.faults = 1.0, [Cut(0)] * 1000
        with pytest.raises(Stalled):
            await one.sent()
        assert len(one.ranges()) > 2


@pytest.mark.rule("worker-13")
async def test_a_port_that_refuses_is_given_up_after_three_requests(
    tmp_path: Path, pauses: list[float]
) -> None:
    """Review R4: it was tried for five minutes."""
    async with site(tmp_path) as one:
        one.worker.address = "127.0.0.1:1"
        with pytest.raises(Unreachable, match="connection refused"):
            await one.sent()
        assert pauses == [1.0, 2.0]


@pytest.mark.rule("worker-13")
async def test_a_port_that_answers_again_in_time_is_not_given_up(
    tmp_path: Path, pauses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each answer starts the count again (review R4)."""
    failures = iter([True, True, False, True, True])
    plain = httpx.AsyncClient.head

    async def head(client: httpx.AsyncClient, url: str) -> httpx.Response:
        if next(failures, False):
            raise httpx.ConnectError("not there")
        return await plain(client, url)

    monkeypatch.setattr(httpx.AsyncClient, "head", head)
    async with site(tmp_path) as one:
        one.worker.faults = [Cut(1_000_000)]
        await one.sent()
        assert one.there.read_bytes() == one.file.read_bytes()
        assert pauses == [1.0, 2.0, 1.0, 2.0, 4.0]


@pytest.mark.rule("T-DL-18", "T-DL-19", "T-DL-20", "R2.24")
async def test_reading_a_file_for_its_hash_keeps_it_alive_and_silence_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if it is all there: what is verified after the end of the wait counts no more."""
    plain = OpenedFile.read

    async def slowly(source: OpenedFile, most: int, digest: Any = None) -> bytes:
        # Real time is the subject: the whole file takes longer than the allowed silence, no piece does.
        await asyncio.sleep(0.25 if digest else 0)
        return await plain(source, SIZE // 6 if digest else most, digest)

    async def never(source: OpenedFile, most: int, digest: Any = None) -> bytes:
        await asyncio.Event().wait()
        return b""

    async with site(tmp_path) as one:
        one.stall = 1.0
        monkeypatch.setattr(OpenedFile, "read", slowly)
        await one.sent()
        monkeypatch.setattr(OpenedFile, "read", never)
        with pytest.raises(Stalled):
            await one.sent()
        assert one.there.read_bytes() == one.file.read_bytes()


@pytest.mark.rule("T-FTS-27", "worker-13")
@pytest.mark.parametrize("status", [405, 500])
async def test_a_worker_that_does_not_tell_what_it_has_is_sent_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    monkeypatch.setattr(FileServer, "_head", lambda server, key: (status, "", {}))
    async with site(tmp_path) as one:
        await one.sent()
        assert one.worker.steps == [("HEAD", status), ("PUT", 200)]


@pytest.mark.rule("R2.57", "worker-14")
async def test_a_companion_that_is_refused_is_left_out_and_a_full_disk_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with site(tmp_path) as one:
        (one.folder / "proj.bin").write_bytes(b"projector")
        planned = one.planned(MMProj="proj.bin")

        async def one_after_the_other(fault: Says) -> StagingResult:
            one.worker.faults = []
            await one.sent()
            one.worker.faults = [fault]
            return await one.sent(planned)

        sent = await one_after_the_other(Says(400, "not that one"))
        assert sent.root
        assert list(sent.failed) == ["proj.bin"]
        assert "not that one" in sent.failed["proj.bin"]
        monkeypatch.setattr(OpenedFile, "_read", unreadable(OpenedFile._read))
        assert "cannot be read" in (await one.sent(planned)).failed["proj.bin"]
        monkeypatch.undo()
        for full in (Says(507, "full"), Says(500, "write: no space left on device"), Says(401)):
            with pytest.raises(FileRefused) as refusal:
                await one_after_the_other(full)
            assert refusal.value.affects_node


@pytest.mark.rule("worker-13")
async def test_an_empty_file_and_a_name_of_any_letters(tmp_path: Path) -> None:
    async with site(tmp_path) as one:
        folder = one.folder / "tree with a blank" / "größe #1?%2f&+"
        folder.mkdir(parents=True)
        (folder / "empty").touch()
        (folder / "größe;v=1.bin").write_bytes(b"x")
        sent = await one.sent(plan_files(one.folder, "m", {"Model": "tree with a blank"}))
        assert sent.root == str(one.worker.folder / "models/m")
        where = one.worker.folder / "models/m" / folder.relative_to(one.folder)
        assert {path.name for path in where.iterdir()} == {"empty", "größe;v=1.bin"}
        assert sorted(one.ranges()) == ["", "bytes 0-0/1"]


@pytest.mark.rule("worker-13")
async def test_several_files_at_once_within_both_bounds(tmp_path: Path) -> None:
    async with site(tmp_path) as one:
        (one.folder / "tree").mkdir()
        for number in range(12):
            (one.folder / "tree" / f"f{number}").write_bytes(os.urandom(300_000))
        planned, node = plan_files(one.folder, "m", {"Model": "tree"}), uuid4()
        await one.sent(planned)
        assert 1 < one.worker.most <= MAX_TRANSFERS_PER_NODE
        assert len(list((one.worker.folder / "models/m/tree").iterdir())) == 12
        one.worker.most = 0
        for path in (one.folder / "tree").iterdir():
            path.write_bytes(os.urandom(300_000))
        again = plan_files(one.folder, "m", {"Model": "tree"})
        one.lanes.all = asyncio.Semaphore(2)
        await asyncio.gather(one.sent(again, node), one.sent(planned_other(one)))
        assert one.worker.most <= 2 < MAX_TRANSFERS


@pytest.mark.rule("worker-13")
async def test_long_transfers_to_other_nodes_delay_no_file_that_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor the look for files. What must be sent waits for its place."""
    monkeypatch.setattr(source_files, "_SETTLED_AFTER_SECONDS", -1e9)
    async with site(tmp_path) as one:
        first = await one.sent()
        one.lanes.all = asyncio.Semaphore(0)
        assert await asyncio.wait_for(one.sent(), 60) == first
        waiting = asyncio.create_task(one.sent(planned_other(one)))
        await until(lambda: one.worker.steps[-1:] == [("HEAD", 404)])
        one.lanes.all.release()
        assert (await waiting).root == first.root


def planned_other(one: Site) -> FilePlan:
    (one.folder / "b.gguf").write_bytes(os.urandom(500_000))
    return plan_files(one.folder, "m", {"Model": "b.gguf"})


def unreadable(plain: Any) -> Any:
    """The projector cannot be read; everything else can, also by root."""

    def read(source: Any, most: int, digest: Any) -> bytes:
        if source._local_file.relative == "proj.bin":
            raise PermissionError(13, "Permission denied")
        return bytes(plain(source, most, digest))

    return read


def looked(one: Site) -> LocalFile:
    return one.planned().files["a.gguf"]


async def hashed(file: LocalFile, read: list[int] | None = None) -> tuple[str, str]:
    hasher = source_files.FileHasher(file)
    async for count in hasher.read():
        (read if read is not None else []).append(count)
    return hasher.sha256, hasher.stamp


async def test_a_hash_is_computed_once_for_a_file_that_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D-HASH-ROWS. A file of a moment ago could change again unseen: it is not remembered."""
    async with site(tmp_path) as one:
        read: list[int] = []
        right = hashlib.sha256(one.file.read_bytes()).hexdigest()
        assert (await hashed(looked(one), read))[0] == right
        assert (sum(read), await in_thread(FileHash.objects.count)) == (SIZE, 0)
        monkeypatch.setattr(source_files, "_SETTLED_AFTER_SECONDS", -1e9)
        for _ in range(2):
            assert (await hashed(looked(one), read))[0] == right
        assert (sum(read), await in_thread(FileHash.objects.count)) == (2 * SIZE, 1)
        status = one.file.stat()
        one.file.write_bytes(bytes(SIZE))
        os.utime(one.file, ns=(status.st_atime_ns, status.st_mtime_ns))
        assert (await hashed(looked(one), read))[0] == hashlib.sha256(bytes(SIZE)).hexdigest()
        assert (sum(read), await in_thread(FileHash.objects.count)) == (3 * SIZE, 1)


@pytest.mark.parametrize("change", [lambda path: path.write_bytes(b"x"), lambda path: os.truncate(path, 9)])
async def test_a_file_that_is_being_written_is_not_sent(
    tmp_path: Path, change: Callable[[Path], Any]
) -> None:
    async with site(tmp_path) as one:
        before = looked(one)
        change(one.file)
        with pytest.raises(FileChanged):
            await hashed(before)
        whole, stamp = await hashed(looked(one))
        now = looked(one)
        one.file.write_bytes(b"something else")
        meter = UploadMeter({"a.gguf": now.size}, "gpu")
        async with client_of(one.worker.server) as client:
            moving = Transfer(client, now, KEY, meter, 20)
            async with moving._stall_limit():
                with pytest.raises(FileChanged):
                    await moving._send(whole, stamp)
        assert not one.there.exists() or one.there.stat().st_size == 0
