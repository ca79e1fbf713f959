"""The reference model of a node's life cycle: written by hand, not derived from the product's table."""

from dataclasses import dataclass, field
from datetime import UTC, datetime
from uuid import UUID

TOKEN = ""
"""The value for a worker that knows only the shared token."""


NEVER = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass
class Claim:
    """A conflict: the claim, and the decision of an admin."""

    kind: str
    claim: str
    name: str
    state: str = "open"


@dataclass
class Node:
    """The state of a node in the model."""

    id: UUID
    name: str
    seen: datetime
    secret: str = ""
    weak: bool = False
    bound: bool = False
    instance: str = ""
    former: list[str] = field(default_factory=list)
    rotating: bool = False
    approved: bool = False
    rejected: bool = False
    revoked: bool = False
    drained: str = ""
    deadline: datetime | None = None
    offline: str = ""
    unhealthy: datetime | None = None
    answered: datetime = NEVER
    """Time of its last answer on the bus."""
    label: str = ""
    replicas: int = 0
    busy: bool = False
    claims: list[Claim] = field(default_factory=list)
    told: list[tuple[str, str]] = field(default_factory=list)
    conflicts: int = 0

    @property
    def status(self) -> str:
        """Return the first status whose condition holds."""
        if not self.approved:
            return "pending"
        if self.offline:
            return "offline"
        if self.drained:
            return "draining"
        return "unhealthy" if self.unhealthy else "healthy"

    @property
    def identified(self) -> bool:
        """Return True if a worker can authenticate as the node."""
        return bool(self.secret) or self.weak

    def holds(self, secret: str) -> bool:
        """Return True if a bearer of this secret is the node."""
        return secret == self.secret if self.secret else self.weak and secret == TOKEN

    def judge(self, secret: str, instance: str) -> str:
        """Return the conflict of a registration; "" if there is none."""
        if secret and secret == self.secret:
            return "instance" if instance in self.former else ""
        if self.secret:
            return "secret" if secret else "token"
        if secret == TOKEN:
            return "token" if self.bound else ""
        return "weak" if self.weak else ""

    def drop(self) -> None:
        """Remove its replicas."""
        self.replicas, self.busy = 0, False
