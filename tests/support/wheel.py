"""The wheel, built and installed as an operator would, but without a network: requirements are linked."""

import os
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from email.parser import Parser
from hashlib import sha256
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
NAME = "localai-cluster"
LOCK = "localai_cluster/bundled/worker.txt"
NO_SERVERS = {
    "DATABASE_URL": "postgresql://user@127.0.0.1:1/name",
    "REDIS_URL": "redis://127.0.0.1:1/0",
    "LOCALAI_NATS_URL": "nats://127.0.0.1:1",
}
"""Settings with servers at addresses where none runs."""


@dataclass(frozen=True)
class Installed:
    """A virtual environment with only the wheel and its requirements."""

    folder: Path

    def program(self, name: str) -> Path:
        """Return the path of a program in the environment."""
        return self.folder / "bin" / name

    def run(self, *argv: str, **env: str) -> subprocess.CompletedProcess[str]:
        """Run one of its programs in an empty folder, with only this environment."""
        place = self.folder / "cwd"
        place.mkdir(exist_ok=True)
        command = [str(self.program(argv[0])), *argv[1:]]
        return subprocess.run(
            command, cwd=place, env={"PATH": os.defpath, **env}, capture_output=True, text=True, check=False
        )


def build(folder: Path) -> Path:
    """Build the wheel as `make package` does; skip the test without built pages."""
    if not (ROOT / "static" / "dist" / "manifest.json").exists():
        pytest.skip("the pages are not built: run `make ui`")
    _pip("wheel", str(ROOT), "--no-build-isolation", "--wheel-dir", str(folder))
    (wheel,) = folder.glob("*.whl")
    return wheel


def install(wheel: Path, folder: Path, extra: str = "") -> Installed:
    """Install the wheel in a new environment, with its requirements for `extra` linked from this one."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    made = Installed(folder)
    _pip("--python", str(made.program("python")), "install", str(wheel))
    (packages,) = folder.glob("lib/python*/site-packages")
    (info,) = packages.glob("*.dist-info")
    for found in closure(metadata.PathDistribution(info).requires or (), extra):
        link(found, packages)
    return made


def pack(folder: Path) -> None:
    """Pack the worker's requirements as wheels again, for pip on a machine without internet."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    folder.mkdir()
    for found in closure(declared, ""):
        tag = Parser().parsestr(found.read_text("WHEEL") or "")["Tag"]
        name = re.sub(r"[-_.]+", "_", found.metadata["Name"]).lower()
        with zipfile.ZipFile(folder / f"{name}-{found.version}-{tag}.whl", "w") as archive:
            for file in found.files or ():
                if ".." not in file.parts and file.suffix != ".pyc":
                    archive.write(str(found.locate_file(file)), str(file))


def relock(wheel: Path, packages: Path) -> None:
    """Replace the hashes in the product's wheel by those of these packages, which are not from an index."""
    lock = "".join(
        "{}=={} --hash=sha256:{}\n".format(*path.name.split("-")[:2], sha256(path.read_bytes()).hexdigest())
        for path in sorted(packages.iterdir())
    )
    with zipfile.ZipFile(wheel) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in (files | {LOCK: lock.encode()}).items():
            archive.writestr(name, content)


def _pip(*words: str) -> None:
    command = [sys.executable, "-m", "pip", *words, "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*command, "--disable-pip-version-check"], check=True)


def closure(requirements: Iterable[str], extra: str) -> Iterator[metadata.Distribution]:
    """Yield all distributions that the requirements need, each once."""
    waiting = [(Requirement(text), extra) for text in requirements]
    seen: set[tuple[str, str]] = set()
    while waiting:
        needed, given = waiting.pop()
        if needed.marker is not None and not needed.marker.evaluate({"extra": given}):
            continue
        name = re.sub(r"[-_.]+", "-", needed.name).lower()
        for wanted in ("", *needed.extras):
            if (name, wanted) in seen:
                continue
            seen.add((name, wanted))
            found = metadata.distribution(name)
            assert needed.specifier.contains(found.version, prereleases=True), (needed, found.version)
            waiting += [(Requirement(text), wanted) for text in found.requires or ()]
            if (name, "") == (name, wanted):
                yield found


def link(found: metadata.Distribution, packages: Path) -> None:
    """Link every file of a distribution into another environment."""
    for file in found.files or ():
        if ".." not in file.parts:
            place = packages / file
            place.parent.mkdir(parents=True, exist_ok=True)
            place.symlink_to(str(found.locate_file(file)))
