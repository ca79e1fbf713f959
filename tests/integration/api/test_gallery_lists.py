"""The galleries' entries in the reference's other shapes (`contract/http-api.md` §4.2, §4.5)."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from django.db import connection
from django.test.utils import CaptureQueriesContext

from localai_cluster.api_document import document
from localai_cluster.kit import clock
from nodes.backends import catalogue
from nodes.models import NodeBackend
from tests.integration.api.test_document import fits
from tests.support import api, hot

pytestmark = pytest.mark.django_db

GIB = 1024**3

ENTRIES: list[dict[str, Any]] = [
    {
        "name": "llama-cpp",
        "description": "Runs GGUF",
        "license": "MIT",
        "tags": ["LLM", "text-to-text", "CPU"],
        "capabilities": {"nvidia": "cuda-llama-cpp", "default": "cpu-llama-cpp"},
    },
    {"name": "cpu-llama-cpp", "alias": "llama-cpp", "uri": "https://me:secret@files.test/cpu?key=1"},
    {"name": "cuda-llama-cpp", "uri": "cuda", "sha256": "AB", "mirrors": ["https://me:secret@files.test/m"]},
    {"name": "llama-cpp-development", "uri": "dev"},
    {"name": "mlx", "uri": "mlx", "capabilities": {"metal": "metal-mlx"}, "tags": ["LLM"]},
    {"name": "whisper", "uri": "w", "tags": ["Audio Transcription", "asr"]},
    {"name": "plain", "uri": "p"},
]
LISTS = ("/backends/available", "/backends/known", "/backends/galleries", "/api/backends/usecases")


@pytest.fixture(autouse=True)
def index(tmp_path: Path, settings: Any, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The one gallery."""
    file = tmp_path / "index.yaml"
    file.write_text(yaml.safe_dump(ENTRIES))
    listed = [{"name": "local", "url": file.as_uri()}]
    settings.CLUSTER = dataclasses.replace(settings.CLUSTER, galleries=listed)
    monkeypatch.setattr(catalogue, "reader", catalogue.Reader())
    monkeypatch.setattr("nodes.api.catalogue._checked_fingerprint", "")
    return file


def read(path: str) -> Any:
    """What the route answers; it fits the API document."""
    answer = api.admin().get(path)
    assert answer.status_code == 200, answer.content
    shape = document()["paths"][path]["get"]["responses"]["200"]["content"]["application/json"]["schema"]
    assert fits(shape, answer.json()) == []
    return answer.json()


def available() -> dict[str, Any]:
    return {entry["name"]: entry for entry in read("/backends/available")}


@pytest.mark.rule("http-4.5")
def test_available_entries_are_as_their_gallery_has_them(index: Path) -> None:
    """The gallery is an object here, what is empty is left out, and credentials are."""
    found = available()
    gallery = {"url": index.as_uri(), "name": "local"}
    assert found["llama-cpp"] == ENTRIES[0] | {"gallery": gallery}
    build = {"name": "cpu-llama-cpp", "alias": "llama-cpp", "uri": "https://files.test/cpu"}
    assert found["cpu-llama-cpp"] == build | {"gallery": gallery}


@pytest.mark.rule("http-4.5", "worker-18.3")
def test_what_no_machine_here_could_run_is_not_available() -> None:
    """A machine without a GPU, and every healthy node: not one that is offline or waits for approval."""
    without_gpu = ["llama-cpp", "cpu-llama-cpp", "llama-cpp-development", "whisper", "plain"]
    assert list(available()) == without_gpu
    api.make_node("late", secret=api.OTHER_SECRET, approved=False, capability="nvidia-cuda-12")
    gpu = api.make_node("gpu", capability="nvidia-cuda-12")
    found = available()
    assert found.keys() == {*without_gpu, "cuda-llama-cpp"}
    assert (found["cuda-llama-cpp"]["sha256"], found["cuda-llama-cpp"]["mirrors"]) == (
        "ab",
        ["https://files.test/m"],
    )
    api.mark(gpu, "silent")
    assert list(available()) == without_gpu


@pytest.mark.rule("http-4.5")
def test_installed_is_said_of_the_whole_cluster() -> None:
    """An approved node counts, whatever its status; names are the same in any case."""
    waiting = api.make_node("late", secret=api.OTHER_SECRET, approved=False)
    NodeBackend.objects.create(node=waiting, name="plain")
    node = api.make_node("a")
    NodeBackend.objects.create(node=node, name="Whisper")
    api.mark(node, "silent")
    assert [name for name, entry in available().items() if entry.get("installed")] == ["whisper"]


