"""Bulk actions and buttons of the admin: what is asked, what is done, what is left alone."""

from typing import Any
from uuid import uuid4

import pytest
from django.test import Client

from localai_cluster.accounts.actors import Actor, ActorKind
from localai_cluster.kit import clock
from nodes.models import BackendNode, NodeEvent, RevokedSecret
from nodes.registry import services
from operations.models import Operation
from tests.support import api, pages

pytestmark = pytest.mark.django_db

ROOT = Actor(ActorKind.USER, "root")
VERBS = ("approve", "reject", "drain", "resume", "rotate", "revoke", "remove")


@pytest.fixture
def root() -> Client:
    """A superuser's browser."""
    return pages.superuser()


def in_state(verb: str) -> BackendNode:
    """A node to which the verb applies."""
    node = api.make_node(approved=verb not in ("approve", "reject"))
    if verb == "resume":
        services.drain(node.id, actor=ROOT, now=clock.now())
    return node


def effect(node: BackendNode) -> tuple[Any, ...]:
    """What verbs change."""
    row = BackendNode.objects.filter(pk=node.id).first()
    if row is None:
        return ("removed",)
    return (row.status, row.reject_reason, row.drain_reason, bool(row.rotation_requested_at), row.fingerprint)


def after(verb: str, node: BackendNode) -> tuple[Any, ...]:
    """What each verb makes of a node to which it applies."""
    mark = node.fingerprint
    return {
        "approve": ("healthy", "", "", False, mark),
        "reject": ("pending", "because", "", False, mark),
        "drain": ("draining", "", "because", False, mark),
        "resume": ("healthy", "", "", False, mark),
        "rotate": ("healthy", "", "", True, mark),
        "revoke": ("pending", "", "", False, ""),
        "remove": ("removed",),
    }[verb]


@pytest.mark.rule("R1.15", "R1.18", "R1.19", "R1.21")
@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("way", ["button", "list"])
def test_every_verb_asks_and_then_does_it_by_the_service(root: Client, verb: str, way: str) -> None:
    """The page changes nothing; "yes" does, with the admin as actor and the reason as cause."""
    node = in_state(verb)
    before = effect(node)
    if way == "button":
        assert pages.url(node.id, verb) in root.get(pages.url(node.id)).content.decode()
        page = root.get(pages.url(node.id, verb))
    else:
        page = pages.select(root, verb, node.id)
    assert page.status_code == 200
    assert [line.row.pk for line in page.context["lines"]] == [node.id]
    assert effect(node) == before, "asking changes nothing"
    typed = {"reason": "because"} if "reason" in page.context["form"].fields else {}
    answer = pages.confirm(root, page, **typed)
    assert answer.status_code == 200
    assert [text[:9] for text in pages.messages(answer)] == ["Node w1: "]
    assert effect(node) == after(verb, node)
    event = NodeEvent.objects.filter(node_id=node.id).first()
    assert event is not None
    assert (event.actor, event.actor_kind) == ("root", "user")
    if typed:
        assert event.cause == "because"


def test_a_reason_is_asked_for_again_and_the_page_stays(root: Client) -> None:
    """A rejection needs one; nothing happens without."""
    node = api.make_node(approved=False)
    page = pages.confirm(root, root.get(pages.url(node.id, "reject")))
    assert page.status_code == 200
    assert "This field is required" in page.content.decode()
    assert api.node(node.id).rejected_at is None
    assert "Node w1: rejected" in str(pages.messages(pages.confirm(root, page, reason="not ours")))
    assert api.node(node.id).reject_reason == "not ours"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("reason", "\u202egood"),
        ("reason", "zero\u200bwidth"),
        ("reason", "nul\0"),
        ("reason", "x" * 256),
        ("deadline", "-1"),
        ("deadline", "1e9"),
        ("deadline", str(2**64)),
        ("deadline", "soon"),
    ],
)
def test_hostile_terms_are_refused_at_their_field(root: Client, field: str, value: str) -> None:
    """Never a 500, never half a drain."""
    node = api.make_node()
    page = pages.confirm(root, root.get(pages.url(node.id, "drain")), **{field: value})
    assert list(page.context["form"].errors) == [field]
    assert api.node(node.id).status == "healthy"


