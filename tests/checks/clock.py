"""The part of the clock ban that ruff cannot see: `auto_now`, SQL's own clock, the event loop's clock.

`python -m tests.checks.clock [folder]` prints one line a finding and exits 1 if there is any.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOMS = ("localai_cluster", "nodes", "operations", "tests", "manage.py")
ALLOWED = {"localai_cluster/kit/clock.py", "tests/checks/clock.py", "tests/tooling/test_checks.py"}

_SQL_CLOCK = re.compile(
    r"\b(now|clock_timestamp|statement_timestamp|transaction_timestamp|timeofday)\s*\(\s*\)"
    r"|\bcurrent_(timestamp|time|date)\b|\blocaltime(stamp)?\b",
    re.IGNORECASE,
)
_SQL_WORDS = re.compile(r"\b(select|insert into|update|delete from|where|values)\b", re.IGNORECASE)


def findings(source: str) -> Iterator[tuple[int, str]]:
    """(line, what) of every way to read a clock past `localai_cluster.kit.clock`."""
    tree = ast.parse(source)
    docstrings = {id(node) for node in _docstrings(tree)}
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg in ("auto_now", "auto_now_add"):
            yield node.value.lineno, f"{node.arg}: set the time in the service"
        elif isinstance(node, ast.Attribute) and node.attr == "time" and _is_loop(node.value):
            yield node.lineno, "loop.time(): use clock.monotonic()"
        elif isinstance(node, ast.Constant) and id(node) not in docstrings and _is_sql_clock(node.value):
            yield node.lineno, "SQL reads its own clock: pass the time in"


def _is_sql_clock(value: object) -> bool:
    return isinstance(value, str) and bool(_SQL_WORDS.search(value) and _SQL_CLOCK.search(value))


def _is_loop(value: ast.expr) -> bool:
    if isinstance(value, ast.Call):
        name = value.func.attr if isinstance(value.func, ast.Attribute) else getattr(value.func, "id", "")
        return name in ("get_running_loop", "get_event_loop", "new_event_loop")
    name = value.attr if isinstance(value, ast.Attribute) else getattr(value, "id", "")
    return name in ("loop", "_loop", "event_loop")


def _docstrings(tree: ast.Module) -> Iterator[ast.Constant]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield node.value


def check(root: Path) -> list[str]:
    """Every finding under `root`, as `path:line: what`."""
    found = []
    for room in ROOMS:
        base = root / room
        for path in sorted([base] if base.is_file() else base.rglob("*.py")):
            name = path.relative_to(root).as_posix()
            if name in ALLOWED or "/generated/" in name:
                continue
            found += [f"{name}:{line}: {what}" for line, what in findings(path.read_text(encoding="utf-8"))]
    return found


def main() -> int:
    """Prints the findings; 1 if there are any."""
    found = check(Path(sys.argv[1] if len(sys.argv) > 1 else "."))
    for line in found:
        print(line)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
