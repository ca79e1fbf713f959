"""What a pasted text means, over REST and with sources that behave as the real ones."""

import dataclasses
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext
from pytest_django import Settings

from localai_cluster.kit import clock
from nodes.models import BackendNode
from nodes.sources import inspection, objects, opening, probing, shares
from tests.support import api, hub
from tests.support.sources import Refusal, Source, sha256_of

pytestmark = pytest.mark.django_db(transaction=True)
REPO = "Qwen/Qwen2.5-0.5B-Instruct-GGUF"
GIB = 2**30


def inspect(text: str, status: int = 200) -> dict[str, Any]:
    answer = api.admin().post("/api/sources/inspect", {"text": text})
    assert answer.status_code == status, answer.content
    found: dict[str, Any] = answer.json()
    return found


def node(name: str, gib: float) -> BackendNode:
    return api.make_node(name, total_vram=int(gib * GIB), available_vram=int(gib * GIB))


def repository(source: Source, **facts: Any) -> dict[str, bytes]:
    files = {
        "README.md": b"# Qwen",
        "qwen2.5-q4_k_m.gguf": hub.gguf(3 * 1024 * 1024, vocabulary=90_000),
        "qwen2.5-q8_0.gguf": hub.gguf(5 * 1024 * 1024, vocabulary=90_000),
    }
    hub.add_repository(source, REPO, files, **facts)
    return files


def test_a_repository_has_its_quantizations_and_where_they_fit(source: Source) -> None:
    node("small", 1)
    files = repository(source)
    found = inspect(REPO)
    assert (found["kind"], found["commit"], found["licence"], found["task"]) == (
        "huggingface", hub.COMMIT, "apache-2.0", "chat",
    )  # fmt: skip
    assert found["name"] == "Qwen2.5-0.5B-Instruct"
    first, second = found["variants"]
    assert (first["id"], first["recommended"], second["id"]) == ("Q4_K_M", True, "Q8_0")
    assert first["size"] == len(files["qwen2.5-q4_k_m.gguf"])
    assert first["context_size"] == 32768
    assert first["fit"]["fits"] is True
    assert first["fit"]["nodes"][0]["node_name"] == "small"
    assert not found["problem"]


def test_one_header_of_a_megabyte_serves_all_quantizations(source: Source) -> None:
    repository(source)
    inspect(REPO)
    ranges = [request.range for request in source.seen("storage") if request.path.endswith(".gguf")]
    assert ranges == [f"bytes=0-{probing.FIGURES_BYTES - 1}"]


def test_figures_behind_the_vocabulary_are_read_too(source: Source) -> None:
    hub.add_repository(source, REPO, {"m-Q4_0.gguf": hub.gguf(4 * 1024 * 1024, vocabulary=90_000, late=True)})
    assert inspect(REPO)["variants"][0]["context_size"] == 32768
    ranges = [request.range for request in source.seen("storage") if request.path.endswith(".gguf")]
    assert ranges == [f"bytes=0-{size - 1}" for size in (probing.FIGURES_BYTES, probing.TABLE_BYTES)]


def test_queries_do_not_grow_with_variants_and_nodes(source: Source) -> None:
    counts = []
    for number in (1, 12):
        files = {f"m{index}-Q4_0.gguf": hub.gguf() for index in range(number)}
        hub.add_repository(source, REPO, files)
        node(f"n{number}", 1)
        inspect(REPO)
        with CaptureQueriesContext(connection) as queries:
            inspect(REPO)
        counts.append(len(queries))
    assert counts[0] == counts[1]


def test_the_reasons_of_a_source_are_told(source: Source) -> None:
    assert "there is no repository a/b" in inspect("a/b", 404)["error"]
    assert "no variant 'Q5_K_M'" in (repository(source), inspect(f"{REPO}:Q5_K_M", 400))[1]["error"]
    source.refusals = [Refusal(429, (("Retry-After", "7"),))]
    assert "429" in inspect(REPO, 503)["error"]


def test_a_gated_repository_is_listed_and_says_what_it_needs(source: Source, settings: Settings) -> None:
    repository(source, token="hf_secret")
    found = inspect(REPO)
    assert found["gated"] is True
    assert found["variants"][0]["gated"] is True
    assert "sign in" in found["problem"]
    assert "hf_secret" not in json.dumps(found)
    settings.CLUSTER = dataclasses.replace(settings.CLUSTER, hugging_face_token="hf_secret")
    assert not inspect(REPO)["problem"]
    assert {request.authorization for request in source.seen("storage")} == {""}, (
        "the token stays with its host"
    )


