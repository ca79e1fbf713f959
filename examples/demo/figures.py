"""Compares the figures of an embeddings answer with the expected ones. No I/O.

The expectations come from `examples/demo.json`; nothing here depends on the model.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Vector = Sequence[float]


@dataclass(frozen=True)
class Figure:
    """One compared number; `row` is its row in the printed table."""

    name: str
    row: str
    value: float
    expected: float
    tolerance: float

    @property
    def holds(self) -> bool:
        """Whether it is as expected; NaN never is."""
        return abs(self.value - self.expected) <= self.tolerance

    def text(self, number: float) -> str:
        """`number` as text; counts have no decimals."""
        return f"{number:.4f}" if self.tolerance else f"{number:.0f}"


def cosine(one: Vector, other: Vector) -> float:
    """The cosine of the angle between two vectors; NaN if one is zero."""
    lengths = math.hypot(*one) * math.hypot(*other)
    return sum(a * b for a, b in zip(one, other, strict=True)) / lengths if lengths else math.nan


def compare(answer: Mapping[str, Any], inputs: Sequence[str], expect: Mapping[str, Any]) -> list[Figure]:
    """All figures of an embeddings answer to `inputs`, in the order of the expectations."""
    entries = sorted(answer["data"], key=lambda entry: entry["index"])
    vectors: dict[str, Vector] = {
        text: entry["embedding"] for text, entry in zip(inputs, entries, strict=False)
    }
    near = float(expect["tolerance"])
    figures = [Figure("vectors", "Vectors", len(entries), len(inputs), 0)]
    for text, vector in vectors.items():
        dimensions = (len(vector), expect["dimensions"], 0)
        figures.append(Figure(f"dimensions of {text!r}", "Dimensions of each vector", *dimensions))
        length = (math.hypot(*vector), expect["norm"], near)
        figures.append(Figure(f"length of {text!r}", "Length of each vector", *length))
    for pair in expect["cosines"]:
        one, other = pair["of"]
        value = cosine(vectors[one], vectors[other])
        row = f'Similarity of "{one}", "{other}"'
        figures.append(Figure(f"cos({one}, {other})", row, value, pair["is"], near))
    for text, components in expect["first_components"].items():
        for place, component in enumerate(components):
            row = f'First numbers of "{text}"'
            figures.append(Figure(f"{text!r} [{place}]", row, vectors[text][place], component, near))
    tokens = answer["usage"]["prompt_tokens"]
    figures.append(Figure("prompt tokens", "Prompt tokens", tokens, expect["prompt_tokens"], 0))
    return figures


def rows(figures: Sequence[Figure]) -> list[tuple[str, str, str]]:
    """The rows of the printed table: what was compared, the answer, and the verdict."""
    found: dict[str, list[Figure]] = {}
    for figure in figures:
        found.setdefault(figure.row, []).append(figure)
    return [(row, _texts(group, "value"), _verdict(group)) for row, group in found.items()]


def _texts(group: Sequence[Figure], what: str) -> str:
    return " ".join(dict.fromkeys(one.text(getattr(one, what)) for one in group))


def _verdict(group: Sequence[Figure]) -> str:
    return "ok" if all(one.holds for one in group) else f"WRONG: expected {_texts(group, 'expected')}"
