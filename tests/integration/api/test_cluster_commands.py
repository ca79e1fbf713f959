"""Commands on a backend of all nodes by REST, by each of their names (`contract/http-api.md` §4.2, §4.5)."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import yaml

from localai_cluster.api_document import document
from localai_cluster.kit import clock
from nodes.api import cluster_backends
from nodes.api.models import wait_for_end
from nodes.backends import catalogue, intents
from nodes.backends.intents import Ended
from nodes.gateway import gateway
from nodes.models import BackendNode, NodeBackend, PendingBackendOp
from operations.models import Operation
from tests.integration.api.test_document import fits
from tests.support import api, hot
from tests.support.races import meanwhile

pytestmark = pytest.mark.django_db

NAMES = {
    "apply": "/backends/apply",
    "upgrade": "/backends/upgrade/echo",
    "delete": "/backends/delete/echo",
}
SYSTEM_DELETE = "/api/backends/system/delete/{name}"


def post(template: str, body: Any = None, **path: str) -> Any:
    """The answer, which the API document describes."""
    answer = api.admin().post(template.format(**path), {} if body is None else body)
    told = document()["paths"][template]["post"]["responses"][str(answer.status_code)]
    assert fits(told["content"]["application/json"]["schema"], answer.json()) == []
    return answer


def plain(verb: str, **more: Any) -> Any:
    """The command under its plain name."""
    if verb == "apply":
        return post("/backends/apply", {"id": "echo", **more})
    return post(f"/backends/{verb}/{{name}}", more, name="echo")


def node(name: str, *, has: str = "") -> BackendNode:
    made = hot.node(name)
    if has:
        NodeBackend.objects.create(node=made, name=has)
    return made


def parts(job: str) -> list[str]:
    return list(Operation.objects.get(pk=job).targets.values_list("node_name", flat=True))


@contextmanager
def a_controller(**wait_for_end: Ended) -> Iterator[None]:
    """Carries out what is asked for meanwhile; on these nodes with this outcome, elsewhere well."""

    def work() -> None:
        for one in intents.claim("controller", now=clock.now(), lease=60, limit=9):
            outcome = wait_for_end.get(one.node.name, Ended())
            intents.record_outcomes({(one.id, one.fence): (outcome, ())}, now=clock.now())

    with meanwhile(work):
        yield


@pytest.fixture
def gallery(tmp_path: Path, settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One gallery with an entry that resolves to two builds."""
    file = tmp_path / "index.yaml"
    choices = {"nvidia": "cuda-echo", "default": "cpu-echo"}
    builds = [{"name": name, "uri": f"/srv/{name}"} for name in ("cpu-echo", "cuda-echo", "lone")]
    file.write_text(yaml.safe_dump([{"name": "echo", "capabilities": choices}, *builds]))
    listed = [{"name": "local", "url": file.as_uri()}]
    settings.CLUSTER = dataclasses.replace(settings.CLUSTER, galleries=listed)
    monkeypatch.setattr(catalogue, "reader", catalogue.Reader())


@pytest.mark.rule("http-4.2", "O10", "O13")
def test_an_install_goes_to_all_nodes() -> None:
    """Not to agents, nor to nodes that were not approved; `gallery@` is kept for the operation.

    Review R21: it leaves files and engines of nodes that have the backend as they are.
    """
    node("a"), node("b")
    api.make_node("late", secret=api.OTHER_SECRET, approved=False)
    api.make_node("agent", secret="c" * 64, node_type="agent", address="")
    answer = post("/api/backends/install/{name}", name="local@echo")
    assert (answer.status_code, {"jobID", "message"} <= answer.json().keys()) == (200, True)
    assert parts(answer.json()["jobID"]) == ["a", "b"]
    assert {(row.gallery, row.force) for row in PendingBackendOp.objects.all()} == {("local", False)}
    again = post("/api/backends/install/{name}", name="local@echo")
    assert again.json() == answer.json() | {"deduplicated": True, "message": "already being installed"}


