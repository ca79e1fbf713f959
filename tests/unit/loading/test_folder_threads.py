"""Threads of calls into the models folder."""

import threading

import pytest

from nodes.definitions.folder import FolderUnresponsive
from nodes.loading import files_in_use


async def test_a_folder_that_hangs_takes_a_limited_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each request left one behind. Once they end, further calls are made."""
    monkeypatch.setattr(files_in_use, "ANSWER_WITHIN", 0.02)
    monkeypatch.setattr(files_in_use, "MAX_OVERDUE_CALLS", 2)
    goes_on, ended, calls = threading.Event(), threading.Barrier(3), list[int]()

    def hang(number: int) -> None:
        calls.append(number)
        goes_on.wait()

    for number in range(5):
        with pytest.raises(FolderUnresponsive):
            await files_in_use.in_folder_thread(hang, number)
    assert calls == [0, 1]
    overdue = list(files_in_use._overdue_calls)
    for call in overdue:
        call.add_done_callback(lambda _: ended.wait())
    goes_on.set()
    ended.wait()
    monkeypatch.setattr(files_in_use, "ANSWER_WITHIN", 60)
    assert await files_in_use.in_folder_thread(lambda: 5) == 5