def test_a_drain_takes_its_deadline(root: Client) -> None:
    """In seconds; zero is one, too."""
    node = api.make_node()
    pages.confirm(root, root.get(pages.url(node.id, "drain")), deadline="0", reason="now")
    row = api.node(node.id)
    assert row.drain_deadline is not None
    assert row.drained_at is not None
    assert row.drain_deadline <= row.drained_at
    assert row.drained_by == "root"


def test_a_bulk_page_says_what_it_does_not_apply_to(root: Client) -> None:
    """Each with the reason that the table gives; only the others are done."""
    new, known = api.make_node("new", approved=False), api.make_node("known")
    page = pages.select(root, "approve", new.id, known.id)
    assert [(line.node.name, line.text.split(".")[0], line.skipped) for line in page.context["lines"]] == [
        ("new", "pending → healthy", False),
        ("known", "the node is healthy", True),
    ]
    assert pages.messages(pages.confirm(root, page)) == ["Node new: approved."]


def test_a_page_that_applies_to_nothing_has_no_button(root: Client) -> None:
    """There is nothing to confirm."""
    node = api.make_node()
    page = pages.select(root, "approve", node.id)
    assert "Not possible for any selected row" in page.content.decode()
    assert page.context["number"] == 0


def test_what_fails_for_one_does_not_stop_the_others(root: Client) -> None:
    """A node that went meanwhile and one that somebody else approved are named; the third is done."""
    rows = [api.make_node(name, approved=False) for name in ("one", "two", "three")]
    page = pages.select(root, "approve", *(row.id for row in rows))
    services.deregister(rows[0].id, actor=ROOT, now=clock.now())
    other = Actor(ActorKind.USER, "ann")
    services.approve(rows[1].id, actor=other, now=clock.now(), reason="mine")
    said = pages.messages(pages.confirm(root, page))
    assert said[0] == "Node three: approved."
    assert any(str(rows[0].id) in text and "no longer exists" in text for text in said[1:])
    (told,) = [text for text in said if text.startswith("Node two")]
    assert "approved by ann" in told
    assert "(mine)" in told
    assert api.node(rows[1].id).approved_by == "ann"


@pytest.mark.rule("R1.15")
def test_no_one_approves_a_secret_he_has_not_seen(root: Client) -> None:
    """Between page and "yes" the node was revoked and another worker came: nothing is approved."""
    node = api.make_node(approved=False)
    page = root.get(pages.url(node.id, "approve"))
    services.revoke(node.id, actor=ROOT, now=clock.now())
    api.make_node(secret=api.OTHER_SECRET, approved=False)
    (told,) = pages.messages(pages.confirm(root, page))
    assert "revoked by root" in told
    assert "registered by worker" in told
    assert api.node(node.id).status == "pending"


def test_a_beat_between_page_and_yes_is_no_obstacle(root: Client) -> None:
    """A heartbeat moves no revision."""
    node = api.make_node(approved=False)
    page = root.get(pages.url(node.id, "approve"))
    BackendNode.objects.filter(pk=node.id).update(last_heartbeat=clock.now(), available_vram=5)
    assert pages.messages(pages.confirm(root, page)) == ["Node w1: approved."]
    assert api.node(node.id).available_vram == 5


@pytest.mark.rule("R1.31")
def test_an_agents_token_is_shown_once(root: Client) -> None:
    """Approving makes its key, which exists nowhere else."""
    node = api.make_node("agent", node_type="agent", approved=False)
    said = pages.messages(pages.confirm(root, root.get(pages.url(node.id, "approve"))))
    (token,) = [text.rsplit(" ", 1)[1] for text in said if "lai-" in text]
    assert api.bearer(token).get("/api/schema").status_code == 200


