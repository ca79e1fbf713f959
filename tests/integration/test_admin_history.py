"""Timeline, identity conflicts and revoked secrets in the admin."""

from typing import Any

import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext

from localai_cluster.accounts.actors import Actor, ActorKind
from localai_cluster.kit import clock, errors
from localai_cluster.kit.nkeys import grouped
from nodes.models import BackendNode, NodeConflict, NodeEvent, RevokedSecret
from nodes.registry import services
from tests.support import api, intents, pages

pytestmark = pytest.mark.django_db

ROOT = Actor(ActorKind.USER, "root")
EVENTS, CONFLICTS = "/admin/nodes/nodeevent/", "/admin/nodes/nodeconflict/"


@pytest.fixture
def root() -> Client:
    """A superuser's browser."""
    return pages.superuser()


def rows(page: Any) -> list[Any]:
    """The rows of a list."""
    return list(page.context["cl"].result_list)


def claimed(name: str = "w1", secret: str = api.OTHER_SECRET, **fields: Any) -> NodeConflict:
    """The conflict of somebody who comes with another secret."""
    with pytest.raises(errors.Conflict):
        services.register(
            services.Registration(name=name, address="10.0.0.9:51100", **fields),
            secret=secret,
            source_address="10.0.0.9",
            now=clock.now(),
            auto_approve=False,
        )
    return NodeConflict.objects.latest("last_at")


@pytest.mark.parametrize(
    ("query", "kinds"),
    [
        ("kind__exact=approved", {"approved"}),
        ("by=root", {"drained", "override"}),
        ("by=nobody", set()),
        ("by=%00", set()),
        ("node=w2", {"registered", "labels"}),
        ("node=%00", set()),
        ("node=nonsense", set()),
        ("q=fans", {"drained"}),
        ("actor_kind__exact=user&kind__exact=override", {"override"}),
    ],
)
def test_the_timeline_is_filtered(root: Client, query: str, kinds: set[str]) -> None:
    """By kind, by node's name or id, by actor, by text."""
    node = api.make_node()
    api.make_node("w2", approved=False)
    services.drain(node.id, actor=ROOT, now=clock.now(), reason="new fans")
    services.set_replica_cap(node.id, 2, actor=ROOT, now=clock.now())
    page = root.get(f"{EVENTS}?{query}")
    assert page.status_code == 200
    assert {event.kind for event in rows(page)} == kinds


def test_the_timeline_outlives_the_node_and_no_one_edits_it(root: Client) -> None:
    """By the id of a node that is gone; no adding, no changing, no deleting."""
    node = api.make_node()
    services.deregister(node.id, actor=ROOT, now=clock.now())
    assert rows(root.get(f"{EVENTS}?node={node.id}"))[0].kind == "deregistered"
    event = NodeEvent.objects.latest("id")
    page = root.get(f"{EVENTS}{event.pk}/change/")
    assert page.status_code == 200
    assert 'name="_save"' not in page.content.decode()
    assert root.get(f"{EVENTS}add/").status_code == 403
    assert root.get(f"{EVENTS}{event.pk}/delete/").status_code == 403


def test_lists_cost_the_same_for_any_number(root: Client) -> None:
    """Events and conflicts."""
    node = api.make_node()
    node.conflicts.create(kind="secret", claim="a" * 64)
    few = [queries(root, path) for path in (EVENTS, CONFLICTS)]
    for index in range(30):
        node.conflicts.create(kind="secret", claim=f"{index:064}")
        services.set_replica_cap(node.id, index + 1, actor=ROOT, now=clock.now())
    assert [queries(root, path) for path in (EVENTS, CONFLICTS)] == few


def queries(browser: Client, path: str) -> int:
    """How many statements a page costs, once the process is warm."""
    browser.get(path)
    with CaptureQueriesContext(connection) as seen:
        assert browser.get(path).status_code == 200
    return len(seen)


def test_a_conflict_shows_both_addresses_on_the_nodes_page(root: Client) -> None:
    """Who claims, who is, how often; both answers have a button."""
    node = api.make_node()
    conflict = claimed()
    text = root.get(pages.url(node.id)).content.decode()
    for said in (
        "Identity conflict: another secret",
        "10.0.0.9:51100",
        "127.0.0.1:51100",
        grouped(conflict.claim),
        pages.conflict_url(conflict, "accept"),
        pages.conflict_url(conflict, "refuse"),
    ):
        assert said in text, said


