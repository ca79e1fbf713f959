"""Operations and intents in the admin: the page asks, the services of the API do it, nothing is edited."""

import re
from typing import Any

import pytest
from django.contrib.auth import get_user_model
from django.contrib.auth.models import Permission
from django.test import Client

from localai_cluster.kit import clock
from nodes.backends import admission, intents
from nodes.backends.backend_requests import INSTALL
from nodes.backends.intents import Ended, Failed
from nodes.models import PendingBackendOp
from operations.models import Operation
from tests.support import hot
from tests.support.intents import ask, claim, part

pytestmark = pytest.mark.django_db(transaction=True)

OPERATIONS, INTENTS = "/admin/operations/operation/", "/admin/nodes/pendingbackendop/"


@pytest.fixture
def root() -> Client:
    """A superuser's browser."""
    return signed_in(get_user_model().objects.create_superuser("root"))


def signed_in(user: Any) -> Client:
    """A browser whose forms carry their CSRF token."""
    client = Client()
    client.force_login(user)
    return client


def do(root: Client, where: str, action: str, *rows: Any, **more: str) -> str:
    """Asks, answers the page, and follows to the list; what the pages say."""
    chosen: dict[str, Any] = {"action": action, "_selected_action": [str(row.pk) for row in rows]}
    asked = root.post(where, chosen)
    assert asked.status_code == 200
    text = asked.content.decode()
    if 'name="confirmed"' not in text:
        return text
    ids = re.findall(r'name="_selected_action" value="([^"]+)"', text)
    answer = root.post(where, {**chosen, "_selected_action": ids, "confirmed": "1", **more}, follow=True)
    return text + answer.content.decode()


def failure(node: str = "one") -> Operation:
    """An operation that failed; nothing else may be due."""
    operation = ask(INSTALL, hot.node(node))
    (intent,) = claim()
    intents.settle({(intent.id, intent.fence): (Ended(error="disk full"), ())}, now=clock.now())
    return Operation.objects.get(pk=operation.pk)


def test_operations_are_cancelled_after_a_question(root: Client) -> None:
    failed, running = failure(), ask(INSTALL, hot.node("a"), hot.node("b"))
    asked = root.post(OPERATIONS, {"action": "cancel", "_selected_action": [str(running.pk)]})
    assert "Ends the operations for good" in asked.content.decode()
    assert Operation.objects.get(pk=running.pk).status == "pending", "the question changes nothing"
    said = do(root, OPERATIONS, "cancel", running, failed)
    assert "failed already" in said
    ended = Operation.objects.get(pk=running.pk)
    assert (ended.status, ended.message) == ("cancelled", "cancelled by root")
    assert "Not possible for any selected row" in do(root, OPERATIONS, "cancel", running)


def test_failures_are_retried_and_dismissed_with_a_comment(root: Client) -> None:
    first = failure()
    do(root, OPERATIONS, "retry", first)
    later = Operation.objects.exclude(pk=first.pk).get()
    assert (later.actor, later.client_address, later.status) == ("root", "127.0.0.1", "pending")
    (intent,) = claim()
    intents.settle({(intent.id, intent.fence): (Ended(error="again"), ())}, now=clock.now())
    do(root, OPERATIONS, "dismiss", later, comment="disk is on order")
    dismissed = Operation.objects.get(pk=later.pk)
    assert (dismissed.dismissed_by, dismissed.dismissed_comment) == ("root", "disk is on order")
    do(root, OPERATIONS, "dismiss", failure("two"), comment="x" * 501)
    assert Operation.objects.filter(dismissed_at=None, status="failed").count() == 1


def test_what_is_completed_is_retried_where_it_was_cancelled(root: Client) -> None:
    """The page refused every completed operation, the API did not."""
    one, two = hot.node("one"), hot.node("two")
    operation = ask(INSTALL, one, two)
    admission.cancel(operation.id, node_id=two.id, actor="ann", now=clock.now())
    whole = ask(INSTALL, one, backend="other")
    for intent in claim(2):
        intents.settle({(intent.id, intent.fence): (Ended(), ())}, now=clock.now())
    assert set(Operation.objects.values_list("status", flat=True)) == {"completed"}
    said = do(root, OPERATIONS, "retry", operation, whole)
    newer = Operation.objects.exclude(pk__in=(operation.pk, whole.pk)).get()
    assert list(newer.targets.values_list("node_name", flat=True)) == ["two"]
    assert "completed" in said


def test_an_intent_is_tried_at_once_and_cancelled_for_all_who_ask(root: Client) -> None:
    node = hot.node("a")
    one, both = ask(INSTALL, node), ask(INSTALL, node, hot.node("b"))
    intent = next(found for found in claim(2) if found.node.name == "a")
    intents.settle({(intent.id, intent.fence): (Failed("no answer"), ())}, now=clock.now())
    assert PendingBackendOp.objects.get(pk=intent.id).next_retry_at > clock.now()
    do(root, INTENTS, "try_now", intent.row)
    assert PendingBackendOp.objects.get(pk=intent.id).next_retry_at <= clock.now()
    do(root, INTENTS, "cancel", intent.row)
    assert not PendingBackendOp.objects.filter(pk=intent.id).exists()
    assert {part(one).status, part(both, node).status} == {"cancelled"}
    assert Operation.objects.get(pk=both.pk).status == "processing"


def test_parts_are_readable_and_nothing_can_be_edited(root: Client) -> None:
    operation = ask(INSTALL, hot.node("gpu-1"))
    shown = root.get(f"{OPERATIONS}{operation.pk}/change/").content.decode()
    assert "gpu-1" in shown
    assert f"/app/operations/{operation.pk}" in shown
    assert 'name="_save"' not in shown
    assert root.post(f"{OPERATIONS}{operation.pk}/change/", {"status": "completed"}).status_code == 403


@pytest.mark.parametrize("where", [OPERATIONS, INTENTS, "/admin/nodes/backendnode/"])
def test_an_id_that_is_none_is_refused(root: Client, where: str) -> None:
    action = "drain" if "backendnode" in where else "cancel"
    assert root.post(where, {"action": action, "_selected_action": ["x"]}).status_code == 400


def test_who_may_only_view_has_no_actions() -> None:
    user = get_user_model().objects.create_user("viewer", is_staff=True)
    user.user_permissions.add(Permission.objects.get(codename="view_operation"))
    viewer = signed_in(user)
    operation = ask(INSTALL, hot.node())
    assert viewer.get(OPERATIONS).status_code == 200
    viewer.post(OPERATIONS, {"action": "cancel", "_selected_action": [str(operation.pk)], "confirmed": "1"})
    assert Operation.objects.get(pk=operation.pk).status == "pending"
