"""`/api/definitions`: list, preview, edit, revisions and deletion over REST, and what is refused."""

import dataclasses
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext
from pytest_django import Settings

from localai_cluster.api_document import document
from localai_cluster.kit import clock
from nodes.definitions import schema, store
from nodes.models import ModelDefinition
from operations.models import Operation
from tests.integration.api.test_document import fits
from tests.support import api, hot

pytestmark = pytest.mark.django_db(transaction=True)

AT = "/api/definitions"
TEXT = "name: m\nbackend: llama-cpp\nparameters:\n  model: m.gguf # the model\n"


@pytest.fixture(autouse=True)
def models(settings: Settings, tmp_path: Path) -> Path:
    """A models folder with one definition and a file."""
    settings.CLUSTER = dataclasses.replace(settings.CLUSTER, models_path=tmp_path)
    (tmp_path / "file.yaml").write_text(TEXT.replace("name: m", "name: file"))
    (tmp_path / "m.gguf").write_text("12345")
    return tmp_path


def answer(method: str, path: str, body: Any = None, status: int = 200) -> Any:
    """The body of an answer with this status, which fits the API document."""
    got = api.admin().send(method, AT + path, body)
    assert got.status_code == status, got.content
    template = AT + _template(path.partition("?")[0])
    described = document()["paths"][template][method.lower()]["responses"]
    value = got.json()
    assert fits(described[str(status)]["content"]["application/json"]["schema"], value) == []
    return value


def _template(path: str) -> str:
    if path in ("", "/schema", "/preview"):
        return path
    for verb in ("/clone", "/disable", "/enable", "/revisions"):
        if path.endswith(verb):
            return "/{name}" + verb
    return "/{name}/revisions/{number}/restore" if path.endswith("/restore") else "/{name}"


def create(text: str = TEXT, **fields: Any) -> Any:
    return answer("POST", "", {"text": text, **fields}, 201)


def test_a_definition_is_created_edited_restored_cloned_and_listed() -> None:
    made = create(reason="for the team")
    assert (made["name"], made["revision"], made["origin"], made["state"]) == ("m", 1, "api", "active")
    assert made["actor"] == "static-key"
    assert made["files"] == [{"path": "m.gguf", "size": 5, "present": True, "source": ""}]
    edited = answer("PUT", "/m", {"changes": {"context_size": 8192}, "revision": 1})
    assert (edited["revision"], edited["form"]["context_size"]) == (2, 8192)
    assert "# the model" in edited["text"]
    revisions = answer("GET", "/m/revisions")
    assert [entry["number"] for entry in revisions["revisions"]] == [2, 1]
    assert "+context_size: 8192\n" in revisions["revisions"][0]["diff"]
    assert answer("GET", "/m/revisions?items=1&page=2")["revisions"][0]["reason"] == "for the team"
    restored = answer("POST", "/m/revisions/1/restore", {"revision": 2})
    assert (restored["revision"], restored["form"]["context_size"]) == (3, None)
    copied = answer("POST", "/m/clone", {"name": "org/copy"}, 201)
    assert (copied["name"], copied["revision"], copied["text"][:15]) == ("org/copy", 1, "name: org/copy\n")
    listed = answer("GET", "")
    assert [(entry["name"], entry["origin"], entry["size"]) for entry in listed["definitions"]] == [
        ("file", "file", 5),
        ("m", "api", 5),
        ("org/copy", "api", 5),
    ]
    assert answer("GET", "/org/copy")["name"] == "org/copy"


def test_the_list_is_filtered_and_paged() -> None:
    create()
    create(TEXT.replace("name: m", "name: Other").replace("llama-cpp", "echo"))
    store.set_disabled("Other", True, now=clock.now())
    answer("PUT", "/file", {"changes": {"context_size": 1}})

    def names(query: str) -> list[str]:
        return [entry["name"] for entry in answer("GET", "?" + query)["definitions"]]

    assert names("term=OTHER") == ["Other"]
    assert names("term=echo") == ["Other"]
    assert names("state=disabled") == ["Other"]
    assert names("state=shadowed") == ["file"]
    assert names("origin=file") == []
    assert names("items=1&page=2") == ["file"]
    assert answer("GET", "?items=1&page=9")["total"] == 3
    for query in ("state=x", "page=0", "items=5000", "x=1", "term="):
        assert answer("GET", "?" + query, status=400)["field"] == query.partition("=")[0]


