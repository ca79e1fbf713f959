"""The wheel in `dist/`, which the server offers to other machines (`make package`).

It is built only if what is in it has changed, so `make run` can ask each time. The new one replaces the old
one in a single step: a running server offers one or the other.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from localai_cluster.embedded.resources import SetupError
from localai_cluster.embedded.ui import ROOT, fingerprint

DIST = ROOT / "dist"
FOLDERS = ("localai_cluster", "nodes", "operations", "templates", "static/site", "static/dist")
FILES = ("pyproject.toml", "README.md", "requirements/wheel.py", "requirements/worker.txt")


def build() -> bool:
    """Builds the wheel unless it is there and of these sources; returns whether it did. `SetupError`."""
    inside = [
        path
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    ]
    stamp, wanted = DIST / ".built", fingerprint([*inside, *(ROOT / name for name in FILES)], ROOT)
    found = set(DIST.glob("localai_cluster-*.whl"))
    if found and stamp.is_file() and stamp.read_text(encoding="utf-8") == wanted:
        return False
    DIST.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=DIST, prefix=".draft-") as draft:
        (wheel,) = _built(Path(draft))
        wheel.replace(DIST / wheel.name)
    for other in found - {DIST / wheel.name}:
        other.unlink(missing_ok=True)
    stamp.write_text(wanted, encoding="utf-8")
    return True


def _built(folder: Path) -> list[Path]:
    """The wheel that pip builds there from what is installed, without a network."""
    words = ("--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check", "--quiet")
    done = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", str(ROOT), *words, "--wheel-dir", str(folder)],
        check=False,
        text=True,
        capture_output=True,
        stdin=subprocess.DEVNULL,
    )
    if done.returncode:
        said = (done.stdout + done.stderr).strip().splitlines() or ["no output"]
        raise SetupError(f"The worker package cannot be built: {said[-1]}.", "Run `make install ui`.")
    return list(folder.glob("*.whl"))


def main() -> int:
    """`make package`; returns its exit code."""
    try:
        build()
    except (SetupError, OSError) as error:
        sys.stderr.write(f"package: {error}\n")
        return 1
    for wheel in sorted(DIST.glob("localai_cluster-*.whl")):
        sys.stdout.write(f"{wheel.relative_to(ROOT)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
