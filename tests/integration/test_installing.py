"""What an installation makes of each outcome of its command; the bus is played by the test."""

from typing import Any

import pytest

from localai_cluster import clock
from localai_cluster.messaging import messages as m
from localai_cluster.messaging import subjects
from localai_cluster.messaging.bus import NotConnected, RequestTimeout
from nodes.backends import commands, install
from operations.executor.executor import write_batch
from operations.executor.recorder import Recorder
from operations.executor.work import Postpone, Work
from operations.ledger import admission, lease
from operations.ledger.progress import Tick
from tests.support import hot
from tests.support.bus import PlayedBus

pytestmark = pytest.mark.django_db(transaction=True)

INSTALLED = m.InstallReply(success=True)


class Stage:
    """A claimed installation on a node whose worker is there."""

    def __init__(self) -> None:
        self.bus, self.node = PlayedBus(), hot.node()
        self.bus.replies[subjects.backend_list(str(self.node.id))] = m.ListReply()
        asked = admission.OperationRequest(
            install.KIND,
            key=install.key(self.node.id, "echo"),
            element="echo",
            payload={"backend": "echo"},
            actor="test",
            node=(self.node.id, self.node.name),
            targets=[(self.node.id, self.node.name)],
        )
        admission.admit(asked, now=clock.now())
        (operation,) = lease.claim("controller", now=clock.now(), lease=60, limit=1)
        self.work = Work(operation, Recorder(write_batch))

    def answers(self, *replies: Any) -> None:
        self.bus.replies[subjects.backend_install(str(self.node.id))] = list(replies)


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Stage:
    for pause in ("PING_EVERY", "_ASK_AGAIN", "BUS_WAIT"):
        monkeypatch.setattr(commands, pause, 0.0)
    return Stage()


@pytest.mark.parametrize("pending", [RequestTimeout("late"), NotConnected("lost")], ids=["late", "bus"])
async def test_it_goes_on_while_there_is_no_answer(stage: Stage, pending: Exception) -> None:
    """Neither the time limit nor our own lost connection ends it."""
    stage.answers(pending, pending, INSTALLED)
    assert await install.InstallBackend(stage.bus)(stage.work) == {"node": "one"}
    assert len(stage.bus.asked[subjects.backend_install(str(stage.node.id))]) == 3


async def test_its_message_says_why_it_is_asked_again(stage: Stage) -> None:
    messages: list[str] = []

    class Heard(Work):
        async def report(self, tick: Tick) -> None:
            messages.append(tick.message)
            await super().report(tick)

    stage.answers(RequestTimeout("late"), INSTALLED)
    await install.InstallBackend(stage.bus)(Heard(stage.work.operation, stage.work.recorder))
    assert [text for text in messages if "asking again" in text] == [
        "node one did not answer within 900 s; asking again"
    ]


@pytest.mark.parametrize(
    ("reply", "says"),
    [(m.InstallReply(error="no such backend"), "no such backend"), (b"[", "cannot be read")],
    ids=["refused", "unreadable"],
)
async def test_an_answer_that_is_no_success_fails_it(stage: Stage, reply: Any, says: str) -> None:
    stage.answers(reply)
    with pytest.raises(install.InstallFailed, match=says):
        await install.InstallBackend(stage.bus)(stage.work)


async def test_it_is_put_off_when_its_worker_is_gone(stage: Stage) -> None:
    stage.bus.replies.clear()
    with pytest.raises(Postpone, match="is not responding"):
        await install.InstallBackend(stage.bus)(stage.work)