def test_a_pointer_in_place_of_a_file_is_told(source: Source) -> None:
    hub.add_repository(source, REPO, {"m-Q4_0.gguf": hub.gguf()}, pointer="m-Q4_0.gguf")
    assert "pointer" in inspect(REPO)["problem"]


def test_a_file_of_another_length_is_told(source: Source) -> None:
    hub.add_repository(source, REPO, {"m-Q4_0.gguf": hub.gguf()})
    source.files[f"{hub.HUB}/{REPO}/resolve/{hub.COMMIT}/m-Q4_0.gguf"] = hub.gguf(9999)
    assert "9999 bytes" in inspect(REPO)["problem"]


@pytest.mark.parametrize("count", [10_001, 100_000])
def test_a_repository_of_too_many_files_is_refused(source: Source, count: int) -> None:
    hub.add_repository(source, REPO, {f"f{number}.gguf": b"" for number in range(count)})
    assert inspect(REPO, 400 if count < 50_000 else 502)["error"]


def test_weights_in_safetensors_go_to_vllm(source: Source) -> None:
    config = {
        "model_type": "qwen2",
        "num_hidden_layers": 24,
        "hidden_size": 896,
        "max_position_embeddings": 32768,
    }
    files = {
        "model.safetensors": bytes(4096),
        "config.json": json.dumps(config).encode(),
        "tokenizer.json": b"{}",
    }
    hub.add_repository(source, "Qwen/Qwen2.5-0.5B-Instruct", files)
    (variant,) = inspect("Qwen/Qwen2.5-0.5B-Instruct")["variants"]
    assert (variant["id"], variant["context_size"]) == ("safetensors", 32768)
    assert {file["path"] for file in variant["files"]} == set(files)


def test_a_model_of_ollama(source: Source) -> None:
    layers = {
        "application/vnd.ollama.image.model": hub.gguf(),
        "application/vnd.ollama.image.template": b"{{ .Prompt }}",
        "application/vnd.ollama.image.params": b'{"stop": ["<|im_end|>"], "temperature": 0.5}',
        "application/vnd.ollama.image.license": b"Apache License\nVersion 2.0",
    }
    hub.add_image(source, "library/qwen2.5", "0.5b", layers)
    found = inspect(f"ollama run {source.host}/library/qwen2.5:0.5b")
    assert (found["kind"], found["licence"]) == ("ollama", "Apache License")
    assert len(found["variants"]) == 1
    assert "there is no" not in found["problem"]
    assert inspect(f"ollama://{source.host}/library/nothing:1b", 404)["error"]


def test_an_artifact_whose_layers_are_files(source: Source) -> None:
    kind = "application/vnd.cncf.model.weight.v1.raw"
    hub.add_image(source, "group/model", "v1", {kind: hub.gguf()}, annotations={kind: "model-Q4_0.gguf"})
    found = inspect(f"oci://{source.host}/group/model:v1")
    assert (found["kind"], found["variants"][0]["id"]) == ("oci", "Q4_0")


def test_the_tags_of_an_artifact_have_folders_of_their_own(source: Source) -> None:
    """Both models are `model.gguf` there: the second one could not be imported under any name."""
    kind, paths = "application/vnd.docker.ai.gguf.v3", set()
    for tag in ("135M", "360M"):
        hub.add_image(source, "ai/smollm2", tag, {kind: hub.gguf() + tag.encode()})
        plan = inspection.plan_import(f"oci://{source.host}/ai/smollm2:{tag}", now=clock.now())
        paths |= {file.path for file in plan.files}
    assert len(paths) == 2
    assert all(re.fullmatch(r"oci/[^/]+/ai/smollm2@[0-9a-f]{12}/model[.]gguf", path) for path in paths)


def test_impossible_sizes_of_a_source_are_refused_or_unknown(source: Source) -> None:
    """A number of more than 64 bits cannot be sent to the page: it was a 500."""
    kind = "application/vnd.cncf.model.weight.v1.raw"
    hub.add_image(source, "group/model", "v1", {kind: hub.gguf()}, annotations={kind: "model-Q4_0.gguf"})
    manifest = "/v2/group/model/manifests/v1"
    document = json.loads(source.files[manifest])  # type: ignore[arg-type]
    document["layers"][0]["size"] = 10**30
    source.files[manifest] = json.dumps(document).encode()
    assert "a possible size" in inspect(f"oci://{source.host}/group/model:v1", 502)["error"]
    repository(source)
    listing = f"{hub.HUB}/api/models/{REPO}/revision/main"
    document = json.loads(source.files[listing])  # type: ignore[arg-type]
    for sibling in document["siblings"]:
        sibling["size"] = 10**30
        sibling.pop("lfs", None)
    source.files[listing] = json.dumps(document).encode()
    assert {variant["size"] for variant in inspect(REPO)["variants"]} == {0}


