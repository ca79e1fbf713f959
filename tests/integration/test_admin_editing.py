"""What an admin types in on a node's page: overrides, labels, and two admins at once."""

import threading
from typing import Any

import pytest
from django.db import connection, connections, transaction
from django.test import Client

from localai_cluster.accounts.actors import Actor, ActorKind
from localai_cluster.kit import clock
from nodes.models import BackendNode, NodeEvent, NodeLabel
from nodes.registry import services
from tests.conftest import eventually
from tests.support import api, fleet, pages

ROOT = Actor(ActorKind.USER, "root")
ANN = Actor(ActorKind.USER, "ann")
GIB = 1024**3


@pytest.fixture
def root(db: None) -> Client:
    """A superuser's browser."""
    return pages.superuser()


def save(browser: Client, node: BackendNode, fields: dict[str, str]) -> Any:
    """Sends a node's page; answers the page that follows."""
    return browser.post(pages.url(node.id), fields, follow=True)


def labels(node: BackendNode) -> dict[str, tuple[str, str]]:
    """Key, value and source."""
    rows = NodeLabel.objects.filter(node=node).values_list("key", "value", "source")
    return {key: (value, source) for key, value, source in rows}


def row_of(fields: dict[str, str], key: str) -> str:
    """The prefix of the form row of a label."""
    (prefix,) = [
        name.removesuffix("-key") for name, value in fields.items() if value == key and "-key" in name
    ]
    return prefix


def put(fields: dict[str, str], key: str, value: str) -> dict[str, str]:
    """The page with one more label in its empty row."""
    index = int(fields["label_set-TOTAL_FORMS"]) - 1
    return fields | {f"label_set-{index}-key": key, f"label_set-{index}-value": value}


def kinds(node: BackendNode) -> list[str]:
    """What happened to the node, newest first."""
    return list(NodeEvent.objects.filter(node_id=node.id).values_list("kind", flat=True))


@pytest.mark.rule("R1.45", "R1.46")
def test_a_replica_cap_is_set_and_handed_back(root: Client) -> None:
    """By the service: the label follows, the worker's registration does not undo it."""
    node = api.make_node()
    fields = pages.load(root, node.id) | {"override_cap": "on", "cap": "3"}
    assert "was changed successfully" in str(pages.messages(save(root, node, fields)))
    api.make_node(max_replicas_per_model=8)
    row = api.node(node.id)
    assert (row.max_replicas_per_model, row.max_replicas_per_model_manually_set) == (3, True)
    assert labels(node)["node.replica-slots"] == ("3", "auto")
    fields = pages.load(root, node.id)
    assert fields["override_cap"] == "on"
    del fields["override_cap"]
    save(root, node, fields)
    assert not api.node(node.id).max_replicas_per_model_manually_set
    overrides = NodeEvent.objects.filter(node_id=node.id, kind="override")
    assert [(event.actor, event.cause) for event in overrides] == [
        ("root", "reset to worker default"),
        ("root", "set"),
    ]


@pytest.mark.rule("R1.47", "R1.48")
@pytest.mark.parametrize(
    ("text", "limit"), [("50%", 4 * GIB), ("2GiB", 2 * GIB), (str(GIB), GIB), ("", 0), ("99TiB", 8 * GIB)]
)
def test_a_vram_budget_is_set_and_handed_back(root: Client, text: str, limit: int) -> None:
    """A percentage, a size, bytes, nothing: what the service takes."""
    node = api.make_node(total_vram=8 * GIB, available_vram=8 * GIB)
    save(root, node, pages.load(root, node.id) | {"override_budget": "on", "budget": text})
    row = api.node(node.id)
    assert (row.vram_budget, row.vram_budget_bytes, row.vram_budget_manually_set) == (text, limit, True)
    fields = pages.load(root, node.id)
    del fields["override_budget"]
    save(root, node, fields)
    row = api.node(node.id)
    assert (row.vram_budget, row.vram_budget_bytes, row.vram_budget_manually_set) == ("", 0, False)


@pytest.mark.parametrize(
    ("typed", "field"),
    [
        ({"override_cap": "on", "cap": "0"}, "cap"),
        ({"override_cap": "on", "cap": ""}, "cap"),
        ({"override_cap": "on", "cap": "-3"}, "cap"),
        ({"override_cap": "on", "cap": str(2**64)}, "cap"),
        ({"override_cap": "on", "cap": "many"}, "cap"),
        ({"cap": "7"}, "cap"),
        ({"override_budget": "on", "budget": "half"}, "budget"),
        ({"override_budget": "on", "budget": "101%"}, "budget"),
        ({"override_budget": "on", "budget": "-1GiB"}, "budget"),
        ({"override_budget": "on", "budget": "9" * 33}, "budget"),
        ({"override_budget": "on", "budget": "1\0"}, "budget"),
        ({"budget": "1GiB"}, "budget"),
    ],
)
def test_a_wrong_override_is_refused_at_its_field(root: Client, typed: dict[str, str], field: str) -> None:
    """Nothing is written, and what was typed in stays on the page."""
    node = api.make_node(total_vram=GIB)
    page = save(root, node, pages.load(root, node.id) | typed)
    assert page.status_code == 200
    assert list(page.context["adminform"].form.errors) == [field]
    assert api.node(node.id).revision == node.revision


