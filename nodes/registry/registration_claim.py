"""The registration that a worker sends, as a well-formed claim (`contract/http-api.md` §1.1).

This module checks only what needs no row; `registration.py` decides the claim.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from localai_cluster.kit import conf, errors, logs, names
from nodes.models import NodeType
from nodes.registry import dial_targets, identity, joining
from nodes.registry.labels import check_labels


@dataclass(frozen=True)
class Running:
    """One engine process that a worker reports as running; `address` may be empty."""

    process_key: str
    address: str = ""


@dataclass(frozen=True)
class Registration:
    """The facts that a worker reports about itself (`contract/http-api.md` §1.1); sizes in bytes."""

    name: str = ""
    node_type: str = NodeType.BACKEND.value
    address: str = ""
    http_address: str = ""
    total_vram: int = 0
    available_vram: int = 0
    total_ram: int = 0
    available_ram: int = 0
    total_disk: int = 0
    available_disk: int = 0
    gpu_vendor: str = ""
    gpu_compute_capability: str = ""
    gpus: Sequence[Mapping[str, Any]] = ()
    """The GPUs one by one, as `gpus.read` returns them; empty if the worker does not report them."""
    capability: str = ""
    max_replicas_per_model: int = 1
    vram_budget: str = ""
    version: str = ""
    """Version of our worker; stock workers send none."""
    labels: Mapping[str, str] = field(default_factory=dict)
    engine_token: str = field(default="", repr=False)
    """The bearer token that its engines expect; "" = the registration token."""
    running_processes: Collection[Running] | None = None
    """None: the worker does not report them, so all replicas end (R1.12 to R1.14), except those of a stock
    worker.
    """


@dataclass(frozen=True)
class Claim:
    """A registration and its sender: fingerprint of the secret ("" = shared token), process, address.

    `ticket`: the join token that it came with instead of the registration token.
    """

    told: Registration
    fingerprint: str
    instance: str
    source_address: str
    ticket: joining.JoinTicket | None = None
    request_id: str = field(default_factory=logs.request_id.get)


def claim(
    registration: Registration,
    *,
    secret: str,
    instance: str = "",
    source_address: str,
    ticket: joining.JoinTicket | None = None,
) -> Claim:
    """Return a well-formed claim.

    Raises InvalidInput for an invalid name, label or address, Forbidden without a secret (unless shared-token
    nodes are admitted, and never with a join token).
    """
    names.check_name(registration.name)
    check_labels(registration.labels)
    dial_targets.check_registered(
        registration.name, registration.address, registration.http_address, source_address
    )
    return Claim(registration, _fingerprint(secret, ticket), instance, source_address, ticket)


def _fingerprint(secret: str, ticket: joining.JoinTicket | None) -> str:
    if secret:
        return identity.check_node_secret(secret)
    if ticket is not None:
        raise errors.Forbidden(
            "a join token admits no worker without a secret of its own: send X-LocalAI-Node-Secret",
            field="X-LocalAI-Node-Secret",
        )
    if conf.cluster().allow_shared_token_nodes:
        return ""
    raise errors.Forbidden(
        "a worker must prove an identity of its own: send X-LocalAI-Node-Secret, or admit stock workers by "
        "LOCALAI_ALLOW_SHARED_TOKEN_NODES=true",
        field="X-LocalAI-Node-Secret",
    )
