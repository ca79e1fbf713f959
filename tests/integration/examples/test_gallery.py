"""The assembled gallery: complete folders, their archives, an index that names them, nothing done twice."""

import hashlib
import os
import runpy
import subprocess
import sys
import tarfile
from pathlib import Path

import yaml

from tests.support.backends import ROOT, gallery


def test_the_index_names_archives_of_complete_folders() -> None:
    """LocalAI's format: each `uri` an archive with a run.sh at its top, and its hash (worker.md 18)."""
    offered = yaml.safe_load((gallery() / "index.yaml").read_text())
    assert {entry["name"] for entry in offered} == {"minilm", "llama-cpp", "echo"}
    for_tests = yaml.safe_load((gallery() / "tests.yaml").read_text())
    assert {entry["name"] for entry in for_tests} == {"broken"}
    for entry in (*offered, *for_tests):
        archive = gallery() / entry["uri"]
        assert archive.parent == gallery()
        assert hashlib.sha256(archive.read_bytes()).hexdigest() == entry["sha256"]
        with tarfile.open(archive) as tar:
            assert tar.getmember("run.sh").mode & 0o111
        assert os.access(gallery() / entry["name"] / "run.sh", os.X_OK)
        assert entry["version"]


def test_the_same_files_give_the_same_archive(tmp_path: Path) -> None:
    """Whenever and by whom they were made: the hash in the index stays."""
    module = runpy.run_path(str(ROOT / "examples/gallery/build.py"))
    hashes = []
    for name, moment in (("one", 1_000_000_000), ("two", 1_700_000_000)):
        folder = tmp_path / name
        (folder / "lib").mkdir(parents=True)
        for file in ("b", "a", "lib/c") if name == "one" else ("lib/c", "a", "b"):
            (folder / file).write_text(file)
            os.utime(folder / file, (moment, moment))
        (folder / module["STAMP"]).write_text(name)
        hashes.append(module["pack"](folder, tmp_path / f"{name}.tar"))
    assert hashes[0] == hashes[1]
    assert (tmp_path / "one.tar").read_bytes() == (tmp_path / "two.tar").read_bytes()


def test_assembling_again_does_nothing() -> None:
    """Nothing changed: no work, no network, and no folder swapped under a worker that copies it."""
    places = [gallery() / name for name in ("minilm", "llama-cpp", "echo", "broken", "minilm.tar")]
    before = [place.stat().st_ino for place in places]
    command = [sys.executable, str(ROOT / "examples/gallery/build.py")]
    offline = {"PATH": os.defpath, "PIP_NO_INDEX": "1"}
    done = subprocess.run(command, env=offline, capture_output=True, text=True, check=True)
    assert done.stdout == ""
    assert [place.stat().st_ino for place in places] == before


def test_model_definitions_name_backends_of_the_gallery() -> None:
    """Every example definition can be served from the example gallery."""
    names = {entry["name"] for entry in yaml.safe_load((gallery() / "index.yaml").read_text())}
    for path in (ROOT / "examples" / "models").glob("*.yaml"):
        definition = yaml.safe_load(path.read_text())
        assert definition["backend"] in names
        assert definition["parameters"]["model"]
        assert definition["name"] == path.stem