@pytest.mark.rule("http-4.2", "O10")
def test_a_reinstall_is_forced_and_waits_for_no_request() -> None:
    """Review R21: whoever asked for it was told how many requests end."""
    node("a")
    post("/api/backends/install/{name}", {"force": True}, name="echo")
    row = PendingBackendOp.objects.get()
    assert (row.force, row.spares_requests) == (True, False)
    refused = post("/api/backends/install/{name}", {"force": "yes"}, name="echo")
    assert (refused.status_code, refused.json()["field"]) == (400, "force")


CHANGES = "/api/backends/changes"


@pytest.mark.rule("http-4.2", "E49")
def test_several_backends_change_by_one_request() -> None:
    """Review R2: leaving the page must not lose half of them. If one is refused, none starts."""
    a, b, unknown = node("a", has="echo"), node("b", has="other"), str(uuid4())
    NodeBackend.objects.create(node=b, name="echo")
    backends = [
        {"backend": "echo", "nodes": [str(a.id), str(b.id)]},
        {"backend": "absent", "nodes": [unknown]},
        {"backend": "other", "nodes": [str(b.id)]},
    ]
    body = {"verb": "upgrade", "backends": backends, "waves": {}}
    assert post(CHANGES, body).json()["results"] == [
        {"backend": "echo"},
        {"backend": "absent", "error": f"node {unknown} is not registered", "field": "nodes"},
        {"backend": "other"},
    ]
    BackendNode.objects.update(inventory_at=clock.now())
    absent = {"backend": "absent", "nodes": [str(a.id), str(b.id)]}
    unlisted = post(CHANGES, body | {"backends": [backends[0], absent]}).json()["results"]
    assert unlisted[0] == {"backend": "echo"}
    assert [refusal["node_name"] for refusal in unlisted[1]["refusals"]] == ["a", "b"]
    assert not Operation.objects.exists()
    body["backends"] = [backends[0], backends[2]]
    echo, other = post(CHANGES, body).json()["results"]
    assert (parts(echo["jobID"]), parts(other["jobID"])) == (["a", "b"], ["b"])
    again = post(CHANGES, body).json()["results"]
    assert [entry["jobID"] for entry in again] == [echo["jobID"], other["jobID"]]
    assert again[0]["deduplicated"]


@pytest.mark.rule("http-4.2")
def test_a_reinstall_of_several_is_forced_and_a_deletion_deletes() -> None:
    a = node("a", has="echo")
    for verb in ("reinstall", "delete"):
        body = {"verb": verb, "backends": [{"backend": "echo", "nodes": [str(a.id)]}]}
        assert "jobID" in post(CHANGES, body).json()["results"][0]
    assert [(row.op, row.force) for row in PendingBackendOp.objects.order_by("requested_at")] == [
        ("install", True),
        ("delete", False),
    ]


@pytest.mark.rule("http-4.2")
@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"verb": "erase"}, "verb"),
        ({"backends": []}, "backends"),
        ({"backends": [{"backend": "../x"}]}, "backends"),
        ({"backends": [{"backend": "a"}, {"backend": "local@a"}]}, "backends"),
        ({"backends": [{"backend": "a", "last_replicas": ["m"]}]}, "last_replicas"),
        ({"verb": "delete", "waves": {}}, "waves"),
        ({"verb": "reinstall"}, "nodes"),
    ],
)
def test_a_wrong_change_of_several_changes_nothing(wrong: dict[str, Any], field: str) -> None:
    refused = post(CHANGES, {"verb": "upgrade", "backends": [{"backend": "a"}]} | wrong)
    assert (refused.status_code, refused.json()["field"].partition(".")[0]) == (400, field)
    assert not Operation.objects.exists()


@pytest.mark.rule("http-4.2")
@pytest.mark.parametrize("force", [False, True])
def test_an_install_from_an_address_drains_engines_unless_it_is_forced(force: bool) -> None:
    """Review R21: it replaces what has this name; so does the operation that tries again."""
    node("a")
    body = {"uri": "oci://images.test/echo:1", "name": "mine", **({"force": True} if force else {})}
    job = post("/api/backends/install-external", body).json()["jobID"]
    row = PendingBackendOp.objects.get()
    assert (row.force, row.spares_requests) == (True, not force)
    api.admin().post(f"/api/operations/{job}/cancel", {})
    again = api.admin().post(f"/api/operations/{job}/retry", {})
    assert again.status_code == 200, again.content
    row = PendingBackendOp.objects.get()
    assert (row.force, row.spares_requests) == (True, not force)


