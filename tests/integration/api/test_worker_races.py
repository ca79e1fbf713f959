"""Many workers at once, by real transactions: one row a name, no lost conflict, no one gets a 500.

And what the calls of a worker cost in statements.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Barrier
from typing import Any
from uuid import UUID

import pytest
from django.db import connection, connections
from django.test.utils import CaptureQueriesContext

from localai_cluster.accounts.actors import Actor, ActorKind
from localai_cluster.accounts.principals import hash_secret
from localai_cluster.kit import clock, errors
from nodes.models import BackendNode, NodeConflict, NodeEvent, NodeLabel
from nodes.registry import lifecycle
from nodes.registry.claims import revoke
from tests.support import api

pytestmark = pytest.mark.django_db(transaction=True)

ROOT = Actor(ActorKind.USER, "root")
OTHERS = 20
ONE = "\N{FULLWIDTH DIGIT ONE}"


def at_once(calls: Iterable[Callable[[], Any]]) -> list[Any]:
    """Runs all of them in the same moment, each on a thread and a connection of its own."""
    todo = list(calls)
    start = Barrier(len(todo))

    def one(call: Callable[[], Any]) -> Any:
        try:
            start.wait(60)
            return call()
        finally:
            connections.close_all()

    with ThreadPoolExecutor(len(todo)) as pool:
        return list(pool.map(one, todo))


def registering(name: str = "w1", secret: str | None = None, **headers: str) -> Callable[[], int]:
    return lambda: api.register(api.registration(name), secret, **headers).status_code


def refused_or_done(verb: Callable[[], Any]) -> Callable[[], str]:
    """An admin's verb, which somebody else may have made impossible."""

    def call() -> str:
        try:
            verb()
        except (errors.NotFound, errors.Conflict, errors.InvalidInput) as refusal:
            return type(refusal).__name__
        return "done"

    return call


def removing(node_id: UUID) -> Callable[[], str]:
    return refused_or_done(lambda: lifecycle.deregister(node_id, actor=ROOT, now=clock.now()))


@pytest.mark.rule("R1.22", "http-1.1")
def test_one_name_twenty_times_at_once() -> None:
    """The same worker, or what looks like it: one row, one id, every registration told once."""
    assert at_once([registering()] * OTHERS) == [201] * OTHERS
    node = BackendNode.objects.get()
    told: Counter[str] = Counter()
    for cause, count in NodeEvent.objects.filter(kind="registered").values_list("cause", "count"):
        told[cause] += count
    assert (sum(told.values()), told["first registration"]) == (OTHERS, 1)
    labels = NodeEvent.objects.filter(kind="labels").count()
    assert (node.revision, labels) == (OTHERS, 1)


@pytest.mark.rule("R1.22", "http-1.1")
def test_one_name_and_twenty_secrets_at_once() -> None:
    """One is the node, the nineteen others are conflicts that an admin sees."""
    statuses = Counter(at_once(registering("w1", f"{i:064x}") for i in range(OTHERS)))
    assert statuses == {201: 1, 409: OTHERS - 1}
    node = BackendNode.objects.get()
    conflicts = NodeConflict.objects.filter(node=node, kind="secret", state="open")
    claims = set(conflicts.values_list("claim", flat=True))
    assert len(claims) == OTHERS - 1
    assert node.fingerprint not in claims


@pytest.mark.rule("R1.22", "http-1.1")
def test_one_secret_and_twenty_names_at_once() -> None:
    """A copied data folder under many names: one node, and the others wait for an admin."""
    statuses = Counter(at_once(registering(f"w{i}", "c" * 64) for i in range(OTHERS)))
    assert statuses == {201: 1, 409: OTHERS - 1}
    assert BackendNode.objects.count() == 1
    assert NodeConflict.objects.filter(kind="name").count() == OTHERS - 1


@pytest.mark.rule("R1.22", "http-1.1")
def test_twenty_names_that_look_alike_at_once() -> None:
    """Equal after NFKC and case folding: one of them, whichever is first."""
    alike = [f"gpu-{'a' if i % 2 else 'A'}{ONE if i % 3 else '1'}" for i in range(OTHERS)]
    assert len(set(alike)) == 4
    statuses = Counter(at_once(registering(name, f"{i:064x}") for i, name in enumerate(alike)))
    assert statuses == {201: 1, 409: OTHERS - 1}
    node = BackendNode.objects.get()
    assert node.name_key == "gpu-a1"
    # Anyone who has the very name of the node is a conflict; who only looks like it is told so.
    assert NodeConflict.objects.count() == alike.count(node.name) - 1


