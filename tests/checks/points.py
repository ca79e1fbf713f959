"""Every commit and message of the packages below goes through a point (`localai_cluster/kit/failpoints.py`).

`python -m tests.checks.points [folder]` prints one line a finding and exits 1 if there is any: a transaction
or a message past the helpers, a write that no registered commit covers, a name that is no literal. `collect`
names all points; `make sweep` kills a process at each.
"""

import ast
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOMS = (
    "operations/ledger",
    "operations/executor",
    "operations/reconcilers",
    "nodes/backends/admission.py",
    "nodes/backends/intents.py",
    "nodes/backends/intent_queue.py",
    "nodes/commands/commands.py",
    "nodes/backends/node_commands.py",
    "nodes/backends/wave_requests.py",
    "nodes/backends/waves.py",
    "nodes/reconcilers/intents.py",
    "nodes/replicas/slots.py",
    "nodes/replicas/unload_requests.py",
)
PACKAGES = ("localai_cluster", "nodes", "operations")
HELPERS = ("localai_cluster/kit/failpoints.py", "localai_cluster/kit/transactions.py")
SUFFIXES = {
    "committed": (":before", ":committed"),
    "wrap_request": (":before", ":sent", ":answered"),
    "wrap_message": (":before", ":sent"),
    "passed": ("",),
}
"""The points that each helper passes."""
_CONDUIT = "point"
"""The parameter through which a caller hands its literal on; it is a question on the bus."""
_WRITES = {
    "bulk_create",
    "bulk_update",
    "create",
    "delete",
    "get_or_create",
    "save",
    "update",
    "update_or_create",
}
_SENDS = {"publish", "request", "ask"}
_MODULES = {Path(room).stem for room in ROOMS} | {"attempts", "target_changes", "progress", "retention"}
_TRANSACTIONS = {"atomic", "commit", "set_autocommit"}


@dataclass(frozen=True)
class Function:
    """One function of the rooms: what it calls, and where it writes."""

    place: str
    name: str
    names: frozenset[str]
    calls: frozenset[str]
    bare: frozenset[str]
    """What it calls outside registered commits."""
    writes: tuple[int, ...]
    """The lines, outside registered commits."""


def collect(root: Path) -> set[str]:
    """The names of all points in the source."""
    found: set[str] = set()
    for path in _sources(root, PACKAGES):
        if path.relative_to(root).as_posix() not in HELPERS:
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call):
                    found |= {name for name, _ in _points(node) if name}
    return found


def check(root: Path) -> list[str]:
    """Every finding under `root`, as `path:line: what`."""
    found: list[str] = []
    functions: list[Function] = []
    for path in _sources(root, PACKAGES):
        name = path.relative_to(root).as_posix()
        if name in HELPERS:
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                found += [f"{name}:{node.lineno}: {what}" for point, what in _points(node) if not point]
    for path in _sources(root, ROOMS):
        name = path.relative_to(root).as_posix()
        tree = ast.parse(path.read_text(encoding="utf-8"))
        found += [f"{name}:{line}: {what}" for line, what in around(tree)]
        functions += _functions(tree, name)
    return sorted(found + _uncovered(functions))