def test_an_address_of_a_file(source: Source) -> None:
    source.files["/files/tiny-Q4_0.gguf"] = hub.gguf()
    found = inspect(source.url("/files/tiny-Q4_0.gguf"))
    assert (found["kind"], found["name"]) == ("https", "tiny-Q4_0")
    source.files["/files/page.gguf"] = b"<html>"
    assert "is not a GGUF file" in inspect(source.url("/files/page.gguf"), 400)["error"]
    assert "query" in inspect(source.url("/files/tiny-Q4_0.gguf?token=x"), 400)["error"]


def test_the_paths_of_files_tell_their_source(source: Source) -> None:
    """Files of two commits, or of two folders of a host, have different paths."""
    repository(source)
    (file,) = inspection.plan_import(REPO, variant="Q8_0", now=clock.now()).files
    assert file.path == f"hf/{REPO}@{hub.COMMIT[:12]}/qwen2.5-q8_0.gguf"
    source.files["/files/a/m-Q4_0.gguf"] = hub.gguf()
    (file,) = inspection.plan_import(source.url("/files/a/m-Q4_0.gguf"), now=clock.now()).files
    assert file.path == f"web/{source.host.replace(':', '-')}/files/a/m-Q4_0.gguf"


@pytest.mark.parametrize(
    "address", ["http://127.0.0.1:9/x.gguf", "http://169.254.169.254/latest/x.gguf", "http://[::1]:9/x.gguf"]
)
def test_private_addresses_are_refused(address: str) -> None:
    assert "not a public address" in inspect(address, 400)["error"]


def test_an_entry_of_a_gallery(source: Source) -> None:
    source.files["/docs/qwen.yaml"] = (
        b"name: x\nconfig_file: |\n  backend: llama-cpp\n  parameters: {model: q-Q4_0.gguf}\n"
    )
    source.files["/files/q.gguf"] = content = hub.gguf()
    source.files["/index.yaml"] = (
        f"- name: qwen\n  url: docs/qwen.yaml\n  license: apache-2.0\n  tags: [llm]\n"
        f"  overrides: {{context_size: 2048}}\n"
        f"  files: [{{filename: q-Q4_0.gguf, uri: {source.url('/files/q.gguf')}}}]\n"
    ).encode()
    found = inspect("local@qwen")
    assert (found["kind"], found["name"], found["task"]) == ("gallery", "qwen", "chat")
    assert found["variants"][0]["size"] == len(content)
    assert "no gallery has" in inspect("local@nothing", 404)["error"]


def entry_with(source: Source, *uris: str) -> None:
    """An entry `mine` of the gallery whose files are at these addresses."""
    files = [f"{{filename: {number}.gguf, uri: '{uri}'}}" for number, uri in enumerate(uris)]
    overrides = "{backend: llama-cpp, parameters: {model: 0.gguf}}"
    text = f"- name: mine\n  overrides: {overrides}\n  files: [{', '.join(files)}]\n"
    source.files["/index.yaml"] = text.encode()


def plan(text: str) -> Any:
    return inspection.plan_import(text, now=clock.now())


def test_files_of_an_entry_are_pinned_to_a_commit(source: Source) -> None:
    """Issue 25: with size and hash, by one request for each repository; a commit stays as it is."""
    content = hub.gguf()
    hub.add_repository(source, "org/a", {"x.gguf": content, "y.gguf": content})
    hub.add_repository(source, "org/b", {"z.gguf": content}, revision="v1")
    entry_with(
        source,
        "huggingface://org/a/x.gguf",
        "hf://org/a/y.gguf",
        "hf://org/b@v1/z.gguf",
        f"hf://org/b@{hub.COMMIT}/z.gguf",
        source.url(f"{hub.HUB}/org/a/resolve/main/x.gguf"),
    )
    files = plan("local@mine").files
    paths = ("org/a", "x"), ("org/a", "y"), ("org/b", "z"), ("org/b", "z"), ("org/a", "x")
    assert [file.url for file in files] == [f"hf://{repo}@{hub.COMMIT}/{name}.gguf" for repo, name in paths]
    assert [file.sha256 for file in files] == [sha256_of(content)] * 3 + ["", sha256_of(content)]
    assert {file.size for file in files} == {len(content)}
    asked = [request.path for request in source.seen("files") if "/api/models/" in request.path]
    assert sorted(asked) == [
        f"{hub.HUB}/api/models/org/{name}" for name in ("a/revision/main", "b/revision/v1")
    ]


