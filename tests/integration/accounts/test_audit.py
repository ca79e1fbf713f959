"""The audit: what people change leaves an entry with who, what, when and from where; nothing else does."""

from datetime import timedelta
from io import StringIO
from typing import Any

import pytest
from django.contrib.auth import get_user_model
from django.core.management import call_command
from django.db import OperationalError, connection
from django.db.models import QuerySet
from django.test import Client
from django.test.utils import CaptureQueriesContext

from localai_cluster.accounts import audit
from localai_cluster.accounts.models import ApiKey, AuditEntry
from localai_cluster.kit import clock
from nodes.backends import admission
from nodes.backends.backend_requests import INSTALL
from nodes.reconcilers import tasks
from tests.support import api, hot
from tests.support.intents import ask, claim

pytestmark = pytest.mark.django_db(transaction=True)


def entries(query: str = "") -> list[dict[str, Any]]:
    """What the API lists."""
    answer = api.admin().get(f"/api/audit{query}")
    assert answer.status_code == 200, answer.content
    found: list[dict[str, Any]] = answer.json()["entries"]
    return found


def kinds(query: str = "") -> list[str]:
    return [entry["kind"] for entry in entries(query)]


def install(*nodes: Any) -> str:
    body = {"nodes": [str(node.id) for node in nodes]}
    answer = api.admin().post("/api/backends/install/echo", body)
    assert answer.status_code == 200, answer.content
    return str(answer.json()["jobID"])


def superuser() -> Client:
    """A browser whose forms carry their CSRF token."""
    client = Client()
    client.force_login(get_user_model().objects.create_superuser("root"))
    return client


@pytest.mark.rule("UW32")
def test_what_is_done_to_an_operation_says_who_and_from_where() -> None:
    one, two = hot.node("one"), hot.node("two")
    job = install(one, two)
    api.admin().post(f"/api/operations/{job}/retry")
    api.admin().post(f"/api/operations/{job}/nodes/{one.id}/cancel")
    api.admin().post(f"/api/operations/{job}/cancel")
    assert kinds(f"?subject={job}") == [
        "operation.cancelled",
        "operation.cancelled_part",
        "operation.tried_at_once",
        "operation.asked",
    ]
    part = entries("?kind=operation.cancelled_part")[0]
    assert (part["actor"], part["actor_kind"], part["address"]) == ("static-key", "static_key", "127.0.0.1")
    assert (part["subject"], part["detail"]) == ("backend install of echo", "on one")


def test_what_is_refused_and_what_no_person_does_leaves_nothing() -> None:
    """A refused change is rolled back with its entry; controllers, workers and reconcilers are no people."""
    operation = ask(INSTALL, hot.node())
    claim()
    admission.cancel(operation.id, actor="controller", now=clock.now())
    assert api.admin().post(f"/api/operations/{operation.id}/cancel").status_code == 409
    api.register(api.registration("w1"))
    assert entries() == []


@pytest.mark.rule("UW32")
def test_nodes_tokens_and_edits_in_the_admin_are_in_the_same_view() -> None:
    node = api.make_node("w1")
    api.admin().post(f"/api/nodes/{node.id}/drain", {"reason": "new disk"})
    api.admin().post("/api/join-tokens", {"note": "rack 4"})
    root = superuser()
    root.post("/admin/accounts/apikey/add/", {"user": root.session["_auth_user_id"], "name": "ci"})
    assert ApiKey.objects.filter(name="ci").exists()
    found = {entry["kind"]: entry for entry in entries()}
    assert found.keys() == {"node.drained", "join_token.made", "admin.added"}
    assert (found["node.drained"]["subject"], found["node.drained"]["detail"]) == ("w1", "new disk")
    assert found["admin.added"]["address"] == "127.0.0.1"
    assert kinds("?kind=node") == ["node.drained"]


