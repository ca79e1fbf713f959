"""The rows of the registry: nodes and labels, history, replicas, what is installed and remembered."""

from nodes.models.credential import BusCredential
from nodes.models.history import NodeConflict, NodeEvent, RevokedSecret
from nodes.models.intent import PendingBackendOp
from nodes.models.inventory import NodeBackend
from nodes.models.joining import JoinToken
from nodes.models.memory import ModelLoadInfo, ModelSchedulingConfig, PrefixPressure, RoutePolicy
from nodes.models.node import BackendNode, NodeLabel, NodeStatus, NodeType
from nodes.models.reasons import DecisionKind, PlacementLog, PlacementOutcome, PlacementRecord
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
from nodes.models.samples import NodeSample
from nodes.models.silence import MassSilence
from nodes.models.staging import BroughtModel, FileHash
from nodes.models.upgrades import BackendOffer, UpgradeCheck

__all__ = [
    "BEING_LOADED",
    "LOADING_PHASES",
    "BackendNode",
    "BackendOffer",
    "BroughtModel",
    "BusCredential",
    "DecisionKind",
    "FileHash",
    "JoinToken",
    "MassSilence",
    "ModelLoadInfo",
    "ModelSchedulingConfig",
    "NodeBackend",
    "NodeConflict",
    "NodeEvent",
    "NodeLabel",
    "NodeModel",
    "NodeSample",
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
    "UpgradeCheck",
    "WebProcess",
]
