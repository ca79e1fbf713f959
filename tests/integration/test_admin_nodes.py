"""The node list and the node page of the admin: what they show, to whom, and at what cost."""

from dataclasses import replace
from typing import Any

import pytest
from django.conf import settings
from django.contrib.admin import site
from django.contrib.contenttypes.models import ContentType
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext

from localai_cluster.accounts.actors import WORKER, Actor, ActorKind
from localai_cluster.kit import clock
from nodes.models import BackendNode, NodeModel, RevokedSecret
from nodes.registry import services
from tests.support import api, pages

pytestmark = pytest.mark.django_db

ROOT = Actor(ActorKind.USER, "root")
GIB = 1024**3
LIST_QUERIES = 6
"""Session, user, vendors, count, nodes, their labels."""
PAGE_QUERIES = 6
"""Session, user, node, its labels, the same to edit, open conflicts."""


@pytest.fixture
def root() -> Client:
    """A superuser's browser."""
    return pages.superuser()


@pytest.fixture
def stock_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that know the shared token only are admitted."""
    admitting = replace(settings.CLUSTER, allow_shared_token_nodes=True)
    monkeypatch.setattr(settings, "CLUSTER", admitting)


def names(page: Any) -> list[str]:
    """The nodes of a list page, in order."""
    return [node.name for node in page.context["cl"].result_list]


def fleet(count: int) -> list[BackendNode]:
    """Approved nodes with labels and a replica each."""
    made = [api.make_node(f"n{i:03}", labels={"rack": str(i % 3)}, total_vram=24 * GIB) for i in range(count)]
    for node in made:
        # A node that registers again, without a list, leaves a row whose engine may run.
        index = NodeModel.engines.filter(node=node).count()
        node.replicas.create(model_name="m", replica_index=index, phase="serving", address="h:1", in_flight=2)
    return made


def queries(browser: Client, path: str) -> int:
    """How many statements a page costs, once the process is warm."""
    browser.get(path)
    with CaptureQueriesContext(
        connection,
    ) as seen:
        assert browser.get(path).status_code == 200
    return len(seen)


def test_the_list_costs_the_same_for_one_node_and_for_a_hundred(root: Client) -> None:
    """Counts come with the nodes; nothing is asked node by node."""
    fleet(1)
    one = queries(root, pages.LIST)
    fleet(100)
    assert len(names(root.get(pages.LIST))) == 100
    assert (one, queries(root, pages.LIST)) == (LIST_QUERIES, LIST_QUERIES)


def test_a_page_costs_the_same_after_many_events(root: Client) -> None:
    """Twenty events, two conflicts and forty labels cost no statement more than none."""
    bare, full = api.make_node("bare"), api.make_node("full", labels={f"k{i}": "v" for i in range(40)})
    for index in range(30):
        services.set_replica_cap(full.id, index + 1, actor=ROOT, now=clock.now())
    full.replicas.create(model_name="m", phase="serving", address="h:1")
    for claim in ("a", "b"):
        full.conflicts.create(kind="secret", claim=claim * 64)
    assert [queries(root, pages.url(node.id)) for node in (bare, full)] == [PAGE_QUERIES] * 2


def test_the_list_says_what_a_status_leaves_open(root: Client) -> None:
    """Words, not colour alone: the reason of an absence, who drains, how a node proves itself."""
    now = clock.now()
    rejected = api.make_node("no", approved=False)
    services.reject(rejected.id, actor=ROOT, now=now, reason="not ours")
    drained = api.make_node("drained")
    drained.replicas.create(model_name="m", phase="serving", address="h:1", in_flight=3)
    services.drain(drained.id, actor=ROOT, now=now, reason="new fans")
    services.deactivate(api.make_node("gone").id, now=now)
    drained.conflicts.create(kind="secret", claim="a" * 64)
    page = root.get(pages.LIST).content.decode()
    for said in ("rejected: not ours", "by root: new fans", "deregistered by the worker", "1 open conflict"):
        assert said in page, said


@pytest.mark.usefixtures("stock_workers")
@pytest.mark.parametrize(
    ("query", "found"),
    [
        ("status=pending", ["new", "no"]),
        ("status=healthy", ["gpu", "weak"]),
        ("status=nonsense", ["gpu", "new", "no", "weak"]),
        ("type=agent", ["weak"]),
        ("label=tier%3Dgold", ["gpu"]),
        ("label=tier", ["gpu", "new"]),
        ("label=tier%3Dgold,gpu.vendor%3Dnvidia", ["gpu"]),
        ("label=tier%3Dgold,rack%3D1", []),
        ("label=%00", []),
        ("label=,", []),
        ("vendor=nvidia", ["gpu"]),
        ("vendor=(none)", ["new", "no", "weak"]),
        ("vendor=%00", []),
        ("identity=weak", ["weak"]),
        ("identity=strong", ["gpu", "new", "no"]),
        ("conflict=open", ["gpu"]),
        ("decision=rejected", ["no"]),
        ("decision=waiting", ["new"]),
        ("q=WEA", ["weak"]),
        ("q=10.0.0.7", ["gpu"]),
        ("status=pending&label=tier", ["new"]),
    ],
)
def test_filters_and_search(root: Client, query: str, found: list[str]) -> None:
    """By state, type, label, vendor, identity, conflict, decision; by name and address."""
    gpu = api.make_node("gpu", gpu_vendor="nvidia", labels={"tier": "gold"}, address="10.0.0.7:1")
    gpu.conflicts.create(kind="secret", claim="a" * 64)
    api.make_node("new", approved=False, labels={"tier": "tin"})
    no = api.make_node("no", approved=False)
    services.reject(no.id, actor=ROOT, now=clock.now(), reason="r")
    api.make_node("weak", secret="", node_type="agent")
    page = root.get(f"{pages.LIST}?{query}")
    assert page.status_code == 200
    assert names(page) == found


def test_the_approval_panel_shows_what_to_compare(root: Client) -> None:
    """Fingerprint in groups of four, addresses, hardware, first seen; gone once it is approved."""
    node = api.make_node(
        approved=False, address="10.0.0.7:51100", gpu_vendor="nvidia", total_vram=24 * GIB, total_ram=GIB
    )
    page = root.get(pages.url(node.id)).content.decode()
    digits = node.fingerprint
    for said in (
        "Awaiting approval",
        " ".join(digits[at : at + 4] for at in range(0, 64, 4)),
        digits,
        "127.0.0.1",
        "10.0.0.7:51100",
        "nvidia, VRAM 24 GiB, RAM 1 GiB, disk -",
        "First seen",
        pages.url(node.id, "approve"),
        pages.url(node.id, "reject"),
    ):
        assert said in page, said
    assert "Weak identity" not in page
    services.approve(node.id, actor=ROOT, now=clock.now())
    page = root.get(pages.url(node.id)).content.decode()
    assert "Awaiting approval" not in page
    assert pages.url(node.id, "approve") not in page, "only what applies has a button"


@pytest.mark.usefixtures("stock_workers")
def test_a_weak_or_rejected_node_says_so(root: Client) -> None:
    """Anyone who approves is warned, and sees an earlier no."""
    node = api.make_node(secret="", approved=False)
    services.reject(node.id, actor=ROOT, now=clock.now(), reason="who is that?")
    page = root.get(pages.url(node.id)).content.decode()
    assert "Anyone who has the token can claim to be this node" in page
    assert "<strong>Rejected</strong> by root" in page
    assert "who is that?" in page
    assert pages.url(node.id, "rotate") not in page, "there is no secret to rotate"


def test_a_drain_shows_what_remains(root: Client) -> None:
    """Requests, replicas, deadline."""
    node = api.make_node()
    for index in range(2):
        node.replicas.create(
            model_name="m", replica_index=index, phase="serving", address="h:1", in_flight=index
        )
    services.drain(node.id, actor=ROOT, now=clock.now(), deadline=7200.5)
    page = root.get(pages.url(node.id)).content.decode()
    assert "1 request in flight, 2 loaded replicas; drain until" in page
    assert "(in 1 h)" in page or "(in 2 h)" in page


def test_the_page_of_a_node_leads_to_its_timeline_and_its_live_page(root: Client) -> None:
    """With actor, cause and detail of its own events; what changes by the second is on the live page."""
    node, _ = api.make_node(), api.make_node("other")
    services.set_replica_cap(node.id, 30, actor=ROOT, now=clock.now())
    page = root.get(pages.url(node.id))
    timeline = root.get(page.context["events_url"])
    assert names_of_events(timeline) == {"w1"}
    assert "max replicas per model: 1 → 30" in timeline.content.decode()
    assert f'href="/app/nodes/{node.id}"' in page.content.decode()


def test_the_index_puts_internal_tables_last(root: Client) -> None:
    """Each registered model is in it once."""
    apps = root.get("/admin/").context["app_list"]
    assert apps[0]["name"] == "Nodes and models"
    assert apps[-1]["name"] == "Internal tables"
    internal = {model["object_name"] for model in apps[-1]["models"]}
    assert {"Sequence", "ModelLoadInfo", "ReplicaUse", "InitialPassword"} <= internal
    listed = [model["object_name"] for app in apps for model in app["models"]]
    assert sorted(listed) == sorted(model.__name__ for model in site._registry)


def test_all_times_have_one_format(root: Client) -> None:
    """Columns that Django formats look like those of the product."""
    node = api.make_node()
    services.revoke(node.id, actor=ROOT, now=clock.now())
    told = f"{RevokedSecret.objects.get().revoked_at:%Y-%m-%d %H:%M:%S} UTC"
    page = root.get("/admin/nodes/revokedsecret/").content.decode()
    assert told in page


def names_of_events(page: Any) -> set[str]:
    """The nodes of an event list."""
    return {event.node_name for event in page.context["cl"].result_list}


def test_a_viewer_sees_everything_and_changes_nothing() -> None:
    """Without the permission to change there is no button, no field and no way."""
    node = api.make_node(approved=False, labels={"tier": "gold"})
    viewer = pages.staff("ann", "view_backendnode")
    page = viewer.get(pages.url(node.id))
    assert page.status_code == 200
    text = page.content.decode()
    for said in ("gold", "1, worker default", "Awaiting approval", node.fingerprint):
        assert said in text, said
    for absent in ("/approve/", "/remove/", 'name="_save"', 'name="cap"', 'name="label_set-0-value"'):
        assert absent not in text, absent
    assert viewer.get(pages.LIST).context["action_form"] is None
    for verb in ("approve", "reject", "drain", "resume", "stop", "rotate", "revoke", "remove"):
        assert viewer.get(pages.url(node.id, verb)).status_code == 403, verb
    viewer.handler.enforce_csrf_checks = False
    for path in (f"{pages.LIST}approve/", f"{pages.LIST}remove/", pages.url(node.id)):
        assert viewer.post(path, {"items": f"{node.id}:1:0"}).status_code == 403, path
    assert api.node(node.id).status == "pending"


def test_who_may_change_may_not_remove() -> None:
    """Removing needs the permission to delete."""
    node = api.make_node()
    changer = pages.staff("ann", "view_backendnode", "change_backendnode")
    assert changer.get(pages.url(node.id, "drain")).status_code == 200
    assert changer.get(pages.url(node.id, "remove")).status_code == 403
    assert pages.url(node.id, "remove") not in changer.get(pages.url(node.id)).content.decode()


@pytest.mark.parametrize("key", ["7d9f0c9e-0000-4000-8000-000000000000", "nonsense", "%00", "1"])
@pytest.mark.parametrize("page", ["change", "delete", "history", "approve"])
def test_a_node_that_is_not_there_is_no_crash(root: Client, key: str, page: str) -> None:
    """Back to the list or the start page; an unknown path is 404."""
    assert root.get(f"{pages.LIST}{key}/{page}/").status_code in (302, 404)


@pytest.mark.parametrize("key", ["nonsense", "%00", "1"])
def test_an_object_has_no_public_page(root: Client, key: str) -> None:
    kind = ContentType.objects.get_for_model(BackendNode)
    assert root.get(f"/admin/r/{kind.pk}/{key}/").status_code == 404


def test_the_stock_deletion_leads_to_the_verb(root: Client) -> None:
    """No one deletes a row past the service."""
    node = api.make_node()
    assert root.get(pages.url(node.id, "delete"))["Location"] == pages.url(node.id, "remove")
    page = root.get(pages.LIST)
    assert "delete_selected" not in page.content.decode()
    services.deactivate(node.id, actor=WORKER, now=clock.now())
    assert BackendNode.objects.count() == 1