def test_a_pasted_definition_is_pinned_too(source: Source) -> None:
    """Issue 25."""
    hub.add_repository(source, "org/a", {"x.gguf": hub.gguf()})
    text = "name: mine\nbackend: llama-cpp\nparameters: {model: x.gguf}\n"
    text += "download_files: [{filename: x.gguf, uri: 'huggingface://org/a/x.gguf'}]\n"
    assert [file.url for file in plan(text).files] == [f"hf://org/a@{hub.COMMIT}/x.gguf"]


@pytest.mark.parametrize(
    ("uris", "status", "reason"),
    [
        (["http://[::1"], 400, "the file '0.gguf' has a malformed address"),
        (["hf://org/a/none.gguf"], 404, "hf://org/a@main/none.gguf does not exist"),
        (["hf://org/b/x.gguf"], 404, "there is no repository org/b"),
        ([f"hf://org/r{number}/x.gguf" for number in range(17)], 400, "17 repositories; at most 16"),
    ],
)
def test_files_that_cannot_be_pinned_are_refused_in_words(
    source: Source, uris: list[str], status: int, reason: str
) -> None:
    """Issue 25."""
    hub.add_repository(source, "org/a", {"x.gguf": hub.gguf()})
    entry_with(source, *uris)
    assert reason in inspect("local@mine", status)["error"]


def test_an_entry_may_not_name_files_of_this_machine(source: Source) -> None:
    source.files["/index.yaml"] = (
        b"- name: evil\n  url: /etc/passwd.yaml\n- name: evil2\n  url: file:///etc/x.yaml\n"
    )
    for name in ("evil", "evil2"):
        assert "beside its own index" in inspect(f"local@{name}", 502)["error"]


def test_a_document_that_expands_is_refused(source: Source) -> None:
    bomb = "a: &a [x, x, x, x, x, x, x, x, x, x]\n"
    for letter, former in zip("bcdefg", "abcdef", strict=True):
        bomb += f"{letter}: &{letter} [{', '.join([f'*{former}'] * 10)}]\n"
    lines = "".join(f"  {line}\n" for line in bomb.splitlines())
    source.files["/docs/bomb.yaml"] = f"config_file:\n{lines}".encode()
    source.files["/index.yaml"] = b"- name: bomb\n  url: docs/bomb.yaml\n"
    assert "too many values" in inspect("local@bomb", 400)["error"]


def test_objects_of_a_store(source: Source) -> None:
    source.redirects = False
    hub.add_objects(
        source, "bucket", {"models/m-Q4_0.gguf": hub.gguf(), "models/m-Q8_0.gguf": hub.gguf(9000)}
    )
    assert [variant["id"] for variant in inspect("s3://bucket/models/")["variants"]] == ["Q4_0", "Q8_0"]
    assert inspect("s3://bucket/models/m-Q8_0.gguf")["variants"][0]["size"] == 9000
    hub.add_objects(source, "odd", {"models/m-Q4_0.gguf": b"no model", "models/m-Q8_0.gguf": hub.gguf(9000)})
    odd = inspect("s3://odd/models/")
    assert [variant["id"] for variant in odd["variants"]] == ["Q4_0", "Q8_0"]
    assert "GGUF" in odd["problem"]
    hub.add_objects(source, "empty", {})
    assert inspect("s3://empty/nothing.gguf", 404)["error"]


