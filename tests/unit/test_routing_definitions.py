"""Model definitions from files: what is accepted, what is loaded, what happens to a broken one."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from localai_cluster.rpc.messages import options_from_mapping
from nodes.definitions.files import Folder, Unusable, load_options, parse, read, revision

PLAIN = {"name": "mini", "backend": "numpy", "parameters": {"model": "mini.bin"}, "embeddings": True}


class Clock:
    """A monotonic clock that stands until it is moved."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    def _write(name: str, content: Any) -> Path:
        path = tmp_path / name
        path.write_text(content if isinstance(content, str) else yaml.safe_dump(content), encoding="utf-8")
        return path

    return _write


def test_what_is_loaded_comes_from_the_file() -> None:
    """R2.3: the mapping covers LocalAI's names and adds the reference's own defaults, nothing else."""
    document = PLAIN | {
        "context_size": 512, "f16": True, "mmap": False, "threads": 3, "options": ["a:b"], "main_gpu": 0,
        "flash_attention": False, "rope_freq_base": 1, "parameters": {"model": "m", "temperature": 0.2},
        "description": "any text", "template": {"chat": "x"},
    }  # fmt: skip
    options = load_options(parse(document, "x.yaml"))
    assert options == {
        "Model": "m", "NBatch": 512, "NGPULayers": 99999999, "MMap": False, "FlashAttention": "off",
        "Threads": 3, "Embeddings": True, "ContextSize": 512, "F16Memory": True, "Options": ["a:b"],
        "MainGPU": "0", "RopeFreqBase": 1.0,
    }  # fmt: skip
    assert options_from_mapping(options).Model == "m"


def test_revision_changes_with_what_is_loaded_only() -> None:
    """The revision depends on the stored definition's engine and options, not on its name or its remarks."""
    first = revision(parse(PLAIN, "x.yaml"))
    assert revision(parse(PLAIN | {"name": "other", "description": "x"}, "y.yaml")) == first
    assert revision(parse(PLAIN | {"backend": "other"}, "x.yaml")) != first
    assert revision(parse(PLAIN | {"context_size": 1}, "x.yaml")) != first


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("- a\n- b", "not a mapping"),
        ("name: x\nbackend: y", "parameters"),
        ("name: x\nparameters: {model: m}", "backend"),
        ("name: ''\nbackend: y\nparameters: {model: m}", "name"),
        ("name: 5\nbackend: y\nparameters: {model: m}", "name"),
        ("name: x\nbackend: y\nparameters: {model: m}\nthreads: many", "threads"),
        ("name: x\nbackend: y\nparameters: {model: m}\nthreads: true", "threads"),
        ("name: x\nbackend: y\nparameters: {model: m}\nthreads: 99999999999", "threads"),
        ("name: x\nbackend: y\nparameters: {model: m}\nembeddings: 5", "embeddings"),
        ("name: x\nbackend: y\nparameters: {model: m}\noptions: [1]", "options"),
        ("name: [", "YAML"),
        ("name: !!python/object/apply:os.system [ls]", "YAML"),
        ("a: &a [x]\nb: [*a, *a]", "aliases"),
        ("#" * 300_000, "larger"),
        ("[" * 20_000, "nested"),
    ],
)
def test_unusable_files_say_why(write: Callable[..., Path], content: str, reason: str) -> None:
    """Every file is checked; the reason names the setting or the syntax."""
    with pytest.raises(Unusable, match=reason):
        read(write("x.yaml", content))


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
DOCUMENTS = (
    SCALARS | st.lists(SCALARS, max_size=3) | st.dictionaries(st.text(max_size=8), SCALARS, max_size=4)
)


@given(DOCUMENTS)
def test_no_document_breaks_the_loader(document: Any) -> None:
    """Whatever YAML may give, it is a definition or `Unusable`."""
    for candidate in (document, PLAIN | {"options": document}, PLAIN | {"threads": document}):
        try:
            options_from_mapping(load_options(parse(candidate, "x.yaml")))
        except Unusable:
            continue


def test_one_broken_file_does_not_take_the_others_down(
    write: Callable[..., Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A broken file and a second file of the same name are logged once, by file name and reason."""
    write("a.yaml", PLAIN)
    write("b.yaml", PLAIN | {"backend": "second"})
    write("c.yml", "name: [")
    write("d.txt", "not looked at")
    clock = Clock()
    folder = Folder(tmp_path, clock)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert [(d.name, d.backend, d.source) for d in folder.all()] == [("mini", "numpy", "a.yaml")]
            clock.now += 2
    assert sorted(str(record.args[0]) for record in caplog.records if isinstance(record.args, tuple)) == [
        "b.yaml",
        "c.yml",
    ]


def test_changes_are_seen_within_a_second(write: Callable[..., Path], tmp_path: Path) -> None:
    """The folder is looked at once a second; new, changed and removed files are noticed then."""
    clock = Clock()
    folder = Folder(tmp_path / "later", clock)
    assert folder.find("mini") is None
    (tmp_path / "later").mkdir()
    path = write("later/a.yaml", PLAIN)
    assert folder.find("mini") is None, "looked at less than a second ago"
    clock.now += 1
    first = folder.find("mini")
    assert first is not None
    path.write_text(yaml.safe_dump(PLAIN | {"context_size": 7}))
    clock.now += 1
    second = folder.find("mini")
    assert second is not None
    assert load_options(second)["ContextSize"] == 7
    path.unlink()
    clock.now += 1
    assert folder.find("mini") is None
