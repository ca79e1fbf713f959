"""Order of the tree: lines by folder, no import cycle, no class name twice in an app, no shared private name.

`python -m tests.checks.house [folder]` prints files and lines of each room, every cycle between modules of
the product, every class name that one app defines twice, and every private name that a class shares with one
of its base classes; it exits 1 on any of the three. Imports inside functions count, since a cycle does not go
away by being late; those under `TYPE_CHECKING` do not.
"""

import ast
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

PACKAGES = ("localai_cluster", "nodes", "operations")
SCRIPTS = ("tests", "static/src")
SUFFIXES = {".py", ".ts", ".tsx", ".css", ".proto"}
LEFT_OUT = {"__pycache__", "generated", "node_modules", "schema.ts"}
DJANGO_NAMES = {"Command", "Meta", "Migration"}
"""Names that Django itself gives these classes."""
_TYPE_CHECKING = {"TYPE_CHECKING", "typing.TYPE_CHECKING"}


@dataclass
class House:
    """What was found."""

    rooms: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Folder -> files, lines."""
    cycles: list[list[str]] = field(default_factory=list)
    """Modules that import each other, directly or through others."""
    doubles: dict[tuple[str, str], list[str]] = field(default_factory=dict)
    """(app, class name) -> where it is defined."""
    collisions: list[str] = field(default_factory=list)
    """Private names that a class shares with a base class."""


def survey(root: Path) -> House:
    """Everything about the tree under `root`."""
    trees = dict(_product(root))
    return House(_rooms(root), cycles(imports(trees)), doubles(trees), collisions(trees))


def product_files(root: Path) -> list[Path]:
    """Return the Python files of the product, without migrations and generated code."""
    files = [path for package in PACKAGES for path in _files(root / package, {".py"})]
    return [path for path in files if "migrations" not in path.parts]


def _product(root: Path) -> Iterator[tuple[str, ast.Module]]:
    """(module, syntax tree) of every module of the product; a package is called like its folder."""
    for package in PACKAGES:
        for path in _files(root / package, {".py"}):
            name = ".".join(path.relative_to(root).with_suffix("").parts)
            text = path.read_text(encoding="utf-8")
            yield name.removesuffix(".__init__"), ast.parse(text, str(path), type_comments=False)


def _files(folder: Path, suffixes: set[str]) -> list[Path]:
    found = (path for path in folder.rglob("*") if path.suffix in suffixes and path.is_file())
    return sorted(path for path in found if not LEFT_OUT & set(path.relative_to(folder).parts))


def _rooms(root: Path) -> dict[str, tuple[int, int]]:
    files: Counter[str] = Counter()
    lines: Counter[str] = Counter()
    for base in (*PACKAGES, *SCRIPTS):
        for path in _files(root / base, SUFFIXES):
            # A room is a folder directly under its base; what lies deeper belongs to it.
            inside = path.relative_to(root / base).parts[:-1][:1]
            room = "/".join((base, *inside))
            files[room] += 1
            lines[room] += len(path.read_text(encoding="utf-8").splitlines())
    return {room: (files[room], lines[room]) for room in sorted(files)}


def imports(trees: Mapping[str, ast.Module]) -> dict[str, set[str]]:
    """Module -> the modules of the product that it imports; packages on the way are not counted.

    `from package import name` is an import of the module `package.name` if there is one, else of `package`.
    """
    packages = {name.rpartition(".")[0] for name in trees}
    found: dict[str, set[str]] = {}
    for module, tree in trees.items():
        home = module if module in packages else module.rpartition(".")[0]
        named = (name for node in _imports(tree) for name in _targets(node, home, trees))
        found[module] = {name for name in named if name != module}
    return found


def _imports(node: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    if isinstance(node, ast.Import | ast.ImportFrom):
        yield node
        return
    children: Iterable[ast.AST] = ast.iter_child_nodes(node)
    if isinstance(node, ast.If) and ast.unparse(node.test) in _TYPE_CHECKING:
        children = node.orelse
    for child in children:
        yield from _imports(child)


def _targets(node: ast.Import | ast.ImportFrom, home: str, known: Iterable[str]) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names if alias.name in known)
        return
    base = node.module or ""
    if node.level:
        parts = home.split(".")
        base = ".".join([*parts[: len(parts) - node.level + 1], *([base] if base else [])])
    for alias in node.names:
        inner = f"{base}.{alias.name}"
        if inner in known:
            yield inner
        elif base in known:
            yield base


def cycles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """The groups of modules that reach each other (Tarjan), each in the order of names."""
    number: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        number[name] = lowest[name] = len(number)
        stack.append(name)
        for other in graph.get(name, ()):
            if other not in number:
                visit(other)
            if other in stack:
                lowest[name] = min(lowest[name], lowest[other])
        if lowest[name] == number[name]:
            start = stack.index(name)
            if len(stack) - start > 1:
                found.append(sorted(stack[start:]))
            del stack[start:]

    for name in graph:
        if name not in number:
            visit(name)
    return sorted(found)


def doubles(trees: Mapping[str, ast.Module]) -> dict[tuple[str, str], list[str]]:
    """Class names that an app defines more than once, with the places; nested classes count."""
    places: dict[tuple[str, str], list[str]] = defaultdict(list)
    for module, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and node.name not in DJANGO_NAMES:
                places[app_of(module), node.name].append(f"{module}:{node.lineno}")
    return {key: found for key, found in sorted(places.items()) if len(found) > 1}


def app_of(module: str) -> str:
    """The app of a module: the worker is a program, the accounts an app of their own."""
    for app in ("localai_cluster.worker", "localai_cluster.accounts"):
        if module == app or module.startswith(f"{app}."):
            return app
    return module.partition(".")[0]


def collisions(trees: Mapping[str, ast.Module]) -> list[str]:
    """Private methods and attributes of a class that a base class, direct or not, has too.

    Both are one attribute of the object, so whoever names the second one replaces the first without a word. A
    method that subclasses are meant to replace is public.
    """
    names = {module: _local_names(module, tree) for module, tree in trees.items()}
    classes = {
        f"{module}.{node.name}": (module, node)
        for module, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }

    def ancestors(name: str) -> Iterator[str]:
        module, node = classes[name]
        for base in node.bases:
            expression = base.value if isinstance(base, ast.Subscript) else base
            target = _resolve(ast.unparse(expression), module, names)
            if target in classes and target != name:
                yield target
                yield from ancestors(target)

    private = {name: _private_names(node) for name, (_, node) in classes.items()}
    return sorted(
        f"{name}.{shared} is also a name of its base class {base}"
        for name in classes
        for base in set(ancestors(name))
        for shared in private[name] & private[base]
    )


def _local_names(module: str, tree: ast.Module) -> dict[str, str]:
    """Name in a module -> its full name, of the classes that it defines and of what it imports from ours."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            found[node.name] = f"{module}.{node.name}"
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return found