def test_the_number_of_queries_is_constant() -> None:
    counts = []
    for size in (1, 30):
        for number in range(size):
            create(TEXT.replace("name: m", f"name: m{size}-{number}"))
        with CaptureQueriesContext(connection) as queries:
            assert len(answer("GET", "?items=1000")["definitions"]) >= size
        counts.append(len(queries))
    assert counts[0] == counts[1]


def test_unusable_files_are_listed_with_line_and_reason(models: Path) -> None:
    (models / "broken.yaml").write_text("name: b\nbackend: x\n  parameters: [")
    (models / "twice.yaml").write_text(TEXT.replace("name: m", "name: file"))
    first, second = answer("GET", "")["unusable"]
    assert (first["file"], first["name"], first["line"]) == ("broken.yaml", "b", 3)
    assert "not valid YAML" in first["error"]
    assert (second["file"], second["line"]) == ("twice.yaml", 0)
    assert "defines 'file' again" in second["error"]


def test_an_edit_of_a_files_model_is_kept_and_shadowed() -> None:
    detail = answer("GET", "/file")
    assert (detail["origin"], detail["revision"], detail["file"]) == ("file", 0, "file.yaml")
    edited = answer("PUT", "/file", {"changes": {"context_size": 5}, "revision": 0})
    assert (edited["shadowed"], edited["state"], edited["file"]) == (True, "shadowed", "file.yaml")
    assert (edited["revision"], edited["form"]["context_size"]) == (1, 5)
    said = answer("PUT", "/file", {"changes": {"context_size": 6}, "revision": 0}, 409)
    assert (said["field"], said["revision"]) == ("revision", 1)
    assert answer("DELETE", "/file", status=202)["message"]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"text": "name: ["}, "text"),
        ({"text": TEXT + "hf_token: abc\n"}, "text"),
        ({"text": TEXT.replace("m.gguf", "")}, "text"),
        ({"text": 5}, "text"),
        ({}, "text"),
        ({"text": TEXT, "name": "../x"}, "text"),
        ({"text": TEXT, "name": " x"}, "name"),
        ({"text": TEXT, "reason": "a\x00"}, "reason"),
        ({"text": TEXT, "reason": "x" * 501}, "reason"),
        ({"text": "name: m\0"}, "text"),
        ({"text": "\ud800"}, "text"),
    ],
)
def test_what_cannot_be_saved_is_400_with_its_field(body: dict[str, Any], field: str) -> None:
    refused = answer("POST", "", body, 400)
    assert refused["field"] == field
    assert not ModelDefinition.objects.exists()


def test_a_syntax_error_has_its_line() -> None:
    refused = answer("POST", "", {"text": TEXT + "x: [\n"}, 400)
    assert (refused["line"], refused["column"]) == (6, 1)


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("GET", "/nope", None, 404),
        ("GET", "/nope/revisions", None, 404),
        ("PUT", "/nope", {"text": TEXT}, 404),
        ("PUT", "/m", {"text": TEXT.replace("name: m", "name: n")}, 400),
        ("PUT", "/m", {}, 400),
        ("PUT", "/m", {"text": TEXT, "changes": {}}, 400),
        ("PUT", "/m", {"changes": {"backend": "x"}}, 400),
        ("PUT", "/m", {"text": TEXT, "revision": 7}, 409),
        ("POST", "", {"text": TEXT}, 409),
        ("POST", "", {"text": TEXT, "name": "file"}, 409),
        ("POST", "/m/clone", {"name": "m"}, 409),
        ("POST", "/nope/clone", {"name": "x"}, 404),
        ("POST", "/m/clone", {"name": ""}, 400),
        ("POST", "/nope/disable", None, 404),
        ("POST", "/file/disable", None, 409),
        ("POST", "/m/revisions/9/restore", None, 404),
        ("POST", "/m/revisions/1/restore", {"revision": 9}, 409),
        ("DELETE", "/nope", None, 404),
        ("DELETE", "/file", None, 409),
        ("DELETE", "/m?files=maybe", None, 400),
        ("POST", "/preview", {"changes": {}}, 400),
        ("POST", "/preview", {"name": "nope", "changes": {}}, 400),
    ],
)
def test_refusals(method: str, path: str, body: Any, status: int) -> None:
    create()
    answer(method, path, body, status)
    assert store.find("m") is not None
    assert ModelDefinition.objects.get(name="m").revision == 1


