"""From a pasted text to a defined model: inspection, import, files in the models folder, `/v1/models`."""

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.conftest import eventually
from tests.support import hub
from tests.support.cluster import ADMIN, Cluster, Process, running_cluster
from tests.support.sources import Source, sha256_of

REPO = "Qwen/Qwen2.5-0.5B-Instruct-GGUF"
FILES = {"qwen-q4_k_m.gguf": hub.gguf(3_000_000), "qwen-q8_0.gguf": hub.gguf(5_000_000)}


@pytest.fixture(scope="module")
def source() -> Iterator[Source]:
    """The hub, a registry of Ollama and a gallery."""
    with hub.playing() as source:
        hub.add_repository(source, REPO, FILES, token="hf_token_of_the_test")
        layers = {
            "application/vnd.ollama.image.model": hub.gguf(70_000),
            "application/vnd.ollama.image.params": b'{"temperature": 0.5}',
        }
        hub.add_image(source, "library/tiny", "1b", layers)
        source.files["/files/entry.gguf"] = content = hub.gguf(50_000)
        source.files["/index.yaml"] = (
            "- name: entry\n  tags: [llm]\n  license: mit\n  size: 50kB\n"
            "  overrides: {backend: llama-cpp, parameters: {model: gallery/entry.gguf}}\n"
            f"  files: [{{filename: gallery/entry.gguf, uri: {source.url('/files/entry.gguf')},"
            f" sha256: {sha256_of(content)}}}]\n"
        ).encode()
        yield source


@pytest.fixture(scope="module")
def cluster(source: Source) -> Iterator[Cluster]:
    """A web process and a controller that know this source."""
    with running_cluster(
        HF_ENDPOINT=source.url(hub.HUB),
        HF_TOKEN="hf_token_of_the_test",
        LOCALAI_GALLERIES=json.dumps([{"name": "local", "url": source.url("/index.yaml")}]),
        LOCALAI_REGISTRIES=json.dumps(
            [{"host": host, "plain_http": True} for host in (source.host, source.storage)]
        ),
    ) as cluster:
        cluster.web()
        cluster.controller()
        yield cluster


def web(cluster: Cluster) -> Process:
    return cluster.processes[0]


def post(cluster: Cluster, path: str, body: Any, status: int) -> Any:
    answer = cluster.post(web(cluster), path, body)
    assert answer.status_code == status, answer.text
    return answer.json()


def completed(cluster: Cluster, job: str) -> dict[str, Any]:
    def ended() -> dict[str, Any] | None:
        state: dict[str, Any] = cluster.get(web(cluster), f"/models/jobs/{job}").json()
        return state if state["processed"] else None

    state: dict[str, Any] = eventually(ended, seconds=60, what=f"operation {job} ends")
    assert "error" not in state, state
    return state


def models(cluster: Cluster) -> set[str]:
    return {model["id"] for model in cluster.get(web(cluster), "/v1/models").json()["data"]}


def defined(cluster: Cluster, name: str) -> None:
    eventually(lambda: name in models(cluster), seconds=10, what=f"{name} is listed")


def test_a_repository_becomes_a_model(cluster: Cluster, source: Source) -> None:
    """Paste, choose a variant, import; the token goes to the hub alone."""
    found = post(cluster, "/api/sources/inspect", {"text": f"https://huggingface.co/{REPO}"}, 200)
    assert found["kind"] == "huggingface"
    found = post(cluster, "/api/sources/inspect", {"text": REPO}, 200)
    assert [variant["id"] for variant in found["variants"]] == ["Q4_K_M", "Q8_0"]
    body = {"text": REPO, "variant": "Q8_0", "name": "qwen", "changes": {"context_size": 1024}}
    started = post(cluster, "/api/models/import", body, 202)
    assert started["model"] == "qwen"
    state = completed(cluster, started["jobID"])
    assert state["total_bytes"] == len(FILES["qwen-q8_0.gguf"])
    (file,) = (cluster.models / "hf").rglob("*.gguf")
    assert file.read_bytes() == FILES["qwen-q8_0.gguf"]
    assert re.fullmatch(f"hf/{REPO}@[0-9a-f]{{12}}/qwen-q8_0.gguf", str(file.relative_to(cluster.models)))
    defined(cluster, "qwen")
    config = cluster.get(web(cluster), "/api/models/config-json/qwen").json()
    assert (config["context_size"], config["backend"]) == (1024, "llama-cpp")
    assert post(cluster, "/api/models/import", body, 409)["field"] == "name"
    stored = cluster.rows("SELECT payload::text FROM operations WHERE kind = 'model_import'")
    assert not any("hf_token_of_the_test" in payload for (payload,) in stored)
    assert {request.authorization for request in source.seen("storage")} == {""}
    for process in cluster.processes:
        assert "hf_token_of_the_test" not in process.output()


