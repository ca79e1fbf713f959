"""The figures of the main job: what an answer must hold, compared with what it holds. No I/O.

What is expected comes from `examples/demo.json`; no model is known here.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Vector = Sequence[float]


@dataclass(frozen=True)
class Figure:
    """One compared number."""

    name: str
    value: float
    expected: float
    tolerance: float

    @property
    def holds(self) -> bool:
        """Whether it is as expected; a number that is no number never is."""
        return abs(self.value - self.expected) <= self.tolerance


def cosine(one: Vector, other: Vector) -> float:
    """The cosine of the angle between two vectors; nan when one has no direction."""
    lengths = math.hypot(*one) * math.hypot(*other)
    return sum(a * b for a, b in zip(one, other, strict=True)) / lengths if lengths else math.nan


def compare(answer: Mapping[str, Any], inputs: Sequence[str], expect: Mapping[str, Any]) -> list[Figure]:
    """Every figure of an embeddings answer to `inputs`, in the order of the expectations."""
    entries = sorted(answer["data"], key=lambda entry: entry["index"])
    vectors: dict[str, Vector] = {
        text: entry["embedding"] for text, entry in zip(inputs, entries, strict=False)
    }
    near = float(expect["tolerance"])
    figures = [Figure("vectors", len(entries), len(inputs), 0)]
    for text, vector in vectors.items():
        figures.append(Figure(f"dimensions of {text!r}", len(vector), expect["dimensions"], 0))
        figures.append(Figure(f"length of {text!r}", math.hypot(*vector), expect["norm"], near))
    for pair in expect["cosines"]:
        one, other = pair["of"]
        value = cosine(vectors[one], vectors[other])
        figures.append(Figure(f"cos({one}, {other})", value, pair["is"], near))
    for text, components in expect["first_components"].items():
        for place, component in enumerate(components):
            figures.append(Figure(f"{text!r} [{place}]", vectors[text][place], component, near))
    tokens = answer["usage"]["prompt_tokens"]
    figures.append(Figure("prompt tokens", tokens, expect["prompt_tokens"], 0))
    return figures
