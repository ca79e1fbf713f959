"""The worker package that `make run` offers: built when what is in it changes, and never half there."""

import shutil
from pathlib import Path

import pytest

from localai_cluster.embedded import build
from localai_cluster.embedded.resources import SetupError


@pytest.fixture
def builds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A project of its own; each build is a wheel with the content of one of its modules."""
    for name in (*build._WHEEL_FILES, *(f"{folder}/some.py" for folder in build._WHEEL_FOLDERS)):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("first")
    made: list[str] = []

    def built(folder: Path) -> list[Path]:
        made.append((tmp_path / "nodes/some.py").read_text())
        wheel = folder / f"localai_cluster-0.{1 + ('newer' in made)}.0-py3-none-any.whl"
        wheel.write_text(made[-1])
        return [wheel]

    monkeypatch.setattr(build, "ROOT", tmp_path)
    monkeypatch.setattr(build, "WHEEL_FOLDER", tmp_path / "dist")
    monkeypatch.setattr(build, "_build_with_pip", built)
    return made


def offered(root: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in (root / "dist").iterdir() if path.name != ".built"}


def test_it_is_built_when_it_is_missing_or_of_other_sources(builds: list[str], tmp_path: Path) -> None:
    assert build.build_wheel()
    assert not build.build_wheel()
    (tmp_path / "nodes/some.py").write_text("changed")
    assert build.build_wheel()
    (tmp_path / "nodes/__pycache__").mkdir()
    (tmp_path / "nodes/__pycache__/some.pyc").write_text("compiled")
    assert not build.build_wheel()
    (tmp_path / "dist/localai_cluster-0.1.0-py3-none-any.whl").unlink()
    assert build.build_wheel()
    assert builds == ["first", "changed", "changed"]
    assert offered(tmp_path) == {"localai_cluster-0.1.0-py3-none-any.whl": "changed"}


def test_a_new_version_replaces_the_old_one(builds: list[str], tmp_path: Path) -> None:
    build.build_wheel()
    (tmp_path / "nodes/some.py").write_text("newer")
    build.build_wheel()
    assert offered(tmp_path) == {"localai_cluster-0.2.0-py3-none-any.whl": "newer"}


def test_a_build_that_fails_leaves_the_old_one(
    builds: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the next one tries again."""
    build.build_wheel()
    (tmp_path / "nodes/some.py").write_text("changed")

    def fails(folder: Path) -> list[Path]:
        (folder / "half.whl").write_text("")
        raise SetupError("The worker package cannot be built: no space.", "Run `make install ui`.")

    with monkeypatch.context() as patched:
        patched.setattr(build, "_build_with_pip", fails)
        with pytest.raises(SetupError, match="no space"):
            build.build_wheel()
    assert offered(tmp_path) == {"localai_cluster-0.1.0-py3-none-any.whl": "first"}
    assert build.build_wheel()


def test_what_is_wrong_is_one_line_with_a_hint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real pip, in a folder that is no project."""
    monkeypatch.setattr(build, "ROOT", tmp_path)
    shutil.rmtree(tmp_path / "dist", ignore_errors=True)
    with pytest.raises(SetupError) as failed:
        build._build_with_pip(tmp_path / "dist")
    assert str(failed.value).startswith("The worker package cannot be built: ")
    assert str(failed.value).endswith("Run `make install ui`.")
    assert "\n" not in str(failed.value)
