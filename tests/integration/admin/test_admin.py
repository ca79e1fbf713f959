"""Django's admin: approval, overrides, read-only lists; what it refuses, to whom, and at what cost."""

import threading
from typing import Any
from uuid import uuid4

import pytest
from django.contrib.admin import site
from django.contrib.auth import get_user_model
from django.contrib.contenttypes.models import ContentType
from django.db import connection, connections, transaction
from django.test import Client
from django.test.utils import CaptureQueriesContext

from localai_cluster.accounts.actors import Actor, ActorKind
from localai_cluster.kit import addresses, clock, leases
from nodes.models import BackendNode, NodeEvent, NodeLabel, RevokedSecret
from nodes.registry import claims, labels, lifecycle
from nodes.registry.overrides import set_replica_cap
from tests.conftest import eventually
from tests.support import api, fleet, hot, intents, pages

pytestmark = pytest.mark.django_db

ROOT = Actor(ActorKind.USER, "root")
ANN = Actor(ActorKind.USER, "ann")
GIB = 1024**3
EVENTS, CONFLICTS = "/admin/nodes/nodeevent/", "/admin/nodes/nodeconflict/"


@pytest.fixture
def root() -> Client:
    """A superuser's browser."""
    return pages.superuser()


def rows(page: Any) -> list[Any]:
    return list(page.context["cl"].result_list)


def queries(browser: Client, path: str) -> int:
    """Return the number of statements of a page, once the process is warm."""
    browser.get(path)
    with CaptureQueriesContext(connection) as captured:
        assert browser.get(path).status_code == 200
    return len(captured)


def save(browser: Client, node: BackendNode, fields: dict[str, str]) -> Any:
    """Send a node's page; return the page that follows."""
    return browser.post(pages.url(node.id), fields, follow=True)


# --- lists and pages


def test_lists_cost_the_same_for_any_number(root: Client) -> None:
    node = api.make_node("n")
    node.conflicts.create(kind="secret", claim="a" * 64)
    few = [queries(root, path) for path in (pages.LIST, EVENTS, CONFLICTS)]
    for index in range(30):
        made = api.make_node(f"n{index:03}", labels={"rack": str(index % 3)})
        made.conflicts.create(kind="secret", claim=f"{index:064}")
    assert [queries(root, path) for path in (pages.LIST, EVENTS, CONFLICTS)] == few


def test_a_page_costs_the_same_after_many_events(root: Client) -> None:
    """Thirty events, two conflicts and forty labels cost no statement more than none."""
    bare, full = api.make_node("bare"), api.make_node("full", labels={f"k{i}": "v" for i in range(40)})
    for index in range(30):
        set_replica_cap(full.id, index + 1, actor=ROOT, now=clock.now())
    for claim in ("a", "b"):
        full.conflicts.create(kind="secret", claim=claim * 64)
    assert queries(root, pages.url(bare.id)) == queries(root, pages.url(full.id))


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("status=pending", ["new", "no"]),
        ("node_type__exact=backend", ["gpu", "new", "no"]),
        ("gpu_vendor=nvidia", ["gpu"]),
        ("rejected_at__isempty=0", ["no"]),
        ("approved_at__isempty=1", ["new", "no"]),
        ("q=NE", ["new"]),
        ("q=10.0.0.7", ["gpu"]),
        ("q=gold", ["gpu"]),
    ],
)
def test_filters_and_search(root: Client, query: str, expected: list[str]) -> None:
    api.make_node("gpu", gpu_vendor="nvidia", labels={"tier": "gold"}, address="10.0.0.7:1")
    api.make_node("new", approved=False)
    rejected = api.make_node("no", approved=False)
    lifecycle.reject(rejected.id, actor=ROOT, now=clock.now(), reason="r")
    page = root.get(f"{pages.LIST}?{query}")
    assert page.status_code == 200
    assert [node.name for node in rows(page)] == expected


def test_no_filter_guesses_a_column_that_no_page_shows(root: Client) -> None:
    """The token of a node's engines was found digit by digit, and texts of people could be searched."""
    api.make_node("n")
    BackendNode.objects.update(engine_token="ab" * 32)
    for path in (
        f"{pages.LIST}?engine_token__startswith=a",
        "/admin/nodes/jointoken/?token_hash__startswith=a",
        "/admin/accounts/apikey/?key_hash__startswith=a",
        "/admin/nodes/storedresponse/?input__startswith=a",
        f"{CONFLICTS}?node__engine_token__startswith=a",
    ):
        assert root.get(path).status_code == 400, path
    for path in (f"{EVENTS}?node_id={uuid4()}", f"{CONFLICTS}?node_id={uuid4()}"):
        assert root.get(path).status_code == 200, path


