"""Examples for the API document, in the shapes of the reference's recorded traffic."""

from typing import Any

from drf_spectacular.utils import OpenApiExample

_ID = "5b1d1f1e-8a58-4f2f-9d0b-2f1f6a9f7c11"
_AT = "2026-08-22T09:15:04.120394Z"
_NODE: dict[str, Any] = {
    "id": _ID,
    "name": "gpu-a",
    "node_type": "backend",
    "address": "10.1.0.4:50051",
    "http_address": "10.1.0.4:50050",
    "status": "draining",
    "total_vram": 25757220864,
    "available_vram": 20000000000,
    "reserved_vram": 0,
    "total_ram": 67108864000,
    "available_ram": 50000000000,
    "total_disk": 500000000000,
    "available_disk": 320000000000,
    "gpu_vendor": "nvidia",
    "gpu_compute_capability": "8.9",
    "capability": "nvidia-cuda-12",
    "max_replicas_per_model": 2,
    "max_replicas_per_model_manually_set": True,
    "vram_budget": "80%",
    "vram_budget_bytes": 20605776691,
    "vram_budget_manually_set": True,
    "last_heartbeat": _AT,
    "created_at": "2026-07-01T08:00:00Z",
    "updated_at": _AT,
    "model_count": 1,
    "in_flight_count": 2,
    "labels": {"gpu.vendor": "nvidia", "gpu.vram": "16GB", "node.name": "gpu-a", "node.replica-slots": "2"},
}
_REPLICA = {
    "id": "7d3c3a52-0c54-4a8e-8f52-5a6d1c1de0aa",
    "node_id": _ID,
    "model_name": "minilm",
    "replica_index": 0,
    "address": "10.1.0.4:50052",
    "state": "loaded",
    "in_flight": 2,
    "last_used": _AT,
    "backend_type": "minilm",
    "config_revision": "3b1f6a6f6c0b",
    "effective_options_hash": "a94a8fe5ccb1",
    "created_at": _AT,
    "updated_at": _AT,
}
_FINGERPRINT = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"
_CONFLICT = {
    "id": "0c0e5b8a-4a7e-4c9c-9f37-1f0a3d1b2c44",
    "node_id": _ID,
    "node_name": "gpu-a",
    "kind": "secret",
    "state": "open",
    "fingerprint": _FINGERPRINT,
    "source_address": "10.1.0.9",
    "advertised_address": "10.1.0.9:50051",
    "node_source_address": "10.1.0.4",
    "count": 3,
    "first_at": _AT,
    "last_at": _AT,
}
_EVENT = {
    "id": 4711,
    "node_id": _ID,
    "node_name": "gpu-a",
    "kind": "drained",
    "at": _AT,
    "last_at": _AT,
    "count": 1,
    "actor_kind": "user",
    "actor": "ann",
    "cause": "new power supply",
    "status_before": "healthy",
    "status_after": "draining",
    "detail": {"deadline_seconds": 600},
}


def _answer(value: Any, name: str = "answer", status: str = "200") -> OpenApiExample:
    return OpenApiExample(name, value, response_only=True, status_codes=[status])


def _sent(value: Any) -> OpenApiExample:
    return OpenApiExample("request", value, request_only=True)


def message(text: str) -> OpenApiExample:
    """The answer of a route that only says what it did."""
    return _answer({"message": text})


NODE = _answer(_NODE)
NODE_DETAIL = _answer(
    _NODE
    | {
        "approval": {"at": "2026-07-01T08:01:00Z", "by": "ann", "reason": ""},
        "drain": {
            "since": _AT,
            "by": "ann",
            "reason": "new power supply",
            "own": False,
            "in_flight": 2,
            "replicas": 1,
            "deadline": "2026-08-22T09:25:04.120394Z",
        },
        "identity": {
            "weak": False,
            "fingerprint": _FINGERPRINT,
            "source_address": "10.1.0.4",
            "first_seen": "2026-07-01T08:00:00Z",
            "bound_at": "2026-07-01T08:00:00Z",
            "instance": "5f0c1f8d6f3b4f0bb7b0d7f3c8a1e2d4",
            "open_conflicts": 0,
        },
        "revision": 7,
        "overrides": {
            "max_replicas_per_model": {"by": "ann", "at": _AT},
            "vram_budget": {"by": "", "at": None},
        },
        "label_sources": dict.fromkeys(_NODE["labels"], "auto"),
        "inventory": {"at": _AT, "error": ""},
    }
)
REPLICA = _answer(_REPLICA)
_WHO = {"id": _ID, "name": "gpu-a", "node_type": "backend", "status": "healthy"}
APPROVED = _answer(_WHO | {"message": "node approved"})
APPROVED_AGENT = _answer(
    _WHO
    | {"name": "agent-1", "node_type": "agent", "message": "node approved", "api_token": "lai-" + "0" * 64},
    "agent",
)
APPROVE = _sent({"reason": "ticket 4711", "fingerprint": _FINGERPRINT})
APPROVE_MANY = _sent({"ids": [_ID, _CONFLICT["id"]], "fingerprints": {_ID: _FINGERPRINT}})
OUTCOMES = _answer(
    {
        "approved": 1,
        "results": [
            {"id": _ID, "name": "gpu-a", "status": "healthy"},
            {"id": _CONFLICT["id"], "error": "node not found"},
        ],
    }
)
REASON = _sent({"reason": "ticket 4711"})
REJECTION = _sent({"reason": "nobody has announced this machine"})
DRAIN = _sent({"reason": "new power supply", "deadline_seconds": 600})
LABELS = _answer(_NODE["labels"])
LABELS_SENT = _sent({"tier": "fast"})
CAP_SENT, CAP = _sent({"value": 3}), _answer({"max_replicas_per_model": 3})
BUDGET_SENT, BUDGET = _sent({"value": "80%"}), _answer({"vram_budget": "80%"})
RESET = _answer({"reset": True})
CONFLICT = _answer(_CONFLICT)
EVENTS = _answer({"events": [_EVENT], "next_cursor": 4711})
INSTALL = _sent({"backend": "local@minilm"})
_JOB = "e63fad81-e53f-4e5f-a2a5-0eb06c5b5af7"
ACCEPTED = _answer(
    {"jobID": _JOB, "statusUrl": f"/api/backends/job/{_JOB}", "message": "backend installation started"},
    status="202",
)