@pytest.mark.rule("http-4.2", "O23")
def test_an_install_from_an_address_keeps_all_of_the_request() -> None:
    node("a")
    body = {"uri": "oci://images.test/echo:1", "name": "mine", "alias": "echo"}
    answer = post("/api/backends/install-external", body)
    assert answer.status_code == 200
    row = PendingBackendOp.objects.get()
    assert (row.backend, row.uri, row.name, row.alias) == ("mine", body["uri"], "mine", "echo")
    for wrong in ({}, {"uri": ""}, {"uri": "oci://images.test/echo:1"}, {"uri": 5, "name": "x"}):
        refused = post("/api/backends/install-external", wrong)
        assert (refused.status_code, isinstance(refused.json()["error"], str)) == (400, True)


@pytest.mark.rule("http-4.2", "O17", "O18")
@pytest.mark.parametrize("verb", ["upgrade", "delete"])
def test_upgrades_and_deletions_go_where_it_is_installed(verb: str) -> None:
    node("a"), node("b", has="echo")
    answer = post(f"/api/backends/{verb}/{{name}}", name="local@echo")
    body = answer.json()
    assert (answer.status_code, body["uuid"]) == (200, body["jobID"])
    assert body["statusUrl"] == f"/api/backends/job/{body['jobID']}"
    assert parts(body["jobID"]) == ["b"]
    nowhere = post(f"/api/backends/{verb}/{{name}}", name="other").json()["jobID"]
    job = api.admin().get(f"/api/backends/job/{nowhere}").json()
    assert job["processed"]
    assert job.get("error") == ("no eligible node" if verb == "upgrade" else None)


@pytest.mark.rule("http-4.2")
@pytest.mark.parametrize("verb", ["install", "upgrade", "delete", "system/delete"])
@pytest.mark.parametrize("name", ["..", "a@b@c", "%00", "a%0Ab", "x" * 256])
def test_what_is_no_name_is_refused_flat(verb: str, name: str) -> None:
    answer = api.admin().post(f"/api/backends/{verb}/{name}", {})
    assert (answer.status_code, answer.json()["field"]) == (400, "name")
    assert not Operation.objects.exists()


@pytest.mark.rule("http-4.5", "O38", "O63")
@pytest.mark.parametrize(
    ("verb", "kind"),
    [("apply", "backend_install"), ("upgrade", "backend_upgrade"), ("delete", "backend_delete")],
)
def test_a_command_by_its_plain_name_is_an_operation_like_any_other(verb: str, kind: str) -> None:
    """In the live list and in the record; `status_url` is whole and leads to its raw status."""
    node("a", has="echo")
    answer = plain(verb)
    body = answer.json()
    assert (answer.status_code, body["id"]) == (200, body["jobID"])
    assert body["status_url"] == f"http://testserver/backends/jobs/{body['id']}"
    (listed,) = api.admin().get("/api/operations").json()["operations"]
    assert (listed["jobID"], listed["kind"], listed["name"]) == (body["id"], kind, "echo")
    status = api.admin().get(body["status_url"].removeprefix("http://testserver"))
    assert (status.status_code, status.json()["processed"]) == (200, False)
    assert status.json()["deletion"] == (verb == "delete")
    assert plain(verb).json()["id"] == body["id"]


@pytest.mark.rule("http-4.5", "O10")
@pytest.mark.parametrize("force", [None, False, True])
def test_apply_leaves_what_is_there_unless_it_is_forced(force: bool | None) -> None:
    node("a")
    assert plain("apply", force=force).status_code == 200
    assert PendingBackendOp.objects.get().force == bool(force)


@pytest.mark.rule("http-4.5", "O11")
def test_a_build_for_one_kind_of_hardware_is_not_applied_everywhere(gallery: None) -> None:
    node("a")
    for id in ("cuda-echo", "local@cpu-echo"):
        refused = post("/backends/apply", {"id": id})
        body = refused.json()
        assert (refused.status_code, body["code"]) == (409, "concrete_backend_requires_target")
        assert (body["meta_alternative"], "hardware-specific build" in body["error"]) == ("echo", True)
    assert not Operation.objects.exists()
    for id in ("echo", "lone"):
        assert post("/backends/apply", {"id": id}).status_code == 200


