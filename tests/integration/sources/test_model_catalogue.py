"""What the galleries of models offer, under our route and under the reference's."""

from pathlib import Path
from typing import Any

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from localai_cluster.kit import clock
from nodes.downloads.imports import KIND
from operations.ledger.admission import OperationRequest, Requester, admit
from tests.support import api
from tests.support.sources import Source

pytestmark = pytest.mark.django_db(transaction=True)
GIB = 2**30
ENTRIES = """
- &base
  name: small
  description: A small one
  license: mit
  tags: [llm, gguf]
  size: 1GiB
- <<: *base
  name: large
  license: apache-2.0
  size: 700GiB
- name: words
  tags: [embeddings]
- name: seen
  overrides: {backend: whisper, known_usecases: [FLAG_TRANSCRIPT]}
"""


@pytest.fixture(autouse=True)
def index(source: Source) -> None:
    source.files["/index.yaml"] = ENTRIES.encode()


def get(path: str, status: int = 200) -> Any:
    answer = api.admin().get(path)
    assert answer.status_code == status, answer.content
    return answer.json()


def names(query: str) -> list[str]:
    return [row["name"] for row in get(f"/api/catalogue{query}")["models"]]


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ("", ["small", "large", "words", "seen"]),
        ("?term=SMALL", ["small", "large"]),
        ("?task=chat", ["small", "large"]),
        ("?task=embeddings", ["words"]),
        ("?task=transcript", ["seen"]),
        ("?licence=MIT", ["small"]),
        ("?gallery=local&items=2&page=2", ["words", "seen"]),
        ("?gallery=other", []),
        (f"?size={2 * GIB}", ["small"]),
        ("?fits=true", ["small"]),
    ],
)
def test_entries_are_filtered(query: str, found: list[str]) -> None:
    api.make_node("a", total_vram=8 * GIB, available_vram=8 * GIB)
    assert names(query) == found


def test_an_entry_says_whether_it_is_here_on_its_way_and_would_fit(models: Path) -> None:
    api.make_node("a", total_vram=8 * GIB, available_vram=8 * GIB)
    (models / "x.yaml").write_text("name: small\nbackend: llama-cpp\nparameters: {model: m}\n")
    job = admit(
        OperationRequest(KIND, key="import:large", element="large", by=Requester("root")), now=clock.now()
    )
    answer = get("/api/catalogue")
    small, large, words, _ = answer["models"]
    assert (small["installed"], small["fits"], small["jobID"], small["size"]) == (True, True, "", GIB)
    assert (large["installed"], large["fits"], large["jobID"]) == (False, False, str(job.operation.id))
    assert (words["size"], words["fits"]) == (0, None)
    assert (answer["tasks"], answer["licences"]) == (
        ["chat", "embeddings", "transcript"],
        ["apache-2.0", "mit"],
    )
    assert (answer["total"], answer["galleries"], answer["gallery_errors"]) == (4, ["local"], [])


def test_queries_do_not_grow_with_entries_and_nodes(source: Source) -> None:
    counts = []
    for number in (1, 40):
        source.files["/index.yaml"] = b"".join(b"- {name: m%d, size: 1GiB}\n" % n for n in range(number * 10))
        api.make_node(f"n{number}", total_vram=GIB, available_vram=GIB)
        get("/api/catalogue")
        with CaptureQueriesContext(connection) as queries:
            get("/api/catalogue?fits=true&items=1000")
        counts.append(len(queries))
    assert counts[0] == counts[1]


def test_a_gallery_that_is_away_is_named(source: Source) -> None:
    del source.files["/index.yaml"]
    assert "404" in get("/api/catalogue", 503)["error"]


@pytest.mark.parametrize("query", ["?page=0", "?items=x", "?fits=yes", "?size=-1", "?nothing=1", "?term="])
def test_a_wrong_parameter_is_named(query: str) -> None:
    assert get(f"/api/catalogue{query}", 400)["field"]


@pytest.mark.rule("http-5.4")
def test_the_reference_lists_the_same_entries() -> None:
    page = get("/api/models?items=3&sort=name&order=asc")
    assert [row["id"] for row in page["models"]] == ["local@large", "local@seen", "local@small"]
    assert (page["currentPage"], page["totalPages"], page["availableModels"]) == (1, 2, 4)
    assert page["allBackends"] == ["whisper"]
    assert [row["name"] for row in get("/api/models?backend=whisper")["models"]] == ["seen"]
    assert [row["name"] for row in get("/models/available")] == ["small", "large", "words", "seen"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/models/apply", {}),
        ("/models/apply", {"id": 5}),
        ("/models/apply", {"id": "local@words", "overrides": []}),
        (
            "/models/apply",
            {"id": "local@words", "files": [{"filename": "../x", "uri": "https://example.com/x"}]},
        ),
        ("/models/import-uri", {}),
        ("/models/import-uri", {"uri": "words"}),
        ("/api/models/import", {"text": "words"}),
        ("/api/models/import", {"text": "local@words", "name": " x"}),
        ("/api/models/import", {"text": "local@words", "changes": {"nothing": 1}, "variant": "none"}),
    ],
)
def test_a_wrong_command_names_its_field(path: str, body: Any) -> None:
    answer = api.admin().post(path, body)
    assert answer.status_code == 400, answer.content
    assert answer.json()["field"]


@pytest.mark.parametrize(
    "path", ["/models/delete/none", "/api/models/delete/local@none", "/api/models/install/local@none"]
)
def test_what_is_not_there_is_404(path: str) -> None:
    assert api.admin().post(path).status_code == 404
