"""What a ruling was made from, as sections of a log, and read back from them. Pure.

Hosts are a section for all rules; the replicas of each model are one, and what else concerns its rule is too.
"""

from collections.abc import Mapping
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
        failure = fleet.failures.get(name)
        found[f"replicas/{name}"] = Section(replicas[name])
        found[f"rule/{name}"] = Section(
            {
                "now": now,
                "tick": tick,
                "demand": tuple((column, getattr(demand, column)) for column in _DEMAND),
                "selector": None if demand.selector is None else tuple(sorted(demand.selector.items())),
                "loads": fleet.loads.get(name, 0),
                "pinned": frozenset(map(str, fleet.pinned.get(name, ()))),
                "failure": (failure.at, failure.error) if failure else None,
                "defined": fleet.defined is None or name in fleet.defined,
            }
        )
    return found


def seen(state: State, model: str) -> tuple[Fleet, Demand, datetime, bool] | None:
    """What `plan` was given, as far as it concerns the rule of one model; None if nothing of it is there."""
    told = state.get(f"rule/{model}")
    if not told:
        return None
    failure = told["failure"]
    labels = state.get("labels of hosts", {})
    fleet = Fleet(
        hosts=[
            Host(UUID(id), name, dict(labels.get(id, ())), slots)
            for id, (name, slots) in state.get("hosts", {}).items()
        ],
        replicas=[_replica(model, row) for row in state.get(f"replicas/{model}", {}).values()],
        loads={model: told["loads"]},
        pinned={model: frozenset(map(UUID, told["pinned"]))},
        failures={} if failure is None else {model: Failure(datetime.fromisoformat(failure[0]), failure[1])},
        defined=frozenset({model}) if told["defined"] else frozenset(),
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
