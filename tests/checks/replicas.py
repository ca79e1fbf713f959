"""The life of a replica: one package writes its columns, and its document is generated.

`python -m tests.checks.replicas` finds every other module of the product that writes a column of the life or
deletes rows of replicas, by the ORM or in SQL, and exits with 1 if there is one. With `--write` it makes
`docs/replica-states.md` from the table in `nodes/replicas/states.py`; a test fails if that is not up to date.
"""

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "docs" / "replica-states.md"
OWNER = Path("nodes/replicas")
"""The package that writes the columns."""
LIFE = frozenset(
    {"owner_kind", "owner_id", "owner_fence", "next_stop_at", "stop_attempts", "stop_error", "start_answered"}
)
"""Columns of the life that no other table has."""
_PRODUCT = ("localai_cluster", "nodes", "operations")
_WRITES = {
    "update",
    "create",
    "bulk_create",
    "bulk_update",
    "update_or_create",
    "get_or_create",
    "delete",
    "save",
}
_SQL = re.compile(r"\b(UPDATE|INSERT\s+INTO|DELETE\s+FROM)\s+\"?node_models\b", re.IGNORECASE)
_HEAD = """# States of a replica

Generated from `nodes/replicas/states.py` by `python -m tests.checks.replicas --write`; do not edit.

One row is one engine, from its reserved slot to the confirmed end of its process. `state`, which clients see,
follows from the phase. Each phase has an owner that moves it on and, except `serving`, a deadline.

```mermaid
stateDiagram-v2
"""


def document() -> str:
    """Return the whole text."""
    lines = [_HEAD, *_diagram(), "```\n", "\n## Phases\n\n", *_phases(), "\n## Events\n\n", *_events()]
    return "".join(lines)


def _diagram() -> Iterator[str]:
    from nodes.replicas.states import TRANSITIONS

    edges: dict[tuple[str, str], list[str]] = defaultdict(list)
    for event, transition in TRANSITIONS.items():
        for source, target in transition.follows.items():
            if source != target:
                edges[source or "[*]", target or "[*]"].append(event)
    for (before, after), events in edges.items():
        yield f"    {before} --> {after}: {', '.join(events)}\n"


def _phases() -> Iterator[str]:
    from nodes.models.replica import STATE_OF
    from nodes.replicas.states import PHASES

    yield "| phase | state | owner | at its deadline | moved on by | reasons | meaning |\n"
    yield "|---|---|---|---|---|---|---|\n"
    for phase, rules in PHASES.items():
        owners = ", ".join(sorted(rules.owners)) or "none"
        reasons = ", ".join(sorted(f"`{reason}`" for reason in rules.reasons))
        state = STATE_OF[phase] or "none"
        cells = (f"`{phase}`", state, owners, rules.deadline, rules.ends, reasons, rules.sentence)
        yield f"| {' | '.join(cells)} |\n"


def _events() -> Iterator[str]:
    from nodes.replicas.states import TRANSITIONS

    yield "| event | from | to | meaning |\n|---|---|---|---|\n"
    for event, transition in TRANSITIONS.items():
        rows: dict[str | None, list[str]] = defaultdict(list)
        for source, target in transition.follows.items():
            rows[target].append(source or "none")
        for after, sources in rows.items():
            yield f"| `{event}` | {', '.join(sources)} | {after or 'none'} | {transition.sentence} |\n"


def strays(root: Path = ROOT) -> Iterator[str]:
    """Yield every place outside the package that writes the life of a replica."""
    for package in _PRODUCT:
        for path in sorted((root / package).rglob("*.py")):
            where = path.relative_to(root)
            if OWNER not in where.parents and "migrations" not in where.parts:
                yield from (f"{where}:{line}: {what}" for line, what in found_in(path.read_text("utf-8")))


def found_in(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and description of each write of the life of a replica in a module."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and _SQL.search(node.value):
            yield node.lineno, "SQL that writes node_models"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _WRITES:
            text = ast.unparse(node.func.value)
            if re.search(r"\bNodeModel\b|\breplicas\b", text):
                yield node.lineno, f"{node.func.attr}() of replicas"
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                if isinstance(target, ast.Attribute) and target.attr in LIFE:
                    yield node.lineno, f"assigns {target.attr}"


def main(*options: str) -> int:
    """Return 1 if another module writes the columns; with `--write`, write the document."""
    if "--write" in options:
        import django

        import tests.support.environment  # noqa: F401

        django.setup()
        DOCUMENT.write_text(document(), encoding="utf-8")
    found = list(strays())
    print("\n".join(found) or "nodes/replicas alone writes the life of a replica")
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
