"""The API document tells the truth about the registry's routes, and so do its examples.

Nothing may be in an answer that the document does not know, and nothing may be missing that it promises.
"""

import contextlib
import re
import threading
from collections.abc import Iterator
from copy import deepcopy
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
from drf_spectacular.generators import SchemaGenerator
from jsonschema import Draft202012Validator  # type: ignore[import-untyped]

from localai_cluster import api_document
from localai_cluster.api_document import SchemaView, document
from localai_cluster.kit import clock
from nodes.backends import worker_logs
from nodes.decisions import fleet_cache
from nodes.decisions.decision_log import record
from nodes.definitions.files import parse_definition
from nodes.loading import load_explanation
from nodes.loading.load_placement import LoadNeeds
from nodes.models import BackendNode, ModelSchedulingConfig, NodeConflict, NodeLabel
from nodes.placement.choose import NO_NEED
from nodes.registry import node_rows
from operations.ledger import admission
from tests.support import api, deciding, worker_http
from tests.support.worker_http import ENGINE_TOKEN, answers, silent

pytestmark = pytest.mark.django_db
METHODS = ("get", "put", "patch", "post", "delete")
_ASKED_OF_WORKERS = re.compile("/backends|/models/(unload|delete)$")
"""What a worker has a part in; the tests of those routes compare their answers."""


@cache
def strict_components() -> dict[str, Any]:
    """The components, closed: a property that is not listed is an error."""
    components: dict[str, Any] = deepcopy(document()["components"])
    for schema in components["schemas"].values():
        if "properties" in schema:
            schema.setdefault("additionalProperties", False)
    told: dict[str, Any] = with_null(components)
    return told