@pytest.mark.rule("R1.21", "R1.22", "http-1.1")
def test_registering_against_an_admin_who_removes() -> None:
    """Again and again: each gets an answer, and what is left is a whole node or none."""
    for _ in range(5):
        node = api.make_node()
        answers = at_once([registering()] * 4 + [removing(node.id)] * 2)
        assert set(answers[:4]) <= {201, 409}
        assert sorted(answers[4:]) == ["NotFound", "done"]
        assert BackendNode.objects.count() <= 1
        for left in BackendNode.objects.all():
            assert NodeLabel.objects.filter(node=left, key="node.name", value="w1").count() == 1


@pytest.mark.rule("R1.14", "R1.19", "http-1.1")
def test_a_drain_is_never_lost_to_a_registration() -> None:
    """D-DRAIN-KEPT: whichever comes first, an admin's drain stands."""
    node = api.make_node()
    for _ in range(5):
        drain = refused_or_done(lambda: lifecycle.drain(node.id, actor=ROOT, now=clock.now()))
        answers = at_once([registering(), drain, registering()])
        assert answers == [201, "done", 201]
        assert api.node(node.id).status == "draining"
        lifecycle.resume(node.id, actor=ROOT, now=clock.now())


@pytest.mark.rule("http-1.1")
def test_a_secret_that_two_take_at_once_has_one_owner() -> None:
    """A worker whose secret was revoked binds a new one while another offers the same for a new name."""
    node = api.make_node()
    for turn in range(5):
        revoke(node.id, actor=ROOT, now=clock.now())
        secret = f"{turn:064x}"
        answers = at_once([registering("w1", secret), registering(f"new-{turn}", secret)])
        assert sorted(answers) == [201, 409]
        assert BackendNode.objects.exclude(fingerprint="").filter(name__in=["w1", f"new-{turn}"]).count() == 1
        if answers[0] == 409:
            assert api.register(api.registration(), f"{turn + 50:064x}").status_code == 201


@pytest.mark.rule("http-1.1")
def test_two_rotations_at_once_leave_one_secret() -> None:
    """The one that is second is not the node any more; two nodes never get the same secret."""
    first, second = api.make_node(), api.make_node("w2", secret=api.OTHER_SECRET)

    def rotating(node_id: UUID, old: str, new: str) -> Callable[[], int]:
        caller = api.worker(old)
        headers: dict[str, Any] = {"X-LocalAI-Node-New-Secret": new}
        return lambda: caller.post(f"/api/node/{node_id}/rotate", **headers).status_code

    same = [rotating(first.id, api.SECRET, "c" * 64), rotating(first.id, api.SECRET, "d" * 64)]
    assert sorted(at_once(same)) == [200, 401]
    fingerprint = api.node(first.id).fingerprint
    now = next(secret for secret in ("c" * 64, "d" * 64) if hash_secret(secret) == fingerprint)
    both = [rotating(first.id, now, "e" * 64), rotating(second.id, api.OTHER_SECRET, "e" * 64)]
    assert sorted(at_once(both)) == [200, 409]


@pytest.mark.rule("http-1.1", "R1.21")
def test_a_copy_that_calls_while_its_node_is_removed() -> None:
    """The conflict may find no node any more: 404 or 409, never a 500."""
    for _ in range(5):
        node = api.make_node()
        BackendNode.objects.filter(pk=node.pk).update(instance="2" * 32)
        headers: dict[str, Any] = {"X-LocalAI-Node-Instance": "1" * 32}
        call = partial(api.worker().post, f"/api/node/{node.id}/drain", **headers)
        *calls, done = at_once([call, call, call, removing(node.id)])
        assert {answer.status_code for answer in calls} <= {404, 409}
        assert done == "done"


COSTS = {
    "a new node": 16,
    "again": 10,
    "again, with its processes": 10,
    "again, with another label": 12,
    "a drain": 9,
    "the own replicas": 2,
}
"""Most statements, BEGIN and COMMIT included."""


@pytest.mark.rule("http-1.1")
def test_what_the_calls_of_a_worker_cost() -> None:
    """Statements are counted, so that no one adds one without seeing it."""
    spent = {}

    def cost(what: str, call: Callable[[], Any]) -> Any:
        with CaptureQueriesContext(connection) as seen:
            answer = call()
        assert answer.status_code < 300, answer.content
        spent[what] = len(seen)
        return answer

    body = api.registration(labels={"tier": "t1"}, total_vram=5)
    made = cost("a new node", lambda: api.register(body))
    own = f"/api/node/{made.json()['id']}"
    cost("again", lambda: api.register(body))
    cost("again, with its processes", lambda: api.register(body | {"running_processes": []}))
    cost("again, with another label", lambda: api.register(body | {"labels": {"tier": "t2"}}))
    cost("a drain", lambda: api.worker().post(f"{own}/drain"))
    cost("the own replicas", lambda: api.worker().get(f"{own}/models"))
    print(spent)
    assert {what: count for what, count in spent.items() if count > COSTS[what]} == {}
