"""The models folder: what changes is seen, what is broken or hangs takes nothing else down."""

import asyncio
import errno
import json
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock
from uuid import uuid4

import pytest
import yaml

from localai_cluster.kit import clock
from nodes.definitions import rows, sizes
from nodes.definitions.files import Definition, UnusableDefinition, parse_file, read_definition
from nodes.definitions.folder import Folder, FolderUnresponsive
from nodes.definitions.rows import StoredDefinition
from tests.conftest import eventually, until
from tests.support.definitions import PLAIN, write
from tests.support.hostile_yaml import HOSTILE_SCALARS

__all__ = ["write"]


class Clock:
    """A monotonic clock that stands until it is moved."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def find(folder: Folder, name: str) -> Definition | None:
    return asyncio.run(folder.find(name))


def test_a_file_that_cannot_be_examined_hides_no_sizes_of_other_models(
    write: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("one", "two"):
        write(f"{name}.yaml", PLAIN | {"name": name, "parameters": {"model": name}})
        (tmp_path / name).write_bytes(b"12345")
    genuine = sizes.files_of

    def files_of(folder: Path, definition: Definition) -> list[tuple[str, int]]:
        if definition.name == "one":
            raise PermissionError(errno.EACCES, "denied")
        return genuine(folder, definition)

    monkeypatch.setattr("nodes.definitions.folder.files_of", files_of)

    async def scenario() -> list[list[tuple[str, int]]]:
        folder = Folder(tmp_path)
        definitions = [await folder.find("one"), await folder.find("two")]
        return await folder.file_lists([one for one in definitions if one is not None])

    assert asyncio.run(scenario()) == [[], [(str(tmp_path / "two"), 5)]]


def test_files_that_are_no_definitions_are_told_from_those_that_are_gone(
    write: Callable[..., Path], tmp_path: Path
) -> None:
    """Issue 23: a second definition of a name is readable, and so is an empty folder; a lost one is not."""
    write("a.yaml", PLAIN)
    write("b.yaml", PLAIN)
    write("c.yml", "name: [")
    now = Clock()
    folder = Folder(tmp_path, now)
    assert asyncio.run(folder.unreadable_files()) == frozenset({"c.yml"})
    for name in ("a.yaml", "b.yaml", "c.yml"):
        (tmp_path / name).unlink()
    now.now += 2
    assert asyncio.run(folder.unreadable_files()) == frozenset()
    tmp_path.rmdir()
    now.now += 2
    assert asyncio.run(folder.unreadable_files()) is None


def every(folder: Folder) -> list[Definition]:
    return asyncio.run(folder.all())


def test_one_broken_file_does_not_take_the_others_down(
    write: Callable[..., Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A broken file and a second file of the same name are logged once, by file name and reason."""
    write("a.yaml", PLAIN)
    write("b.yaml", PLAIN | {"backend": "second"})
    write("c.yml", "name: [")
    write("d.txt", "not looked at")
    now = Clock()
    folder = Folder(tmp_path, now)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert [(d.name, d.backend, d.source) for d in every(folder)] == [("mini", "numpy", "a.yaml")]
            now.now += 2
    assert sorted(str(record.args[0]) for record in caplog.records if isinstance(record.args, tuple)) == [
        "b.yaml",
        "c.yml",
    ]


