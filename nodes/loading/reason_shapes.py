"""Decisions of placement on the wire: recorded decisions, current decisions, and decisions of a plan."""

from dataclasses import replace

from django.db.models import F, Value
from django.db.models.expressions import Combinable
from django.db.models.functions import Coalesce, NullIf

from localai_cluster.web.shapes import (
    EXAMPLE_JOB_ID,
    EXAMPLE_NODE_ID,
    EXAMPLE_TIME,
    FLAG,
    TEXT,
    TEXTS,
    TIME,
    UUID,
    Row,
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
_SENTENCE_EXAMPLE = "most VRAM free: 20.0 GiB against 12.0 GiB on b"
_FULL_REASON_EXAMPLE = "no free slot for this model"
_REPLICA_ID_EXAMPLE = "7d3c3a52-0c54-4a8e-8f52-5a6d1c1de0aa"
_MEMORY_EXAMPLE = (
    "fits on a (needs 8.0 of 20.0 GiB: weights 7.2, context 0.4, backend 0.4);"
    " on b with 4k context: 0.2 GiB missing for all of it"
)

NEED = Shape(
    "PlacementNeed",
    "What a replica needs of its node, in bytes; 0 means not known.",
    [
        field("vram", _BYTES_SCHEMA, example=8589934592),
        field(
            "vram_required",
            FLAG,
            "Whether lack of it keeps a node out, or only ranks it lower.",
            example=False,
        ),
        field("disk", _BYTES_SCHEMA, example=9663676416),
        field("disk_required", FLAG, example=True),
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
            example="learned",
            optional=True,
        ),
        field("readings", count(), "Number of loads from which it was learned.", example=3, optional=True),
        field(
            "learned_at",
            TEXT,
            "When the newest of them was read; empty unless learned.",
            example="2026-11-27T09:12:44.125301+00:00",
            optional=True,
        ),
    ],
)
NODES = Shape(
    "PlacementNodes",
    "How many nodes were considered, and how many of them could take the replica.",
    [field("considered", count(), example=3), field("feasible", count(), example=2)],
)
REFUSED = Shape(
    "PlacementRefused",
    "How many nodes one reason kept out.",
    [
        field("code", TEXT, example="full"),
        field("reason", TEXT, example=_FULL_REASON_EXAMPLE),
        field("count", count(), example=1),
    ],
)
TERMS = Shape(
    "PlacementTerms",
    "What a node is ranked by; the first one that differs decides.",
    [
        field("failures", count(), "Of this load on this node; fewest first.", example=0),
        field(
            "shared",
            FLAG,
            "Whether a model of the same concurrency group is loaded there; if not first.",
            example=False,
        ),
        field("has_memory", FLAG, "Whether the node is known to have enough free memory.", example=True),
        field("gpus", count(1), "On how many GPUs it would be; fewest first.", optional=True),
        field("busy", FLAG, "Whether a replica is loaded there; idle nodes first.", example=False),
        field("in_flight", count(), "Requests on a busy node; fewest first.", example=0),
        field(
            "memory",
            _BYTES_SCHEMA,
            "VRAM: free if `has_memory`, else available; most first.",
            example=21474836480,
        ),
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
        field("node_id", UUID, example=EXAMPLE_NODE_ID),
        field("node", TEXT, example="a"),
        field("replica_index", count(), example=0),
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
_SECOND_EXAMPLE = BEST.example | {
    "node_id": "0f7d3f0e-58b6-4c9e-b7d7-3c1a3a0e8a55",
    "node": "b",
    "terms": TERMS.example | {"memory": 12884901888},
    "against": "less VRAM free: 12.0 GiB against 20.0 GiB on a",
}
MISS = Shape(
    "PlacementMiss",
    "A node that could not take the replica, and its figures; the nearest come first.",
    [
        field("node_id", UUID, example="a2b1c7d4-2f0e-4a7b-9a59-6b8f2e1d0c33"),
        field("node", TEXT, example="c"),
        field("code", TEXT, example="full"),
        field("reason", TEXT, example=_FULL_REASON_EXAMPLE),
        field(
            "free_vram",
            _BYTES_SCHEMA,
            "Effectively free; negative if more is reserved than available.",
            example=4294967296,
        ),
        field("free_gpus", _BYTES_LIST_SCHEMA, "The same on each GPU, by index.", optional=True),
        field("available_disk", _BYTES_SCHEMA, example=107374182400),
        field("promised_bytes", _BYTES_SCHEMA, "Of these, what other loads will take.", optional=True),
        field("total_disk", _BYTES_SCHEMA, "0 if not reported.", example=214748364800),
        field("disk_quota", _BYTES_SCHEMA, "For the files of models; 0: no limit.", optional=True),
        field("quota_used", _BYTES_SCHEMA, "What they take of it, with what loads bring.", optional=True),
        field("replicas", count(), "Of this model.", example=1),
        field("slots", count(), "How many of them it may have.", example=1),
        field("in_flight", count(), example=2),
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
_FACT_FIELDS = [
    field("need", NEED.ref),
    field("selector", TEXT, example="the selector of model minilm: tier=fast"),
    field("nodes", NODES.ref),
    field("refused", REFUSED.many),
    field("best", BEST.many, example=[BEST.example, _SECOND_EXAMPLE]),
    field("misses", MISS.many),
    field("evicts", EVICTED.many, example=[]),
]
_FACT_NAMES = [one.name for one in _FACT_FIELDS]
_DECISION_FIELDS = [
    field("outcome", OUTCOME.ref, example="placed"),
    field(
        "reason",
        TEXT,
        "What decided between the best and the second, or why no node was found.",
        example=_SENTENCE_EXAMPLE,
    ),
    field(
        "node_id", UUID, "Null unless placed, as the two after it.", example=EXAMPLE_NODE_ID, nullable=True
    ),
    field("node", TEXT, example="a", nullable=True),
    field("replica_index", count(), example=0, nullable=True),
    *_FACT_FIELDS,
]
_RECORD_COLUMNS: dict[str, Combinable] = {
    "node_id": text("node_id"),
    "node": NullIf(F("node_name"), Value("")),
    **{name: F(f"facts__{name}") for name in _FACT_NAMES},
}
NODE_MEMORY = Shape(
    "NodeMemory",
    "Whether a node has the memory for one more replica, and what would help; memory in bytes.",
    [
        field("node_id", UUID, example=EXAMPLE_NODE_ID),
        field("node", TEXT, example="a"),
        field(
            "verdict",
            {"type": "string", "enum": [verdict.value for verdict in MemoryVerdict]},
            example="fits",
        ),
        field("needed", _BYTES_SCHEMA, "0 means not known.", example=8589934592),
        field("usable", _BYTES_SCHEMA, "What such a replica could have there.", example=21474836480),
        field("missing", _BYTES_SCHEMA, example=0),
        field("context", count(), "The largest smaller context that fits, in tokens; 0: none.", example=0),
        field("unload", TEXTS, "The replicas whose end would make it fit.", example=[]),
        field("reason", TEXT, "Why the node is `refused`; empty for the other verdicts.", example=""),
        field("says", TEXT, example="fits on a (needs 8.0 of 20.0 GiB)"),
    ],
)
MEMORY = Shape(
    "MemoryExplained",
    "Which nodes have the memory for one more replica.",
    [
        field("says", TEXT, "All of it in one sentence, of the first nodes.", example=_MEMORY_EXAMPLE),
        field(
            "terms",
            mapping_schema(_BYTES_SCHEMA),
            "The terms of the need: weights, context, buffers and so on.",
            example={"weights": 7730941132, "context": 429496729, "backend": 429496729},
        ),
        field("context", count(), "Tokens of context in the definition; 0: not known.", example=8192),
        field("considered", count(), "The number of nodes.", example=2),
        field("nodes", NODE_MEMORY.many, f"At most {MAX_VERDICTS}; those that fit come first."),
    ],
)
DECISION = Shape("PlacementDecision", "One decision of placement, and why.", _DECISION_FIELDS)
_WAITING_EXAMPLE = DECISION.example | {
    "outcome": "waiting",
    "reason": f"no node can take it: 1 {_FULL_REASON_EXAMPLE}",
    **dict.fromkeys(("node_id", "node", "replica_index")),
    "need": {"vram": 8589934592, "vram_required": False, "disk": 0, "disk_required": True},
    "selector": "",
    "nodes": {"considered": 1, "feasible": 0},
    "best": [],
    "misses": [],
}
PLANNED = Shape(
    "PlannedReplica",
    "One decision of a plan, as if the replicas before it were loaded.",
    [
        field("replica", count(1), "The first is 1.", example=1),
        field("hypothetical", FLAG, "Whether the node is one of those that the plan adds.", example=False),
        *_DECISION_FIELDS,
    ],
)
PLAN = Shape(
    "PlacementPlan",
    "Where so many replicas would go. The last decision is `waiting` if one found no node.",
    [
        field("model", TEXT, example="minilm", nullable=True),
        field("wanted", count(1), example=2),
        field("placed", count(), example=1),
        field("decisions", PLANNED.many),
        field("memory", MEMORY.ref, "For the first replica."),
    ],
)
RECORD = Shape(
    "PlacementRecord",
    "A decision as it was kept, or a wait for as long as its reasons stay. Only placements compare nodes.",
    [
        column("id", count(), example=7),
        column("kind", KIND.ref, "What was decided.", example="placement"),
        column(
            "operation_id",
            UUID,
            "Null for a decision of the replica pass.",
            example=EXAMPLE_JOB_ID,
            nullable=True,
        ),
        column("at", TIME, example=EXAMPLE_TIME),
        column("last_at", TIME, "When its figures were read.", example=EXAMPLE_TIME),
        *(replace(one, column=_RECORD_COLUMNS.get(one.name, F(one.name))) for one in _DECISION_FIELDS),
    ],
)
REPLICA = Shape(
    "ReplicaAt",
    "Where a replica runs.",
    [
        column("id", UUID, example=_REPLICA_ID_EXAMPLE),
        column("node_id", UUID, example=EXAMPLE_NODE_ID),
        column("node", TEXT, example="a", source=F("node__name")),
        column("node_status", NODE_STATUS.ref, example="healthy", source=F("node__status")),
        column("replica_index", count(), example=0),
        column("state", REPLICA_STATE.ref, example="loaded"),
        column("in_flight", count(), example=2),
        column(
            "since",
            TIME,
            "Loaded, or begun to load.",
            example=EXAMPLE_TIME,
            source=Time(Coalesce("loaded_at", "created_at")),
        ),
        column("last_used", TIME, example=EXAMPLE_TIME),
    ],
)
NEXT = Shape(
    "NextRequest",
    "What the next request would find now; nothing is done.",
    [
        field(
            "action", {"type": "string", "enum": ["route", "join", "wait", "load", "refuse"]}, example="route"
        ),
        field("says", TEXT, example="it is sent to replica 0 on a; requests there: 2"),
        field(
            "replica_id", UUID, "The replica it would be sent to.", example=_REPLICA_ID_EXAMPLE, nullable=True
        ),
        field("operation_id", UUID, "What it would wait for, or what failed.", example=None, nullable=True),
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
        field("model", TEXT, example="minilm"),
        field("defined", FLAG, example=True),
        field("replicas", REPLICA.many),
        field("records", RECORD.many, "The latest first."),
        field("next", NEXT.ref),
    ],
)
PLACE_WHY = Shape(
    "NodeWithReason",
    "A node, and why.",
    [field("node", TEXT, example="a"), field("why", TEXT, example=_SENTENCE_EXAMPLE)],
)
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
        field("model_name", TEXT, example="minilm"),
        field("node_selector", mapping_schema(TEXT), example={}),
        field("min_replicas", count(), example=2),
        field("max_replicas", count(), example=0),
        field("spread_all", FLAG, example=False),
    ],
)
RULE_PLAN = Shape(
    "RulePlan",
    "What the replica pass would do now if the rule were saved.",
    [
        field("rule", GIVEN_RULE.ref),
        field("replicas_now", count(), "Loaded on healthy nodes.", example=1),
        field("loading", count(), "Loads under way.", example=0),
        field("wanted", count(), "Replicas that the pass would aim at.", example=2),
        field(
            "says",
            TEXT,
            "What it would do and why, or why nothing.",
            example="2 wanted, 1 running, 0 loading: starting 1",
        ),
        field(
            "waits_until",
            TIME,
            "When a cooldown ends; the rest is what comes then.",
            example=None,
            nullable=True,
        ),
        field("loads", PLACE_WHY.many, "Where replicas would be loaded, one after another."),
        field("left_out", count(), "Loads after these whose node was not worked out.", example=0),
        field("retires", PLACE_WHY.many, example=[]),
        field("unsatisfiable", UNSATISFIED.ref, example=None, nullable=True),
        field("misses", MISS.many, "The nodes that came nearest, if a replica found no place.", example=[]),
    ],
)
NODE_FIT = Shape(
    "NodeFit",
    "Whether one node could take one more replica.",
    [
        field("node_id", UUID, example=EXAMPLE_NODE_ID),
        field("reason", TEXT, "Why it cannot; empty if it can.", example=_FULL_REASON_EXAMPLE),
        field("enough_vram", FLAG, "Whether what is needed, as far as known, is free there.", example=True),
    ],
)
FIT = Shape(
    "ModelFit",
    "Which nodes could take one more replica of a model now.",
    [
        field("model", TEXT, example="minilm"),
        field("nodes", NODE_FIT.many, "Every node."),
        field("placement", DECISION.ref, "What placement would make of it.", example=_WAITING_EXAMPLE),
        field("memory", MEMORY.ref),
    ],
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
        **{name: explanation.facts[name] for name in _FACT_NAMES},
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
