"""Files that an import has recorded and left at their sources count as if they were here."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from nodes.definitions.files import Definition, parse_file
from nodes.definitions.headers import Header, parse_figures
from nodes.definitions.recorded_files import (
    MAX_HEADER_BYTES,
    RecordedFile,
    files_at_source,
    parse_entries,
)
from nodes.definitions.sizes import measure
from nodes.loading.source_files import Unsendable, plan_files
from tests.support import hub

SHA256 = "a" * 64
HEADER = parse_figures(hub.gguf(), 10**9)


def recorded(path: str, size: int = 1000, header: Header | None = None) -> RecordedFile:
    return RecordedFile(path, f"https://h/{path}", size, SHA256, header)


def definition_of(model: str, *files: RecordedFile, **options: Any) -> Definition:
    text = json.dumps({"name": "m", "backend": "llama-cpp", "parameters": {"model": model}, **options})
    return replace(parse_file(text.encode(), "definitions/m"), files={file.path: file for file in files})


def test_a_record_survives_its_row() -> None:
    file = recorded("a/m.gguf", header=HEADER)
    (read,) = parse_entries(json.loads(json.dumps([file.as_entry()]))).values()
    assert replace(read, header=None) == replace(file, header=None)
    assert read.header is not None
    assert (read.header.architecture, dict(read.header.figures)) == (HEADER.architecture, HEADER.figures)


def test_a_header_that_is_too_large_for_a_row_is_left_out() -> None:
    """The size alone counts then; a hostile file decides how many figures it has."""
    header = Header("x", {f"key{number}": 1 for number in range(MAX_HEADER_BYTES // 8)})
    assert "header" not in recorded("m.gguf", header=header).as_entry()


def test_a_header_that_postgresql_cannot_store_is_left_out() -> None:
    """A key with NUL."""
    assert "header" not in recorded("m.gguf", header=Header("x", {"key\0": 1})).as_entry()


def test_a_file_that_cannot_be_seen_is_not_at_its_source(tmp_path: Path) -> None:
    """Else a folder whose server is down would be downloaded again. A link to itself cannot be followed."""
    (tmp_path / "a").symlink_to("a")
    with pytest.raises(OSError, match="symbolic links"):
        files_at_source(tmp_path, {"a/m.gguf": recorded("a/m.gguf")})


@pytest.mark.parametrize(
    "entry",
    [
        None,
        7,
        {},
        {"path": "a", "source": "https://h/a", "size": "9", "sha256": SHA256},
        {"path": "a", "source": "https://h/a", "size": 9},
        {"path": "a", "source": "https://h/a", "size": 9, "sha256": ""},
        {"path": "a", "source": "", "size": 9, "sha256": SHA256},
        {"path": "a", "source": "https://h/a", "size": 0, "sha256": SHA256},
        {"path": "a", "source": "https://h/a", "size": 9, "sha256": SHA256, "header": []},
    ],
)
def test_an_entry_of_another_version_does_not_break_the_others(entry: object) -> None:
    good = recorded("b").as_entry()
    assert parse_entries([entry, good]).keys() == {"b"}


def test_the_record_of_a_load_keeps_them() -> None:
    """`load_info` stores the definition of the last load as JSON, for a row that cannot be read."""
    definition = definition_of("m.gguf", recorded("m.gguf", header=HEADER))
    again = msgspec.convert(msgspec.json.decode(msgspec.json.encode(definition)), Definition)
    assert again.files["m.gguf"].size == 1000
    assert again.files["m.gguf"].header is not None


@pytest.mark.rule("R2.41")
def test_shards_of_which_some_are_here_count_together(tmp_path: Path) -> None:
    """Without the tensors of all of them, none count: the sum would be too small."""
    names = [f"m-{number:05}-of-00003.gguf" for number in (1, 2, 3)]
    (tmp_path / names[1]).write_bytes(b"x" * 500)
    definition = definition_of(names[0], recorded(names[0], header=HEADER), recorded(names[2], 70))
    files = measure(tmp_path, definition)
    assert files.weights == files.payload == 1570
    assert files.header is not None
    assert (files.header.figures, files.header.tensors) == (HEADER.figures, ())
    plan = plan_files(tmp_path, "m", definition.options, definition.files)
    assert sorted(plan.files) == names
    assert sorted(plan.at_source) == [names[0], names[2]]


@pytest.mark.rule("R2.41")
def test_a_repository_whose_weights_are_at_their_source(tmp_path: Path) -> None:
    (tmp_path / "repo").mkdir()
    (tmp_path / "repo" / "config.json").write_text('{"num_hidden_layers": 4, "hidden_size": 64}')
    definition = definition_of("repo", recorded("repo/model.safetensors", 5000))
    files = measure(tmp_path, definition)
    assert (files.weights, files.payload) == (5000, 5000 + 43)
    assert files.header is not None
    assert files.header.figures["block_count"] == 4
    (named,) = plan_files(tmp_path, "m", definition.options, definition.files).named
    assert (named.relative, {file.relative for file in named.files}) == (
        "repo",
        {"repo/config.json", "repo/model.safetensors"},
    )


def test_companions_and_values_of_options_are_planned_too(tmp_path: Path) -> None:
    """R2.57: also relative to the folder of the model, which is not here."""
    files = [recorded(path) for path in ("a/m.gguf", "a/p.gguf", "a/vae.bin")]
    definition = definition_of("a/m.gguf", *files, mmproj="a/p.gguf", options=["vae_path:vae.bin"])
    plan = plan_files(tmp_path, "m", definition.options, definition.files)
    assert plan.at_source == ["a/m.gguf", "a/p.gguf", "a/vae.bin"]
    assert plan.missing == {}
    assert measure(tmp_path, definition).projector == 1000


def test_a_file_that_is_here_is_not_at_its_source(tmp_path: Path) -> None:
    """Also one that was changed here: it is sent as it is."""
    (tmp_path / "m.gguf").write_bytes(b"changed")
    definition = definition_of("m.gguf", recorded("m.gguf"))
    plan = plan_files(tmp_path, "m", definition.options, definition.files)
    assert (plan.at_source, plan.files["m.gguf"].size) == ([], 7)
    assert measure(tmp_path, definition).weights == 7


def test_a_folder_that_is_a_link_out_of_the_models_folder_is_refused(tmp_path: Path) -> None:
    models, outside = tmp_path / "models", tmp_path / "outside"
    models.mkdir()
    outside.mkdir()
    (models / "a").symlink_to(outside)
    definition = definition_of("a/m.gguf", recorded("a/m.gguf"))
    with pytest.raises(Unsendable, match="leads out"):
        plan_files(models, "m", definition.options, definition.files)