def test_several_rows_deleted_in_the_admin_are_an_entry_each() -> None:
    root = superuser()
    user = root.session["_auth_user_id"]
    for name in ("a", "b"):
        root.post("/admin/accounts/apikey/add/", {"user": user, "name": name})
    ids = list(ApiKey.objects.values_list("pk", flat=True))
    deletion = {"action": "delete_selected", "_selected_action": ids}
    assert root.post("/admin/accounts/apikey/", deletion).status_code == 200, "it asks first"
    assert kinds("?kind=admin.deleted") == []
    root.post("/admin/accounts/apikey/", deletion | {"post": "yes"})
    assert not ApiKey.objects.exists()
    assert kinds("?kind=admin.deleted") == ["admin.deleted"] * 2


def test_the_command_line_is_a_place_too() -> None:
    operation = ask(INSTALL, hot.node())
    call_command("operations", "cancel", str(operation.id), stdout=StringIO())
    (entry,) = entries()
    assert (entry["kind"], entry["actor_kind"], entry["address"]) == ("operation.cancelled", "command", "")


def test_an_address_is_there_without_its_query() -> None:
    """Signed addresses carry their signature there, and the audit outlives the record."""
    body = {"uri": "https://images.test/echo.tar?signature=s3cret", "nodes": [str(hot.node().id)]}
    assert api.admin().post("/api/backends/install-external", body).status_code == 200
    (entry,) = entries()
    assert "https://images.test/echo.tar" in entry["subject"]
    assert "s3cret" not in str(entry)


def test_clearing_the_record_and_its_entry_are_one(monkeypatch: pytest.MonkeyPatch) -> None:
    operation = ask(INSTALL, hot.node())
    admission.cancel(operation.id, actor="ann", now=clock.now())

    def outage(*_: Any) -> None:
        raise OperationalError("gone")

    with monkeypatch.context() as broken:
        broken.setattr(QuerySet, "delete", outage)
        assert api.admin().delete("/api/operations/history").status_code == 503
    assert entries() == []
    assert api.admin().delete("/api/operations/history").status_code == 200
    assert kinds() == ["operation.history_cleared"]


def many(number: int) -> None:
    now = clock.now()
    AuditEntry.objects.bulk_create(
        AuditEntry(at=now - timedelta(minutes=n), kind="node.drained", actor=f"a{n % 2}", subject=str(n))
        for n in range(number)
    )


def test_pages_filters_and_refusals() -> None:
    many(5)
    first = api.admin().get("/api/audit?limit=2&actor=a0").json()
    rest = api.admin().get(f"/api/audit?limit=2&actor=a0&cursor={first['nextCursor']}").json()
    assert [entry["subject"] for entry in first["entries"] + rest["entries"]] == ["4", "2", "0"]
    assert "nextCursor" not in rest
    since = (clock.now() - timedelta(minutes=2, seconds=30)).strftime("%Y-%m-%dT%H:%M:%SZ")
    assert {entry["subject"] for entry in entries(f"?from={since}")} == {"0", "1", "2"}
    assert {entry["subject"] for entry in entries(f"?to={since}")} == {"3", "4"}
    for query, field in (
        ("cursor=x", "cursor"),
        ("limit=0", "limit"),
        ("from=soon", "from"),
        ("who=me", "who"),
    ):
        answer = api.admin().get(f"/api/audit?{query}")
        assert answer.status_code == 400
        assert field in api.message(answer)
    assert api.bearer("nobody").get("/api/audit").status_code == 401


def test_the_list_costs_the_same_for_any_number() -> None:
    def statements() -> int:
        with CaptureQueriesContext(connection) as captured:
            entries()
        return len(captured)

    many(1)
    few = statements()
    many(40)
    assert statements() == few


def test_old_entries_go_with_the_events() -> None:
    many(3)
    AuditEntry.objects.filter(subject="1").update(at=clock.now() - timedelta(days=3650))
    tasks.prune_timeline()
    assert set(AuditEntry.objects.values_list("subject", flat=True)) == {"0", "2"}
    assert audit.prune(before=clock.now() + timedelta(days=1), limit=1) == 1
