"""Numbers of nodes that models fit on, for lists; need and fleet are those of `load_explanation.node_fit`.

The number of queries is the same for any number of models, nodes and replicas.
"""

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from uuid import UUID

from asgiref.sync import async_to_sync

from localai_cluster.web.shapes import FLAG, TEXT, Row, Shape, count, field
from nodes.decisions import fleet_cache
from nodes.decisions.fleet_cache import FleetQuestion
from nodes.definitions.folder import folder
from nodes.loading import load_info, load_request
from nodes.loading.load_placement import LoadNeeds
from nodes.loading.reason_shapes import MEMORY
from nodes.placement.choose import find_refusal, has_memory
from nodes.placement.evict import ProtectionRules, Resident
from nodes.placement.explain import FleetView, explain_memory, nearest_by_memory
from nodes.replicas import eviction, fleet_queries
from operations.executor.work import in_thread

MAX_MODELS = 100
FIT_SUMMARY = Shape(
    "ModelFitSummary",
    "How many nodes could take one more replica of a model now.",
    [
        field("model", TEXT, example="minilm"),
        field("defined", FLAG, example=True),
        field(
            "fitting",
            count(),
            "Nodes that can take it and have the memory, as far as it is known.",
            example=1,
        ),
        field("possible", count(), "Nodes that can take it, also those where it would be tight.", example=2),
        field(
            "says",
            TEXT,
            "Which nodes have the memory, in one sentence; empty if it is not defined.",
            example=MEMORY.example["says"],
        ),
    ],
)
FIT_SUMMARIES = Shape(
    "ModelFitSummaries",
    "Where many models fit.",
    [field("models", FIT_SUMMARY.many, "In the order of the request, each name once.")],
)


@dataclass(frozen=True)
class _Evictable:
    """The replicas on nodes that lack memory, and the rules that protect them from eviction."""

    by_node: Mapping[UUID, Sequence[Resident]]
    rules: ProtectionRules

    def of(self, view: FleetView) -> list[Resident]:
        """Return the replicas on the nodes that lack memory in this view.

        Only the nodes count that an explanation of the view names.
        """
        return [
            resident
            for node, _ in nearest_by_memory(view)
            for resident in self.by_node.get(node.id, ())
            if not has_memory(node, view.need)
        ]


def read_summaries(model_names: Sequence[str], now: datetime) -> Row:
    """Return the number of nodes that each model fits on; 0 for a model without a definition."""
    needs = _needs_of(model_names)
    views = _read_views(needs)
    evictable = _read_evictable(views.values(), now)
    return FIT_SUMMARIES.of(models=[_summary(name, views.get(name), evictable) for name in model_names])


@async_to_sync
async def _needs_of(model_names: Sequence[str]) -> dict[str, LoadNeeds]:
    models = folder()
    definitions = list((await load_info.find_definitions(models, model_names)).values())
    readings = await in_thread(load_info.readings_by_model, definitions)
    files = await asyncio.gather(*(models.sizes.of(definition) for definition in definitions))
    return {
        definition.name: LoadNeeds(
            definition,
            load_request.estimate_need(definition, model_files, readings[definition.name]),
            await models.conflicting(definition),
        )
        for definition, model_files in zip(definitions, files, strict=True)
    }


def _read_views(needs: dict[str, LoadNeeds]) -> dict[str, FleetView]:
    """Return, for each model, the fleet as its decision would see it."""
    selectors = fleet_queries.selectors_of(needs)
    questions = [FleetQuestion(name, wanted.conflicts) for name, wanted in needs.items()]
    fleets = fleet_cache.read_fleets(questions)
    return {
        name: FleetView(fleet, wanted.need, selectors[name])
        for (name, wanted), fleet in zip(needs.items(), fleets, strict=True)
    }


def _read_evictable(views: Iterable[FleetView], now: datetime) -> _Evictable:
    """Read the replicas on the nodes that lack memory. At most three queries."""
    lacking = {
        node.id for view in views for node, _ in nearest_by_memory(view) if not has_memory(node, view.need)
    }
    residents = eviction.residents(lacking, now=now)
    by_node: defaultdict[UUID, list[Resident]] = defaultdict(list)
    for resident in residents:
        by_node[resident.node_id].append(resident)
    return _Evictable(by_node, eviction.guard("", residents, now=now))


def _summary(model_name: str, view: FleetView | None, evictable: _Evictable) -> Row:
    if view is None:
        return FIT_SUMMARY.of(model=model_name, defined=False, fitting=0, possible=0, says="")
    possible = [
        node for node in view.nodes if find_refusal(node, need=view.need, selector=view.selector) is None
    ]
    rules = replace(evictable.rules, model_name=model_name)
    return FIT_SUMMARY.of(
        model=model_name,
        defined=True,
        fitting=sum(has_memory(node, view.need) for node in possible),
        possible=len(possible),
        says=explain_memory(view, evictable.of(view), rules).describe(),
    )
