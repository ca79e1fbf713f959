"""The labels that a model's scheduling rule demands of its nodes. Pure."""

from collections.abc import Set
from dataclasses import dataclass

Labels = frozenset[tuple[str, str]]
"""Keys and values."""


@dataclass(frozen=True)
class Selector:
    """What a node must have to match (R1.68); without labels every node does."""

    model: str = ""
    labels: Labels | None = frozenset()
    """None: what is stored cannot be read, and nothing matches (R1.69)."""

    def matches(self, labels: Set[tuple[str, str]]) -> bool:
        """Whether a node with these labels matches; more labels do no harm."""
        return self.labels is not None and self.labels <= labels

    def __str__(self) -> str:
        whose = f"the selector of model {self.model}" if self.model else "the selector"
        if self.labels is None:
            return f"{whose}, which cannot be read"
        said = ", ".join(f"{key}={value}" for key, value in sorted(self.labels))
        return f"{whose}: {said}"


ANY = Selector()
