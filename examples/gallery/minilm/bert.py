"""The forward pass of a BERT encoder for one unpadded text, in NumPy with single precision."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]

HEADS = 12
EPSILON = np.float32(1e-12)


class Linear:
    """`x @ weight.T + bias`."""

    def __init__(self, weights: Mapping[str, Array], *names: str) -> None:
        # Several layers that read the same input are one product.
        self.weight = np.ascontiguousarray(np.concatenate([weights[f"{name}.weight"] for name in names]).T)
        self.bias = np.concatenate([weights[f"{name}.bias"] for name in names])

    def __call__(self, x: Array) -> Array:
        return x @ self.weight + self.bias


class Norm:
    """Brings each row to mean 0 and variance 1, then scales and shifts it."""

    def __init__(self, weights: Mapping[str, Array], name: str) -> None:
        self.weight, self.bias = weights[f"{name}.weight"], weights[f"{name}.bias"]

    def __call__(self, x: Array) -> Array:
        centred = x - x.mean(axis=-1, keepdims=True)
        variance = np.square(centred).mean(axis=-1, keepdims=True)
        return centred / np.sqrt(variance + EPSILON) * self.weight + self.bias


class Layer:
    """Self-attention and a feed-forward step, each added to its input and normalised."""

    def __init__(self, weights: Mapping[str, Array], name: str) -> None:
        attention = f"{name}.attention"
        self.qkv = Linear(weights, *(f"{attention}.self.{part}" for part in ("query", "key", "value")))
        self.merge = Linear(weights, f"{attention}.output.dense")
        self.attention_norm = Norm(weights, f"{attention}.output.LayerNorm")
        self.widen = Linear(weights, f"{name}.intermediate.dense")
        self.narrow = Linear(weights, f"{name}.output.dense")
        self.output_norm = Norm(weights, f"{name}.output.LayerNorm")

    def __call__(self, x: Array) -> Array:
        x = self.attention_norm(x + self.merge(self._attend(x)))
        return self.output_norm(x + self.narrow(gelu(self.widen(x))))

    def _attend(self, x: Array) -> Array:
        length, width = x.shape
        query, key, value = self.qkv(x).reshape(length, 3, HEADS, width // HEADS).transpose(1, 2, 0, 3)
        scores = query @ key.transpose(0, 2, 1) / np.float32((width // HEADS) ** 0.5)
        return (softmax(scores) @ value).transpose(1, 0, 2).reshape(length, width)


class Bert:
    """Token ids in, one vector a token out."""

    def __init__(self, weights: Mapping[str, Array]) -> None:
        self.words = weights["embeddings.word_embeddings.weight"]
        # One text has one segment, so its type vector is the same for every position.
        self.positions = (
            weights["embeddings.position_embeddings.weight"]
            + weights["embeddings.token_type_embeddings.weight"][0]
        )
        self.norm = Norm(weights, "embeddings.LayerNorm")
        count = sum(name.endswith("attention.self.query.weight") for name in weights)
        self.layers = [Layer(weights, f"encoder.layer.{number}") for number in range(count)]

    def __call__(self, ids: NDArray[np.int64]) -> Array:
        x = self.norm(self.words[ids] + self.positions[: len(ids)])
        for layer in self.layers:
            x = layer(x)
        return x


def softmax(x: Array) -> Array:
    """Along the last axis, safe for large values."""
    powers = np.exp(x - x.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


def gelu(x: Array) -> Array:
    """x times the normal distribution function of x."""
    return x * (np.float32(0.5) + np.float32(0.5) * erf(x * np.float32(0.5**0.5)))


def erf(x: Array) -> Array:
    """The error function to 1.5e-7 (Abramowitz and Stegun 7.1.26); NumPy has none."""
    size = np.abs(x)
    t = np.float32(1) / (np.float32(1) + np.float32(0.3275911) * size)
    series = np.float32(1.061405429)
    for factor in (-1.453152027, 1.421413741, -0.284496736, 0.254829592):
        series = series * t + np.float32(factor)
    return np.sign(x) * (np.float32(1) - series * t * np.exp(-size * size))
