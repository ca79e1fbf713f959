"""The assembled gallery: complete folders, an index that points to them, nothing done twice."""

import os
import subprocess
import sys
from pathlib import Path

import yaml

from tests.support.backends import ROOT, gallery


def test_the_index_points_to_complete_folders() -> None:
    """The index is LocalAI's format, each `uri` a directory with a run.sh at its top (worker.md 18)."""
    offered = yaml.safe_load((gallery() / "index.yaml").read_text())
    assert {entry["name"] for entry in offered} == {"minilm", "echo"}
    for_tests = yaml.safe_load((gallery() / "tests.yaml").read_text())
    assert {entry["name"] for entry in for_tests} == {"broken"}
    for entry in (*offered, *for_tests):
        folder = Path(entry["uri"])
        assert folder.is_absolute()
        assert os.access(folder / "run.sh", os.X_OK)
        assert entry["version"]


def test_assembling_again_does_nothing() -> None:
    """Nothing changed: no work, no network, and no folder swapped under a worker that copies it."""
    places = [gallery() / name for name in ("minilm", "echo", "broken")]
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
