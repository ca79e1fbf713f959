"""The decision of a load as sections of a log, and read back from them. Pure.

What all loads see of the nodes is one section; what only this model has there (slots taken, labels asked for,
concurrency groups, files) are sections of the model, and what only this load knows is one of the load. So two
loads of different models share what they can.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from operator import attrgetter
from typing import Any
from uuid import UUID

from nodes.placement.choose import Candidate, Need
from nodes.placement.evict import Eviction, Guard, Resident
from nodes.placement.explain import FleetView
from nodes.placement.sections import Section, State
from nodes.placement.selector import Selector
from nodes.placement.setbacks import Setback
from nodes.placement.settle import LoadQuestion, Occupants

_EVER = datetime.max.replace(tzinfo=UTC)
_Read = Callable[[Any], Any]

_OF_MODEL: Mapping[str, _Read] = {
    "taken": frozenset,
    "labels": lambda pairs: frozenset(map(tuple, pairs)),
    "conflicts": frozenset,
    "brought": lambda size: size or 0,
    "has_backend": bool,
}
"""What of a node is another thing for each model, a section each; and how it is read back."""
_READ: Mapping[str, _Read] = {"id": UUID}
"""How a field of a node is read back that is neither plain nor a set (of tuples); see `_plain`."""
_COLUMNS = tuple(one.name for one in fields(Candidate) if one.name not in _OF_MODEL)
_values, _name = attrgetter(*_COLUMNS), attrgetter("name")
_RESIDENT = tuple(one.name for one in fields(Resident))
_resident = attrgetter(*_RESIDENT)
_RESIDENT_READ: Mapping[str, _Read] = {
    "id": UUID,
    "node_id": UUID,
    "last_used": datetime.fromisoformat,
    "loaded_at": lambda at: None if at is None else datetime.fromisoformat(at),
}


@dataclass(frozen=True)
class SeenByLoad:
    """A load's question as it was, with what could make room for it; `over` if its time had come."""

    question: LoadQuestion
    occupants: Occupants | None
    over: bool


def sections(
    load: str, model: str, question: LoadQuestion, room: Eviction | None = None, *, over: bool = False
) -> dict[str, Section]:
    """What the load with this id saw and knew when it was decided."""
    view = question.view
    whole = not view.restricted
    found = {
        # Readers of a later version may know other columns.
        "columns": Section({"node": _COLUMNS, "resident": _RESIDENT}, whole=False),
        # By name: hashing a thousand UUIDs costs more than comparing all that the nodes have.
        "nodes": Section(dict(zip(map(_name, view.nodes), map(_values, view.nodes), strict=True)), whole),
        f"load/{load}": Section(_known(question, room, over)),
    }
    for name in _OF_MODEL:
        # What a node does not have is only worth a word where it may have had it.
        rows = {node.name: value for node in view.nodes if (value := getattr(node, name)) or not whole}
        found[f"{name}/{model}"] = Section(rows, whole)
    return found | (_of_room(room) if room is not None else {})


def _known(question: LoadQuestion, room: Eviction | None, over: bool) -> dict[str, Any]:
    view, selector = question.view, question.view.selector
    known = {node.id for node in view.nodes} if view.setbacks or view.resting else set()
    guard = room.guard if room is not None else None
    return {
        "need": tuple(asdict(view.need).items()),
        "selector": (selector.model, selector.labels),
        "setbacks": tuple((id, one.times) for id, one in view.setbacks.items() if id in known),
        "resting": frozenset(map(str, view.resting & known)),
        "nodes": frozenset(map(_name, view.nodes)) if view.restricted else None,
        "refusing": frozenset(map(str, question.refusing)),
        "evicts": question.evicts,
        "over": over,
        "guard": None if guard is None else (guard.model_name, guard.now),
    }


def _of_room(room: Eviction) -> dict[str, Section]:
    """The replicas on the nodes that were looked at, and what the rules say of their models."""
    if room.guard is None:
        return {}
    by_node: dict[UUID, list[Resident]] = {id: [] for id in room.looked_at}
    for one in sorted(room.among, key=lambda one: one.id):
        if one.node_id in by_node:
            by_node[one.node_id].append(one)
    guard = room.guard
    models = {one.model_name for one in room.among}
    rules = {
        name: (guard.loaded.get(name, 0), guard.minimums.get(name), name in guard.spread) for name in models
    }
    return {
        "residents": Section(
            {id: tuple(map(_resident, found)) for id, found in by_node.items()}, whole=False
        ),
        "rules": Section(rules, whole=False),
    }


def known(state: State, load: str, model: str) -> SeenByLoad | None:
    """What the load saw and knew; None if the state has nothing of it."""
    told = state.get(f"load/{load}")
    if not told:
        return None
    name, labels = told["selector"]
    selector = Selector(name, None if labels is None else frozenset(map(tuple, labels)))
    view = FleetView(
        nodes=list(_nodes(state, model, told["nodes"])),
        need=Need(**{key: _plain(value) for key, value in told["need"]}),
        selector=selector,
        setbacks={UUID(id): Setback(times, _EVER) for id, times in told["setbacks"]},
        resting=frozenset(map(UUID, told["resting"])),
        restricted=told["nodes"] is not None,
    )
    question = LoadQuestion(view, frozenset(map(UUID, told["refusing"])), told["evicts"])
    return SeenByLoad(question, _occupants(state, told["guard"]), told["over"])


def _nodes(state: State, model: str, only: Iterable[str] | None) -> Iterable[Candidate]:
    rows, columns = state.get("nodes", {}), state["columns"]["node"]
    of_model = {name: state.get(f"{name}/{model}", {}) for name in _OF_MODEL}
    for node in rows if only is None else only:
        own = {name: read(of_model[name].get(node, ())) for name, read in _OF_MODEL.items()}
        yield Candidate(**_read(columns, rows[node], _COLUMNS, _READ), **own)


def _occupants(state: State, guard: tuple[str, str] | None) -> Occupants | None:
    if guard is None:
        return None
    columns = state["columns"]["resident"]
    rows = (row for found in state.get("residents", {}).values() for row in found)
    rules = state.get("rules", {})
    return Occupants(
        [Resident(**_read(columns, row, _RESIDENT, _RESIDENT_READ)) for row in rows],
        Guard(
            guard[0],
            datetime.fromisoformat(guard[1]),
            loaded={name: loaded for name, (loaded, _, _) in rules.items()},
            minimums={name: least for name, (_, least, _) in rules.items() if least is not None},
            spread={name for name, (_, _, spread) in rules.items() if spread},
        ),
    )


def _read(
    columns: Iterable[str], row: Iterable[Any], expected: Iterable[str], reads: Mapping[str, _Read]
) -> dict[str, Any]:
    """The columns of a row that are still known; others have their default."""
    told = dict(zip(columns, row, strict=True))
    return {name: reads.get(name, _plain)(told[name]) for name in expected if name in told}


def _plain(value: Any) -> Any:
    """A list was a set, of tuples where it has lists; everything else is as it was."""
    if not isinstance(value, list):
        return value
    return frozenset(tuple(one) if isinstance(one, list) else one for one in value)
