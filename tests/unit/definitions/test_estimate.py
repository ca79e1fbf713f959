"""Headers of models' files, their sizes and the disk space that they need (D-VRAM-LOCAL, D-FIT)."""

import asyncio
import json
import os
import resource
import struct
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodes.definitions import headers, sizes
from nodes.definitions.files import Definition, parse_definition
from nodes.definitions.headers import Header, Tensor, UnreadableHeader, read_config, read_header
from nodes.definitions.sizes import ModelFiles, Sizes, measure, with_file_paths
from nodes.loading.files_in_use import FilesInUse
from nodes.placement import fit, memory
from tests.support.definitions import PLAIN

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


def made_of(*pairs: bytes, tensors: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, len(pairs)) + b"".join(pairs)


def tensor(name: str, *shape: int, kind: int = 0, offset: int = 0) -> bytes:
    dimensions = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return text(name) + dimensions + struct.pack("<IQ", kind, offset)


def list_of(kind: int, length: int, items: bytes) -> bytes:
    return struct.pack("<IQ", kind, length) + items


def figures(values: Mapping[str, int]) -> list[bytes]:
    name = pair("general.architecture", TEXT, text("llama"))
    return [name, *(pair(f"llama.{key}", U32, struct.pack("<I", value)) for key, value in values.items())]


VOCABULARY = pair("tokenizer.ggml.tokens", LIST, list_of(TEXT, 3, text("a") + text("bb") + text("")))
SCORES = pair("tokenizer.ggml.scores", LIST, list_of(F32, 5000, bytes(20000)))
NAME = pair("general.name", TEXT, text("block_count"))


@pytest.fixture
def written(tmp_path: Path) -> Path:
    return tmp_path / "model.gguf"


def header(path: Path) -> Header:
    found = read_header(path)
    assert found is not None
    return found


@pytest.mark.rule("R2.41")
@pytest.mark.parametrize("version", [2, 3])
def test_the_figures_of_a_gguf_are_found_wherever_they_stand(written: Path, version: int) -> None:
    """Before or after a vocabulary, which is stepped over and counted."""
    first, *rest = figures(FIGURES)
    written.write_bytes(made_of(NAME, first, VOCABULARY, SCORES, *rest, version=version) + bytes(64))
    found = header(written)
    counts = {"tokenizer.ggml.tokens": 3, "tokenizer.ggml.scores": 5000}
    assert (found.architecture, found.figures) == ("llama", {**FIGURES, **counts})


