"""The labels that a model's scheduling rule demands of its nodes. Pure."""

from collections.abc import Set
from dataclasses import dataclass

Labels = frozenset[tuple[str, str]]
"""Pairs of key and value."""


@dataclass(frozen=True)
class Selector:
    """The labels that a node must have to match (R1.68); without labels every node matches."""

    model: str = ""
    labels: Labels | None = frozenset()
    """None: the stored selector cannot be read, and no node matches (R1.69)."""

    def matches(self, labels: Set[tuple[str, str]]) -> bool:
        """Return True if a node with these labels matches; additional labels do not matter."""
        return self.labels is not None and self.labels <= labels

    def __str__(self) -> str:
        subject = f"the selector of model {self.model}" if self.model else "the selector"
        if self.labels is None:
            return f"{subject}, which cannot be read"
        pairs = ", ".join(f"{key}={value}" for key, value in sorted(self.labels))
        return f"{subject}: {pairs}"


ANY = Selector()