def test_a_preview_says_what_saving_would_do_and_saves_nothing() -> None:
    create()
    node = hot.node()
    hot.replica(node, "m", config_revision="f" * 64)
    seen = answer("POST", "/preview", {"name": "m", "changes": {"context_size": 8192}})
    assert (seen["valid"], seen["revision_changes"], seen["form"]["context_size"]) == (True, True, 8192)
    assert seen["replicas"] == [{"node_id": str(node.id), "node_name": "one", "replica_index": 0}]
    assert seen["fit"]["model"] == "m"
    assert "+context_size: 8192\n" in seen["diff"]
    same = answer("POST", "/preview", {"text": TEXT})
    assert (same["revision_changes"], same["replicas"], same["diff"]) == (False, [], "")
    new = answer("POST", "/preview", {"text": TEXT.replace("name: m", "name: new")})
    assert (new["valid"], new["revision_changes"], new["replicas"]) == (True, True, [])
    assert ModelDefinition.objects.get().revision == 1


@pytest.mark.parametrize("name", [{}, {"name": "m"}])
def test_a_preview_checks_its_text_once(name: dict[str, str]) -> None:
    """Issue 25: it runs while somebody types."""
    create()
    with patch.object(schema, "check_text", wraps=schema.check_text) as check:
        assert answer("POST", "/preview", {"text": TEXT, **name})["valid"]
    assert check.call_count == 1


def test_a_preview_of_a_wrong_text_has_all_its_errors() -> None:
    seen = answer("POST", "/preview", {"text": TEXT + "threads: x\nmmap: 5\n"})
    assert (seen["valid"], seen["form"], seen["fit"]) == (False, None, None)
    assert [(error["line"], error["path"]) for error in seen["errors"]] == [(5, "threads"), (6, "mmap")]
    renamed = answer("POST", "/preview", {"name": "other", "text": TEXT})
    assert [error["path"] for error in renamed["errors"]] == ["name"]
    shadowed = answer("POST", "/preview", {"name": "file", "changes": {"context_size": 1}})
    assert any("file.yaml" in warning for warning in shadowed["warnings"])


def test_disabling_ends_the_model_and_enabling_brings_it_back() -> None:
    create()
    assert answer("POST", "/m/disable")["state"] == "disabled"
    assert api.admin().get("/api/models/config-json/m").status_code == 404
    assert answer("POST", "/m/enable")["state"] == "active"
    assert api.admin().get("/api/models/config-json/m").json()["name"] == "m"


def test_a_deletion_is_an_operation() -> None:
    create()
    first = answer("DELETE", "/m?files=true", status=202)
    again = answer("DELETE", "/m", status=202)
    assert (again["jobID"], first["deduplicated"], again["deduplicated"]) == (first["jobID"], False, True)
    operation = Operation.objects.get()
    assert (operation.kind, operation.element, operation.payload["files"]) == ("definition_delete", "m", True)
    assert api.admin().get(first["statusUrl"]).status_code == 200


def test_localais_clients_delete_a_model() -> None:
    create()
    by_name = api.admin().post("/models/delete/m")
    assert (by_name.status_code, by_name.json().keys()) == (200, {"uuid", "status"})
    by_id = api.admin().post("/api/models/delete/gallery@m").json()
    assert by_id == {"jobID": by_name.json()["uuid"], "message": "the definition is being deleted"}
    assert by_name.json()["status"].endswith(f"/models/jobs/{by_id['jobID']}")
    assert [api.admin().post(f"/models/delete/{name}").status_code for name in ("nope", "file")] == [404, 409]


def test_the_schema_is_served() -> None:
    assert answer("GET", "/schema")["properties"]["context_size"]["type"] == ["integer", "null"]


@pytest.mark.parametrize("route", ["definitions/{}", "definitions/{}/revisions", "models/config-json/{}"])
def test_a_name_with_a_line_break_gets_the_error_body_of_its_route(route: str) -> None:
    """Random inputs found that it was that of an unknown route."""
    answer = api.admin().get(f"/api/{route.format('a%0Ab')}")
    assert answer.status_code in (400, 404)
    assert isinstance(answer.json()["error"], str)