def test_the_clients_of_the_reference_manage_models(cluster: Cluster, source: Source) -> None:
    """The requests of LocalAI's pages and of its command line, in their order."""
    page = cluster.get(web(cluster), "/api/models?page=1&items=9&sort=name&order=asc").json()
    (entry,) = page["models"]
    assert (entry["id"], entry["installed"], entry["processing"]) == ("local@entry", False, False)
    assert page["repositories"] == [{"url": source.url("/index.yaml"), "name": "local"}]
    estimate = cluster.get(web(cluster), "/api/models/estimate/local@entry?contexts=2048,8192").json()
    assert estimate["sizeBytes"] == 50_000
    assert estimate["estimates"]["2048"]["vramBytes"] < estimate["estimates"]["8192"]["vramBytes"]
    (listed,) = cluster.get(web(cluster), "/models/available").json()
    assert (listed["name"], listed["gallery"]["name"]) == ("entry", "local")
    assert cluster.get(web(cluster), "/models/galleries").json() == page["repositories"]
    started = post(cluster, "/api/models/install/local@entry", None, 200)
    completed(cluster, started["jobID"])
    assert cluster.get(web(cluster), f"/api/models/job/{started['jobID']}").json()["completed"] is True
    assert started["jobID"] in cluster.get(web(cluster), "/models/jobs").json()
    defined(cluster, "entry")
    assert cluster.get(web(cluster), "/api/models").json()["models"][0]["installed"] is True
    catalogue = cluster.get(web(cluster), "/api/catalogue?task=chat&licence=mit").json()
    assert [(row["name"], row["installed"]) for row in catalogue["models"]] == [("entry", True)]
    again = post(cluster, "/models/apply", {"id": "local@entry", "name": "second"}, 200)
    assert again["status"] == f"{web(cluster).url}/models/jobs/{again['uuid']}"
    completed(cluster, again["uuid"])
    imported = post(
        cluster,
        "/models/import-uri",
        {"uri": source.url("/files/entry.gguf"), "preferences": {"name": "third"}},
        200,
    )
    completed(cluster, imported["uuid"])
    defined(cluster, "third")
    deleted = post(cluster, "/models/delete/second", None, 200)
    completed(cluster, deleted["uuid"])
    eventually(lambda: "second" not in models(cluster), seconds=10, what="the model is gone")
    assert (cluster.models / "gallery" / "entry.gguf").exists()


def test_pull_shows_its_progress_and_ends_with_success(cluster: Cluster, source: Source) -> None:
    """Ollama's clients read lines; the last one says how it ended."""
    name = f"{source.host}/library/tiny:1b"
    with httpx.stream(
        "POST", f"{web(cluster).url}/api/pull", headers=ADMIN, json={"model": name}, timeout=60
    ) as answer:
        assert answer.headers["content-type"] == "application/x-ndjson"
        lines = [json.loads(line) for line in answer.iter_lines()]
    assert lines[0] == {"status": "pulling manifest"}
    assert lines[-1] == {"status": "success"}, lines
    assert all(line["digest"].startswith("sha256:") for line in lines[1:-1])
    defined(cluster, name)
    assert post(cluster, "/api/pull", {"model": name, "stream": False}, 200) == {"status": "success"}
    assert "error" in post(cluster, "/api/pull", {"model": f"{source.host}/library/none:1b"}, 404)
