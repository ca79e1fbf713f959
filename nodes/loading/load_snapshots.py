"""Encode the input of a load's decision as sections of the snapshot log, and decode it. Pure.

Node facts that are the same for all loads form one section. Node facts that depend on the model (indices in
use, tested labels, concurrency groups, files, disk space that other loads will take) are sections of the
model, and facts that depend on the load are a section of the load. So two loads of different models share
most sections.

Rows name their columns, because another version may have written them: an unknown column is ignored, and a
missing column has its default.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from operator import attrgetter
from typing import Any
from uuid import UUID

import msgspec

from nodes.decisions.decision_log import Section, State
from nodes.placement.choose import Candidate
from nodes.placement.evict import Eviction, Resident
from nodes.placement.load_decision import EvictionCandidates, LoadQuestion

_NO_END = datetime.max.replace(tzinfo=UTC)
_SECTION_BY_MODEL_FIELD: Mapping[str, tuple[str, Any]] = {
    "used_indices": ("taken", ()),
    "labels": ("labels", ()),
    "conflicts": ("conflicts", ()),
    "staged_bytes": ("brought", 0),
    "promised_bytes": ("promised", 0),
    "other_models_bytes": ("other_models", 0),
    "has_backend": ("has_backend", None),
}
"""For each node field that depends on the model: the name of its section, and the value of a missing row."""
_NODE_FIELDS = tuple(field.name for field in fields(Candidate) if field.name not in _SECTION_BY_MODEL_FIELD)
_RESIDENT_FIELDS = tuple(field.name for field in fields(Resident))
_node_values, _resident_values, _get_name = (
    attrgetter(*_NODE_FIELDS),
    attrgetter(*_RESIDENT_FIELDS),
    attrgetter("name"),
)


@dataclass(frozen=True)
class LoadSnapshot:
    """What a load's decision has read, and the replicas that it could have evicted."""

    question: LoadQuestion
    occupants: EvictionCandidates | None
    is_expired: bool
    """True if no request needed the load any more."""


def encode_load(
    load: str,
    model: str,
    question: LoadQuestion,
    eviction: Eviction | None = None,
    *,
    is_expired: bool = False,
) -> dict[str, Section]:
    """Encode all facts that the decision of a load used; `load` is the id of the load."""
    view = question.view
    all_nodes = not view.restricted
    result = {
        "columns": Section({"node": _NODE_FIELDS, "resident": _RESIDENT_FIELDS}, whole=False),
        # By name: hashing a thousand UUIDs costs more than comparing all the nodes' fields.
        "nodes": Section(
            dict(zip(map(_get_name, view.nodes), map(_node_values, view.nodes), strict=True)), all_nodes
        ),
        f"load/{load}": Section(_encode_load_facts(question, eviction, is_expired)),
    }
    for name, (section, _) in _SECTION_BY_MODEL_FIELD.items():
        # A missing fact is only recorded where it may have existed before.
        rows = {
            node.name: value
            for node in view.nodes
            if (value := getattr(node, name)) or value is False or not all_nodes
        }
        result[f"{section}/{model}"] = Section(rows, all_nodes)
    return result | (_encode_eviction(eviction) if eviction is not None else {})


def _encode_load_facts(question: LoadQuestion, eviction: Eviction | None, is_expired: bool) -> dict[str, Any]:
    view, selector = question.view, question.view.selector
    node_ids = {node.id for node in view.nodes} if view.backoffs or view.backed_off else set()
    rules = eviction.guard if eviction is not None else None
    return {
        "need": tuple(asdict(view.need).items()),
        "selector": (selector.model, selector.labels),
        "setbacks": tuple((id, backoff.times) for id, backoff in view.backoffs.items() if id in node_ids),
        "resting": frozenset(map(str, view.backed_off & node_ids)),
        "nodes": frozenset(map(_get_name, view.nodes)) if view.restricted else None,
        "refusing": frozenset(map(str, question.refusing)),
        "evicts": question.evicts,
        "fits_in_place": question.fits_by_replacement,
        "over": is_expired,
        "guard": None
        if rules is None
        else (rules.model_name, rules.now, rules.least_serving, tuple(sorted(map(str, rules.claimed)))),
    }


def _encode_eviction(eviction: Eviction) -> dict[str, Section]:
    """Encode the replicas on the nodes considered for an eviction, and the rules that protect them."""
    rules = eviction.guard
    if rules is None:
        return {}
    by_node: dict[UUID, list[Resident]] = {id: [] for id in eviction.looked_at}
    for resident in sorted(eviction.among, key=lambda resident: resident.id):
        if resident.node_id in by_node:
            by_node[resident.node_id].append(resident)
    rows = {id: tuple(map(_resident_values, residents)) for id, residents in by_node.items()}
    by_model = {
        name: (rules.loaded.get(name, 0), rules.minimums.get(name), name in rules.spread)
        for name in {resident.model_name for resident in eviction.among}
    }
    return {"residents": Section(rows, whole=False), "rules": Section(by_model, whole=False)}


def decode_load(state: State, load: str, model: str) -> LoadSnapshot | None:
    """Decode the facts of a load's decision; None if the state does not have them."""
    facts = state.get(f"load/{load}")
    if not facts:
        return None
    view = {
        "nodes": list(_decode_nodes(state, model, facts["nodes"])),
        "need": dict(facts["need"]),
        "selector": dict(zip(("model", "labels"), facts["selector"], strict=True)),
        "backoffs": {id: {"times": times, "until": _NO_END} for id, times in facts["setbacks"]},
        "backed_off": facts["resting"],
        "restricted": facts["nodes"] is not None,
    }
    question = {"view": view, "refusing": facts["refusing"], "evicts": facts["evicts"]}
    question["fits_by_replacement"] = facts.get("fits_in_place", False)  # an older version did not write it
    candidates = _decode_candidates(state, facts["guard"]) if facts["guard"] is not None else None
    return LoadSnapshot(msgspec.convert(question, LoadQuestion), candidates, facts["over"])


def _decode_nodes(state: State, model: str, node_names: Iterable[str] | None) -> Iterable[dict[str, Any]]:
    rows, columns = state.get("nodes", {}), state["columns"]["node"]
    for node in rows if node_names is None else node_names:
        of_model = {
            name: state.get(f"{section}/{model}", {}).get(node, default)
            for name, (section, default) in _SECTION_BY_MODEL_FIELD.items()
        }
        yield dict(zip(columns, rows[node], strict=True)) | of_model


def _decode_candidates(state: State, guard: Sequence[Any]) -> EvictionCandidates:
    columns, rules = state["columns"]["resident"], state.get("rules", {})
    of_all_nodes = [row for rows in state.get("residents", {}).values() for row in rows]
    candidates = {
        "residents": [dict(zip(columns, row, strict=True)) for row in of_all_nodes],
        # An older version wrote the first two.
        "guard": dict(zip(("model_name", "now", "least_serving", "claimed"), guard, strict=False))
        | {
            "loaded": {name: loaded for name, (loaded, _, _) in rules.items()},
            "minimums": {name: least for name, (_, least, _) in rules.items() if least is not None},
            "spread": [name for name, (_, _, spread) in rules.items() if spread],
        },
    }
    return msgspec.convert(candidates, EvictionCandidates)
