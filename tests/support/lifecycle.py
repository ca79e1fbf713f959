"""What the life cycle's model knows of a node: written by hand, not derived from the product's table."""

from dataclasses import dataclass, field
from datetime import datetime
from uuid import UUID

TOKEN = ""
"""Stands for a worker that knows the shared token only."""


@dataclass
class Claim:
    """A conflict: what was claimed, and what an admin said."""

    kind: str
    claim: str
    name: str
    state: str = "open"


@dataclass
class Node:
    """What the model knows of a node."""

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
    label: str = ""
    replicas: int = 0
    busy: bool = False
    claims: list[Claim] = field(default_factory=list)
    told: list[tuple[str, str]] = field(default_factory=list)
    conflicts: int = 0

    @property
    def status(self) -> str:
        """The first that holds."""
        if not self.approved:
            return "pending"
        if self.offline:
            return "offline"
        if self.drained:
            return "draining"
        return "unhealthy" if self.unhealthy else "healthy"

    @property
    def identified(self) -> bool:
        """Whether anybody can speak for it."""
        return bool(self.secret) or self.weak

    def holds(self, secret: str) -> bool:
        """Whether the bearer of that secret is the node."""
        return secret == self.secret if self.secret else self.weak and secret == TOKEN

    def judge(self, secret: str, instance: str) -> str:
        """What does not fit about a registration, "" if it does."""
        if secret and secret == self.secret:
            return "instance" if instance in self.former else ""
        if self.secret:
            return "secret" if secret else "token"
        if secret == TOKEN:
            return "token" if self.bound else ""
        return "weak" if self.weak else ""

    def drop(self) -> None:
        """Its replicas go."""
        self.replicas, self.busy = 0, False
