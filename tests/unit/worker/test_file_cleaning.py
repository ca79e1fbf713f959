"""Which staged files go after a day, and which never do (worker.md §14: the reference never cleans)."""

import asyncio
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from localai_cluster.kit import clock
from localai_cluster.worker.files import keys
from localai_cluster.worker.files.keys import STAGED_FILE_MAX_AGE, Folders, remove_old_staged_files
from localai_cluster.worker.files.locks import PathLocks
from localai_cluster.worker.files.routes import FileServer
from tests.conftest import until
from tests.support.worker_http import fetches


def left(staging: Path) -> set[str]:
    return {str(path.relative_to(staging)) for path in staging.rglob("*") if path.name != "later"}


@pytest.mark.rule("worker-14")
def test_what_was_for_one_request_goes_after_a_day(tmp_path: Path) -> None:
    """D-STAGING-CLEANED. Other folders stay as they are, and so does what lies behind a link."""
    staging, other = tmp_path / "staging", tmp_path / "other"
    request, own = staging / "ephemeral/inputs/12345678", staging / "somebody/s"
    for folder in (request, own, other):
        folder.mkdir(parents=True)
    for path in (request / "a.wav", request / "a.wav.sha256", own / "file", other / "kept"):
        path.write_text("x")
    (staging / "localai-output-1.tmp").write_text("x")
    (staging / "another.tmp").write_text("x")
    (request / "out").symlink_to(other)
    now = clock.now()
    assert (
        remove_old_staged_files(staging, now + STAGED_FILE_MAX_AGE - timedelta(hours=1), lambda path: False)
        == 0
    )
    assert (
        remove_old_staged_files(
            staging, now + STAGED_FILE_MAX_AGE + timedelta(hours=1), lambda path: path.name == "a.wav"
        )
        == 3
    )
    kept = {"somebody", "somebody/s", "somebody/s/file", "another.tmp"}
    folders = {"ephemeral", "ephemeral/inputs", "ephemeral/inputs/12345678"}
    assert left(staging) == kept | folders | {"ephemeral/inputs/12345678/a.wav"}
    assert remove_old_staged_files(staging, now + 3 * STAGED_FILE_MAX_AGE, lambda path: False) == 1
    for _ in range(3):
        remove_old_staged_files(staging, now + 3 * STAGED_FILE_MAX_AGE, lambda path: False)
    assert left(staging) == kept | {"ephemeral"}
    assert (other / "kept").exists()


@pytest.mark.rule("worker-14")
def test_a_folder_that_is_a_link_is_not_entered(tmp_path: Path) -> None:
    staging, other = tmp_path / "staging", tmp_path / "other"
    staging.mkdir()
    other.mkdir()
    (other / "kept").write_text("x")
    (staging / "ephemeral").symlink_to(other)
    assert remove_old_staged_files(staging, clock.now() + 3 * STAGED_FILE_MAX_AGE, lambda path: False) == 0
    assert remove_old_staged_files(tmp_path / "missing", clock.now(), lambda path: False) == 0
    assert (other / "kept").exists()


@pytest.mark.rule("worker-14")
def test_an_upload_that_ends_while_a_thread_asks_for_it_does_not_end_the_cleaning() -> None:
    """The cleaning looks from another thread: an entry may go between any two of its looks."""

    class Ends(dict[Path, object]):
        def __contains__(self, path: object) -> bool:
            return True

    locks = PathLocks()
    locks._entries = Ends()  # type: ignore[assignment]
    assert not locks.uploading(Path("a"))


@pytest.mark.rule("worker-14")
async def test_a_cleaning_that_fails_is_told_and_comes_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    times, third = 0, asyncio.Event()

    def broken(*arguments: object) -> int:
        nonlocal times
        times += 1
        if times == 3:
            loop.call_soon_threadsafe(third.set)
        raise RuntimeError("a link to itself")

    loop = asyncio.get_running_loop()
    monkeypatch.setattr(keys, "REMOVAL_INTERVAL_SECONDS", 0.0)
    monkeypatch.setattr(keys, "remove_old_staged_files", broken)
    async with FileServer(Folders.of_worker(tmp_path / "models", tmp_path / "own", ()), fetches()).running():
        async with asyncio.timeout(60):
            await third.wait()
    assert "a link to itself" in caplog.text


@pytest.mark.rule("worker-12.1", "worker-14")
async def test_folders_are_made_and_cleaned_at_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that cannot be made does not keep the worker from starting."""
    monkeypatch.setattr(keys, "REMOVAL_INTERVAL_SECONDS", 0.01)
    folders = Folders.of_worker(tmp_path / "deep" / "models", tmp_path / "own", ())
    folders.data.parent.mkdir()
    folders.data.write_text("in the way")
    stale = folders.staging / "ephemeral" / "inputs" / "1" / "a"
    stale.parent.mkdir(parents=True)
    stale.write_text("x")
    long_after = datetime.now(UTC) + 2 * STAGED_FILE_MAX_AGE  # noqa: TID251
    monkeypatch.setattr(clock, "now", lambda: long_after)

    async with FileServer(folders, fetches()).running():
        await until(lambda: not stale.exists())
        assert folders.models.is_dir()
    assert os.listdir(folders.staging) == ["ephemeral"]