def test_revoking_refuses_the_secret(root: Client) -> None:
    """The fingerprint is remembered, with who said so."""
    node = api.make_node()
    pages.confirm(root, root.get(pages.url(node.id, "revoke")), reason="stolen")
    assert list(RevokedSecret.objects.values_list("pk", "revoked_by")) == [(node.fingerprint, "root")]


def test_nothing_is_done_without_post_and_token(root: Client) -> None:
    """GET is refused, and a POST from elsewhere."""
    node = api.make_node(approved=False)
    assert root.get(f"{pages.LIST}approve/").status_code == 405
    assert root.post(pages.url(node.id, "approve"), {}).status_code in (403, 405)
    assert root.post(f"{pages.LIST}approve/", {"items": f"{node.id}:1:0"}).status_code == 403
    assert api.node(node.id).status == "pending"


@pytest.mark.parametrize(
    "items",
    [
        "nonsense",
        "1:2:3",
        f"{uuid4()}:x:0",
        f"{uuid4()}:1",
        "\0",
        " ".join(f"{uuid4()}:1:0" for _ in range(501)),
    ],
    ids=["word", "no-id", "no-number", "too-few", "nul", "too-many"],
)
def test_items_that_no_page_carried_are_400(items: str) -> None:
    """Nothing is guessed."""
    browser = pages.superuser("forger")
    browser.handler.enforce_csrf_checks = False
    assert browser.post(f"{pages.LIST}drain/", {"items": items}).status_code == 400


def test_numbers_beyond_the_columns_are_no_crash() -> None:
    """A revision that cannot be is another one's; the row is left alone."""
    browser = pages.superuser("forger")
    browser.handler.enforce_csrf_checks = False
    node = api.make_node()
    items = {"items": f"{node.id}:{2**70}:{2**70}"}
    page = browser.post(f"{pages.LIST}drain/", items, follow=True)
    assert page.status_code == 200
    assert "Nothing was changed" in pages.messages(page)[0]
    assert api.node(node.id).status == "healthy"


def test_the_way_back_keeps_the_filters(root: Client) -> None:
    """After a bulk action the list is as it was."""
    node = api.make_node(approved=False)
    page = pages.select(root, "approve", node.id, at=f"{pages.LIST}?status=pending")
    answer = pages.confirm(root, page)
    assert answer.redirect_chain == [(f"{pages.LIST}?status=pending", 302)]


def test_at_most_five_hundred_at_once(root: Client) -> None:
    """More is no choice that anybody has looked at."""
    BackendNode.objects.bulk_create(
        BackendNode(name=f"n{i}", name_key=f"n{i}", address="h:1") for i in range(501)
    )
    fields = pages.form_of(root.get(pages.LIST))[1]
    chosen = {**fields, "action": "drain", "select_across": "1", "_selected_action": str(uuid4())}
    page = root.post(pages.LIST, chosen, follow=True)
    assert pages.messages(page) == ["Select at most 500 rows."]


@pytest.mark.parametrize("way", ["button", "list"])
def test_stopping_a_worker_asks_and_then_makes_the_operation(root: Client, way: str) -> None:
    """Review R12: the node itself is what it was until its worker has left."""
    node = api.make_node()
    page = root.get(pages.url(node.id, "stop")) if way == "button" else pages.select(root, "stop", node.id)
    assert page.status_code == 200
    assert not Operation.objects.exists(), "asking changes nothing"
    answer = pages.confirm(root, page, reason="because")
    operation = Operation.objects.get()
    assert (operation.kind, operation.node_id, operation.actor) == ("node_stop", node.id, "root")
    assert operation.payload == {"reason": "because"}
    assert str(operation.id) in str(pages.messages(answer))
    assert api.node(node.id).status == "healthy"
