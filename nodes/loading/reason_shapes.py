"""Decisions of placement on the wire: recorded decisions, current decisions, and decisions of a plan."""

from dataclasses import replace

from django.db.models import F, Value
from django.db.models.expressions import Combinable
from django.db.models.functions import Coalesce, NullIf

from localai_cluster.web.shapes import (
    FLAG,
    TEXT,
    TEXTS,
    TIME,
    UUID,
    Row,
    Schema,
    Shape,
    Time,
    column,
    count,
    enum,
    field,
    mapping_schema,
    text,
)
from nodes.models import DecisionKind, PlacementOutcome
from nodes.placement.explain import MAX_VERDICTS, Explanation, MemoryExplanation, MemoryVerdict
from nodes.registry.shape import NODE_STATUS
from nodes.replicas.shape import REPLICA_STATE

_BYTES_SCHEMA = {"type": "integer", "format": "int64"}
_BYTES_LIST_SCHEMA = {"type": "array", "items": _BYTES_SCHEMA}
_COUNTS_SCHEMA = {"type": "array", "items": count()}
OUTCOME = enum("PlacementOutcome", PlacementOutcome)
KIND = enum("DecisionKind", DecisionKind)

NEED = Shape(
    "PlacementNeed",
    "What a replica needs of its node, in bytes; 0 means not known.",
    [
        field("vram", _BYTES_SCHEMA),
        field("vram_required", FLAG, "Whether lack of it keeps a node out, or only ranks it lower."),
        field("disk", _BYTES_SCHEMA),
        field("disk_required", FLAG),
        field(
            "files",
            _BYTES_SCHEMA,
            "The part of `disk` that is the model's files; 0 means not known.",
            optional=True,
        ),
        field("own_gpus", FLAG, "Whether the definition says which GPUs it uses.", optional=True),
        field(
            "vram_share",
            {"type": "number"},
            "The share of a card that the backend takes; 0: it takes `vram`.",
            optional=True,
        ),
        field("cards", count(), "Of how many cards it takes the share.", optional=True),
        field(
            "terms",
            mapping_schema(_BYTES_SCHEMA),
            "The terms of `vram`: weights, context, buffers and so on. Absent in older records.",
            optional=True,
        ),
        field(
            "by_gpu",
            mapping_schema(_BYTES_SCHEMA),
            "The part of each GPU that the definition names.",
            optional=True,
        ),
        field(
            "source",
            {"type": "string", "enum": ["stated", "learned", "estimated"]},
            "Where `vram` comes from: the definition, readings of former loads, or the estimate.",
            optional=True,
        ),
        field("readings", count(), "Number of loads from which it was learned.", optional=True),
        field("learned_at", TEXT, "When the newest of them was read; empty unless learned.", optional=True),
    ],
)
NODES = Shape(
    "PlacementNodes",
    "How many nodes were considered, and how many of them could take the replica.",
    [field("considered", count()), field("feasible", count())],
)
REFUSED = Shape(
    "PlacementRefused",
    "How many nodes one reason kept out.",
    [field("code", TEXT), field("reason", TEXT), field("count", count())],
)
TERMS = Shape(
    "PlacementTerms",
    "What a node is ranked by; the first one that differs decides.",
    [
        field("failures", count(), "Of this load on this node; fewest first."),
        field("shared", FLAG, "Whether a model of the same concurrency group is loaded there; if not first."),
        field("has_memory", FLAG, "Whether the node is known to have enough free memory."),
        field("gpus", count(1), "On how many GPUs it would be; fewest first.", optional=True),
        field("busy", FLAG, "Whether a replica is loaded there; idle nodes first."),
        field("in_flight", count(), "Requests on a busy node; fewest first."),
        field("memory", _BYTES_SCHEMA, "VRAM: free if `has_memory`, else available; most first."),
        field(
            "lacks_backend",
            FLAG,
            "Whether the backend has to be installed there; named where all other terms are equal.",
            optional=True,
        ),
    ],
)
BEST = Shape(
    "PlacementBest",
    "A node that could take the replica; the first one of a list is the best.",
    [
        field("node_id", UUID),
        field("node", TEXT),
        field("replica_index", count()),
        field(
            "gpus",
            _COUNTS_SCHEMA,
            "The GPUs it would be on, by index; none if that is not known.",
            optional=True,
        ),
        field("terms", TERMS.ref),
        field("against", TEXT, "Why this node comes after the best.", optional=True),
    ],
)
MISS = Shape(
    "PlacementMiss",
    "A node that could not take the replica, and its figures; the nearest come first.",
    [
        field("node_id", UUID),
        field("node", TEXT),
        field("code", TEXT),
        field("reason", TEXT),
        field("free_vram", _BYTES_SCHEMA, "Effectively free; negative if more is reserved than available."),
        field("free_gpus", _BYTES_LIST_SCHEMA, "The same on each GPU, by index.", optional=True),
        field("available_disk", _BYTES_SCHEMA),
        field("promised_bytes", _BYTES_SCHEMA, "Of these, what other loads will take.", optional=True),
        field("total_disk", _BYTES_SCHEMA, "0 if not reported."),
        field("disk_quota", _BYTES_SCHEMA, "For the files of models; 0: no limit.", optional=True),
        field("quota_used", _BYTES_SCHEMA, "What they take of it, with what loads bring.", optional=True),
        field("replicas", count(), "Of this model."),
        field("slots", count(), "How many of them it may have."),
        field("in_flight", count()),
    ],
)
EVICTED = Shape(
    "PlacementEviction",
    "A replica that is to leave first, to make room.",
    [
        field("replica_id", UUID),
        field("replica", TEXT, "Model and index."),
        field("vram", _BYTES_SCHEMA, "What it is estimated to give back."),
        field("last_used", TIME),
    ],
)
_FACT_SCHEMAS: dict[str, Schema] = {
    "need": NEED.ref,
    "selector": TEXT,
    "nodes": NODES.ref,
    "refused": REFUSED.many,
    "best": BEST.many,
    "misses": MISS.many,
    "evicts": EVICTED.many,
}
_DECISION_FIELDS = [
    field("outcome", OUTCOME.ref),
    field("reason", TEXT, "What decided between the best and the second, or why no node was found."),
    field("node_id", UUID, "Null unless placed, as the two after it.", nullable=True),
    field("node", TEXT, nullable=True),
    field("replica_index", count(), nullable=True),
    *(field(name, schema) for name, schema in _FACT_SCHEMAS.items()),
]
_RECORD_COLUMNS: dict[str, Combinable] = {
    "node_id": text("node_id"),
    "node": NullIf(F("node_name"), Value("")),
    **{name: F(f"facts__{name}") for name in _FACT_SCHEMAS},
}
NODE_MEMORY = Shape(
    "NodeMemory",
    "Whether a node has the memory for one more replica, and what would help; memory in bytes.",
    [
        field("node_id", UUID),
        field("node", TEXT),
        field("verdict", {"type": "string", "enum": [verdict.value for verdict in MemoryVerdict]}),
        field("needed", _BYTES_SCHEMA, "0 means not known."),
        field("usable", _BYTES_SCHEMA, "What such a replica could have there."),
        field("missing", _BYTES_SCHEMA),
        field("context", count(), "The largest smaller context that fits, in tokens; 0: none."),
        field("unload", TEXTS, "The replicas whose end would make it fit."),
        field("reason", TEXT, "Why the node is `refused`; empty for the other verdicts."),
        field("says", TEXT),
    ],
)
MEMORY = Shape(
    "MemoryExplained",
    "Which nodes have the memory for one more replica.",
    [
        field("says", TEXT, "All of it in one sentence, of the first nodes."),
        field(
            "terms",
            mapping_schema(_BYTES_SCHEMA),
            "The terms of the need: weights, context, buffers and so on.",
        ),
        field("context", count(), "Tokens of context in the definition; 0: not known."),
        field("considered", count(), "The number of nodes."),
        field("nodes", NODE_MEMORY.many, f"At most {MAX_VERDICTS}; those that fit come first."),
    ],
)
DECISION = Shape("PlacementDecision", "One decision of placement, and why.", _DECISION_FIELDS)
PLANNED = Shape(
    "PlannedReplica",
    "One decision of a plan, as if the replicas before it were loaded.",
    [
        field("replica", count(1), "The first is 1."),
        field("hypothetical", FLAG, "Whether the node is one of those that the plan adds."),
        *_DECISION_FIELDS,
    ],
)
PLAN = Shape(
    "PlacementPlan",
    "Where so many replicas would go. The last decision is `waiting` if one found no node.",
    [
        field("model", TEXT, nullable=True),
        field("wanted", count(1)),
        field("placed", count()),
        field("decisions", PLANNED.many),
        field("memory", MEMORY.ref, "For the first replica."),
    ],
)
RECORD = Shape(
    "PlacementRecord",
    "A decision as it was kept, or a wait for as long as its reasons stay. Only placements compare nodes.",
    [
        column("id", count()),
        column("kind", KIND.ref, "What was decided."),
        column("operation_id", UUID, "Null for a decision of the replica pass.", nullable=True),
        column("at", TIME),
        column("last_at", TIME, "When its figures were read."),
        *(replace(one, column=_RECORD_COLUMNS.get(one.name, F(one.name))) for one in _DECISION_FIELDS),
    ],
)
REPLICA = Shape(
    "ReplicaAt",
    "Where a replica runs.",
    [
        column("id", UUID),
        column("node_id", UUID),
        column("node", TEXT, source=F("node__name")),
        column("node_status", NODE_STATUS.ref, source=F("node__status")),
        column("replica_index", count()),
        column("state", REPLICA_STATE.ref),
        column("in_flight", count()),
        column("since", TIME, "Loaded, or begun to load.", source=Time(Coalesce("loaded_at", "created_at"))),
        column("last_used", TIME),
    ],
)
NEXT = Shape(
    "NextRequest",
    "What the next request would find now; nothing is done.",
    [
        field("action", {"type": "string", "enum": ["route", "join", "wait", "load", "refuse"]}),
        field("says", TEXT),
        field("replica_id", UUID, "The replica it would be sent to.", nullable=True),
        field("operation_id", UUID, "What it would wait for, or what failed.", nullable=True),
        field(
            "placement", DECISION.ref, "Where one more replica would go; null if undefined.", nullable=True
        ),
        field("memory", MEMORY.ref, "Null if undefined.", nullable=True),
    ],
)
EXPLAINED = Shape(
    "ModelExplained",
    "Where a model runs, why, and what its next request would find.",
    [
        field("model", TEXT),
        field("defined", FLAG),
        field("replicas", REPLICA.many),
        field("records", RECORD.many, "The latest first."),
        field("next", NEXT.ref),
    ],
)
PLACE_WHY = Shape("NodeWithReason", "A node, and why.", [field("node", TEXT), field("why", TEXT)])
UNSATISFIED = Shape(
    "RuleUnsatisfied",
    "Why a rule cannot be satisfied now.",
    [
        field("reason", TEXT),
        field("counts", mapping_schema(count()), "How many nodes each reason keeps out, by its code."),
    ],
)
GIVEN_RULE = Shape(
    "PreviewedRule",
    "The rule that is looked at.",
    [
        field("model_name", TEXT),
        field("node_selector", mapping_schema(TEXT)),
        field("min_replicas", count()),
        field("max_replicas", count()),
        field("spread_all", FLAG),
    ],
)
RULE_PLAN = Shape(
    "RulePlan",
    "What the replica pass would do now if the rule were saved.",
    [
        field("rule", GIVEN_RULE.ref),
        field("replicas_now", count(), "Loaded on healthy nodes."),
        field("loading", count(), "Loads under way."),
        field("wanted", count(), "Replicas that the pass would aim at."),
        field("says", TEXT, "What it would do and why, or why nothing."),
        field("waits_until", TIME, "When a cooldown ends; the rest is what comes then.", nullable=True),
        field("loads", PLACE_WHY.many, "Where replicas would be loaded, one after another."),
        field("left_out", count(), "Loads after these whose node was not worked out."),
        field("retires", PLACE_WHY.many),
        field("unsatisfiable", UNSATISFIED.ref, nullable=True),
        field("misses", MISS.many, "The nodes that came nearest, if a replica found no place."),
    ],
)
NODE_FIT = Shape(
    "NodeFit",
    "Whether one node could take one more replica.",
    [
        field("node_id", UUID),
        field("reason", TEXT, "Why it cannot; empty if it can."),
        field("enough_vram", FLAG, "Whether what is needed, as far as known, is free there."),
    ],
)
FIT = Shape(
    "ModelFit",
    "Which nodes could take one more replica of a model now.",
    [
        field("model", TEXT),
        field("nodes", NODE_FIT.many, "Every node."),
        field("placement", DECISION.ref, "What placement would make of it."),
        field("memory", MEMORY.ref),
    ],
)