def test_a_claim_that_cannot_be_accepted_says_what_to_do(root: Client) -> None:
    """Two processes with one secret: no button, a hint."""
    node = api.make_node()
    conflict = node.conflicts.create(kind="instance", claim="1" * 32, source_address="10.0.0.9")
    text = root.get(pages.url(node.id)).content.decode()
    assert "stop one of the two processes, or revoke the secret" in text
    assert pages.conflict_url(conflict, "accept") not in text
    assert pages.conflict_url(conflict, "refuse") in text
    page = pages.select(root, "accept", conflict.pk, at=CONFLICTS)
    assert page.context["number"] == 0


@pytest.mark.parametrize("verb", ["accept", "refuse"])
@pytest.mark.parametrize("way", ["button", "list"])
def test_a_conflict_is_decided(root: Client, verb: str, way: str) -> None:
    """Accepting makes the claimant the node and refuses the former secret forever."""
    node, done = api.make_node(), {"accept": "accepted", "refuse": "refused"}[verb]
    conflict = claimed()
    if way == "button":
        page = root.get(pages.conflict_url(conflict, verb))
    else:
        page = pages.select(root, verb, conflict.pk, at=CONFLICTS)
    answer = pages.confirm(root, page)
    assert pages.messages(answer) == [f"Node w1: {done}."]
    conflict.refresh_from_db()
    assert (conflict.state, conflict.decided_by) == (done, "root")
    changed = api.node(node.id).fingerprint == conflict.claim
    assert changed is (verb == "accept")
    assert RevokedSecret.objects.filter(pk=node.fingerprint).exists() is (verb == "accept")
    if way == "button":
        assert answer.redirect_chain == [(pages.url(node.id), 302)]


def test_two_claims_for_one_node_can_be_refused_but_not_both_accepted(root: Client) -> None:
    """The second acceptance would lock out the first; the page says so and leaves it alone."""
    node = api.make_node()
    first, second = claimed(), claimed(secret="c" * 64)
    page = pages.select(root, "accept", first.pk, second.pk, at=CONFLICTS)
    done, refused = pages.messages(pages.confirm(root, page))
    assert done == "Node w1: accepted."
    assert "conflict accepted by root" in refused
    assert NodeConflict.objects.filter(state="accepted").count() == 1
    assert api.node(node.id).fingerprint == NodeConflict.objects.get(state="accepted").claim
    NodeConflict.objects.update(state="open")
    page = pages.select(root, "refuse", first.pk, second.pk, at=CONFLICTS)
    assert pages.messages(pages.confirm(root, page)) == ["Nodes w1, w1: refused."]


def test_a_conflict_of_a_node_that_has_moved_is_left_open(root: Client) -> None:
    """The node was revoked between page and "yes"."""
    node = api.make_node()
    conflict = claimed()
    page = root.get(pages.conflict_url(conflict, "accept"))
    services.revoke(node.id, actor=Actor(ActorKind.USER, "ann"), now=clock.now())
    (told,) = pages.messages(pages.confirm(root, page))
    assert "revoked by ann" in told
    conflict.refresh_from_db()
    assert conflict.state == "open"


def test_who_may_only_look_decides_nothing() -> None:
    """Neither on the list nor on the node's page."""
    node = api.make_node()
    conflict = claimed()
    viewer = pages.staff("ann", "view_backendnode", "view_nodeconflict")
    assert "/accept/" not in viewer.get(pages.url(node.id)).content.decode()
    assert viewer.get(CONFLICTS).context["action_form"] is None
    assert viewer.get(pages.conflict_url(conflict, "accept")).status_code == 403


def test_revoked_secrets_are_listed_and_stay(root: Client) -> None:
    """Fingerprint, node, who, when; no one takes one back by hand."""
    node = api.make_node()
    services.revoke(node.id, actor=ROOT, now=clock.now())
    page = root.get("/admin/nodes/revokedsecret/")
    assert [secret.pk for secret in rows(page)] == [node.fingerprint]
    assert root.get(f"/admin/nodes/revokedsecret/{node.fingerprint}/delete/").status_code == 403
    assert BackendNode.objects.get().status == "pending"


@pytest.mark.rule("R1.110")
def test_what_waits_for_its_node_is_listed_and_counted_by_backend(root: Client) -> None:
    """By backend, the oldest first; a search counts those of one backend on all nodes."""
    one, two = api.make_node("w1"), api.make_node("w2", secret=api.OTHER_SECRET)
    for node, backend in ((two, "echo"), (one, "whisper"), (one, "echo"), (one, "bark")):
        intents.ask(intents.INSTALL, node, backend=backend)
    page = root.get("/admin/nodes/pendingbackendop/")
    wanted = [("bark", "w1"), ("echo", "w2"), ("echo", "w1"), ("whisper", "w1")]
    assert [(row.backend, row.node.name) for row in rows(page)] == wanted
    assert root.get("/admin/nodes/pendingbackendop/?q=echo").context["cl"].result_count == 2
