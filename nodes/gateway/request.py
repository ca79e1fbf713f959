"""One inference request: an object whose fields every processing step sets.

The endpoint sets the caller, the client's address, the path and the body; the handler sets the model and the
wait limit; the gateway sets the deadline; the picker sets the confirmed caller and the replica.
"""

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple
from uuid import UUID

from localai_cluster.accounts.principals import ANONYMOUS, Principal
from localai_cluster.kit import conf
from localai_cluster.web.bodies import Form
from localai_cluster.web.wire import Header
from nodes.gateway.prefix_table import Chain
from operations.ledger.admission import Requester


@dataclass(frozen=True, slots=True)
class Replica:
    """A picked replica. It counts the request as in flight until it is released."""

    id: UUID
    node_id: UUID
    index: int
    model: str
    address: str
    token: str = field(default="", repr=False)
    """Bearer token for calls to the replica's engine."""


class PickRequest(NamedTuple):
    """The conditions of one pick. Equal pick requests are distributed over the replicas together."""

    model: str
    candidates: frozenset[UUID] | None
    preferred: tuple[UUID, int] | None
    cached_ratio: float | None
    scope: int
    """Number of the model with its allowed nodes, within which picks are distributed together."""


_NO_FORM = Form()


@dataclass(slots=True, eq=False)
class InferenceRequest:
    """One inference request with the results of the steps that have processed it."""

    principal: Principal = ANONYMOUS
    key_hash: str = ""
    """Hash of a stored key that is not confirmed yet, otherwise "". Until then `principal` is anonymous."""
    key_owner: str = ""
    """Hash of the request's API key, stored or static; "" for a session or without a key."""
    client_address: str = ""
    request_id: str = ""
    path: str = ""
    body: bytes = b""
    form: Form = _NO_FORM
    """The form of a route that accepts files; for such a route `body` is empty."""
    model: str = ""
    """Name of the model; "" until the handler has found its definition."""
    candidates: frozenset[UUID] | None = None
    """Ids of the nodes that may be picked; None for all nodes that the model's rule allows."""
    preferred: tuple[UUID, int] | None = None
    """Node and index of the preferred replica. Without a `cached_ratio` the preference applies at any load
    (R1.80); with a `cached_ratio` only if the replica is not overloaded (R3.14).
    """
    chain: Chain = ()
    """Block hashes of the prompt; empty if the request is not routed by prefix."""
    cached_ratio: float | None = None
    """Fraction of the prompt that the preferred replica caches, 0 to 1.

    0 without a preferred replica, None without a chain.
    """
    is_prefix_cached: bool | None = None
    """True if the picked replica caches enough of the prompt; None if the pick ignored prefixes."""
    wait_until: float = math.inf
    """Time on the monotonic clock at which the request stops waiting for a load; infinite without a limit."""
    is_anthropic_client: bool = False
    """True if the client uses Anthropic's API, on a route that several dialects share."""
    is_patient: bool = False
    """True if the request waits longer for a load than usual, because its client does not retry."""
    deadline: float = math.inf
    """Monotonic time at which the response must be complete; set when the first replica is picked."""
    replica: Replica | None = None
    """The replica of the latest pick; None before."""
    names_node: bool = False
    """True if the response names its node despite the setting: an administrator's page sent the request."""
    has_begun: bool = False
    """True if the client has received a part of the response. Then no other replica may be tried."""
    pick_result: "asyncio.Future[None]" = field(init=False, repr=False)
    """Future that completes when the pick ends; each pick creates a new one."""
    pick_attempts: int = 0
    """Number of failed SQL statements during the latest pick."""

    @property
    def requester(self) -> Requester:
        """The caller, as an operation records it."""
        return Requester(self.principal.name, self.request_id, self.client_address)

    def ignore_prefixes(self) -> None:
        """Ignore prefixes in all further picks of this request."""
        self.chain, self.preferred, self.cached_ratio = (), None, None

    def begin_pick(self) -> "asyncio.Future[None]":
        """Create and return the future that completes when the pick ends."""
        self.replica, self.is_prefix_cached, self.pick_attempts = None, None, 0
        self.pick_result = asyncio.get_running_loop().create_future()
        return self.pick_result


def node_header(request: InferenceRequest) -> Sequence[Header]:
    """Return the header that names the replica's node (§6.3), or nothing if disabled or without a replica."""
    is_exposed = request.names_node or conf.cluster().expose_node_header
    if not is_exposed or request.replica is None:
        return ()
    return ((b"x-localai-node", str(request.replica.node_id).encode()),)
