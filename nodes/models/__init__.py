"""The tables of the registry."""

from nodes.models.definition import DefinitionOrigin, DefinitionRevision, ModelDefinition
from nodes.models.identity import BusCredential, JoinToken, NodeConflict, RevokedSecret
from nodes.models.inventory import (
    BackendOffer,
    BroughtModel,
    FileHash,
    GalleryCopy,
    NodeBackend,
    PendingBackendOp,
    UpgradeCheck,
)
from nodes.models.node import (
    BackendNode,
    MassSilence,
    NodeEvent,
    NodeLabel,
    NodeStatus,
    NodeType,
)
from nodes.models.replica import (
    BEING_LOADED,
    LOADING_PHASES,
    NodeModel,
    OwnerKind,
    Phase,
    PhaseReason,
    ReplicaState,
    ReplicaUse,
    WebProcess,
)
from nodes.models.response import StoredResponse
from nodes.models.scheduling import (
    DecisionKind,
    ModelLoadInfo,
    ModelSchedulingConfig,
    PlacementLog,
    PlacementOutcome,
    PlacementRecord,
    PrefixPressure,
    RoutePolicy,
)

__all__ = [
    "BEING_LOADED",
    "LOADING_PHASES",
    "BackendNode",
    "BackendOffer",
    "BroughtModel",
    "BusCredential",
    "DecisionKind",
    "DefinitionOrigin",
    "DefinitionRevision",
    "FileHash",
    "GalleryCopy",
    "JoinToken",
    "MassSilence",
    "ModelDefinition",
    "ModelLoadInfo",
    "ModelSchedulingConfig",
    "NodeBackend",
    "NodeConflict",
    "NodeEvent",
    "NodeLabel",
    "NodeModel",
    "NodeStatus",
    "NodeType",
    "OwnerKind",
    "PendingBackendOp",
    "Phase",
    "PhaseReason",
    "PlacementLog",
    "PlacementOutcome",
    "PlacementRecord",
    "PrefixPressure",
    "ReplicaState",
    "ReplicaUse",
    "RevokedSecret",
    "RoutePolicy",
    "StoredResponse",
    "UpgradeCheck",
    "WebProcess",
]