@pytest.mark.rule("R2.41")
def test_a_vocabulary_may_be_longer_than_one_read(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts on the border of two reads, and texts that are longer than a read."""
    monkeypatch.setattr(headers, "_READ_BYTES", 50)
    words = ["x" * (number * 7 % 130) for number in range(300)]
    vocabulary = list_of(TEXT, len(words), b"".join(map(text, words)))
    written.write_bytes(made_of(pair("t.tokens", LIST, vocabulary), *figures(FIGURES)))
    assert header(written).figures == {"t.tokens": 300, **FIGURES}


@pytest.mark.rule("R2.41")
def test_a_list_has_a_figure_for_each_layer(written: Path) -> None:
    heads = pair("llama.attention.head_count_kv", LIST, list_of(I32, 3, struct.pack("<3i", 4, 16, -8)))
    written.write_bytes(made_of(*figures({}), heads))
    assert header(written).figures == {"attention.head_count_kv": (4, 16, 0)}


@pytest.mark.rule("R2.41")
def test_a_tensor_ends_where_the_next_begins(written: Path) -> None:
    """In any order, with a type that nobody knows; the last one ends with the file."""
    rows = tensor("b", 8, 4, offset=32, kind=999) + tensor("a", 7, offset=0) + tensor("c", 1, offset=96)
    content = made_of(tensors=3) + rows
    written.write_bytes(content + bytes(-len(content) % 32) + bytes(100))
    assert header(written).tensors == (
        Tensor("b", 999, (8, 4), 64),
        Tensor("a", 0, (7,), 32),
        Tensor("c", 0, (1,), 4),
    )


def test_tensors_at_one_place_count_once(written: Path) -> None:
    content = made_of(tensors=3) + tensor("a", 8) + tensor("b", 8) + tensor("c", 8, offset=32)
    written.write_bytes(content + bytes(-len(content) % 32) + bytes(64))
    assert [each.size for each in header(written).tensors] == [32, 0, 32]


def test_a_file_of_another_kind_has_no_header(written: Path) -> None:
    written.write_bytes(b"GGML" + bytes(100))
    assert read_header(written) is None
    written.write_bytes(b"")
    assert read_header(written) is None


MANY = struct.pack("<Q", 0) * 300_000
HOSTILE = {
    "another version": (made_of(*figures(FIGURES), version=9), "unknown version"),
    "cut": (made_of(*figures(FIGURES))[:60], "ends early"),
    "a key without an end": (
        made_of(struct.pack("<Q", 2**63)),
        "a key or name has 9223372036854775808 bytes",
    ),
    "a text without an end": (
        made_of(pair("a.b", TEXT, struct.pack("<Q", 2**64 - 1))),
        "longer than the file",
    ),
    "a list without an end": (made_of(pair("a.b", LIST, list_of(U64, 2**61, b""))), "longer than the file"),
    "texts without an end": (
        made_of(pair("a.b", LIST, list_of(TEXT, 2**63, text("")))),
        "more than 2000000 texts",
    ),
    "too few texts": (made_of(pair("a.b", LIST, list_of(TEXT, 9, text("")))), "ends early"),
    "a long text in a list": (
        made_of(pair("a.b", LIST, list_of(TEXT, 1, struct.pack("<Q", 2**63)))),
        "longer than the file",
    ),
    "a list of lists": (made_of(pair("a.b", LIST, list_of(LIST, 1, list_of(U8, 1, b"1")))), "list of lists"),
    "an unknown kind": (made_of(pair("a.b", 99, b"")), "unknown kind 99"),
    "an unknown kind in a list": (made_of(pair("a.b", LIST, list_of(99, 1, b""))), "list of lists"),
    "more pairs than there are": (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**63), "9223372036854775808 keys"),
    "a million keys": (b"GGUF" + struct.pack("<IQQ", 3, 0, 10**6) + MANY, "1000000 keys"),
    "tensors without an end": (made_of(tensors=2**63), "9223372036854775808 tensors"),
    "fewer tensors than said": (made_of(tensors=9) + tensor("a", 1), "ends early"),
    "a tensor of many dimensions": (made_of(tensors=1) + tensor("a", *range(5)), "5 dimensions"),
    "a tensor beyond the end": (made_of(tensors=1) + tensor("a", 1, offset=2**62), "do not fit"),
}


@pytest.mark.rule("R2.40")
@pytest.mark.parametrize(("content", "reason"), HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_header_is_refused(written: Path, content: bytes, reason: str) -> None:
    """With the reason, and without the memory that it asks for."""
    written.write_bytes(content)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(UnreadableHeader, match=reason):
        read_header(written)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024, "KiB"


def test_impossible_figures_are_none(written: Path) -> None:
    """Also lists with more figures than layers can have."""
    negative = pair("a.block_count", I32, struct.pack("<i", -5))
    large = pair("a.embedding_length", U64, struct.pack("<Q", 2**60))
    wide = pair("a.scores", LIST, list_of(U8, 5000, bytes(5000)))
    written.write_bytes(made_of(negative, large, wide))
    assert header(written).figures == {"a.scores": 5000}


def test_the_lists_of_a_header_are_kept_up_to_a_limit(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(headers, "MAX_FIGURES", 5)
    lists = [pair(f"a.{name}", LIST, list_of(U8, 3, b"123")) for name in "bc"]
    written.write_bytes(made_of(*lists))
    assert header(written).figures == {"a.b": (49, 50, 51), "a.c": 3}


VALID = (
    made_of(*figures(FIGURES), VOCABULARY, SCORES, NAME, tensors=2)
    + tensor("a", 2)
    + tensor("b", 3, offset=8)
)


@given(st.binary(max_size=300))
def test_no_bytes_break_the_reader(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    _read_or_refuse(tmp_path_factory, b"GGUF" + struct.pack("<IQQ", 3, 0, 5) + content)


@given(st.integers(4, len(VALID) - 1), st.binary(min_size=1, max_size=9), st.booleans())
def test_no_change_of_a_true_header_breaks_the_reader(
    tmp_path_factory: pytest.TempPathFactory, position: int, change: bytes, cut: bool
) -> None:
    content = VALID[:position] + change + (b"" if cut else VALID[position + len(change) :])
    _read_or_refuse(tmp_path_factory, content)


def _read_or_refuse(folder: pytest.TempPathFactory, content: bytes) -> None:
    path = folder.getbasetemp() / "any.gguf"
    path.write_bytes(content)
    try:
        found = header(path)
    except UnreadableHeader:
        return
    assert sum(tensor.size for tensor in found.tensors) <= len(content)
    fit.estimate(ModelFiles(len(content), header=found), fit.load_options({}))


@pytest.mark.rule("R2.40")
def test_a_header_that_is_refused_leaves_the_size(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The reason is in the log; the need is that of a file without figures."""
    put(tmp_path, "m.gguf", 0)
    (tmp_path / "m.gguf").write_bytes(made_of(tensors=2**63))
    found = measure(tmp_path, defined("m.gguf"))
    assert (found.weights, found.header) == (24, None)
    assert "m.gguf is refused: it has 9223372036854775808 tensors" in caplog.text


def test_a_header_that_goes_on_and_on_is_refused_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A list of long texts had us read the whole file, again for each decision."""
    with open(tmp_path / "m.gguf", "wb") as file:
        file.write(made_of(pair("tokens", 9, struct.pack("<IQ", 8, 300))))
        for _ in range(300):
            file.write(struct.pack("<Q", 1024 * 1024))
            file.seek(1024 * 1024, os.SEEK_CUR)
        file.write(bytes(8))
    read = Mock(wraps=read_header)
    monkeypatch.setattr(sizes, "read_header", read)
    for _ in range(2):
        assert measure(tmp_path, defined("m.gguf")).header is None
    read.assert_called_once()
    assert caplog.text.count("m.gguf is refused: its header has more than 268435456 bytes") == 1


CONFIG = {
    "model_type": "qwen3",
    "num_hidden_layers": 4,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "sliding_window": 4096,
    "max_window_layers": "text",
}


@pytest.mark.rule("R2.41")
def test_a_config_has_the_same_figures(tmp_path: Path) -> None:
    """A window counts for the layers that slide; in a model with images the text's part counts."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    found = read_config(path)
    assert found is not None
    assert (found.architecture, found.figures) == (
        "qwen3",
        {**FIGURES_OF_CONFIG, "attention.key_length": 128},
    )
    kinds = ["sliding_attention", "full_attention", "linear_attention", "full_attention"]
    path.write_text(json.dumps({"text_config": {**CONFIG, "layer_types": kinds}}))
    found = read_config(path)
    assert found is not None
    assert found.figures["attention.sliding_window"] == 4096
    assert found.figures["attention.sliding_window_pattern"] == (1, 0, 0, 0)
    assert found.figures["attention.head_count_kv"] == (8, 8, 0, 8)
    assert read_config(tmp_path / "absent.json") is None


FIGURES_OF_CONFIG = {
    "block_count": 4,
    "embedding_length": 1024,
    "attention.head_count": 16,
    "attention.head_count_kv": 8,
}


@pytest.mark.parametrize("content", ["[" * 9000, "{", "[]", '{"text_config": 3}', "[" + " " * 2**20 + "]"])
def test_a_config_that_is_none_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(UnreadableHeader, match="it is"):
        read_config(tmp_path / "config.json")


def test_a_config_in_another_encoding_hides_no_depth() -> None:
    """In UTF-16 the limit of the depth took an escaped quote for the end of a string."""
    content = '["\\"", ' + "[" * 9000 + "]" * 9001
    for encoding in ("utf-8", "utf-16", "utf-16-le", "utf-32"):
        with pytest.raises(UnreadableHeader, match="it is"):
            headers.parse_json(content.encode(encoding))
    assert headers.parse_json('["\\""]'.encode("utf-8-sig")) == ['"']


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
    assert measure(tmp_path, one) == ModelFiles(weights=100, payload=123, projector=100, adapters=23)


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


@pytest.mark.parametrize("name", ["x-00001-of-00000.gguf", "x-00007-of-00003.gguf", "x-01001-of-01200.gguf"])
def test_a_file_with_an_impossible_number_is_no_shard(tmp_path: Path, name: str) -> None:
    """It was none of its own shards: it counted as unused, so it could be deleted, and had no size."""
    put(tmp_path, name, 10)
    assert sizes.shards(tmp_path / name) == [tmp_path / name]
    assert measure(tmp_path, defined(name)) == ModelFiles(10, 10)
    assert FilesInUse.of(tmp_path, [defined(name)]).has(name)


def test_only_so_many_files_of_a_folder_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(5):
        put(tmp_path, f"many/{number}.bin", 10)
    monkeypatch.setattr(sizes, "MAX_FILES", 3)
    assert measure(tmp_path, defined("many")).weights == 30


@pytest.mark.rule("R2.40", "R2.41")
def test_a_gguf_of_the_folder_is_read(tmp_path: Path) -> None:
    content = made_of(*figures(FIGURES))
    (tmp_path / "m.gguf").write_bytes(content)
    found = asyncio.run(Sizes(tmp_path).of(defined("m.gguf")))
    assert found.header is not None
    assert found == ModelFiles(len(content), len(content), found.header)
    assert found.header.figures == FIGURES
    assert measure(tmp_path, defined("m.gguf")).header is found.header, "it is read once"


def test_headers_of_many_models_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From 65 files on, each request of the page of models read them all again."""
    read = Mock(wraps=read_header)
    monkeypatch.setattr(sizes, "read_header", read)
    for number in range(80):
        (tmp_path / f"{number}.gguf").write_bytes(made_of(*figures(FIGURES)))
    for _ in range(2):
        for number in range(80):
            assert measure(tmp_path, defined(f"{number}.gguf")).header is not None
    assert read.call_count == 80


@pytest.mark.rule("R2.41")
def test_the_parts_of_a_model_have_the_figures_of_the_first_and_the_tensors_of_all(tmp_path: Path) -> None:
    first = made_of(*figures(FIGURES), tensors=1) + tensor("blk.0.a", 4)
    second = made_of(tensors=1) + tensor("blk.1.a", 8)
    for number, content in enumerate((first, second), 1):
        padded = content + bytes(-len(content) % 32) + bytes(32)
        (tmp_path / f"m-0000{number}-of-00002.gguf").write_bytes(padded)
    found = measure(tmp_path, defined("m-00001-of-00002.gguf")).header
    assert found is not None
    assert found.figures == FIGURES
    assert [(each.name, each.size) for each in found.tensors] == [("blk.0.a", 32), ("blk.1.a", 32)]


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
        measured._calls.limit = 60
        last = asyncio.create_task(measured.of(defined("m")))
        await asyncio.sleep(0)
        goes_on.set()
        return await last

    assert asyncio.run(scenario()) == ModelFiles(weights=5)
    assert looks == ["m"]
    assert sizes.MEASURE_LIMIT == 10


def test_two_texts_of_one_name_have_sizes_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A preview of another text is measured beside the load of the stored one."""
    both = threading.Barrier(2)

    def slow(folder: Path, definition: Definition) -> ModelFiles:
        both.wait(60)
        return ModelFiles(weights=len(definition.model))

    monkeypatch.setattr(sizes, "measure", slow)
    measured = Sizes(tmp_path, limit=60)
    texts = [parse_definition(PLAIN | {"parameters": {"model": model}}, "x") for model in ("a", "abc")]

    async def scenario() -> list[ModelFiles]:
        return await asyncio.gather(*map(measured.of, texts))

    assert [files.weights for files in asyncio.run(scenario())] == [1, 3]


@pytest.mark.parametrize(
    "other", ["loop.gguf", "n" * 300], ids=["a loop of links", "a name that is too long"]
)
def test_a_path_that_cannot_be_a_file_counts_as_none(tmp_path: Path, other: str) -> None:
    (tmp_path / "loop.gguf").symlink_to("loop.gguf")
    (tmp_path / "m.gguf").write_bytes(b"12345")
    definition = parse_definition(PLAIN | {"parameters": {"model": "m.gguf"}, "tokenizer": other}, "x")
    assert sizes.measure(tmp_path, definition).weights == 5
    assert [size for _, size in sizes.files_of(tmp_path, definition)] == [5]


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
