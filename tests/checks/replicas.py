"""The life of a replica: one package writes its columns, and its document is generated.

`python -m tests.checks.replicas` finds every other module of the product that writes a column of the life or
deletes rows of replicas, by the ORM or in SQL, and exits with 1 if there is one. With `--write` it makes
`docs/replica-states.md` from the table in `nodes/replicas/states.py`; a test fails if that is not up to date.
"""

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Set
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "docs" / "replica-states.md"
OWNER = Path("nodes/replicas")
"""The package that writes the columns."""
LIFE = frozenset(
    {"owner_kind", "owner_id", "owner_fence", "next_stop_at", "stop_attempts", "stop_error", "start_answered"}
)
"""Columns of the life that no other table has."""
SHARED = frozenset({"phase", "reason", "deadline", "claimed_until", "started_at"})
"""Columns of the life whose names other tables have too. `operations` writes only its own tables: it must not
import `nodes`."""
_OTHERS = {
    "nodes/backends/upgrade_state.py": {"claimed_until"},
    "nodes/decisions/decision_log.py": {"reason"},
    "nodes/definitions/store.py": {"reason"},
    "nodes/gateway/gateway.py": {"deadline"},
    "nodes/scheduling/passes.py": {"reason"},
}
"""By module: columns of other tables, or attributes, that it writes under these names."""
_PRODUCT = ("localai_cluster", "nodes", "operations")
_WRITES = {
    "claim_rows",
    "update",
    "create",
    "bulk_create",
    "bulk_update",
    "update_or_create",
    "get_or_create",
    "delete",
    "save",
}
_SQL = re.compile(
    r"\b(UPDATE|(INSERT|MERGE)\s+INTO|DELETE\s+FROM|COPY|TRUNCATE(\s+TABLE)?)\s+(ONLY\s+)?(\"?\w+\"?\.)?\"?node_models\b",
    re.IGNORECASE,
)
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
    from nodes.models.replica import STATE_BY_PHASE
    from nodes.replicas.states import PHASES

    yield "| phase | state | owner | at its deadline | moved on by | reasons | meaning |\n"
    yield "|---|---|---|---|---|---|---|\n"
    for phase, rules in PHASES.items():
        owners = ", ".join(sorted(rules.owners)) or "none"
        reasons = ", ".join(sorted(f"`{reason}`" for reason in rules.reasons))
        state = STATE_BY_PHASE[phase] or "none"
        cells = (f"`{phase}`", state, owners, rules.deadline, rules.ends, reasons, rules.description)
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
                columns = LIFE if package == "operations" else LIFE | SHARED - _OTHERS.get(str(where), set())
                found = found_in(path.read_text("utf-8"), columns)
                yield from (f"{where}:{line}: {what}" for line, what in found)


def found_in(source: str, columns: Set[str] = LIFE | SHARED) -> Iterator[tuple[int, str]]:
    """Yield line and description of each write of the life of a replica, or of these columns, in a module."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and _SQL.search(node.value):
            yield node.lineno, "SQL that writes node_models"
        if isinstance(node, ast.Call) and (name := _called(node)) in _WRITES:
            # A model's `save` takes no columns by keyword: that of a service may take a `reason`.
            words = {word.arg for word in node.keywords} if name != "save" else set()
            written = sorted(columns & words)
            if written or re.search(r"\bNodeModel\b|\breplicas\b", _receiver(node)):
                yield node.lineno, f"{name}() of {', '.join(written) or 'replicas'}"
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign):
            for target in _targets(node):
                if isinstance(target, ast.Attribute) and target.attr in columns and not _is_own(target):
                    yield node.lineno, f"assigns {target.attr}"


def _called(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _receiver(call: ast.Call) -> str:
    """Return the expressions that may be the rows: what the method belongs to, and the first argument."""
    owner = [call.func.value] if isinstance(call.func, ast.Attribute) else []
    return " ".join(ast.unparse(rows) for rows in [*owner, *call.args[:1]])


def _targets(node: ast.Assign | ast.AugAssign | ast.AnnAssign) -> Iterator[ast.expr]:
    for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
        yield from target.elts if isinstance(target, ast.Tuple | ast.List) else [target]


def _is_own(target: ast.Attribute) -> bool:
    return isinstance(target.value, ast.Name) and target.value.id == "self"


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
