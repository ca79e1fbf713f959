"""How a model answers, as far as its definition says: which template makes its prompt, and how it samples.

None of it is told to `LoadModel`, so none of it is part of the revision. A value that cannot be used is left
out with a warning, which the lists of models show: the model itself still loads.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_NUMBERS = {
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "repeat_penalty": float,
    "frequency_penalty": float,
    "presence_penalty": float,
    "typical_p": float,
    "max_tokens": int,
    "seed": int,
}
_TEMPLATES = ("chat", "chat_message", "completion", "edit", "function", "multimodal")
GO_TEMPLATE = (
    "`template` is written in Go's language, which is not supported: the model's own template is used instead"
)


@dataclass(frozen=True)
class Answering:
    """What a definition says of its answers."""

    defaults: Mapping[str, float | int] = field(default_factory=dict)
    """Of what a request does not say, by the names of `parameters`."""
    stop: tuple[str, ...] = ()
    template: str = ""
    """A Jinja template of chats; empty: the engine uses the model's own."""
    warnings: tuple[str, ...] = ()


SILENT = Answering()
"""Of a definition that says nothing of it."""


def answering_of(document: Mapping[Any, Any], parameters: Mapping[Any, Any]) -> Answering:
    """What a definition's file says of it."""
    warnings: list[str] = []
    defaults: dict[str, float | int] = {}
    for name, kind in _NUMBERS.items():
        value = parameters.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int if kind is int else int | float):
            warnings.append(f"`parameters.{name}` is not a number and is ignored")
        elif not -(2**31) <= value < 2**31:
            warnings.append(f"`parameters.{name}` is out of range and is ignored")
        else:
            defaults[name] = kind(value)
    stop = document.get("stopwords") or []
    if not isinstance(stop, list) or not all(_is_text(word) for word in stop):
        warnings.append("`stopwords` is not a list of texts and is ignored")
        stop = []
    return Answering(defaults, tuple(stop), _template(document.get("template"), warnings), tuple(warnings))


def _template(section: object, warnings: list[str]) -> str:
    """The Jinja template of chats, if the definition has one; Go's cannot be used."""
    if section is None:
        return ""
    if not isinstance(section, Mapping):
        warnings.append("`template` is not a mapping and is ignored")
        return ""
    written = [name for name in _TEMPLATES if isinstance(section.get(name), str) and section[name].strip()]
    if not written or section.get("use_tokenizer_template") is True:
        return ""
    if section.get("jinja_template") is True and "chat" in written:
        if _is_text(section["chat"]):
            return str(section["chat"])
        warnings.append("`template.chat` has characters that are no text and is ignored")
        return ""
    warnings.append(GO_TEMPLATE)
    return ""


def _is_text(value: object) -> bool:
    """Return True for a text that an engine can be sent: neither empty nor with half a pair of surrogates."""
    return isinstance(value, str) and bool(value) and not any("\ud800" <= one <= "\udfff" for one in value)
