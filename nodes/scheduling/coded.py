"""What a ruling was made from, as sections of a log, and read back from them. Pure.

Hosts are a section for all rules; the replicas of each model are one, and what else concerns its rule is too.
"""

from collections.abc import Callable, Mapping
from dataclasses import fields
from datetime import datetime
from operator import attrgetter
from typing import Any
from uuid import UUID

from nodes.placement.sections import Section, State
from nodes.scheduling.picture import Demand, Failure, Fleet, Host, Placed

_PLACED = tuple(one.name for one in fields(Placed) if one.name != "model")
_placed = attrgetter(*_PLACED)
_DEMAND = tuple(one.name for one in fields(Demand) if one.name not in ("selector", "model"))

_Told = Callable[[Fleet, str], Any]
_Read = Callable[[str, Any], Any]


def _failure(model: str, told: Any) -> dict[str, Failure]:
    return {} if told is None else {model: Failure(datetime.fromisoformat(told[0]), told[1])}


_OF_RULE: Mapping[str, tuple[_Told, _Read]] = {
    "loads": (lambda fleet, model: fleet.loads.get(model, 0), lambda model, told: {model: told}),
    "pinned": (
        lambda fleet, model: tuple(sorted(map(str, fleet.pinned.get(model, ())))),
        lambda model, told: {model: frozenset(map(UUID, told))},
    ),
    "failures": (
        lambda fleet, model: (found.at, found.error) if (found := fleet.failures.get(model)) else None,
        _failure,
    ),
    "defined": (
        lambda fleet, model: fleet.defined is None or model in fleet.defined,
        lambda model, told: frozenset({model} if told else ()),
    ),
    "revisions": (
        lambda fleet, model: fleet.revisions.get(model),
        lambda model, told: {} if told is None else {model: told},
    ),
    "pressed": (lambda fleet, model: fleet.pressed.get(model, 0), lambda model, told: {model: told}),
    # Of all models: there are few, and one rule looks at its own replicas only.
    "replacing": (
        lambda fleet, _: tuple(sorted((str(id), lacks) for id, lacks in fleet.replacing.items())),
        lambda _, told: {UUID(id): lacks for id, lacks in told},
    ),
}
"""What of a fleet concerns one rule, besides hosts and replicas: how it is told, and how it is read back."""


def sections(fleet: Fleet, demands: Mapping[str, Demand], now: datetime, *, tick: bool) -> dict[str, Section]:
    """What was seen of these rules."""
    labels = {host.id: tuple(sorted(host.labels.items())) for host in fleet.hosts if host.labels}
    found = {
        "hosts": Section({host.id: (host.name, host.slots) for host in fleet.hosts}),
        "labels of hosts": Section(labels),
    }
    replicas: dict[str, dict[UUID, Any]] = {name: {} for name in demands}
    for row in fleet.replicas:
        if row.model in replicas:
            replicas[row.model][row.id] = _placed(row)
    for name, demand in demands.items():
        found[f"replicas/{name}"] = Section(replicas[name])
        found[f"rule/{name}"] = Section(
            {
                "now": now,
                "tick": tick,
                "demand": tuple((column, getattr(demand, column)) for column in _DEMAND),
                "selector": None if demand.selector is None else tuple(sorted(demand.selector.items())),
                **{field: told(fleet, name) for field, (told, _) in _OF_RULE.items()},
            }
        )
    return found


def seen(state: State, model: str) -> tuple[Fleet, Demand, datetime, bool] | None:
    """What `plan` was given, as far as it concerns the rule of one model; None if nothing of it is there."""
    told = state.get(f"rule/{model}")
    if not told:
        return None
    labels = state.get("labels of hosts", {})
    fleet = Fleet(
        hosts=[
            Host(UUID(id), name, dict(labels.get(id, ())), slots)
            for id, (name, slots) in state.get("hosts", {}).items()
        ],
        replicas=[_replica(model, row) for row in state.get(f"replicas/{model}", {}).values()],
        # One that is not there was not seen yet when this was written.
        **{field: read(model, told[field]) for field, (_, read) in _OF_RULE.items() if field in told},
    )
    return fleet, _demand(model, told), datetime.fromisoformat(told["now"]), told["tick"]


def _replica(model: str, row: list[Any]) -> Placed:
    told = dict(zip(_PLACED, row, strict=True))
    told |= {"id": UUID(told["id"]), "node_id": UUID(told["node_id"])}
    return Placed(model=model, **{**told, "idle_since": datetime.fromisoformat(told["idle_since"])})


def _demand(model: str, told: Mapping[str, Any]) -> Demand:
    columns = dict(told["demand"])
    for name in ("until", "looked_at", "changed_at"):
        if columns[name] is not None:
            columns[name] = datetime.fromisoformat(columns[name])
    selector = None if told["selector"] is None else dict(told["selector"])
    return Demand(model=model, selector=selector, **columns)