@pytest.mark.parametrize("scalar", HOSTILE_SCALARS)
def test_a_hostile_file_is_its_own_error_only(
    scalar: str, write: Callable[..., Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Review R6: after a restart one such file left no model at all, and only the log said so."""
    write("a.yaml", PLAIN)
    write("b.yaml", f"name: other\nthreads: {scalar}\n")
    now = Clock()
    folder = Folder(tmp_path, now)
    for _ in range(3):
        assert [one.name for one in every(folder)] == ["mini"]
        now.now += 2
    problems = asyncio.run(folder.problems())
    assert (problems.folder, list(problems.files)) == ("", ["b.yaml"])
    assert caplog.messages == [f"Model definition b.yaml {problems.files['b.yaml']}"]
    json.dumps(problems.files).encode()


def test_problems_end_with_the_file_and_are_logged_again_when_they_return(
    write: Callable[..., Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Review R6: names of files are whatever the disk has; an absent folder is a problem of its own."""
    now = Clock()
    folder = Folder(tmp_path / "models", now)
    problems = asyncio.run(folder.problems())
    assert (problems.folder, problems.files) == ("cannot be listed: No such file or directory", {})
    (tmp_path / "models").mkdir()
    odd_name = os.fsdecode(b"\xff\n.yaml")
    for _ in range(2):
        write("models/a.yaml", "name: [")
        (tmp_path / "models" / odd_name).write_text("- x")
        now.now += 2
        problems = asyncio.run(folder.problems())
        assert (problems.folder, list(problems.files)) == ("", ["a.yaml", r"\xff\x0a.yaml"])
        for path in (tmp_path / "models").iterdir():
            path.unlink()
        now.now += 2
        assert not asyncio.run(folder.problems())
    assert [line.partition(" is")[0] for line in caplog.messages[1:]] == [
        "Model definition a.yaml",
        r"Model definition \xff\x0a.yaml",
    ] * 2


def test_a_link_that_leads_nowhere_is_a_problem_until_its_target_is_there(
    write: Callable[..., Path], tmp_path: Path
) -> None:
    """Review R6: such a definition was neither a model nor a problem."""
    (tmp_path / "away.yaml").symlink_to(tmp_path / "target")
    (tmp_path / "self.yaml").symlink_to(tmp_path / "self.yaml")
    now = Clock()
    folder = Folder(tmp_path, now)
    assert asyncio.run(folder.problems()).files == {
        "away.yaml": "cannot be read: No such file or directory",
        "self.yaml": "cannot be read: Too many levels of symbolic links",
    }
    (tmp_path / "self.yaml").unlink()
    write("target", PLAIN)
    now.now += 2
    assert [one.name for one in every(folder)] == ["mini"]
    assert not asyncio.run(folder.problems())


def refuse_status(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    """Let every look at the file fail as on a mount that has lost it."""
    plain = os.stat

    def stat(target: Any, **options: Any) -> os.stat_result:
        if target == path:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return plain(target, **options)

    monkeypatch.setattr(os, "stat", stat)


def test_a_file_whose_status_cannot_be_read_is_not_a_removed_one(
    write: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its model would have been unloaded, and the record of its last load withdrawn."""
    write("a.yaml", PLAIN)
    write("b.yaml", PLAIN | {"name": "other"})
    now = Clock()
    folder = Folder(tmp_path, now)
    assert [one.name for one in every(folder)] == ["mini", "other"]
    with monkeypatch.context() as patch:
        refuse_status(patch, tmp_path / "a.yaml")
        now.now += 2
        assert [one.name for one in every(folder)] == ["mini", "other"]
        problem = "has files that cannot be examined, such as a.yaml: Stale file handle"
        assert asyncio.run(folder.problems()).folder == problem
        assert asyncio.run(folder.unreadable_files()) is None
        fresh = Folder(tmp_path, now)
        assert [one.name for one in every(fresh)] == ["other"]
        problems = asyncio.run(fresh.problems())
        assert (problems.folder, problems.files) == (problem, {"a.yaml": "cannot be read: Stale file handle"})
        assert asyncio.run(fresh.unreadable_files()) is None
    now.now += 2
    for models in (folder, fresh):
        assert [one.name for one in every(models)] == ["mini", "other"]
        assert not asyncio.run(models.problems())
        assert asyncio.run(models.unreadable_files()) == frozenset()


def test_two_undecodable_names_are_two_problems(tmp_path: Path) -> None:
    """Review R6: one took the other's place."""
    for name in (b"\xff.yaml", b"\xfe.yaml", b"\\xff.yaml"):
        (tmp_path / os.fsdecode(name)).write_text("- x")
    problems = asyncio.run(Folder(tmp_path, Clock()).problems())
    assert sorted(problems.files) == [r"\x5cxff.yaml", r"\xfe.yaml", r"\xff.yaml"]


def test_a_file_that_was_added_before_a_lookup_is_found(write: Callable[..., Path], tmp_path: Path) -> None:
    """One web process listed a model, and another one, which had looked just before, answered 404."""
    folder = Folder(tmp_path / "later", Clock())
    assert every(folder) == []
    (tmp_path / "later").mkdir()
    write("later/a.yaml", PLAIN)
    assert find(folder, "mini") is not None


def test_lookups_of_unknown_names_share_a_scan(
    mount: "Stuck", write: Callable[..., Path], tmp_path: Path
) -> None:
    """A client that asks for names that do not exist does not make the folder be read each time."""
    write("a.yaml", PLAIN)
    folder = Folder(tmp_path)

    async def scenario() -> None:
        assert await folder.find("mini") is not None
        await asyncio.gather(*(folder.find(f"unknown {number}") for number in range(100)))

    asyncio.run(scenario())
    assert mount.calls == 2


def test_changes_are_seen_within_a_second(write: Callable[..., Path], tmp_path: Path) -> None:
    """The folder is looked at once a second; changed and removed files are noticed then."""
    now = Clock()
    folder = Folder(tmp_path, now)
    path = write("a.yaml", PLAIN)
    assert find(folder, "mini") is not None
    path.write_text(yaml.safe_dump(PLAIN | {"context_size": 7}))
    now.now += 1
    second = find(folder, "mini")
    assert second is not None
    assert second.options["ContextSize"] == 7
    path.unlink()
    now.now += 1
    assert find(folder, "mini") is None


# A folder that cannot be listed, and the rows that its files win over


def row_of(name: str) -> rows.Rows:
    """One stored definition whose backend is called `row`."""
    content = parse_file(
        yaml.safe_dump(PLAIN | {"name": name, "backend": "row"}).encode(), f"definitions/{name}"
    )
    return {uuid4(): StoredDefinition(1, name, "api", 1, False, clock.now(), content)}


@pytest.mark.parametrize("code", [errno.EACCES, errno.ENOENT])
def test_a_folder_that_cannot_be_listed_brings_no_row_into_force(
    code: int, write: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pass would replace all replicas by those of the row, and back again."""
    write("a.yaml", PLAIN)
    write("b.yaml", "name: [")
    now = Clock()
    stored = dict(row_of("mini"))
    folder = Folder(tmp_path, now, read_rows=lambda _: stored)
    assert [one.backend for one in every(folder)] == ["numpy"]
    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", Mock(side_effect=OSError(code, os.strerror(code))))
        now.now += 2
        assert [one.backend for one in every(folder)] == ["numpy"]
        problems = asyncio.run(folder.problems())
        assert (problems.folder, list(problems.files)) == (
            f"cannot be listed: {os.strerror(code)}",
            ["b.yaml"],
        )
        assert asyncio.run(folder.unreadable_files()) is None
        assert asyncio.run(folder.file_of("mini")) == "a.yaml"
    now.now += 2
    assert asyncio.run(folder.unreadable_files()) == frozenset({"b.yaml"})
    assert asyncio.run(folder.problems()).folder == ""


def test_rows_wait_for_the_first_list_of_a_folder_that_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that starts while the folder cannot be listed does not know which rows its files win over."""
    now = Clock()
    stored = dict(row_of("mini"))
    folder = Folder(tmp_path, now, read_rows=lambda _: stored)
    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", Mock(side_effect=PermissionError(errno.EACCES, "denied")))
        for _ in range(2):
            for ask in (folder.all, lambda: folder.find("mini")):
                with pytest.raises(FolderUnresponsive, match="cannot be listed: denied"):
                    asyncio.run(ask())
            assert asyncio.run(folder.problems()).folder == "cannot be listed: denied"
            assert asyncio.run(folder.unreadable_files()) is None
            now.now += 2
    assert [one.backend for one in every(folder)] == ["row"]
    without_folder = Folder(tmp_path / "absent", read_rows=lambda _: stored)
    assert [one.backend for one in every(without_folder)] == ["row"], "rows need no folder"


# What is no file, and what does not answer


def odd(path: Path, kind: str) -> None:
    """Something that a reader of files must not open."""
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as link:
            link.bind(str(path))
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(path)


@pytest.mark.parametrize("kind", ["fifo", "socket", "device", "folder", "loop"])
def test_only_regular_files_are_read(
    kind: str, write: Callable[..., Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A FIFO once stopped a web process for minutes. It is named in the log, the file beside it serves."""
    write("a.yaml", PLAIN)
    odd(tmp_path / "b.yaml", kind)
    with caplog.at_level(logging.WARNING):
        assert [one.name for one in every(Folder(tmp_path))] == ["mini"]
    with pytest.raises(UnusableDefinition, match="cannot be read"):
        read_definition(tmp_path / "b.yaml")
    if kind != "loop":
        assert "Model definition b.yaml cannot be read: not a regular file" in caplog.messages


def test_a_file_that_becomes_a_fifo_while_it_is_opened_is_not_waited_for(
    write: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look and the opening another thing may have taken its place."""
    path, plain = write("a.yaml", PLAIN), os.stat

    def swapped(target: Any, **options: Any) -> os.stat_result:
        found = plain(target, **options)
        if target == path:
            path.unlink()
            os.mkfifo(path)
        return found

    monkeypatch.setattr(os, "stat", swapped)
    with pytest.raises(UnusableDefinition, match="not a regular file"):
        read_definition(path)


class Stuck:
    """A mount that does not answer until it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.hangs, self.calls, self._scandir = threading.Event(), 0, os.scandir
        self._goes_on = threading.Event()
        monkeypatch.setattr("nodes.definitions.folder.os.scandir", self._listed)

    def _listed(self, path: Any) -> Any:
        self.calls += 1
        if self.hangs.is_set():
            self._goes_on.wait()
        return self._scandir(path)

    def end(self) -> None:
        self.hangs.clear()
        self._goes_on.set()


@pytest.fixture
def mount(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stuck]:
    stuck = Stuck(monkeypatch)
    yield stuck
    stuck.end()


def test_a_folder_that_hangs_stops_nothing_that_is_known(
    mount: Stuck, write: Callable[..., Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The loop turns while it hangs, known models serve, others are 503; one thread waits for all."""
    write("a.yaml", PLAIN)
    now = Clock()
    folder = Folder(tmp_path, now, limit=60)

    async def scenario() -> int:
        assert await folder.find("mini") is not None
        # Not before: on a busy machine a first look takes its time.
        folder._limit = folder._scans._limit = 0.05
        mount.hangs.set()
        now.now += 2
        assert (await folder.problems()).folder == "does not answer"
        turns, done = 0, asyncio.ensure_future(folder.find("mini"))
        while not done.done():
            turns += 1
            await asyncio.sleep(0)
        assert (await done) is not None
        for _ in range(20):
            now.now += 2
            assert [one.name for one in await folder.all()] == ["mini"]
            with pytest.raises(FolderUnresponsive) as refused:
                await folder.find("other")
            assert (refused.value.status, tmp_path.name in refused.value.message) == (503, True)
        return turns

    with caplog.at_level(logging.WARNING):
        assert asyncio.run(scenario()) > 10
        assert mount.calls == 2
        write("b.yaml", PLAIN | {"name": "other"})
        mount.end()
        eventually(lambda: "answers again" in caplog.text, what="the folder answers again")
    now.now += 2
    assert find(folder, "other") is not None
    assert find(folder, "nothing") is None
    assert [line for line in caplog.messages if "has not answered" in line] == [
        f"The models folder {tmp_path} has not answered for 0.05 s; definitions that are known go on serving"
    ]


def test_a_folder_that_never_answered_is_a_503(mount: Stuck, tmp_path: Path) -> None:
    """Nothing is known, so nothing can be said; the request waits no longer than the limit."""
    mount.hangs.set()
    folder = Folder(tmp_path, limit=0.05)
    for ask in (folder.all, lambda: folder.find("mini")):
        with pytest.raises(FolderUnresponsive):
            asyncio.run(ask())


def test_a_request_that_leaves_ends_no_look(mount: Stuck, write: Callable[..., Path], tmp_path: Path) -> None:
    """The look belongs to all who wait for it."""
    write("a.yaml", PLAIN)
    folder = Folder(tmp_path)

    async def scenario() -> Definition | None:
        mount.hangs.set()
        first, second = asyncio.ensure_future(folder.find("mini")), asyncio.ensure_future(folder.find("mini"))
        await until(lambda: mount.calls == 1)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        mount.end()
        return await second

    assert asyncio.run(scenario()) is not None
    assert mount.calls == 1


def test_a_defect_of_ours_leaves_what_was_known(
    write: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """When a look raises, those who wait for it get an answer."""
    write("a.yaml", PLAIN)
    now = Clock()
    folder = Folder(tmp_path, now)
    assert find(folder, "mini") is not None
    monkeypatch.setattr("nodes.definitions.folder._index_definitions", lambda *_: 1 / 0)
    for _ in range(3):
        now.now += 2
        assert find(folder, "mini") is not None
    assert asyncio.run(folder.problems()).folder == "cannot be read: division by zero"
    assert len(caplog.messages) == 1, "logged once, not with every look"


# Files of models


def test_files_that_hang_take_no_thread_of_the_loop(
    write: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any caller of `/api/show` could take all threads that also read the database, one with each request.

    However often files are asked for, one thread for each waits.
    """
    write("a.yaml", PLAIN)
    folder, goes_on, calls = Folder(tmp_path), threading.Event(), list[str]()

    def hang(name: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            calls.append(name)
            goes_on.wait()

        return call

    for name in ("template_has_tools", "read_content", "files_of"):
        monkeypatch.setattr(f"nodes.definitions.folder.{name}", hang(name))

    async def scenario() -> None:
        definition = await folder.find("mini")
        assert definition is not None
        folder._reads.limit = 0.05
        for _ in range(3):
            assert not await folder.has_tools(definition)
            with pytest.raises(FolderUnresponsive, match="does not answer"):
                await folder.text("mini")
            assert await folder.file_lists([definition]) == [[]]

    try:
        asyncio.run(asyncio.wait_for(scenario(), 60))
    finally:
        goes_on.set()
    assert calls == ["template_has_tools", "read_content", "files_of"]


def test_the_template_of_a_file_is_read_once_and_never_from_a_fifo(
    write: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each request read up to 64 MiB of the file; a FIFO had it wait for a writer."""
    definition = read_definition(write("a.yaml", PLAIN))
    find_template = Mock(return_value=True)
    monkeypatch.setattr(sizes, "tools_in_template", find_template)
    file = tmp_path / definition.model
    for content in (b"GGUF", b"GGUF2"):
        file.write_bytes(content)
        find_template.reset_mock()
        assert [sizes.template_has_tools(tmp_path, definition) for _ in range(2)] == [True, True]
        find_template.assert_called_once()
    file.unlink()
    os.mkfifo(file)
    with open(os.open(file, os.O_RDWR | os.O_NONBLOCK), "wb", buffering=0) as writer:
        writer.write(b"GGUF")
        assert not sizes.template_has_tools(tmp_path, definition)
