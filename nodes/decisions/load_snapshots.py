"""Encode the decision of a load as sections of a log, and decode it from them. Pure.

The node facts that all loads see are one section. Node facts that only one model sees (slots taken, labels
tested, concurrency groups, files) are sections of the model, and facts that only one load has are a section
of the load. So two loads of different models share most sections.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from operator import attrgetter
from typing import Any
from uuid import UUID

from nodes.decisions.snapshot_log import Section, State
from nodes.placement.choose import Candidate, Need, Selector
from nodes.placement.evict import Eviction, ProtectionRules, Resident
from nodes.placement.explain import FleetView
from nodes.placement.load_decision import EvictionCandidates, LoadQuestion
from nodes.placement.node_backoff import NodeBackoff

_EVER = datetime.max.replace(tzinfo=UTC)
_Read = Callable[[Any], Any]

_PER_MODEL: Mapping[str, _Read] = {
    "taken": frozenset,
    "labels": lambda pairs: frozenset(map(tuple, pairs)),
    "conflicts": frozenset,
    "brought": lambda size: size or 0,
    "has_backend": bool,
}
"""Node fields that differ by model, one section each, and their decoders."""
_READ: Mapping[str, _Read] = {"id": UUID}
"""Decoders of node fields that are neither plain nor a set (of tuples); see `_plain`."""
_COLUMNS = tuple(column.name for column in fields(Candidate) if column.name not in _PER_MODEL)
_values, _name = attrgetter(*_COLUMNS), attrgetter("name")
_RESIDENT = tuple(column.name for column in fields(Resident))
_resident = attrgetter(*_RESIDENT)
_RESIDENT_READ: Mapping[str, _Read] = {
    "id": UUID,
    "node_id": UUID,
    "last_used": datetime.fromisoformat,
    "loaded_at": lambda at: None if at is None else datetime.fromisoformat(at),
}


@dataclass(frozen=True)
class LoadSnapshot:
    """The question of a load at its decision, and the replicas it could evict; `over` if it had expired."""

    question: LoadQuestion
    occupants: EvictionCandidates | None
    over: bool


def encode_load(
    load: str, model: str, question: LoadQuestion, room: Eviction | None = None, *, over: bool = False
) -> dict[str, Section]:
    """Encode all facts that the decision of the load with this id used."""
    view = question.view
    all_nodes = not view.restricted
    result = {
        # Readers of a later version may know other columns.
        "columns": Section({"node": _COLUMNS, "resident": _RESIDENT}, whole=False),
        # By name: hashing a thousand UUIDs costs more than comparing all the nodes' fields.
        "nodes": Section(dict(zip(map(_name, view.nodes), map(_values, view.nodes), strict=True)), all_nodes),
        f"load/{load}": Section(_load_facts(question, room, over)),
    }
    for name in _PER_MODEL:
        # A missing fact is only recorded where it may have existed before.
        rows = {node.name: value for node in view.nodes if (value := getattr(node, name)) or not all_nodes}
        result[f"{name}/{model}"] = Section(rows, all_nodes)
    return result | (_eviction_sections(room) if room is not None else {})


def _load_facts(question: LoadQuestion, room: Eviction | None, over: bool) -> dict[str, Any]:
    view, selector = question.view, question.view.selector
    node_ids = {node.id for node in view.nodes} if view.backoffs or view.backed_off else set()
    guard = room.guard if room is not None else None
    return {
        "need": tuple(asdict(view.need).items()),
        "selector": (selector.model, selector.labels),
        "setbacks": tuple((id, setback.times) for id, setback in view.backoffs.items() if id in node_ids),
        "resting": frozenset(map(str, view.backed_off & node_ids)),
        "nodes": frozenset(map(_name, view.nodes)) if view.restricted else None,
        "refusing": frozenset(map(str, question.refusing)),
        "evicts": question.evicts,
        "over": over,
        "guard": None if guard is None else (guard.model_name, guard.now),
    }


def _eviction_sections(room: Eviction) -> dict[str, Section]:
    """Encode the replicas on the nodes that were considered, and the rules of their models."""
    if room.guard is None:
        return {}
    by_node: dict[UUID, list[Resident]] = {id: [] for id in room.looked_at}
    for resident in sorted(room.among, key=lambda resident: resident.id):
        if resident.node_id in by_node:
            by_node[resident.node_id].append(resident)
    guard = room.guard
    models = {resident.model_name for resident in room.among}
    rules = {
        name: (guard.loaded.get(name, 0), guard.minimums.get(name), name in guard.spread) for name in models
    }
    return {
        "residents": Section(
            {id: tuple(map(_resident, residents)) for id, residents in by_node.items()}, whole=False
        ),
        "rules": Section(rules, whole=False),
    }


def decode_load(state: State, load: str, model: str) -> LoadSnapshot | None:
    """Decode the facts of the load's decision; None if the state has none."""
    facts = state.get(f"load/{load}")
    if not facts:
        return None
    name, labels = facts["selector"]
    selector = Selector(name, None if labels is None else frozenset(map(tuple, labels)))
    view = FleetView(
        nodes=list(_nodes(state, model, facts["nodes"])),
        need=Need(**{key: _plain(value) for key, value in facts["need"]}),
        selector=selector,
        backoffs={UUID(id): NodeBackoff(times, _EVER) for id, times in facts["setbacks"]},
        backed_off=frozenset(map(UUID, facts["resting"])),
        restricted=facts["nodes"] is not None,
    )
    question = LoadQuestion(view, frozenset(map(UUID, facts["refusing"])), facts["evicts"])
    return LoadSnapshot(question, _occupants(state, facts["guard"]), facts["over"])


def _nodes(state: State, model: str, node_names: Iterable[str] | None) -> Iterable[Candidate]:
    rows, columns = state.get("nodes", {}), state["columns"]["node"]
    of_model = {name: state.get(f"{name}/{model}", {}) for name in _PER_MODEL}
    for node in rows if node_names is None else node_names:
        model_facts = {name: read(of_model[name].get(node, ())) for name, read in _PER_MODEL.items()}
        yield Candidate(**_read(columns, rows[node], _COLUMNS, _READ), **model_facts)


def _occupants(state: State, guard: tuple[str, str] | None) -> EvictionCandidates | None:
    if guard is None:
        return None
    columns = state["columns"]["resident"]
    rows = (row for residents in state.get("residents", {}).values() for row in residents)
    rules = state.get("rules", {})
    return EvictionCandidates(
        [Resident(**_read(columns, row, _RESIDENT, _RESIDENT_READ)) for row in rows],
        ProtectionRules(
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
    """Decode the columns of a row that still exist; missing ones get their default."""
    values = dict(zip(columns, row, strict=True))
    return {name: reads.get(name, _plain)(values[name]) for name in expected if name in values}


def _plain(value: Any) -> Any:
    """Decode a list as a set, with tuples for inner lists; return any other value unchanged."""
    if not isinstance(value, list):
        return value
    return frozenset(tuple(item) if isinstance(item, list) else item for item in value)