def test_a_page_saved_untouched_writes_nothing(root: Client) -> None:
    """No event, no revision, and the worker's labels stay the worker's."""
    node = api.make_node(labels={"tier": "gold", " odd ": " blanks "})
    before, events = labels(node), kinds(node)
    save(root, node, pages.load(root, node.id))
    assert (labels(node), kinds(node), api.node(node.id).revision) == (before, events, node.revision)


@pytest.mark.rule("R1.30")
def test_labels_are_made_changed_renamed_and_removed_as_one_change(root: Client) -> None:
    """What an admin touches is the admin's and survives a registration; the rest stays as it is."""
    own = {"tier": "t1", "rack": "7", "old": "x", "zone": "b"}
    node = api.make_node(labels=own)
    fields = put(pages.load(root, node.id), "new", "1")
    fields[row_of(fields, "tier") + "-value"] = "gold"
    fields[row_of(fields, "rack") + "-key"] = "shelf"
    fields[row_of(fields, "old") + "-DELETE"] = "on"
    save(root, node, fields)
    assert kinds(node).count("labels") == 2, "the registration's and one more"
    api.make_node(labels={"tier": "t1", "zone": "c"})
    assert {key: value for key, value in labels(node).items() if not key.startswith("node.")} == {
        "tier": ("gold", "admin"),
        "shelf": ("7", "admin"),
        "new": ("1", "admin"),
        "zone": ("c", "worker"),
    }


def test_two_labels_can_change_places(root: Client) -> None:
    """Keys are compared with each other on the page, not with the rows as they were."""
    node = api.make_node(labels={"a": "1", "b": "2"})
    fields = pages.load(root, node.id)
    first, second = row_of(fields, "a"), row_of(fields, "b")
    save(root, node, fields | {f"{first}-key": "b", f"{second}-key": "a"})
    assert (labels(node)["a"], labels(node)["b"]) == (("2", "admin"), ("1", "admin"))


def test_the_registrys_own_labels_cannot_be_edited(root: Client) -> None:
    """Neither by the page nor by a request that no page made."""
    node = api.make_node()
    fields = pages.load(root, node.id)
    assert not [name for name in fields if name.endswith("-key") and fields[name].startswith("node.")]
    own = NodeLabel.objects.get(node=node, key="node.name")
    for index in range(int(fields["label_set-INITIAL_FORMS"])):
        if fields[f"label_set-{index}-id"] == str(own.pk):
            fields |= {
                f"label_set-{index}-key": "mine",
                f"label_set-{index}-value": "evil",
                f"label_set-{index}-DELETE": "on",
            }
    before = labels(node)
    save(root, node, fields)
    assert labels(node) == before
    page = save(root, node, put(pages.load(root, node.id), "node.name", "evil"))
    assert "duplicate" in page.content.decode()
    assert labels(node) == before


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("a\u202eb", "v"),
        ("a\u200bb", "v"),
        ("k", "\u2066v"),
        ("k", "a\nb"),
        ("k", "a\0b"),
        ("k\0", "v"),
        ("", "v"),
        ("   ", "v"),
        ("k" * 129, "v"),
        ("k", "v" * 256),
        ("k", "\ufdd0"),
    ],
    ids=[
        "bidi",
        "zero-width",
        "isolate",
        "line",
        "nul",
        "nul-key",
        "no-key",
        "blank",
        "long-key",
        "long",
        "none",
    ],
)
def test_hostile_labels_are_refused_on_the_page(root: Client, key: str, value: str) -> None:
    """At their field where there is one; nothing is written."""
    node = api.make_node()
    before = labels(node)
    page = save(root, node, put(pages.load(root, node.id), key, value))
    assert page.status_code == 200
    (formset,) = [inline.formset for inline in page.context["inline_admin_formsets"]]
    assert any(formset.errors) or formset.non_form_errors()
    assert labels(node) == before


def test_labels_are_escaped(root: Client) -> None:
    """A label is text, on every page."""
    node = api.make_node(labels={"<b>": '"><script>alert(1)</script>'})
    services.merge_labels(node.id, {"<i>": "<script>"}, actor=ROOT, now=clock.now())
    for path in (pages.url(node.id), "/admin/nodes/nodelabel/", "/admin/nodes/nodeevent/"):
        text = root.get(path).content.decode()
        assert "<script>alert" not in text
        assert "<b>" not in text


def test_too_many_labels_are_refused_on_the_page(root: Client) -> None:
    """As many as the service takes in one change."""
    node = api.make_node()
    fields = pages.load(root, node.id)
    first = int(fields["label_set-INITIAL_FORMS"])
    fields["label_set-TOTAL_FORMS"] = str(first + 65)
    for index in range(first, first + 65):
        fields |= {f"label_set-{index}-key": f"k{index}", f"label_set-{index}-value": "v"}
    page = save(root, node, fields)
    assert "at most 64" in page.content.decode()
    assert len(labels(node)) == first


