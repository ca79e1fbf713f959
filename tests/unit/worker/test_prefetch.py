"""Models whose files a worker fetches before it registers (worker.md §17)."""

import hashlib
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from localai_cluster.worker import download
from localai_cluster.worker.config import Config, build
from localai_cluster.worker.prefetch import prefetch

pytestmark = pytest.mark.rule("worker-17", "worker-2")
SITE = "http://site"
WEIGHTS = b"weights" * 100


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


class Site:
    """Files by address, and the addresses that were read."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.read: list[str] = []

    def index(self, *entries: dict[str, Any]) -> None:
        self.files[f"{SITE}/index.yaml"] = json.dumps(list(entries)).encode()

    def client(self) -> httpx.AsyncClient:
        def respond(request: httpx.Request) -> httpx.Response:
            self.read.append(str(request.url))
            content = self.files.get(str(request.url))
            return (
                httpx.Response(404)
                if content is None
                else httpx.Response(200, stream=httpx.ByteStream(content))
            )

        return httpx.AsyncClient(transport=httpx.MockTransport(respond))


def config(folder: Path, models: str, **more: str) -> Config:
    (folder / "models").mkdir(exist_ok=True)
    given = {
        "register_to": "http://c",
        "models_path": str(folder / "models"),
        "backends_path": str(folder / "backends"),
        "galleries": json.dumps([{"name": "site", "url": f"{SITE}/index.yaml"}]),
        "prefetch_models": models,
        "hugging_face_url": f"{SITE}/hf",
        "github_url": f"{SITE}/git",
    }
    return build(given | more, {})


def model(name: str, uri: str, content: bytes = WEIGHTS, **more: Any) -> dict[str, Any]:
    file = {"filename": f"{name}/weights.gguf", "uri": uri, "sha256": digest(content)}
    return {"name": name, "files": [file], **more}


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Site:
    monkeypatch.setattr(download, "RETRY_PAUSES", ())
    return Site()


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


async def test_the_files_of_the_named_models_are_in_the_models_folder(tmp_path: Path, site: Site) -> None:
    """By every address of §18.6 that serves model files; others of the gallery are left alone."""
    site.index(
        model("one", "weights.gguf"),
        model("two", "huggingface://owner/repo/sub/weights.gguf"),
        model("three", "hf.co/owner/repo/weights.gguf"),
        model("four", "github:owner/repo/weights.gguf@v1"),
        model("five", f"{SITE}/unasked"),
    )
    for path in ("weights.gguf", "hf/owner/repo/resolve/main/sub/weights.gguf"):
        site.files[f"{SITE}/{path}"] = WEIGHTS
    site.files[f"{SITE}/hf/owner/repo/resolve/main/weights.gguf"] = WEIGHTS
    site.files[f"{SITE}/git/owner/repo/v1/weights.gguf"] = WEIGHTS
    await prefetch(config(tmp_path, "One, site@two,three ,,four"), site.client())
    expected = ["four/weights.gguf", "one/weights.gguf", "three/weights.gguf", "two/weights.gguf"]
    assert names(tmp_path / "models") == expected
    assert (tmp_path / "models" / "one" / "weights.gguf").read_bytes() == WEIGHTS


async def test_a_document_that_an_entry_names_has_files_too(tmp_path: Path, site: Site) -> None:
    site.index(model("one", f"{SITE}/a", url=f"{SITE}/one.yaml"))
    document = {"config_file": "x: y", "files": [{"filename": "tokenizer.json", "uri": f"{SITE}/b"}]}
    site.files |= {f"{SITE}/one.yaml": json.dumps(document).encode(), f"{SITE}/a": WEIGHTS, f"{SITE}/b": b"t"}
    await prefetch(config(tmp_path, "one"), site.client())
    assert names(tmp_path / "models") == ["one/weights.gguf", "tokenizer.json"]


async def test_a_file_with_the_hash_of_its_gallery_is_kept(tmp_path: Path, site: Site) -> None:
    site.index(model("one", f"{SITE}/a"))
    site.files[f"{SITE}/a"] = WEIGHTS
    given = config(tmp_path, "one")
    await prefetch(given, site.client())
    await prefetch(given, site.client())
    assert site.read.count(f"{SITE}/a") == 1
    (tmp_path / "models" / "one" / "weights.gguf").write_bytes(b"spoilt")
    await prefetch(given, site.client())
    assert site.read.count(f"{SITE}/a") == 2
    assert (tmp_path / "models" / "one" / "weights.gguf").read_bytes() == WEIGHTS


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        (model("one", f"{SITE}/lost"), "HTTP status 404"),
        (model("one", f"{SITE}/a", b"other"), "the gallery says"),
        (model("one", "ollama://llama"), "not a source"),
        (model("one", f"{SITE}/a", url=f"{SITE}/lost.yaml"), "HTTP status 404"),
        ({"name": "one", "files": [{"filename": "../out", "uri": f"{SITE}/a"}]}, "invalid key"),
        ({"name": "one", "files": [{"filename": "/etc/out", "uri": f"{SITE}/a"}]}, "invalid key"),
        ({"name": "other"}, "no gallery has it"),
    ],
)
async def test_what_cannot_be_fetched_is_a_warning(
    tmp_path: Path, site: Site, entry: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The other models are fetched, and nothing is left of the one that failed."""
    site.index(entry, model("two", f"{SITE}/a"))
    site.files[f"{SITE}/a"] = WEIGHTS
    await prefetch(config(tmp_path, "one,two"), site.client())
    [warning] = [line for line in caplog.messages if "model one was not fetched" in line]
    assert reason in warning
    assert names(tmp_path) == ["models/two/weights.gguf"]


async def test_without_a_gallery_nothing_fails(
    tmp_path: Path, site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    await prefetch(config(tmp_path, "one"), site.client())
    assert "gallery site cannot be read" in caplog.text
    await prefetch(config(tmp_path, ""), site.client())
    assert site.read == [f"{SITE}/index.yaml"]