def around(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, what) of each transaction and each message past the helpers."""
    sending = (node for node in ast.walk(tree) if _is_with(node, "wrap_request", "wrap_message"))
    covered = {id(inner) for node in sending for inner in ast.walk(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.alias) and _last(node) in _TRANSACTIONS:
            yield node.lineno, "a transaction of its own: use committed(…)"
        elif isinstance(node, ast.Call) and _sends(node) and id(node) not in covered:
            yield (
                node.lineno,
                "a message around the points: use failpoints.wrap_request(…) or failpoints.wrap_message(…)",
            )


def _last(node: ast.Attribute | ast.alias) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.name


def _sends(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Attribute) and call.func.attr in _SENDS


def _points(call: ast.Call) -> Iterator[tuple[str, str]]:
    """(point, "") of each point that this call passes, or ("", what) of a name that cannot be collected."""
    helper = _name(call.func)
    of_points = isinstance(call.func, ast.Attribute) and _name(call.func.value) == "failpoints"
    if helper in SUFFIXES and call.args and (of_points or helper == "committed"):
        first = call.args[0]
        if isinstance(first, ast.Constant):
            yield from ((f"{first.value!s}{suffix}", "") for suffix in SUFFIXES[helper])
        elif not (isinstance(first, ast.Name) and first.id == _CONDUIT):
            yield "", f"the point of {helper}(…) is not a literal"
    for keyword in call.keywords:
        if keyword.arg == _CONDUIT and isinstance(keyword.value, ast.Constant):
            yield from ((f"{keyword.value.value!s}{suffix}", "") for suffix in SUFFIXES["wrap_request"])


def _functions(tree: ast.Module, place: str) -> Iterator[Function]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            bare = list(_called(node, inside=False))
            writes = tuple(line for called, line in bare if _writes(called))
            named = frozenset(_told(place, one) for one, _ in _called(node, inside=True))
            open_ = frozenset(_told(place, one) for one, _ in bare)
            yield Function(place, node.name, _names(place, node.name), named, open_, writes)


def _names(place: str, name: str) -> frozenset[str]:
    """What a call of this function may look like; a private one is called in its own module."""
    if name.startswith("_"):
        return frozenset({f"{place}:{name}"})
    return frozenset({name, f"{Path(place).stem}.{name}"})


def _told(place: str, called: ast.expr) -> str:
    """A call as one of `_names`: with its module where that stands before it."""
    name = _name(called)
    if name.startswith("_"):
        return f"{place}:{name}"
    module = called.value if isinstance(called, ast.Attribute) else None
    return f"{module.id}.{name}" if isinstance(module, ast.Name) and module.id in _MODULES else name


def _writes(called: ast.expr) -> bool:
    """Whether it is a verb of a queryset or a row, or the ledger's own `update`; a worker's are messages."""
    of_worker = isinstance(called, ast.Attribute) and _name(called.value) == "worker"
    return _name(called) in _WRITES and not of_worker


def _called(node: ast.AST, *, inside: bool) -> Iterator[tuple[ast.expr, int]]:
    """(what, line) of each call of a function, or in a thread for it; `inside`: registered commits too.

    Inner functions are looked at on their own.
    """
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if _is_with(child, "committed") and not inside:
            continue
        if isinstance(child, ast.Call):
            yield child.func, child.lineno
            if _name(child.func) == "in_thread":
                yield child.args[0], child.lineno
        yield from _called(child, inside=inside)


def _uncovered(functions: Sequence[Function]) -> list[str]:
    """The writes that can be reached without a registered commit.

    A step is a function that is called within commits or by other steps only. Functions with the same name
    are judged together, unless the calls name their modules.
    """
    called = {name for one in functions for name in one.calls}
    steps = {one for one in functions if one.names & called}
    while True:
        bare = {name for one in functions if one not in steps for name in one.bare}
        if not (gone := {one for one in steps if one.names & bare}):
            break
        steps -= gone
    return [
        f"{one.place}:{line}: {one.name} writes, and no committed(…) covers it"
        for one in functions
        if one not in steps
        for line in one.writes
    ]


def _is_with(node: ast.AST, *helpers: str) -> bool:
    if not isinstance(node, ast.With | ast.AsyncWith):
        return False
    used = (item.context_expr for item in node.items)
    return any(isinstance(one, ast.Call) and _name(one.func) in helpers for one in used)


def _name(called: ast.expr) -> str:
    if isinstance(called, ast.Attribute):
        return called.attr
    return called.id if isinstance(called, ast.Name) else ""


def _sources(root: Path, rooms: tuple[str, ...]) -> Iterator[Path]:
    for room in rooms:
        base = root / room
        found = [base] if base.is_file() else base.rglob("*.py")
        yield from (p for p in sorted(found) if "migrations" not in p.parts and "generated" not in p.parts)


def main() -> int:
    """Prints the findings; 1 if there are any."""
    found = check(Path(sys.argv[1] if len(sys.argv) > 1 else "."))
    print("\n".join(found) if found else "every commit and message has its point")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
