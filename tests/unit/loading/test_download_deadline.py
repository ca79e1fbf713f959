"""The deadline of a scale-up moves while the control plane downloads files for it."""

from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest

from localai_cluster.kit import clock
from nodes.loading import load_request, source_downloads
from nodes.loading.load_request import SCALE_UP, ProgressDeadline
from operations.executor.work import WakeUps
from operations.ledger import admission
from operations.models import Operation, Status


async def at_once(call: Callable[..., Any], *args: Any, **named: Any) -> Any:
    return call(*args, **named)


@pytest.mark.rule("R2.24")
async def test_bytes_of_an_earlier_step_do_not_count_for_a_download(monkeypatch: pytest.MonkeyPatch) -> None:
    """The installation before it may have been larger: then the load would be given up at its next pause."""
    moved: list[Any] = []
    load = Operation(id=uuid4(), payload={SCALE_UP: True}, created_at=clock.now() - timedelta(hours=1))
    work: Any = SimpleNamespace(operation=load, progress=lambda tick: None)
    attempt: Any = SimpleNamespace(
        work=work,
        definition=None,
        slot=SimpleNamespace(node_name="n"),
        deadline=ProgressDeadline(work),
        report=lambda *_: at_once(int),
        tick=lambda *_, **figures: figures,
    )
    states = [
        Operation(status=Status.PROCESSING, current_bytes=5, total_bytes=9),
        Operation(status=Status.COMPLETED),
    ]
    for module in (load_request, source_downloads):
        monkeypatch.setattr(module, "in_thread", at_once)
    monkeypatch.setattr(source_downloads, "_POLL_SECONDS", 0.0)
    monkeypatch.setattr(source_downloads, "check_former_load", lambda *_: None)
    monkeypatch.setattr(source_downloads, "request_download", lambda *_, **__: Operation(id=uuid4()))
    monkeypatch.setattr(source_downloads, "_read_download", lambda _: states.pop(0))
    monkeypatch.setattr(admission, "extend_need", moved.append)
    await attempt.deadline.extend_on_progress(10**10)
    moved.clear()
    await source_downloads.download(attempt, ["w.gguf"], WakeUps())
    assert [list(until) for until in moved] == [[load.id]]