@pytest.mark.rule("http-4.5")
def test_known_backends_are_what_a_model_may_be_for() -> None:
    """By modality and name; neither builds nor development ones, but what is installed besides."""
    node = api.make_node("a")
    for name in ("whisper", "own"):
        NodeBackend.objects.create(node=node, name=name)
    assert [list(entry.values()) for entry in read("/backends/known")] == [
        ["own", "", False, True],
        ["plain", "", False, False],
        ["whisper", "asr", False, True],
        ["llama-cpp", "text", False, "Runs GGUF", False],
        ["mlx", "text", False, False],
    ]


@pytest.mark.rule("http-4.5")
def test_galleries_are_named_without_credentials(settings: Any) -> None:
    listed = [{"name": "local", "url": "https://me:secret@files.test/index.yaml?key=1"}]
    settings.CLUSTER = dataclasses.replace(settings.CLUSTER, galleries=listed)
    assert read("/backends/galleries") == [{"url": "https://files.test/index.yaml", "name": "local"}]


@pytest.mark.rule("http-4.2")
def test_use_cases_follow_the_tags() -> None:
    """Whatever their spelling; an entry without a tag that says it is left out."""
    assert read("/api/backends/usecases") == {
        "llama-cpp": ["chat"],
        "mlx": ["chat"],
        "whisper": ["transcript"],
    }


@pytest.mark.rule("http-4.5")
@pytest.mark.parametrize("path", LISTS)
def test_a_list_costs_the_same_with_many_nodes(path: str) -> None:
    """And is refused to everybody but admins."""

    def costs() -> int:
        with CaptureQueriesContext(connection) as seen:
            assert api.admin().get(path).status_code == 200
        return len(seen)

    api.make_node("first", capability="amd")
    api.admin().get(path)
    few = costs()
    for number in range(5):
        node = api.make_node(f"n{number}", secret=f"{number}" * 64, capability=f"nvidia-{number}")
        NodeBackend.objects.create(node=node, name="whisper")
    assert costs() == few
    assert api.bearer(api.SECRET).get(path).status_code in (401, 403)


@pytest.mark.rule("http-4.5")
def test_when_no_gallery_can_be_read_it_is_a_503(index: Path) -> None:
    index.unlink()
    for path in LISTS:
        answer = api.admin().get(path)
        expected = 200 if path == "/backends/galleries" else 503
        assert answer.status_code == expected
        assert expected == 200 or "local cannot be read" in answer.json()["error"]


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        pytest.param([{"capability": "nvidia-cuda-12"}], {"nvidia-cuda-12"}, id="T-REG-110"),
        pytest.param([{"gpu_vendor": "amd", "total_vram": 16 * GIB}], {"amd"}, id="T-REG-111"),
        pytest.param([{"gpu_vendor": "nvidia", "total_vram": 4 * GIB}], set(), id="T-REG-112"),
        pytest.param([{"total_vram": 16 * GIB}], set(), id="no-vendor"),
        pytest.param([{"capability": "metal"}, {"capability": "metal"}], {"metal"}, id="T-REG-113"),
        pytest.param([{"capability": "metal"}, {"capability": "intel"}], {"metal", "intel"}, id="T-REG-114"),
        pytest.param(
            [{"capability": "metal", "offline": True}, {"capability": "intel", "node_type": "agent"}],
            set(),
            id="T-REG-115",
        ),
        pytest.param([], set(), id="T-REG-116"),
    ],
)
@pytest.mark.rule(*("R1.77", *(f"T-REG-{number}" for number in range(110, 117))))
def test_what_the_healthy_nodes_can_run(
    nodes: list[dict[str, Any]], expected: set[str], django_assert_num_queries: Callable[[int], Any]
) -> None:
    """A node of an older worker counts by the vendor of its GPUs; `default` is there in any case."""
    for number, told in enumerate(nodes):
        fields = dict(told)
        hot.node(f"n{number}", offline_at=clock.now() if fields.pop("offline", False) else None, **fields)
    with django_assert_num_queries(1):
        assert catalogue.cluster_capabilities() == expected | {"default"}