@pytest.mark.parametrize("broken", ["", "x", "-1", str(2**70)])
def test_a_page_without_its_revision_saves_nothing(root: Client, broken: str) -> None:
    """Who does not say what he has seen may not write."""
    node = api.make_node()
    fields = pages.load(root, node.id) | {"revision": broken, "override_cap": "on", "cap": "3"}
    assert save(root, node, fields).status_code == 200
    assert api.node(node.id).revision == node.revision


@pytest.mark.parametrize("management", ["x", "-1", "99999999"])
def test_a_broken_form_count_is_no_crash(root: Client, management: str) -> None:
    """What no page sends."""
    node = api.make_node()
    for name in ("label_set-TOTAL_FORMS", "label_set-INITIAL_FORMS"):
        fields = pages.load(root, node.id) | {name: management}
        assert save(root, node, fields).status_code in (200, 400)
    assert api.node(node.id).revision == node.revision


def test_a_save_does_not_overwrite_what_a_beat_wrote_meanwhile(root: Client) -> None:
    """A beat makes no page out of date, and a save writes only the columns that were asked for."""
    node = api.make_node(total_vram=8 * GIB, available_vram=8 * GIB)
    fields = pages.load(root, node.id)
    at = clock.now()
    fleet.beat(fleet.beat_of(node, at=at, available_vram=3 * GIB, available_ram=2 * GIB))
    save(root, node, fields | {"override_cap": "on", "cap": "3"})
    row = api.node(node.id)
    assert (row.available_vram, row.available_ram, row.last_heartbeat) == (3 * GIB, 2 * GIB, at)
    assert row.max_replicas_per_model == 3


def test_the_second_of_two_admins_is_told_what_the_first_has_done(root: Client) -> None:
    """A drain, an override, labels: nothing of the second page is written, neither overrides nor labels."""
    node = api.make_node(labels={"tier": "t1"})
    fields = put(pages.load(root, node.id), "mine", "1") | {"override_cap": "on", "cap": "3"}
    services.drain(node.id, actor=ANN, now=clock.now(), reason="new fans")
    services.merge_labels(node.id, {"tier": "gold"}, actor=ANN, now=clock.now())
    revision = api.node(node.id).revision
    page = save(root, node, fields)
    said = str(page.context["adminform"].form.non_field_errors())
    assert "Nothing was saved" in said
    assert "drained by ann" in said
    assert "(new fans;" in said
    assert "set: tier=gold" in said
    assert "registered" not in said, "that was before the page"
    row = api.node(node.id)
    assert (row.revision, row.max_replicas_per_model_manually_set) == (revision, False)
    assert "mine" not in labels(node)
    assert "3" in page.content.decode(), "what was typed in is still there"


def test_a_node_that_is_removed_meanwhile_is_no_crash(root: Client) -> None:
    """The page says so."""
    node = api.make_node()
    fields = pages.load(root, node.id)
    services.deregister(node.id, actor=ANN, now=clock.now())
    assert save(root, node, fields | {"override_cap": "on", "cap": "3"}).status_code == 200
    assert not BackendNode.objects.exists()


def test_a_page_of_a_node_that_falls_silent_and_returns_is_out_of_date(root: Client) -> None:
    """That is more than a heartbeat."""
    node = api.make_node()
    fields = pages.load(root, node.id)
    services.fell_silent([node.id], limit=-1, actor=Actor(ActorKind.TASK, "liveness"), now=clock.now())
    page = save(root, node, fields | {"override_cap": "on", "cap": "3"})
    assert "lost contact by liveness" in page.content.decode()
    assert not api.node(node.id).max_replicas_per_model_manually_set


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("first", ["page", "button"])
def test_two_admins_in_two_transactions_write_once(first: str) -> None:
    """The second save waits for the first transaction, then sees that its page is out of date."""
    node, browser = api.make_node(), pages.superuser()
    fields = pages.load(browser, node.id) | {"override_cap": "on", "cap": "7"}
    question = browser.get(pages.url(node.id, "drain"))
    answers: list[Any] = []

    def second() -> None:
        answers.append(save(browser, node, fields) if first == "page" else pages.confirm(browser, question))
        connections.close_all()

    with transaction.atomic():
        services.set_replica_cap(node.id, 3, actor=ANN, now=clock.now())
        thread = threading.Thread(target=second)
        thread.start()
        eventually(_somebody_waits, what="the second save waits for the lock")
        assert not answers
    thread.join()
    told = answers[0].content.decode()
    assert "override by ann" in told
    row = api.node(node.id)
    assert (row.max_replicas_per_model, row.status) == (3, "healthy")
    assert kinds(node).count("override") == 1


def _somebody_waits() -> bool:
    with connection.cursor() as cursor:
        cursor.execute("SELECT count(*) FROM pg_locks WHERE NOT granted")
        (waiting,) = cursor.fetchone()
    return bool(waiting)