def with_null(schema: Any) -> Any:
    """The same for a validator that does not know OpenAPI's `nullable`."""
    if isinstance(schema, list):
        return [with_null(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    told = {name: with_null(part) for name, part in schema.items() if name != "nullable"}
    return {"anyOf": [told, {"type": "null"}]} if schema.get("nullable") is True else told


def fits(schema: dict[str, Any], value: Any) -> list[str]:
    """What is wrong with the value."""
    validator = Draft202012Validator(with_null(schema) | {"components": strict_components()})
    return [f"{error.json_path}: {error.message}" for error in validator.iter_errors(value)]


def operations() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Every operation on nodes and on placement for admins."""
    for path, methods in document()["paths"].items():
        if path.startswith(("/api/nodes", "/api/models/{model}", "/api/placement")):
            yield from ((method, path, what) for method, what in methods.items() if method in METHODS)


def template_of(path: str) -> str:
    """The document's path for a concrete one."""
    path = path.partition("?")[0]
    for template in sorted((path for _, path, _ in operations()), key=lambda t: (t.count("{"), -len(t))):
        pattern = re.sub(
            r"\{(\w+)\}", lambda name: ".+" if name[1] in ("key", "model") else "[^/]+", template
        )
        if re.fullmatch(pattern, path):
            return template
    raise AssertionError(f"the document does not know {path}")


class Reader:
    """An admin who compares every answer with the document."""

    def __init__(self) -> None:
        self.seen: set[tuple[str, str, int]] = set()

    def __call__(self, method: str, path: str, body: Any = None) -> Any:
        """Sends, compares, answers the body."""
        answer = api.admin().send(method, path, body)
        template = template_of(path)
        status = answer.status_code
        responses = document()["paths"][template][method.lower()]["responses"]
        assert str(status) in responses, (method, path, status, answer.content)
        content = responses[str(status)].get("content")
        value = answer.json() if answer.content else None
        assert (content is None) is (value is None), (method, path)
        if content is not None:
            assert answer["Content-Type"] in content
            assert fits(content["application/json"]["schema"], value) == [], (method, path)
        self.seen.add((method.lower(), template, status))
        return value


def claimed(node: BackendNode, kind: str, claim: str) -> str:
    row = NodeConflict.objects.create(
        node=node, kind=kind, claim=claim, source_address="10.0.0.9", advertised_address="10.0.0.9:1"
    )
    return str(row.pk)


UNKNOWN = "/api/nodes/00000000-0000-4000-8000-00000000dead"


def edit(read: Reader) -> None:
    """Labels and overrides."""
    at = f"/api/nodes/{api.make_node('edited').id}"
    read("PUT", f"{at}/labels", {"a": "b"})
    read("PATCH", f"{at}/labels", {"models/x": "c"})
    read("PATCH", f"{at}/labels", {"x": 5})
    read("GET", f"{at}/labels")
    for method, body in (("PUT", {}), ("PATCH", {"a": "c"})):
        read(method, f"{at}/labels?revision=0", body)
    for revision in ("0", "x"):
        read("DELETE", f"{at}/labels/models/x?revision={revision}")
    read("DELETE", f"{at}/labels/models/x")
    for what, value in (("max-replicas-per-model", 3), ("vram-budget", "80%"), ("disk-quota", "80%")):
        read("PUT", f"{at}/{what}", {"value": value})
        read("PUT", f"{at}/{what}", {})
        read("PUT", f"{at}/{what}?revision=0", {"value": value})
        for revision in ("0", "x"):
            read("DELETE", f"{at}/{what}?revision={revision}")
        read("DELETE", f"{at}/{what}")


def rule(read: Reader) -> None:
    """Rules of scheduling, one with everything and one with nothing."""
    at = "/api/nodes/scheduling"
    whole = {
        "model_name": "org/m",
        "node_selector": {"a": "b"},
        "min_replicas": 1,
        "route_policy": "prefix_cache",
    }
    thresholds = {"balance_abs_threshold": 3, "balance_rel_threshold": 1.5, "min_prefix_match": 0.4}
    for body in (whole | thresholds, {"model_name": "plain"}, {"model_name": "all", "spread_all": True}, {}):
        read("POST", at, body)
    ModelSchedulingConfig.objects.update(unsatisfiable_until=clock.now(), unsatisfiable_ticks=3)
    for path in (at, f"{at}/org/m", f"{at}/none"):
        read("GET", path)
    read("DELETE", f"{at}/org/m")


def reasons(read: Reader) -> None:
    """Explanations and plans, with and without a place."""
    node = api.make_node("roomy", total_vram=8, available_vram=8)
    load = admission.OperationRequest("model_load", "model:loading#0", "loading", admission.Requester("a"))
    admission.admit(load, now=clock.now())
    read("GET", "/api/models/loading/load-status")
    read("GET", "/api/models/nothing/explain")
    decided(node, "explained")
    read("GET", "/api/models/explained/explain")
    for body in ({"need": {"vram": 8}, "replicas": 2, "nodes": [{"count": 1, "vram_gib": 1.5}]}, {}):
        read("POST", "/api/placement/plan", body)
    read("GET", "/api/placement/fit/nothing")
    defined = parse_definition({"name": "org/m", "backend": "echo", "parameters": {"model": "m"}}, "m.yaml")
    with patch.object(load_explanation, "needs_of", return_value=LoadNeeds(defined, NO_NEED)):
        read("GET", "/api/placement/fit/org/m")
    read("POST", "/api/placement/fit", {"models": ["org/m", "nothing"]})
    read("POST", "/api/placement/fit", {"models": []})


def decided(node: BackendNode, model: str) -> None:
    """A record of a wait and one of a placement."""
    for nodes in ([], fleet_cache.read_fleet(model, allowed_nodes=[node.id])):
        record(deciding.decided(model, node.id, nodes), now=clock.now())


def let_in(read: Reader) -> None:
    """Approval and rejection."""
    poor, agent = (
        api.make_node("poor", approved=False),
        api.make_node("agent", node_type="agent", address="", approved=False),
    )
    healthy = api.make_node("healthy")
    read("POST", f"/api/nodes/{poor.id}/reject", {"reason": "no"})
    read("POST", f"/api/nodes/{poor.id}/reject", {})
    read("POST", f"/api/nodes/{healthy.id}/reject", {"reason": "no"})
    read("GET", f"/api/nodes/{poor.id}")
    read("GET", "/api/nodes")
    read("POST", f"/api/nodes/{agent.id}/approve", {"reason": "ours"})
    read("POST", f"/api/nodes/{healthy.id}/approve")
    read("POST", f"/api/nodes/{poor.id}/approve", {"fingerprint": "f" * 64})
    read("POST", "/api/nodes/approve", {"ids": [str(node.id) for node in (poor, agent, healthy)]})
    read("POST", "/api/nodes/bulk", {"verb": "drain", "ids": [str(healthy.id)]})
    read("POST", "/api/nodes/bulk", {"verb": "drain"})
    read("POST", "/api/nodes/bulk", {"verb": "resume", "ids": [str(healthy.id)]})
    read("POST", "/api/nodes/approve", {})


def come_and_go(read: Reader) -> None:
    """Drains, and what makes a node unwell; replicas in every shape."""
    node = api.make_node(
        "worn", total_vram=8, available_vram=8, gpu_vendor="nvidia", capability="x", vram_budget="50%"
    )
    api.replica(node, backend_type="mock", phase="stopping", stop_attempts=1)
    api.replica(node, "n", phase="stopping", stop_error="e", effective_options_hash="h", in_flight=1)
    api.replica(node, "o", state="loading", address="", config_revision="r")
    at = f"/api/nodes/{node.id}"
    read("GET", "/api/nodes/models")
    read("GET", f"{at}/models")
    read("POST", f"{at}/drain", {"reason": "disk", "deadline_seconds": 60})
    read("GET", at)
    for _ in range(2):
        read("POST", f"{at}/resume")
    for _ in range(2):
        read("POST", f"{at}/stop", {"reason": "moves"})
    for event in ("unhealthy", "silent"):
        api.mark(node, event)
        read("GET", at)
    read("POST", f"{at}/stop")
    read("GET", "/api/nodes?limit=2&sort=-name")


def dispute(read: Reader) -> None:
    """Conflicts, rotation, revocation; then the node goes and its timeline stays."""
    node, weak = api.make_node("claimed"), api.make_node("weak", approved=False)
    BackendNode.objects.filter(pk=weak.pk).update(fingerprint="", weak_identity=True, last_heartbeat=None)
    known, other = claimed(node, "secret", "c" * 64), claimed(node, "instance", "d" * 32)
    at = f"/api/nodes/{node.id}"
    read("GET", "/api/nodes/conflicts")
    for conflict, verdict in ((known, "accept"), (known, "refuse"), (other, "accept"), (other, "refuse")):
        read("POST", f"{at}/conflicts/{conflict}/{verdict}")
    read("GET", f"{at}/conflicts?limit=1")
    read("POST", f"{at}/identity/rotate")
    read("GET", at)
    read("POST", f"/api/nodes/{weak.id}/identity/rotate")
    read("GET", f"/api/nodes/{weak.id}")
    read("POST", f"{at}/identity/revoke", {"reason": "stolen"})
    read("POST", f"{at}/identity/revoke")
    read("GET", at)
    read("GET", f"{at}/events?limit=2")
    read("DELETE", at)
    read("GET", f"{at}/events")


def ask_workers(read: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logs, of workers that answer, refuse, keep silent, and of a node that may not be asked yet."""
    kinds = {"real": None, "refusing": answers("401 Unauthorized", b"no"), "silent": silent}
    for name, script in kinds.items():
        if name == "silent":
            monkeypatch.setattr(worker_logs, "ANSWER_LIMIT", 0.2)
        with worker_http.worker(script) as served:
            where: dict[str, Any] = {"http_address": served.address, "engine_token": ENGINE_TOKEN}
            node = api.make_node(name, **where)
            served.prints("m#0", "hello")
            for path in ("", "/m", "/" + "m" * 513):
                read("GET", f"/api/nodes/{node.id}/backend-logs{path}")
            pending = api.make_node(f"{name}-pending", approved=False, **where)
            for path in ("", "/m"):
                read("GET", f"/api/nodes/{pending.id}/backend-logs{path}")


@pytest.mark.rule("http-2.1", "http-2.3", "http-2.4", "http-2.5", "http-2.13")
@pytest.mark.rule("http-2.6", "http-2.7", "http-2.8", "http-2.9")
def test_every_answer_fits_the_document(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each route answers with success, and with each refusal that the document lists for it."""
    read = Reader()
    for story in (edit, rule, reasons, let_in, come_and_go, dispute):
        story(read)
    ask_workers(read, monkeypatch)
    known = {
        (method, path, int(status))
        for method, path, what in operations()
        for status in what["responses"]
        if int(status) not in BY_OTHER_TESTS and not _ASKED_OF_WORKERS.search(path)
    }
    for method, path, status in sorted(known - read.seen):
        refuse(read, method, path, status)
    assert known - read.seen == set()


BY_OTHER_TESTS = (401, 403, 413, 429, 503)
"""What the caller or the machine is refused for, not the request."""


def refuse(read: Reader, method: str, path: str, status: int) -> None:
    """An unknown node, or a body or parameter that cannot be."""
    node_id = UNKNOWN.rpartition("/")[2] if status == 404 else str(api.make_node("last").id)
    where = re.sub(r"\{\w+\}", node_id, path)
    read(method.upper(), where + ("?x=1" if method == "get" and status == 400 else ""), b"{")


def examples() -> Iterator[tuple[str, dict[str, Any], Any]]:
    """Every example with its schema."""
    for method, path, what in operations():
        contents = [what["requestBody"]["content"]] if "requestBody" in what else []
        contents += [answer["content"] for answer in what["responses"].values() if "content" in answer]
        assert all(content["application/json"].get("examples") for content in contents), (method, path)
        for content in contents:
            media = content["application/json"]
            for example in media.get("examples", {}).values():
                yield f"{method} {path}", media["schema"], example["value"]


def test_every_example_fits_its_schema() -> None:
    """And every body that is sent or answered has one."""
    found = list(examples())
    assert [(name, wrong) for name, schema, value in found if (wrong := fits(schema, value))] == []
    assert {name for name, _, _ in found} == {f"{method} {path}" for method, path, _ in operations()}


RECORDED = [
    ("nodes-list", "one draining node", "get /api/nodes"),
    ("models-on-node", "one loaded replica", "get /api/nodes/models"),
    ("node-actions", "approve an agent: api_token is returned once", "post /api/nodes/{node_id}/approve"),
    ("node-actions", "delete", "delete /api/nodes/{node_id}"),
    ("labels-and-caps", "replica cap", "put /api/nodes/{node_id}/max-replicas-per-model"),
    ("labels-and-caps", "budget in percent", "put /api/nodes/{node_id}/vram-budget"),
    ("labels-and-caps", "reset the budget", "delete /api/nodes/{node_id}/vram-budget"),
]


@pytest.mark.parametrize(("file", "name", "operation"), RECORDED, ids=[name for _, name, _ in RECORDED])
def test_examples_have_the_recorded_shapes(file: str, name: str, operation: str) -> None:
    """Every recorded key stands in an example with the same JSON type."""
    recorded = next(entry for entry in api.examples(file) if entry["name"] == name)["body"]
    shown = [value for found, _, value in examples() if found == operation]
    entry = recorded[0] if isinstance(recorded, list) else recorded
    answers = [value[0] if isinstance(value, list) else value for value in shown]
    assert any(
        {key: type(answer.get(key)) for key in entry} == {key: type(value) for key, value in entry.items()}
        for answer in answers
    ), (entry, answers)


def test_the_document_and_the_rows_name_the_same_fields() -> None:
    """What the list answers has the keys of its shape."""
    node = api.make_node(
        "full", total_vram=8, available_vram=8, capability="x", vram_budget="50%", version="0", approved=False
    )
    BackendNode.objects.update(
        disk_quota="9",
        disk_quota_size=9,
        fingerprint="",
        weak_identity=True,
        rejected_at=clock.now(),
        rejected_by="ann",
        reject_reason="no",
        revoked_at=clock.now(),
        revoked_by="ann",
        revoke_reason="lost",
    )
    claimed(node, "weak", "c" * 64)
    (element,) = node_rows.list_rows(BackendNode.objects.all())
    assert set(element) == set(document()["components"]["schemas"]["Node"]["properties"])
    NodeLabel.objects.all().delete()
    NodeConflict.objects.all().delete()
    BackendNode.objects.update(
        weak_identity=False,
        rejected_at=None,
        revoked_at=None,
        capability="",
        worker_version="",
        vram_budget="",
        vram_budget_bytes=0,
        disk_quota="",
        disk_quota_size=0,
    )
    (element,) = node_rows.list_rows(BackendNode.objects.all())
    assert set(element) == set(document()["components"]["schemas"]["Node"]["required"])


def test_a_process_makes_the_document_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library is not made for two threads at once: the first two readers after a start got a 500."""
    both = threading.Barrier(2)

    def get_schema(self: Any, **given: Any) -> dict[str, Any]:
        begun.append(True)
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(timeout=0.3)
        return {}

    begun: list[bool] = []
    monkeypatch.setattr(SchemaGenerator, "get_schema", get_schema)
    monkeypatch.setattr(api_document, "_generate", cache(api_document._generate.__wrapped__))
    request: Any = None
    readers = [threading.Thread(target=SchemaView().get, args=(request,)) for _ in range(2)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    assert begun == [True]


@pytest.mark.parametrize(
    "path", ["/v1/audio/transcriptions", "/v1/audio/speech", "/tts", "/v1/images/generations"]
)
def test_what_no_real_engine_has_answered_says_so(path: str) -> None:
    """Review R22: an operator who reads only the API document took sound and images for proved."""
    assert "scripted engines only" in document()["paths"][path]["post"]["description"]
