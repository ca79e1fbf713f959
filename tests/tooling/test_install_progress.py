"""`make`'s installing step: says how many packages are left, and passes pip's failure on."""

import importlib.util
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COUNT = 12
ARGUMENTS = ["install", "--disable-pip-version-check", "--progress-bar=off", "--require-hashes", "--no-deps"]
PIP = """
import sys
assert sys.argv[1:] == {argv!r}, sys.argv
for number in range({count}):
    print(f"Collecting p{{number}}==1")
    print("  Downloading a wheel")
print({last!r})
sys.exit({code})
"""


def install(tmp_path: Path, last: str, code: int) -> subprocess.CompletedProcess[str]:
    """The installing step with a pip that plays a script."""
    (tmp_path / "lock.txt").write_text("".join(f"p{n}==1 \\\n    --hash=sha256:0\n" for n in range(COUNT)))
    (tmp_path / "pip").mkdir()
    (tmp_path / "pip" / "__init__.py").touch()
    script = PIP.format(argv=[*ARGUMENTS, "-r", "lock.txt"], count=COUNT, last=last, code=code)
    (tmp_path / "pip" / "__main__.py").write_text(script)
    return subprocess.run(
        [sys.executable, str(ROOT / "requirements" / "progress.py"), "lock.txt"],
        cwd=tmp_path,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_it_says_how_many_packages_are_left(tmp_path: Path) -> None:
    done = install(tmp_path, "Installing collected packages: one, two, three", 0)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "make: lock.txt: downloading package 10 of 12",
        "make: lock.txt: downloading package 12 of 12",
        "make: lock.txt: unpacking 3 packages",
        "make: installed the 12 packages of lock.txt",
    ]


def test_unpacking_shows_progress_without_a_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Review R16: unpacking 88 packages took 88 s without a word."""
    spec = importlib.util.spec_from_file_location("progress", ROOT / "requirements" / "progress.py")
    assert spec
    assert spec.loader
    step = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(step)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    (tmp_path / "lock.txt").write_text("")
    progress = step.Progress(str(tmp_path / "lock.txt"))
    progress.hear("Installing collected packages: " + ", ".join(f"p{number}" for number in range(25)))
    for number in range(25):
        (tmp_path / f"p{number}.dist-info").mkdir()
        progress.look()
    for _ in range(step.SILENT_LOOKS):
        progress.look()
    lines = [line.rpartition(": ")[2] for line in capsys.readouterr().out.splitlines()]
    assert lines == ["unpacking 25 packages", *(f"unpacking package {done} of 25" for done in (10, 20, 25))]


def test_a_failure_is_passed_on_with_pips_words(tmp_path: Path) -> None:
    done = install(tmp_path, "ERROR: no such thing", 3)
    assert done.returncode == 3
    assert done.stderr.splitlines()[-1] == "ERROR: no such thing"
    assert "installed the" not in done.stdout
