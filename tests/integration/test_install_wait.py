"""An install that waits for its node: when it looks again, and when it gives up."""

from datetime import timedelta
from uuid import uuid4

import pytest

from localai_cluster import clock, conf
from nodes.backends import install
from nodes.models import BackendNode
from operations.executor.executor import write_batch
from operations.executor.recorder import Recorder
from operations.executor.work import Postpone, Work
from operations.ledger import admission, lease
from operations.models import Operation
from tests.support import api, hot
from tests.support.bus import PlayedBus

pytestmark = pytest.mark.django_db(transaction=True)


def claimed(node: BackendNode, *, seconds_left: float) -> Work:
    """A running install of `echo` that may wait for so long."""
    now = clock.now()
    request = admission.OperationRequest(
        install.KIND,
        key=f"{uuid4()}",
        element="echo",
        payload={"backend": "echo"},
        actor="test",
        node=(node.id, node.name),
        needed_until=now + timedelta(seconds=seconds_left),
    )
    admission.admit(request, now=now)
    (operation,) = lease.claim("controller", now=now, lease=60, limit=1)
    return Work(operation, Recorder(write_batch))


@pytest.mark.parametrize(
    ("offline", "waiting", "reason"),
    [(True, True, "node one is offline"), (False, False, "node one is not responding")],
)
async def test_an_install_waits_for_its_node_and_fails_when_its_time_is_over(
    offline: bool, waiting: bool, reason: str
) -> None:
    """Absence is a wait, which the node's return ends; silence is a back-off. Neither lasts for ever."""

    def prepared() -> tuple[Work, Work]:
        node = hot.node("one")
        if offline:
            BackendNode.objects.update(offline_at=clock.now())
        return claimed(node, seconds_left=60), claimed(node, seconds_left=-1)

    patient, late = await hot.in_thread(prepared)
    handler = install.InstallBackend(PlayedBus())
    with pytest.raises(Postpone, match=reason) as pause:
        await handler(patient)
    assert pause.value.waiting is waiting
    with pytest.raises(install.InstallFailed, match=f"given up, because {reason}"):
        await handler(late)


async def test_an_install_that_is_asked_for_again_meanwhile_waits_on() -> None:
    """The time is read when the attempt ends, not when it began."""

    def prepared() -> Work:
        work = claimed(hot.node("one", offline_at=clock.now()), seconds_left=-1)
        admission.need_until(work.id, clock.now() + timedelta(seconds=60))
        return work

    with pytest.raises(Postpone):
        await install.InstallBackend(PlayedBus())(await hot.in_thread(prepared))


def test_an_install_by_rest_says_when_it_gives_up_and_asking_again_moves_that() -> None:
    """CLUSTER_INSTALL_WAIT, from the last request on."""
    node = api.make_node()
    limit = timedelta(seconds=conf.cluster().install_wait)
    path = f"/api/nodes/{node.id}/backends/install"
    before = clock.now()
    assert api.admin().post(path, {"backend": "echo"}).status_code == 202
    first = Operation.objects.get().needed_until
    assert first is not None
    assert before + limit <= first <= clock.now() + limit
    (listed,) = api.admin().get("/api/operations").json()["operations"]
    assert listed["givesUpAt"] == first.isoformat()
    assert api.admin().post(path, {"backend": "echo"}).status_code == 202
    second = Operation.objects.get().needed_until
    assert second is not None
    assert second > first
