"""The document `docs/node-states.md`, made from the table in `nodes/registry/states.py`.

`python -m tests.checks.states` writes it; a test fails if the committed one is not what would be written.
The diagram shows every change of status that facts which can really come about allow; the facts are walked
from a first registration and from an enrolment.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import fields
from itertools import product
from pathlib import Path
from typing import Any, get_args

from nodes.registry.states import (
    STATUSES,
    TRANSITIONS,
    Absence,
    Drain,
    Event,
    Facts,
    Refusal,
    apply,
    status_of,
)

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "node-states.md"
FIRST = (Facts(), Facts(approved=True, offline="left"))
"""What a node is made with: by its first registration, by an enrolment."""

_VALUES: dict[str, tuple[Any, ...]] = {"drained": get_args(Drain), "offline": get_args(Absence)}
_REPLICAS = {
    "kept": "kept",
    "unlisted": "removed, except those that the worker lists",
    "idle": "removed if idle, else at the end of the drain",
    "all": "removed",
    "forgotten": "removed, and their engines are not accounted for any more",
}
_HEAD = """# States of a node

Generated from `nodes/registry/states.py` by `python -m tests.checks.states`; do not edit.

Facts describe a node, each with actor, time and reason. `status` follows from them: the first that applies of
{statuses}. Events change facts and never set a status directly.

- `approved`, `rejected`, `revoked`: an admin's decisions. `pending` means not approved.
- `identified`: it has credentials, its own secret or the shared token.
- `drained`: by an `admin`, or by its worker itself (`own`).
- `offline`: it is `silent` until the next heartbeat, or it has `left` until the next registration.
- `unhealthy`: it did not answer a command.

```mermaid
stateDiagram-v2
"""


def everything() -> Iterator[Facts]:
    """Every combination of facts, also those that never come about."""
    names = [field.name for field in fields(Facts)]
    for values in product(*(_VALUES.get(name, (False, True)) for name in names)):
        yield Facts(**dict(zip(names, values, strict=True)))


def reachable() -> set[Facts]:
    """The facts that come about."""
    found, waiting = set(FIRST), list(FIRST)
    while waiting:
        facts = waiting.pop()
        for event in Event:
            after = apply(event, facts)
            if not isinstance(after, Refusal) and after not in found:
                found.add(after)
                waiting.append(after)
    return found


def document() -> str:
    """The whole text."""
    lines = [_HEAD.format(statuses=", ".join(STATUSES)), *_diagram(), "```\n"]
    lines += ["\n## Events\n\n", *_table()]
    return "".join(lines)


def _diagram() -> Iterator[str]:
    yield f"    [*] --> {status_of(FIRST[0])}: first registration\n"
    yield f"    [*] --> {status_of(FIRST[1])}: enrolled\n"
    edges: dict[tuple[str, str], set[str]] = defaultdict(set)
    for facts, event in product(reachable(), Event):
        after = apply(event, facts)
        if not isinstance(after, Refusal) and status_of(after) != status_of(facts):
            edges[status_of(facts), status_of(after)].add(event.value)
    for before, after_status in sorted(edges, key=lambda edge: tuple(map(STATUSES.index, edge))):
        names = ", ".join(sorted(edges[before, after_status]))
        yield f"    {before} --> {after_status}: {names}\n"
    yield f"    {STATUSES[0]} --> [*]: {Event.DEREGISTERED} (from every state)\n"


def _table() -> Iterator[str]:
    yield "| event | allowed in | refused if | facts | replicas | meaning |\n|---|---|---|---|---|---|\n"
    for event, row in TRANSITIONS.items():
        allowed = [status for status in STATUSES if status in row.allowed]
        states = "any" if len(allowed) == len(STATUSES) else ", ".join(allowed)
        effect, replicas = _effect(event), _REPLICAS[row.replicas]
        cells = (f"`{event}`", states, row.guard_reason, effect, replicas, row.sentence)
        yield f"| {' | '.join(cells)} |\n"


def _effect(event: Event) -> str:
    changes: dict[str, set[tuple[Any, Any]]] = defaultdict(set)
    for facts in everything():
        after = apply(event, facts)
        if isinstance(after, Refusal):
            continue
        for field in fields(Facts):
            before, value = getattr(facts, field.name), getattr(after, field.name)
            if value != before:
                changes[field.name].add((before, value))
    return "; ".join(_changed(name, pairs) for name, pairs in changes.items()) or "none"


def _changed(name: str, pairs: set[tuple[Any, Any]]) -> str:
    after = {value for _, value in pairs}
    others = set(_VALUES.get(name, (False, True))) - after
    if len(after) == 1 and {before for before, _ in pairs} == others:
        return f"`{name}` = {_word(after.pop())}"
    return f"`{name}`: " + ", ".join(f"{_word(a)} becomes {_word(b)}" for a, b in sorted(pairs))


def _word(value: Any) -> str:
    return {True: "yes", False: "no", "": "no"}.get(value, str(value))


if __name__ == "__main__":
    DOCUMENT.write_text(document(), encoding="utf-8")