@pytest.mark.rule("http-4.5")
@pytest.mark.parametrize(
    "body",
    [
        {},
        {"id": ""},
        {"id": None},
        {"id": 5},
        {"id": "a/b"},
        {"id": "x" * 256},
        {"id": "echo", "force": "yes"},
    ],
)
def test_what_cannot_be_applied_is_refused_by_its_field(body: dict[str, Any]) -> None:
    answer = post("/backends/apply", body)
    assert (answer.status_code, answer.json()["field"]) == (400, "force" if "force" in body else "id")
    assert not Operation.objects.exists()


@pytest.mark.rule("http-4.5")
@pytest.mark.parametrize("path", [*NAMES.values(), "/api/backends/system/delete/echo"])
def test_nobody_else_may(path: str) -> None:
    node("a", has="echo")
    for credential in (api.SECRET, "wrong"):
        assert api.bearer(credential).post(path, {"id": "echo"}).status_code in (401, 403)
    assert not Operation.objects.exists()


@pytest.mark.django_db(transaction=True)
@pytest.mark.rule("http-4.2", "O18", "O38")
def test_a_deletion_that_waits_succeeds_where_only_some_nodes_have_it() -> None:
    """D-BACKENDS-SYSTEM-DELETE: the reference reports a failure of the node that never had it."""
    node("a", has="echo"), node("b")
    with a_controller():
        answer = post(SYSTEM_DELETE, name="echo")
    operation = Operation.objects.get()
    assert (answer.status_code, answer.json()["success"]) == (200, True)
    assert answer.json()["message"] == "backend echo deleted; it was on 1 node"
    assert (answer.json()["jobID"], operation.kind) == (str(operation.id), "backend_delete")
    assert parts(str(operation.id)) == ["a"]


@pytest.mark.django_db(transaction=True)
@pytest.mark.rule("http-4.2", "O16", "O38")
def test_a_deletion_that_fails_is_a_502_with_the_nodes_and_their_reasons() -> None:
    node("a", has="echo"), node("b", has="echo"), node("c", has="echo")
    with a_controller(a=Ended(error="disk"), c=Ended(error="busy")):
        answer = post(SYSTEM_DELETE, name="echo")
    assert (answer.status_code, answer.json()["error"]) == (502, "a: disk; c: busy")


@pytest.mark.django_db(transaction=True)
@pytest.mark.rule("http-4.2")
def test_a_deletion_that_takes_long_goes_on_and_the_answer_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway, "MAX_WAIT_SECONDS", 0.0)
    node("a", has="echo")
    answer = post(SYSTEM_DELETE, name="echo")
    assert (answer.status_code, answer.json()["success"]) == (202, False)
    assert Operation.objects.get().status == "pending"
    assert api.admin().get(answer.json()["statusUrl"]).json()["processed"] is False


@pytest.mark.django_db(transaction=True)
def test_a_record_that_is_cleared_while_someone_waits_is_no_server_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def cleared(operation: Operation, seconds: float) -> Operation:
        Operation.objects.all().delete()
        return wait_for_end(operation, seconds)

    monkeypatch.setattr(cluster_backends, "wait_for_end", cleared)
    answer = post(SYSTEM_DELETE, name="echo")
    assert (answer.status_code, answer.json()["error"]) == (502, "the record of the operation was cleared")


@pytest.mark.django_db(transaction=True)
@pytest.mark.rule("http-4.2")
def test_what_is_nowhere_is_gone_and_what_is_in_the_way_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gateway, "MAX_WAIT_SECONDS", 0.0)
    made = node("a")
    nowhere = post(SYSTEM_DELETE, name="other")
    assert (nowhere.status_code, nowhere.json()["message"]) == (200, "backend other is on no node")
    NodeBackend.objects.create(node=made, name="echo")
    post("/api/backends/upgrade/{name}", name="echo")
    intents.claim("controller", now=clock.now(), lease=60, limit=9)
    waits = post(SYSTEM_DELETE, name="echo")
    assert (waits.status_code, waits.json()["message"]) == (202, "the deletion goes on")
    deletion = Operation.objects.get(pk=waits.json()["jobID"])
    assert deletion.message == "waits for the upgrade of echo on a"