FIT_SUMMARY = Shape(
    "ModelFitSummary",
    "How many nodes could take one more replica of a model now.",
    [
        field("model", TEXT),
        field("defined", FLAG),
        field("fitting", count(), "Nodes that can take it and have the memory, as far as it is known."),
        field("possible", count(), "Nodes that can take it, also those where it would be tight."),
        field("says", TEXT, "Which nodes have the memory, in one sentence; empty if it is not defined."),
    ],
)
FIT_SUMMARIES = Shape(
    "ModelFitSummaries",
    "Where many models fit.",
    [field("models", FIT_SUMMARY.many, "In the order of the request, each name once.")],
)


def decision(explanation: Explanation) -> Row:
    """Return the wire form of a decision that has no record."""
    placed = explanation.node is not None
    return DECISION.of(
        outcome=explanation.outcome,
        reason=explanation.sentence,
        node_id=str(explanation.node.id) if explanation.node else None,
        node=explanation.node.name if explanation.node else None,
        replica_index=explanation.replica_index if placed else None,
        **{name: explanation.facts[name] for name in _FACT_SCHEMAS},
    )


def memory(explained: MemoryExplanation) -> Row:
    """Return the wire form of the comparison of nodes' memory with a need."""
    need = explained.need
    return MEMORY.of(
        says=explained.describe(),
        terms=dict(need.terms),
        context=need.contexts[0][0] if need.contexts else 0,
        considered=explained.considered,
        nodes=[
            NODE_MEMORY.of(
                node_id=str(entry.node.id),
                node=entry.node.name,
                verdict=entry.verdict,
                needed=entry.needed,
                usable=entry.usable,
                missing=entry.missing,
                context=entry.context,
                unload=list(entry.unload),
                reason=entry.reason,
                says=entry.describe(),
            )
            for entry in explained.nodes
        ],
    )