@pytest.mark.parametrize(
    "path",
    [
        f"{EVENTS}?kind__regex=(",
        f"{EVENTS}?at__year=999999999999",
        f"{EVENTS}?at__gte=x",
        "/admin/auth/user/?username__iregex=(",
        "/admin/auth/user/?date_joined__year=0",
        "/admin/accounts/apikey/?revoked_at__year=0",
        "/admin/django_q/failure/%00/change/",
        "/admin/django_q/success/%00/delete/",
    ],
)
def test_an_impossible_id_or_filter_is_no_crash(root: Client, path: str) -> None:
    """A regular expression could also keep the database busy."""
    assert root.get(path).status_code in (302, 400, 404)


def test_an_action_on_a_list_with_an_impossible_filter_is_400() -> None:
    browser = Client()
    browser.force_login(get_user_model().objects.create_superuser("root"))
    action = {"action": "delete_selected", "_selected_action": "1"}
    for path in (f"{EVENTS}?at__year=999999999999", "/admin/auth/user/?date_joined__year=0"):
        assert browser.post(path, action).status_code == 400, path


def test_a_defect_of_a_page_is_no_impossible_filter(root: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is a 500 with its traceback in the log; a 400 would hide it."""
    node = api.make_node("n")
    monkeypatch.setattr(BackendNode, "__str__", lambda _: addresses.parse("no address").target)
    root.raise_request_exception = False
    assert root.get(f"{pages.url(node.pk)}?_popup=1").status_code == 500


@pytest.mark.parametrize("query", ["status=%00", "gpu_vendor=%00", "node_type__exact=%00", "x=%00", "q=%00"])
def test_a_filter_that_no_page_makes_is_no_crash(root: Client, query: str) -> None:
    assert root.get(f"{pages.LIST}?{query}").status_code in (200, 302, 400)


def test_the_page_shows_what_to_compare_and_the_reasons(root: Client) -> None:
    """Fingerprint in groups of four, addresses, hardware, a rejection; the decisions that apply."""
    node = api.make_node(approved=False, address="10.0.0.7:51100", gpu_vendor="nvidia", total_vram=24 * GIB)
    lifecycle.reject(node.id, actor=ROOT, now=clock.now(), reason="who is that?")
    digits = node.fingerprint
    groups = " ".join(digits[at : at + 4] for at in range(0, 64, 4))
    for page in (root.get(pages.url(node.id)), pages.select(root, "approve", node.id)):
        text = page.content.decode()
        for shown in (groups, "127.0.0.1", "10.0.0.7:51100", "nvidia, VRAM 24.0", "who is that?"):
            assert shown in text, shown
    lifecycle.approve(node.id, actor=ROOT, now=clock.now())
    text = root.get(pages.url(node.id)).content.decode()
    assert 'value="approve"' not in text, "only what applies has a button"
    assert f"{EVENTS}?node_id={node.id}" in text
    assert f'href="/app/nodes/{node.id}"' in text


def test_the_timeline_of_a_removed_node_is_listed_and_read_only(root: Client) -> None:
    node = api.make_node()
    api.make_node("other")
    lifecycle.deregister(node.id, actor=ROOT, now=clock.now())
    events = rows(root.get(f"{EVENTS}?node_id={node.id}"))
    assert events[0].kind == "deregistered"
    assert {event.node_name for event in events} == {"w1"}
    page = root.get(f"{EVENTS}{events[0].pk}/change/")
    assert 'name="_save"' not in page.content.decode()
    assert root.get(f"{EVENTS}add/").status_code == 403
    assert root.get(f"{EVENTS}{events[0].pk}/delete/").status_code == 403


def test_revoked_secrets_are_listed_and_stay(root: Client) -> None:
    """In the one format of times; no one takes one back by hand."""
    node = api.make_node()
    claims.revoke(node.id, actor=ROOT, now=clock.now())
    page = root.get("/admin/nodes/revokedsecret/")
    assert [secret.pk for secret in rows(page)] == [node.fingerprint]
    assert f"{RevokedSecret.objects.get().revoked_at:%Y-%m-%d %H:%M:%S} UTC" in page.content.decode()
    assert root.get(f"/admin/nodes/revokedsecret/{node.fingerprint}/delete/").status_code == 403


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
    intent = rows(page)[0]
    shown = root.get(f"/admin/nodes/pendingbackendop/{intent.pk}/change/").context["adminform"]
    fields = [field.field["name"] for fieldset in shown for line in fieldset for field in line]
    assert fields[-len(leases.LEASE_COLUMNS) :] == sorted(leases.LEASE_COLUMNS, key=fields.index)


@pytest.mark.django_db(transaction=True)
def test_an_operation_shows_its_targets_and_nothing_can_be_edited() -> None:
    browser = pages.superuser()
    browser.handler.enforce_csrf_checks = False
    page = f"/admin/operations/operation/{intents.ask(intents.INSTALL, hot.node('gpu-1')).pk}/change/"
    text = browser.get(page).content.decode()
    assert "gpu-1" in text
    assert "/app/operations/" in text
    assert 'name="_save"' not in text
    assert browser.post(page, {"status": "completed"}).status_code == 403


def test_labels_are_escaped(root: Client) -> None:
    node = api.make_node(labels={"<b>": '"><script>alert(1)</script>'})
    labels.edit_labels(node.id, {"<i>": "<script>"}, actor=ROOT, now=clock.now())
    for path in (pages.url(node.id), "/admin/nodes/nodelabel/", EVENTS):
        text = root.get(path).content.decode()
        assert "<script>alert" not in text
        assert "<b>" not in text


def test_the_index_puts_internal_tables_last(root: Client) -> None:
    """Each registered model is in it once."""
    app_list = root.get("/admin/").context["app_list"]
    assert app_list[0]["name"] == "Nodes and models"
    assert app_list[-1]["name"] == "Internal tables"
    internal = {model["object_name"] for model in app_list[-1]["models"]}
    assert {"Sequence", "ModelLoadInfo", "ReplicaUse", "InitialPassword"} <= internal
    listed = [model["object_name"] for app in app_list for model in app["models"]]
    assert sorted(listed) == sorted(model.__name__ for model in site._registry)


@pytest.mark.parametrize("key", ["7d9f0c9e-0000-4000-8000-000000000000", "nonsense", "%00", "1"])
@pytest.mark.parametrize("page", ["change", "delete", "history", "approve"])
def test_a_node_that_is_not_there_is_no_crash(root: Client, key: str, page: str) -> None:
    assert root.get(f"{pages.LIST}{key}/{page}/").status_code in (302, 403, 404)


@pytest.mark.parametrize("key", ["nonsense", "%00", "1"])
def test_an_object_has_no_public_page(root: Client, key: str) -> None:
    kind = ContentType.objects.get_for_model(BackendNode)
    assert root.get(f"/admin/r/{kind.pk}/{key}/").status_code == 404


# --- permissions


def test_a_viewer_sees_everything_and_changes_nothing() -> None:
    """Without the permission to change there is no button, no field and no way."""
    node = api.make_node(approved=False, labels={"tier": "gold"})
    viewer = pages.staff("ann", "view_backendnode")
    page = viewer.get(pages.url(node.id))
    assert page.status_code == 200
    text = page.content.decode()
    for shown in ("gold", "max replicas per model", "pending", node.fingerprint):
        assert shown.lower() in text.lower(), shown
    for absent in ('value="approve"', 'name="_save"', 'name="cap"', 'name="label_set-0-value"'):
        assert absent not in text, absent
    assert viewer.get(pages.LIST).context["action_form"] is None
    viewer.handler.enforce_csrf_checks = False
    assert viewer.post(pages.url(node.id), {"cap": "3"}).status_code == 403
    viewer.post(pages.LIST, {"action": "approve", "_selected_action": [str(node.id)], "revisions": "x"})
    assert api.node(node.id).status == "pending"


def test_no_one_deletes_a_node_past_the_service(root: Client) -> None:
    node = api.make_node()
    assert root.get(pages.url(node.id, "delete")).status_code == 403
    assert "delete_selected" not in root.get(pages.LIST).content.decode()


# --- approval


@pytest.mark.rule("R1.15")
@pytest.mark.parametrize("way", ["page", "list"])
@pytest.mark.parametrize(("action", "status"), [("approve", "healthy"), ("reject", "pending")])
def test_a_decision_asks_and_then_acts_by_the_service(
    root: Client, action: str, status: str, way: str
) -> None:
    """The page changes nothing; "yes" does, with the admin as actor and the reason as cause."""
    node = api.make_node(approved=False)
    if way == "page":
        fields = pages.form_with(root.get(pages.url(node.id)), action)
        page = root.post(pages.LIST, fields)
    else:
        page = pages.select(root, action, node.id)
    assert [line[0].pk for line in page.context["lines"]] == [node.id]
    assert api.node(node.id).revision == node.revision, "asking changes nothing"
    answer = pages.confirm(root, page, reason="because")
    assert pages.messages(answer) == [f"Node w1: {action.removesuffix('e')}ed."]
    row = api.node(node.id)
    assert (row.status, row.approval_reason or row.reject_reason) == (status, "because")
    event = NodeEvent.objects.filter(node_id=node.id).latest("id")
    assert (event.actor, event.actor_kind, event.cause) == ("root", "user", "because")


def test_a_reason_is_asked_for_again_and_the_page_stays(root: Client) -> None:
    """A rejection needs one; nothing happens without."""
    node = api.make_node(approved=False)
    page = pages.confirm(root, pages.select(root, "reject", node.id))
    assert page.status_code == 200
    assert "This field is required" in page.content.decode()
    assert api.node(node.id).rejected_at is None
    assert "Node w1: rejected" in str(pages.messages(pages.confirm(root, page, reason="not ours")))
    assert api.node(node.id).reject_reason == "not ours"


@pytest.mark.parametrize("reason", ["\u202egood", "zero\u200bwidth", "nul\0", "x" * 256], ids=ascii)
def test_a_hostile_reason_is_refused_at_its_field(root: Client, reason: str) -> None:
    node = api.make_node(approved=False)
    page = pages.confirm(root, pages.select(root, "approve", node.id), reason=reason)
    assert list(page.context["form"].errors) == ["reason"]
    assert api.node(node.id).status == "pending"


def test_a_page_says_what_it_does_not_apply_to(root: Client) -> None:
    """With the reason that the table of states gives; only the others are decided."""
    new, known = api.make_node("new", approved=False), api.make_node("known")
    page = pages.select(root, "approve", new.id, known.id)
    assert [(line[0].name, line[1]) for line in page.context["lines"]] == [
        ("known", "the node is healthy"),
        ("new", ""),
    ]
    assert pages.messages(pages.confirm(root, page)) == ["Node new: approved."]
    assert "Not possible for any selected row" in pages.select(root, "approve", new.id).content.decode()


def test_what_fails_for_one_does_not_stop_the_others(root: Client) -> None:
    """A node that was removed and one that somebody else approved are named; the third is approved."""
    nodes = [api.make_node(name, approved=False) for name in ("one", "two", "three")]
    page = pages.select(root, "approve", *(node.id for node in nodes))
    lifecycle.deregister(nodes[0].id, actor=ROOT, now=clock.now())
    lifecycle.approve(nodes[1].id, actor=ANN, now=clock.now(), reason="mine")
    shown = pages.messages(pages.confirm(root, page))
    assert "Node three: approved." in shown
    assert any(str(nodes[0].id) in text and "not found" in text for text in shown)
    (outdated,) = [text for text in shown if text.startswith("Node two")]
    assert "approved by ann" in outdated
    assert "(mine)" in outdated
    assert api.node(nodes[1].id).approved_by == "ann"


@pytest.mark.rule("R1.15")
def test_no_one_approves_a_secret_he_has_not_seen(root: Client) -> None:
    """Between page and "yes" the node was revoked and another worker came: nothing is approved."""
    node = api.make_node(approved=False)
    page = pages.select(root, "approve", node.id)
    claims.revoke(node.id, actor=ROOT, now=clock.now())
    api.make_node(secret=api.OTHER_SECRET, approved=False)
    (refusal,) = pages.messages(pages.confirm(root, page))
    assert "registered by worker" in refusal
    assert "Nothing was changed" in refusal
    assert api.node(node.id).status == "pending"


def test_a_heartbeat_between_page_and_yes_is_no_obstacle(root: Client) -> None:
    """A heartbeat moves no revision."""
    node = api.make_node(approved=False)
    page = pages.select(root, "approve", node.id)
    BackendNode.objects.filter(pk=node.id).update(last_heartbeat=clock.now(), available_vram=5)
    assert pages.messages(pages.confirm(root, page)) == ["Node w1: approved."]
    assert api.node(node.id).available_vram == 5


@pytest.mark.rule("R1.31")
def test_an_agents_token_is_shown_once(root: Client) -> None:
    """Approving makes its key, which exists nowhere else, not even in a cookie."""
    node = api.make_node("agent", node_type="agent", approved=False)
    page = pages.confirm(root, pages.select(root, "approve", node.id))
    (shown,) = pages.messages(page)
    token = shown[shown.index("lai-") :].split(")")[0]
    assert token in page.content.decode()
    assert "messages" not in root.cookies
    assert token not in root.get(pages.LIST).content.decode()
    assert api.bearer(token).get("/api/schema").status_code == 200


def test_nothing_is_decided_without_post_and_token(root: Client) -> None:
    node = api.make_node(approved=False)
    fields = {"action": "approve", "_selected_action": [str(node.id)]}
    assert root.get(pages.LIST, fields).status_code in (200, 302)
    assert root.post(pages.LIST, fields).status_code == 403
    assert api.node(node.id).status == "pending"


@pytest.mark.parametrize("revisions", ["", "nonsense", "\0", "{}", "a:b:c", "x" * 9999])
def test_revisions_that_no_page_carried_are_400(revisions: str) -> None:
    browser = pages.superuser("forger")
    browser.handler.enforce_csrf_checks = False
    node = api.make_node(approved=False)
    fields = {"action": "approve", "_selected_action": [str(node.id)], "revisions": revisions}
    assert browser.post(pages.LIST, fields).status_code == 400
    assert api.node(node.id).status == "pending"


def test_an_id_that_is_none_is_refused() -> None:
    browser = pages.superuser("forger")
    browser.handler.enforce_csrf_checks = False
    assert browser.post(pages.LIST, {"action": "approve", "_selected_action": ["x"]}).status_code == 400


def test_the_way_back_keeps_the_filters(root: Client) -> None:
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
    chosen = {**fields, "action": "approve", "select_across": "1", "_selected_action": str(uuid4())}
    page = root.post(pages.LIST, chosen, follow=True)
    assert pages.messages(page) == ["Select at most 500 rows."]


# --- overrides


@pytest.mark.rule("R1.45", "R1.46")
def test_a_replica_cap_is_set_and_reset(root: Client) -> None:
    """By the service: the label follows, the worker's registration does not undo it."""
    node = api.make_node()
    fields = pages.load(root, node.id) | {"override_cap": "on", "cap": "3"}
    assert "was changed successfully" in str(pages.messages(save(root, node, fields)))
    api.make_node(max_replicas_per_model=8)
    row = api.node(node.id)
    assert (row.max_replicas_per_model, row.max_replicas_per_model_manually_set) == (3, True)
    assert NodeLabel.objects.get(node=node, key="node.replica-slots").value == "3"
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
def test_a_vram_budget_is_set_and_reset(root: Client, text: str, limit: int) -> None:
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


def test_a_disk_quota_is_set_and_removed(root: Client) -> None:
    node = api.make_node(total_disk=8 * GIB)
    save(root, node, pages.load(root, node.id) | {"quota": "50%"})
    row = api.node(node.id)
    assert (row.disk_quota, row.disk_quota_bytes) == ("50%", 4 * GIB)
    save(root, node, pages.load(root, node.id) | {"quota": ""})
    row = api.node(node.id)
    assert (row.disk_quota, row.disk_quota_bytes) == ("", 0)


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
        ({"quota": "0"}, "quota"),
        ({"quota": "101%"}, "quota"),
        ({"quota": "9" * 33}, "quota"),
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
    node = api.make_node(labels={"tier": "gold", " odd ": " blanks "})
    before = list(NodeLabel.objects.filter(node=node).values_list("key", "value", "source"))
    events = NodeEvent.objects.count()
    save(root, node, pages.load(root, node.id))
    assert list(NodeLabel.objects.filter(node=node).values_list("key", "value", "source")) == before
    assert (NodeEvent.objects.count(), api.node(node.id).revision) == (events, node.revision)


@pytest.mark.parametrize("broken", ["", "x", "-1", str(2**70)])
def test_a_page_without_its_revision_saves_nothing(root: Client, broken: str) -> None:
    node = api.make_node()
    fields = pages.load(root, node.id) | {"seen_revision": broken, "override_cap": "on", "cap": "3"}
    assert save(root, node, fields).status_code == 200
    assert api.node(node.id).revision == node.revision


@pytest.mark.parametrize("management", ["x", "-1", "99999999"])
def test_a_broken_form_count_is_no_crash(root: Client, management: str) -> None:
    node = api.make_node()
    for name in ("label_set-TOTAL_FORMS", "label_set-INITIAL_FORMS"):
        fields = pages.load(root, node.id) | {name: management}
        assert save(root, node, fields).status_code in (200, 400)
    assert api.node(node.id).revision == node.revision


def test_a_save_does_not_overwrite_what_a_heartbeat_wrote_meanwhile(root: Client) -> None:
    """A heartbeat makes no page out of date, and a save writes only the columns that were asked for."""
    node = api.make_node(total_vram=8 * GIB, available_vram=8 * GIB)
    fields = pages.load(root, node.id)
    at = clock.now()
    fleet.beat(fleet.beat_of(node, at=at, available_vram=3 * GIB, available_ram=2 * GIB))
    save(root, node, fields | {"override_cap": "on", "cap": "3"})
    row = api.node(node.id)
    assert (row.available_vram, row.available_ram, row.last_heartbeat) == (3 * GIB, 2 * GIB, at)
    assert row.max_replicas_per_model == 3


def test_the_second_of_two_admins_is_shown_what_the_first_has_done(root: Client) -> None:
    node = api.make_node(labels={"tier": "t1"})
    fields = pages.load(root, node.id) | {"override_cap": "on", "cap": "3"}
    lifecycle.drain(node.id, actor=ANN, now=clock.now(), reason="new fans")
    revision = api.node(node.id).revision
    page = save(root, node, fields)
    shown = str(page.context["adminform"].form.non_field_errors())
    assert "Nothing was saved" in shown
    assert "drained by ann" in shown
    assert "(new fans)" in shown
    row = api.node(node.id)
    assert (row.revision, row.max_replicas_per_model_manually_set) == (revision, False)
    assert 'value="3"' in page.content.decode(), "what was typed in is still there"


def test_a_node_that_is_removed_meanwhile_is_no_crash(root: Client) -> None:
    node = api.make_node()
    fields = pages.load(root, node.id)
    lifecycle.deregister(node.id, actor=ANN, now=clock.now())
    assert save(root, node, fields | {"override_cap": "on", "cap": "3"}).status_code == 200
    assert not BackendNode.objects.exists()


def test_a_page_of_a_node_that_falls_silent_is_out_of_date(root: Client) -> None:
    """That is more than a heartbeat."""
    node = api.make_node()
    fields = pages.load(root, node.id)
    lifecycle.mark_silent([node.id], limit=-1, actor=Actor(ActorKind.TASK, "liveness"), now=clock.now())
    page = save(root, node, fields | {"override_cap": "on", "cap": "3"})
    assert "lost contact by liveness" in page.content.decode()
    assert not api.node(node.id).max_replicas_per_model_manually_set


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("way", ["override", "approval"])
def test_two_admins_in_two_transactions_write_once(way: str) -> None:
    """The second waits for the first transaction, then sees that its page is out of date."""
    node, browser = api.make_node(approved=way == "override"), pages.superuser()
    fields = pages.load(browser, node.id) | {"override_cap": "on", "cap": "7"}
    question = pages.select(browser, "approve", node.id)
    answers: list[Any] = []

    def second() -> None:
        answers.append(save(browser, node, fields) if way == "override" else pages.confirm(browser, question))
        connections.close_all()

    with transaction.atomic():
        set_replica_cap(node.id, 3, actor=ANN, now=clock.now())
        thread = threading.Thread(target=second)
        thread.start()
        eventually(_somebody_waits, what="the second save waits for the lock")
        assert not answers
    thread.join()
    assert "override by ann" in answers[0].content.decode()
    row = api.node(node.id)
    assert (row.max_replicas_per_model, row.status) == (3, "healthy" if way == "override" else "pending")


def _somebody_waits() -> bool:
    with connection.cursor() as cursor:
        cursor.execute("SELECT count(*) FROM pg_locks WHERE NOT granted")
        (waiting,) = cursor.fetchone()
    return bool(waiting)
