"""How much memory and disk a model needs: formulas, headers of GGUF files, sizes (D-VRAM-LOCAL)."""

import asyncio
import os
import struct
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodes.definitions import sizes
from nodes.definitions.files import Definition, parse_definition
from nodes.definitions.sizes import ModelFiles, Sizes, measure, read_header, with_file_paths
from nodes.placement import memory

GIB = 2**30
TEXT, LIST, U8, U32, I32, F32, U64 = 8, 9, 0, 4, 5, 6, 10
FIGURES = {
    "block_count": 32,
    "embedding_length": 4096,
    "attention.head_count": 32,
    "attention.head_count_kv": 8,
}


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def pair(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def made_of(*pairs: bytes, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, 0, len(pairs)) + b"".join(pairs)


def list_of(kind: int, length: int, items: bytes) -> bytes:
    return struct.pack("<IQ", kind, length) + items


def figures(values: Mapping[str, int]) -> list[bytes]:
    return [pair(f"llama.{key}", U32, struct.pack("<I", value)) for key, value in values.items()]


VOCABULARY = pair("tokenizer.ggml.tokens", LIST, list_of(TEXT, 3, text("a") + text("bb") + text("")))
SCORES = pair("tokenizer.ggml.scores", LIST, list_of(F32, 5000, bytes(20000)))
NAME = pair("general.name", TEXT, text("block_count"))


@pytest.fixture
def written(tmp_path: Path) -> Path:
    return tmp_path / "model.gguf"


@pytest.mark.rule("R2.41")
@pytest.mark.parametrize("version", [2, 3])
def test_the_figures_of_a_gguf_are_found_wherever_they_stand(written: Path, version: int) -> None:
    """Before or after a vocabulary, which is stepped over."""
    first, *rest = figures(FIGURES)
    written.write_bytes(made_of(NAME, first, VOCABULARY, SCORES, *rest, version=version) + bytes(64))
    assert read_header(written) == FIGURES


@pytest.mark.rule("R2.41")
def test_the_largest_layer_counts_where_they_differ(written: Path) -> None:
    heads = pair("gemma.attention.head_count_kv", LIST, list_of(I32, 3, struct.pack("<3i", 4, 16, 8)))
    written.write_bytes(made_of(heads))
    assert read_header(written) == {"attention.head_count_kv": 16}


def test_a_file_of_another_kind_has_no_header(written: Path) -> None:
    written.write_bytes(b"GGML" + bytes(100))
    assert read_header(written) is None
    written.write_bytes(b"")
    assert read_header(written) is None


HOSTILE = {
    "another version": made_of(*figures(FIGURES), version=9),
    "cut": made_of(*figures(FIGURES))[:30],
    "a key without an end": made_of(struct.pack("<Q", 2**63)),
    "a text without an end": made_of(pair("a.b", TEXT, struct.pack("<Q", 2**64 - 1))),
    "a list without an end": made_of(pair("a.b", LIST, list_of(U64, 2**61, b""))),
    "texts without an end": made_of(pair("a.b", LIST, list_of(TEXT, 2**63, text("")))),
    "a list of lists": made_of(pair("a.b", LIST, list_of(LIST, 1, list_of(U8, 1, b"1")))),
    "an unknown kind": made_of(pair("a.b", 99, b"")),
    "an unknown kind in a list": made_of(pair("a.b", LIST, list_of(99, 1, b""))),
    "more pairs than there are": b"GGUF" + struct.pack("<IQQ", 3, 0, 2**63),
    "nonsense": made_of(pair("a.block_count", I32, struct.pack("<i", -5))),
    "too much": made_of(pair("a.block_count", U64, struct.pack("<Q", 2**60))),
}


@pytest.mark.rule("R2.40")
@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_header_says_nothing(written: Path, content: bytes) -> None:
    """It neither raises nor makes the reader allocate what it asks for."""
    written.write_bytes(content)
    assert read_header(written) == {}


def test_a_header_that_goes_on_and_on_is_left(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was found until then counts."""
    monkeypatch.setattr(sizes, "MOST_STEPS", 50)
    (layers, *rest) = figures(FIGURES)
    endless = pair("tokenizer.ggml.tokens", LIST, list_of(TEXT, 100, text("") * 100))
    written.write_bytes(made_of(layers, endless, *rest))
    assert read_header(written) == {"block_count": 32}


@given(st.binary(max_size=300))
def test_no_bytes_break_the_reader(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "any.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 5) + content)
    found = read_header(path)
    assert found is not None
    assert set(found) <= set(sizes.WANTED)


KV = 2 * 4096 * 8 * 8192
OVERHEAD = 150_000_000 + 2 * 8 * GIB * 2 // 100
SMALL_CACHE = {"CacheTypeKey": "q8_0", "CacheTypeValue": "q8_0"}
FORMULAS: list[tuple[Any, ...]] = [
    ("all", FIGURES, {"NGPULayers": 99999999}, 8 * GIB + KV + OVERHEAD),
    ("no layers said", FIGURES, {"NGPULayers": 0}, 8 * GIB + KV + OVERHEAD),
    ("a longer context", FIGURES, {"ContextSize": 16384}, 8 * GIB + 2 * KV + OVERHEAD),
    ("a cache of 8 bits", FIGURES, SMALL_CACHE, 8 * GIB + KV // 2 + OVERHEAD),
    ("one half of 8 bits", FIGURES, {"CacheTypeKey": "q8_0"}, 8 * GIB + KV + OVERHEAD),
    ("half the layers", FIGURES, {"NGPULayers": 16}, 4 * GIB + KV + 150_000_000 + 2 * 4 * GIB * 2 // 100),
    ("heads only", {"attention.head_count": 16}, {}, 8 * GIB + 2 * KV + OVERHEAD),
    ("one key only", {"block_count": 80}, {}, 8 * GIB + KV + OVERHEAD),
    ("no metadata", {}, {}, 8 * GIB + 2048 * 8192),
    ("no GGUF", None, {"ContextSize": 100}, 8 * GIB + 2048 * 100),
    ("a context that cannot be", None, {"ContextSize": -1}, 8 * GIB + 2048 * 8192),
]


@pytest.mark.rule("R2.41", "C37")
@pytest.mark.parametrize(
    ("said", "options", "expected"), [row[1:] for row in FORMULAS], ids=[row[0] for row in FORMULAS]
)
def test_the_estimate_of_a_file_of_8_gib(
    said: dict[str, int] | None, options: dict[str, Any], expected: int
) -> None:
    assert memory.estimate_vram(8 * GIB, said, options) == expected


@pytest.mark.rule("R2.40")
def test_what_is_not_known_needs_nothing() -> None:
    assert memory.estimate_vram(0, FIGURES, {}) == 0
    absurd = dict.fromkeys(FIGURES, sizes.LARGEST_FIGURE)
    assert memory.estimate_vram(2**62, absurd, {"ContextSize": 2**31 - 1}) == memory.LARGEST


@pytest.mark.rule("R2.37", "C38", "T-DSK-1", "T-DSK-2", "T-DSK-13")
def test_disk_space_for_a_payload() -> None:
    """A margin of 5 %, at least 1 GiB; 2 GiB for what is not known."""
    assert 70 * 10**9 < memory.required_disk(70 * 10**9) < 80 * 10**9
    assert memory.required_disk(70 * 10**9) == 70 * 10**9 * 105 // 100
    assert memory.required_disk(GIB) == 2 * GIB
    assert memory.required_disk(0) == memory.required_disk(-1) == 2 * GIB


def defined(model: str, **settings: Any) -> Definition:
    document = {"name": "m", "backend": "b", "parameters": {"model": model}, **settings}
    return parse_definition(document, "m.yaml")


def put(folder: Path, name: str, size: int) -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(bytes(size))


@pytest.mark.rule("R2.37", "R2.40", "R2.42")
def test_local_files_are_measured(tmp_path: Path) -> None:
    """Projector, adapter and the like belong to the payload; one path counts once, a missing one nothing."""
    put(tmp_path, "org/model.bin", 100)
    put(tmp_path, "adapter/a/weights.bin", 20)
    put(tmp_path, "adapter/b.json", 3)
    one = defined("org/model.bin", mmproj="org/model.bin", lora_adapter="adapter", draft_model="absent.gguf")
    assert measure(tmp_path, one) == ModelFiles(weights=100, payload=123)


@pytest.mark.rule("R2.40", "R2.42")
@pytest.mark.parametrize("model", ["org/name", "../outside", "/etc/passwd", ".", "a/../../outside", "pipe"])
def test_a_model_that_is_no_file_of_the_folder_is_not_known(tmp_path: Path, model: str) -> None:
    """A repository is asked for nowhere; a path out of the folder is not looked at; a pipe is not opened."""
    put(tmp_path, "outside", 100)
    folder = tmp_path / "models"
    put(folder, "other.bin", 7)
    os.mkfifo(folder / "pipe")
    assert measure(folder, defined(model)) == ModelFiles()


@pytest.mark.rule("R2.41")
def test_shards_and_variants(tmp_path: Path) -> None:
    """A model in parts is the sum of them; of the variants in a folder the largest counts."""
    for number in (1, 2, 3):
        put(tmp_path, f"big/q8-0000{number}-of-00003.gguf", 10)
    put(tmp_path, "big/q4.gguf", 15)
    put(tmp_path, "big/README.md", 99)
    put(tmp_path, "plain/a.safetensors", 5)
    put(tmp_path, "plain/b.safetensors", 6)
    put(tmp_path, "plain/config.json", 7)
    assert measure(tmp_path, defined("big/q8-00001-of-00003.gguf")) == ModelFiles(30, 30)
    assert measure(tmp_path, defined("big")) == ModelFiles(30, 144)
    assert measure(tmp_path, defined("plain")) == ModelFiles(11, 18)


def test_only_so_many_files_of_a_folder_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(5):
        put(tmp_path, f"many/{number}.bin", 10)
    monkeypatch.setattr(sizes, "MOST_FILES", 3)
    assert measure(tmp_path, defined("many")).weights == 30


@pytest.mark.rule("R2.40", "R2.41")
def test_a_gguf_of_the_folder_is_read(tmp_path: Path) -> None:
    content = made_of(*figures(FIGURES))
    (tmp_path / "m.gguf").write_bytes(content)
    found = asyncio.run(Sizes(tmp_path).of(defined("m.gguf")))
    assert found == ModelFiles(len(content), len(content), FIGURES)


@pytest.mark.rule("R2.40", "C37")
def test_a_folder_that_hangs_costs_one_thread_and_the_time_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then the size is not known; however often it is asked for, one look waits."""
    goes_on, looks = threading.Event(), list[str]()

    def hanging(folder: Path, definition: Definition) -> ModelFiles:
        looks.append(definition.name)
        goes_on.wait()
        return ModelFiles(weights=5)

    monkeypatch.setattr(sizes, "measure", hanging)
    measured = Sizes(tmp_path, limit=0.02)

    async def scenario() -> ModelFiles:
        for _ in range(3):
            assert await measured.of(defined("m")) == ModelFiles()
        measured._limit = 60
        last = asyncio.create_task(measured.of(defined("m")))
        await asyncio.sleep(0)
        goes_on.set()
        return await last

    assert asyncio.run(scenario()) == ModelFiles(weights=5)
    assert looks == ["m"]
    assert sizes.MEASURE_LIMIT == 10


@pytest.mark.rule("R2.40")
def test_an_error_is_nothing_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(folder: Path, definition: Definition) -> ModelFiles:
        raise OSError("broken")

    monkeypatch.setattr(sizes, "measure", broken)
    assert asyncio.run(Sizes(tmp_path).of(defined("m"))) == ModelFiles()


def test_a_load_names_the_models_file(tmp_path: Path) -> None:
    """As the reference does, as an absolute path; a name that leads out of the folder gives none."""
    told = with_file_paths(tmp_path, "org/model.gguf", {"Model": "org/model.gguf"})
    assert told["Model"] == "org/model.gguf"
    assert (told["ModelFile"], told["ModelPath"]) == (str(tmp_path / "org/model.gguf"), str(tmp_path))
    assert with_file_paths(tmp_path, "../model.gguf", {"Threads": 2}) == {"Threads": 2}
