"""One request of the inference edge: a single object that each station on its way fills in.

The endpoint fills in the caller, where the request comes from, its path and body; the surface the model and
how long to wait; the gateway the time limit; the picker the confirmed caller and the replica.
"""

import asyncio
import math
from dataclasses import dataclass, field
from typing import NamedTuple
from uuid import UUID

from localai_cluster.accounts.principals import ANONYMOUS, Principal
from localai_cluster.web.multipart import Form
from nodes.routing.chains import Chain


@dataclass(frozen=True, slots=True)
class Replica:
    """A picked replica; it counts as in flight until it is released."""

    id: UUID
    node_id: UUID
    index: int
    model: str
    address: str
    token: str = field(default="", repr=False)
    """The bearer for calls to it."""


class PickWish(NamedTuple):
    """What a pick is to find; equal wishes are spread over the replicas together."""

    model: str
    candidates: frozenset[UUID] | None
    preferred: tuple[UUID, int] | None
    share: float | None = None

    @property
    def whichever(self) -> "PickWish":
        """What is left of it where prefixes do not count."""
        return PickWish(self.model, self.candidates, None, 0.0)


@dataclass(slots=True, eq=False)
class InferenceRequest:
    """One request and what is known of it so far."""

    principal: Principal = ANONYMOUS
    key_hash: str = ""
    """Of a stored key that no statement has confirmed yet; until then `principal` is anonymous."""
    client_address: str = ""
    request_id: str = ""
    path: str = ""
    body: bytes = b""
    form: Form = field(default_factory=Form)
    """The body of a route that takes files, in place of `body`."""
    model: str = ""
    """Empty until the surface has found its definition."""
    candidates: frozenset[UUID] | None = None
    """The nodes whose replicas it may have; None: all that its model's rule allows."""
    preferred: tuple[UUID, int] | None = None
    """Node and index of the replica that it should have, however busy that is (R1.80); with a `share`, if
    that is not too busy (R3.14)."""
    chain: Chain = ()
    """Of its prompt; empty if it is not to be routed by that."""
    share: float | None = None
    """How much of the prompt that replica was given last, 0 if there is none; None without a chain."""
    remembered: bool | None = None
    """Whether the latest pick found such a replica, with share enough; None if prefixes had no part in it."""
    wait_until: float = math.inf
    """When it stops waiting for a load, on the monotonic clock; infinite without a limit."""
    deadline: float = math.inf
    """When the answer must be complete, on the monotonic clock; set with the first replica."""
    replica: Replica | None = None
    """The replica of the latest pick."""
    names_node: bool = False
    """Whether the answer says which node made it, whatever the setting: an administrator's page asks."""
    begun: bool = False
    """Whether the client has a part of the answer: then no other replica may begin another one."""
    picked: "asyncio.Future[None]" = field(init=False, repr=False)
    """Done when the picker has decided; each pick makes a new one."""
    pick_attempts: int = 0
    """Statements that failed during the latest pick."""

    @property
    def wish(self) -> PickWish:
        """What its pick is to find."""
        return PickWish(self.model, self.candidates, self.preferred, self.share)

    def route_plainly(self) -> None:
        """Its next picks do not go by its prompt."""
        self.chain, self.preferred, self.share = (), None, None

    def begin_pick(self) -> "asyncio.Future[None]":
        """Starts a pick, the first one or another; what it returns is done when the picker has decided."""
        self.replica, self.remembered, self.pick_attempts = None, None, 0
        self.picked = asyncio.get_running_loop().create_future()
        return self.picked
