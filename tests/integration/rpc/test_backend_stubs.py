"""Generating the gRPC stubs: fast when nothing changed, whole when two builds meet."""

import subprocess
import sys
from pathlib import Path

from localai_cluster.rpc.build import build_stubs

ROOT = Path(__file__).resolve().parents[3]


def test_a_second_build_does_nothing(tmp_path: Path) -> None:
    """Only a changed contract or compiler is a reason to generate."""
    target = tmp_path / "stubs"
    assert build_stubs(target)
    before = {path.name: path.stat().st_mtime_ns for path in target.iterdir()}
    assert not build_stubs(target)
    assert {path.name: path.stat().st_mtime_ns for path in target.iterdir()} == before


def test_a_lost_file_comes_back(tmp_path: Path) -> None:
    """The stamp alone proves nothing."""
    assert build_stubs(tmp_path)
    (tmp_path / "backend_pb2_grpc.py").unlink()
    assert build_stubs(tmp_path)
    assert (tmp_path / "backend_pb2_grpc.py").exists()


def test_builds_side_by_side_leave_importable_modules(tmp_path: Path) -> None:
    """Two processes may build at once; no one ever imports half a file, nothing is left behind."""
    command = [sys.executable, "-m", "localai_cluster.rpc.build", str(tmp_path)]
    builds = [subprocess.Popen(command, cwd=ROOT) for _ in range(3)]
    assert [process.wait(timeout=360) for process in builds] == [0, 0, 0]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ".stamp",
        "backend_pb2.py",
        "backend_pb2_grpc.py",
    ]
    use = "import backend_pb2_grpc; print(backend_pb2_grpc.BackendStub.__name__)"
    done = subprocess.run(
        [sys.executable, "-c", use], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "BackendStub"
