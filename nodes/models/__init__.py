"""The rows of the registry: nodes and labels, history, replicas, what is installed and remembered."""

from nodes.models.engine import EngineStart
from nodes.models.history import NodeConflict, NodeEvent, RevokedSecret
from nodes.models.inventory import NodeBackend
from nodes.models.memory import ModelLoadInfo, ModelSchedulingConfig, PendingBackendOp
from nodes.models.node import BackendNode, NodeLabel, NodeStatus, NodeType
from nodes.models.replica import NodeModel, ReplicaState, ReplicaUse, WebProcess

__all__ = [
    "BackendNode",
    "EngineStart",
    "ModelLoadInfo",
    "ModelSchedulingConfig",
    "NodeBackend",
    "NodeConflict",
    "NodeEvent",
    "NodeLabel",
    "NodeModel",
    "NodeStatus",
    "NodeType",
    "PendingBackendOp",
    "ReplicaState",
    "ReplicaUse",
    "RevokedSecret",
    "WebProcess",
]