def _resolve(expression: str, module: str, names: Mapping[str, Mapping[str, str]]) -> str:
    """Return the full name of a class; a package may import the class from one of its modules."""
    seen: set[str] = set()
    while True:
        first, _, rest = expression.partition(".")
        target = names[module].get(first, first) + (f".{rest}" if rest else "")
        module, _, expression = target.rpartition(".")
        if target in seen or names.get(module, {}).get(expression, target) == target:
            return target
        seen.add(target)


def _private_names(node: ast.ClassDef) -> set[str]:
    """Names with one underscore that the class defines, or that its methods assign to `self`.

    `self._count += 1` does not define a name: there must be one.
    """
    found = {item.name for item in node.body if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)}
    for item in ast.walk(node):
        if isinstance(item, ast.Assign | ast.AnnAssign):
            targets = item.targets if isinstance(item, ast.Assign) else [item.target]
            for target in (part for whole in targets for part in ast.walk(whole)):
                if isinstance(target, ast.Name) and item in node.body:
                    found.add(target.id)
                elif isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self":
                    found.add(target.attr)
    return {name for name in found if name.startswith("_") and not name.startswith("__")}


def report(house: House) -> list[str]:
    """What to print."""
    width = max(map(len, house.rooms), default=0)
    lines = [f"{'room':<{width}}  files   lines"]
    rows = [*house.rooms.items(), ("all", _sum(house.rooms.values()))]
    lines += [f"{room:<{width}}  {files:>5}  {count:>6}" for room, (files, count) in rows]
    lines += [f"cycle: {' <-> '.join(cycle)}" for cycle in house.cycles]
    lines += [f"{app} defines {name} twice: {', '.join(at)}" for (app, name), at in house.doubles.items()]
    lines += house.collisions
    counts = f"{len(house.cycles)} import cycles, {len(house.doubles)} class names defined twice"
    return [*lines, f"{counts}, {len(house.collisions)} private names shared with a base class"]


def _sum(rooms: Iterable[tuple[int, int]]) -> tuple[int, int]:
    files, lines = zip(*rooms, strict=True)
    return sum(files), sum(lines)


def main() -> int:
    """Prints the report; 1 if there is a cycle, a double name or a shared private name."""
    house = survey(Path(sys.argv[1] if len(sys.argv) > 1 else "."))
    print("\n".join(report(house)))
    return 1 if house.cycles or house.doubles or house.collisions else 0


if __name__ == "__main__":
    sys.exit(main())