def test_a_store_that_does_not_answer_is_given_up(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    """Issue 25: a request to a store has a limit."""
    monkeypatch.setattr(objects, "REQUEST_WITHIN", 0.2)
    source.redirects, source.pause_at = False, 0
    hub.add_objects(source, "bucket", {"models/m-Q4_0.gguf": hub.gguf()})
    try:
        assert "s3://bucket/models/: no answer within" in inspect("s3://bucket/models/", 502)["error"]
    finally:
        source.released.set()


def test_a_share_is_used_where_it_is(models: Path) -> None:
    share = models / "share" / "team"
    share.mkdir(parents=True)
    (share / "m-Q4_0.gguf").write_bytes(hub.gguf())
    (share / "out.gguf").symlink_to("/etc/hostname")
    found = inspect(str(share))
    assert (found["kind"], [variant["id"] for variant in found["variants"]]) == ("folder", ["Q4_0"])
    assert "CLUSTER_SHARE_ROOTS" in inspect("/etc", 400)["error"]
    assert "CLUSTER_SHARE_ROOTS" in inspect(f"{share}/../../../x", 400)["error"]


def test_a_file_whose_name_is_not_text_is_left_out(models: Path) -> None:
    """On a share of another system; with it the request for the whole folder failed."""
    share = models / "share" / "team"
    share.mkdir(parents=True)
    (share / "m-Q4_0.gguf").write_bytes(hub.gguf())
    (share / os.fsdecode(b"caf\xe9.gguf")).write_bytes(hub.gguf())
    assert [variant["id"] for variant in inspect(str(share))["variants"]] == ["Q4_0"]


def test_what_a_share_cannot_give_is_told(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    share = models / "share" / "team"
    share.mkdir(parents=True)
    assert "cannot be read" in inspect(f"{share}/{'x' * 300}", 400)["error"]
    (share / "m-Q4_0.gguf").write_bytes(hub.gguf())
    (share / "m-Q8_0.gguf").write_bytes(hub.gguf())
    measured = shares._convert_file

    def vanishing(base: Path, path: Path) -> Any:
        if path.name == "m-Q8_0.gguf":
            path.unlink()
        return measured(base, path)

    monkeypatch.setattr(shares, "_convert_file", vanishing)
    assert [variant["id"] for variant in inspect(str(share))["variants"]] == ["Q4_0"]


def test_a_definition_in_full(source: Source) -> None:
    text = "name: mine\nbackend: llama-cpp\nparameters: {model: m.gguf}\n"
    found = inspect(text)
    assert (found["kind"], found["name"]) == ("definition", "mine")
    assert "is not valid YAML" in inspect("name: [\nbackend: x", 400)["error"]
    assert "aliases" in inspect("name: &a x\nbackend: *a\nparameters: {model: m}", 400)["error"]


def test_a_name_leads_to_candidates(source: Source) -> None:
    source.files["/index.yaml"] = (
        b"- {name: qwen2.5-0.5b, description: small, size: 400MB}\n- {name: other}\n"
    )
    source.files[f"{hub.HUB}/api/models"] = json.dumps(hub.shape("hub-search")["models"]).encode()
    found = inspect("qwen2.5")
    assert (found["kind"], found["variants"]) == ("search", [])
    assert [candidate["text"] for candidate in found["candidates"]] == [
        "local@qwen2.5-0.5b", f"hf://{REPO}", "hf://Qwen/Qwen2.5-0.5B",
    ]  # fmt: skip
    assert found["candidates"][0]["size"] == 400_000_000
    del source.files[f"{hub.HUB}/api/models"]
    assert len(inspect("qwen2.5")["candidates"]) == 1
    assert "404" in inspect("qwen2.5")["problem"]


def test_only_administrators_inspect(source: Source) -> None:
    answer = api.worker().post("/api/sources/inspect", {"text": "x"})
    assert answer.status_code in (401, 403)
    bodies: list[Any] = [{}, {"text": 5}, {"text": ""}, []]
    for body in bodies:
        assert api.admin().post("/api/sources/inspect", body).status_code == 400
    assert source.requests == []


def test_a_url_of_a_document_reads_no_file_of_this_machine(tmp_path: Path) -> None:
    """It belongs to no gallery; the working directory must not count as that of its index."""
    document = Path.cwd() / "pyproject.toml"
    for url in (document.as_uri(), str(document), "pyproject.toml", (tmp_path / "x.yaml").as_uri()):
        answer = api.admin().post("/models/apply", {"url": url, "name": "m"})
        assert answer.status_code in (400, 502), answer.content
        assert "beside its own index" in answer.content.decode()


def test_no_query_of_an_address_is_kept(source: Source) -> None:
    text = f"""\
name: mine
backend: llama-cpp
parameters: {{model: m.gguf}}
download_files: [{{filename: m.gguf, uri: "{source.url("/files/m.gguf")}?sig=hidden"}}]
"""
    refusal = inspect(text, 400)["error"]
    assert "has a query" in refusal
    assert "hidden" not in refusal


@pytest.mark.parametrize(
    ("url", "is_sent"),
    [
        ("https://hub.example/x", True),
        ("https://hub.example:443/x", True),
        ("http://hub.example/x", False),
        ("http://hub.example:8080/x", False),
        ("https://hub.example:8443/x", False),
    ],
)
def test_the_token_goes_to_the_configured_address_only(settings: Settings, url: str, is_sent: bool) -> None:
    settings.CLUSTER = dataclasses.replace(
        settings.CLUSTER, hugging_face_url="https://hub.example", hugging_face_token="hf_x"
    )
    out = opening.build_outbound(settings.CLUSTER)
    assert bool(out.credential_of(url)) is is_sent
    assert out.is_allowed("hub.example", 443)
    assert not out.is_allowed("hub.example", 8080)
