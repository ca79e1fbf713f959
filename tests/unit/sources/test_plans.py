"""Paths and files that an import may write."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localai_cluster.kit import names
from localai_cluster.kit.errors import InvalidInput
from nodes.sources.plans import ImportPlan, SourceFile, check_files, check_path, from_payload

FILE = SourceFile("hf/a/b/x.gguf", "hf://a/b@c/x.gguf", 10, "0" * 64)


@pytest.mark.parametrize(
    "path",
    [
        "../x", "a/../x", "/x", "a//x", "", ".", "a/.", ".hidden", "a/.git/x", "a\\b", "x\0y", "a\nb",
        "a\u202eb", "con", "a/NUL.txt", "a/x:y", "x.", " x", "x ", "m.yaml", "M.YML", "a/x.sha256", "a" * 200,
        "a/" * 20 + "x", "é" * 120,
    ],
)  # fmt: skip
def test_a_path_that_must_not_be_written_is_refused(path: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        check_path(path)
    assert refused.value.field == "text"


@pytest.mark.parametrize("path", ["x.gguf", "hf/a/b/x-00001-of-00002.gguf", "a/config.yaml", "Modèle/x.bin"])
def test_a_plain_path_is_kept(path: str) -> None:
    assert check_path(path) == path


@given(st.text(max_size=60))
def test_a_path_stays_in_the_folder_or_is_refused(path: str) -> None:
    try:
        check_path(path)
    except InvalidInput:
        return
    assert {"", ".", ".."}.isdisjoint(path.split("/"))
    assert not names.find_unprintable(path)


@pytest.mark.parametrize(
    "files",
    [
        [FILE, replace(FILE, path="hf/A/B/X.gguf")],
        [FILE, FILE],
        [replace(FILE, path="hf/a"), FILE],
        [replace(FILE, sha256="xyz")],
        [replace(FILE, size=-1)],
        [replace(FILE, url="https://example.com/" + "x" * 5000)],
        [replace(FILE, path=f"f{number}") for number in range(2001)],
    ],
)
def test_files_that_cannot_be_there_together_are_refused(files: list[SourceFile]) -> None:
    with pytest.raises(InvalidInput):
        check_files(files)


def test_a_plan_survives_its_payload() -> None:
    plan = ImportPlan("m", "name: m\n", (FILE, replace(FILE, path="y", sha256="")), "import", "hf://a/b")
    assert from_payload(plan.as_payload()) == plan
