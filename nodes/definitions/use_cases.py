"""Prompt template and sampling defaults of a model, as its definition sets them.

`LoadModel` receives none of it, so none of it is part of the revision. An unusable value is left out with a
warning, which the lists of models show: the model itself still loads.
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
    """The prompt template, stop words and sampling defaults of one definition."""

    defaults: Mapping[str, float | int] = field(default_factory=dict)
    """Sampling values for the fields that a request omits, by the names of `parameters`."""
    stop: tuple[str, ...] = ()
    template: str = ""
    """A Jinja template for chats. If empty, the engine uses the model's own."""
    warnings: tuple[str, ...] = ()


SILENT = Answering()
"""The value for a definition without a template, stop words or sampling defaults."""


def answering_of(document: Mapping[Any, Any], parameters: Mapping[Any, Any]) -> Answering:
    """Parse the answering settings of a definition's file; unusable values become warnings."""
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
    """Return the Jinja template for chats, or "" without one. Go templates are not supported."""
    if section is None:
        return ""
    if not isinstance(section, Mapping):
        warnings.append("`template` is not a mapping and is ignored")
        return ""
    nonempty_templates = [
        name for name in _TEMPLATES if isinstance(section.get(name), str) and section[name].strip()
    ]
    if not nonempty_templates or section.get("use_tokenizer_template") is True:
        return ""
    if section.get("jinja_template") is True and "chat" in nonempty_templates:
        if _is_text(section["chat"]):
            return str(section["chat"])
        warnings.append("`template.chat` has characters that are no text and is ignored")
        return ""
    warnings.append(GO_TEMPLATE)
    return ""


def _is_text(value: object) -> bool:
    """Return True if an engine can receive the text: it is not empty and has no lone surrogate."""
    return (
        isinstance(value, str)
        and bool(value)
        and not any("\ud800" <= character <= "\udfff" for character in value)
    )
