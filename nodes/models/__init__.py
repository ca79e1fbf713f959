"""The rows of the registry: nodes and labels, their history, replicas, what is remembered, API keys."""

from nodes.models.history import NodeConflict, NodeEvent, RevokedSecret
from nodes.models.key import ApiKey
from nodes.models.memory import ModelLoadInfo, ModelSchedulingConfig, PendingBackendOp
from nodes.models.node import BackendNode, NodeLabel, NodeStatus, NodeType
from nodes.models.replica import NodeModel, ReplicaState, ReplicaUse, WebProcess

__all__ = [
    "ApiKey",
    "BackendNode",
    "ModelLoadInfo",
    "ModelSchedulingConfig",
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
