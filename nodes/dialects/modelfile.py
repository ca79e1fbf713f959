"""Conversion between Ollama's Modelfile, or equal fields of a request, and settings of a definition. Pure."""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from localai_cluster.kit import names
from localai_cluster.kit.errors import ClusterError, InvalidInput
from nodes.definitions.files import Definition

MAX_LINES = 10_000


class NotSupported(ClusterError):
    """The request has an instruction of a Modelfile that the cluster does not support."""

    message = "This function is not supported."
    status = 501
    code = "not_implemented"


@dataclass
class Modelfile:
    """The instructions of a Modelfile; `base` is the name of a model or of a file."""

    base: str = ""
    parameters: dict[str, list[Any]] = field(default_factory=dict)
    template: str = ""
    system: str = ""

    def add(self, instruction: str, value: str) -> None:
        """Add one instruction. Raise InvalidInput for an unknown instruction, NotSupported for an adapter."""
        match instruction.upper():
            case "FROM":
                self.base = value
            case "PARAMETER":
                name, _, stated = value.partition(" ")
                self.parameters.setdefault(name.lower(), []).append(stated.strip().strip('"'))
            case "TEMPLATE":
                self.template = value
            case "SYSTEM":
                self.system = value
            case "ADAPTER":
                raise NotSupported("ADAPTER is not supported: define the adapter in the model's definition")
            case "LICENSE" | "MESSAGE" | "REQUIRES":
                pass  # they do not change what an engine does
            case _:
                raise InvalidInput(
                    f"modelfile: {names.to_single_line(instruction[:32])!r} is no instruction",
                    field="modelfile",
                )


_INSTRUCTION_PATTERN = re.compile(r"\s*([A-Za-z]+)\s+(.*)", re.DOTALL)
_TRIPLE_QUOTES = '"""'


def parse_modelfile(text: str) -> Modelfile:
    """Parse the text of a Modelfile; raise InvalidInput."""
    modelfile = Modelfile()
    for instruction, value in _split_instructions(text):
        modelfile.add(instruction, value)
    if not modelfile.base:
        raise InvalidInput("modelfile: has no FROM", field="modelfile")
    return modelfile


def _split_instructions(text: str) -> Iterator[tuple[str, str]]:
    """Yield the name and the value of each instruction. A value in triple quotes may have several lines."""
    lines = text.splitlines()
    if len(lines) > MAX_LINES:
        raise InvalidInput(f"modelfile: has more than {MAX_LINES} lines", field="modelfile")
    remaining = iter(lines)
    for line in remaining:
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        match = _INSTRUCTION_PATTERN.fullmatch(line)
        if match is None:
            raise InvalidInput(
                f"modelfile: {names.to_single_line(line[:64])!r} has no value", field="modelfile"
            )
        instruction, value = match[1], match[2].strip()
        if value.startswith(_TRIPLE_QUOTES):
            parts = [value.removeprefix(_TRIPLE_QUOTES)]
            while _TRIPLE_QUOTES not in parts[-1]:
                following = next(remaining, None)
                if following is None:
                    raise InvalidInput("modelfile: a text in triple quotes does not end", field="modelfile")
                parts.append(following)
            value = "\n".join(parts).rpartition(_TRIPLE_QUOTES)[0]
        elif len(value) > 1 and value[0] == value[-1] == '"' and instruction.upper() != "PARAMETER":
            value = value[1:-1]
        yield instruction, value


_TYPE_BY_GENERATION_PARAMETER = {
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "typical_p": float,
    "seed": int,
    "repeat_penalty": float,
    "frequency_penalty": float,
    "presence_penalty": float,
}
"""Type of the value of each parameter of generation."""
_DEFINITION_FIELD_BY_PARAMETER = {
    "num_ctx": "context_size",
    "num_gpu": "gpu_layers",
    "num_thread": "threads",
    "num_batch": "batch",
}
"""Field of a definition for each parameter that concerns the load of a model."""


def to_settings(modelfile: Modelfile) -> dict[str, Any]:
    """Convert a Modelfile to settings of a definition. Ignore unknown parameters; raise InvalidInput."""
    settings: dict[str, Any] = {}
    parameters: dict[str, Any] = {}
    for name, values in modelfile.parameters.items():
        last = values[-1] if values else None
        if name == "stop":
            settings["stopwords"] = _parse_stop_words(values)
        elif name in _DEFINITION_FIELD_BY_PARAMETER:
            settings[_DEFINITION_FIELD_BY_PARAMETER[name]] = _parse_number(name, last, int)
        elif name in _TYPE_BY_GENERATION_PARAMETER:
            parameters[name] = _parse_number(name, last, _TYPE_BY_GENERATION_PARAMETER[name])
        elif name == "num_predict" and (tokens := _parse_number(name, last, int)) > 0:
            parameters["max_tokens"] = tokens
    if parameters:
        settings["parameters"] = parameters
    if modelfile.system:
        settings["system_prompt"] = modelfile.system
    if modelfile.template:
        # A template in Go's language has `.System`; it is kept, and the model's own is used.
        is_jinja = "{%" in modelfile.template or not re.search(r"\{\{-?\s*\.", modelfile.template)
        settings["template"] = {"chat": modelfile.template} | ({"jinja_template": True} if is_jinja else {})
    return settings


def _parse_stop_words(values: list[Any]) -> list[str]:
    # A number is the text that a client wrote without quotes.
    if not all(isinstance(value, str | int | float) and not isinstance(value, bool) for value in values):
        raise InvalidInput("parameters: stop is not a list of texts", field="parameters")
    return [str(value) for value in values if str(value)]


def _parse_number(name: str, value: Any, kind: type) -> Any:
    try:
        if isinstance(value, bool):
            raise ValueError
        number = float(value)
        if not math.isfinite(number):
            raise ValueError
        return int(number) if kind is int else number
    except (ValueError, TypeError, OverflowError):
        raise InvalidInput(f"parameters: {name} is not a number", field="parameters") from None


def render_parameters(definition: Definition) -> str:
    """Return the parameters of a definition in the syntax of a Modelfile, without the word `PARAMETER`."""
    options, generation = definition.options, definition.generation
    stated: dict[str, Any] = {
        name: options[option] for name, option in _LOAD_OPTION_BY_PARAMETER.items() if options.get(option)
    }
    stated |= {
        "num_predict" if name == "max_tokens" else name: value for name, value in generation.defaults.items()
    }
    lines = [f"{name:<30} {value}" for name, value in stated.items()]
    lines += [f'{"stop":<30} "{word}"' for word in generation.stop]
    return "\n".join(lines)


_LOAD_OPTION_BY_PARAMETER = {"num_ctx": "ContextSize", "num_thread": "Threads"}


def render_modelfile(definition: Definition) -> str:
    """Return a Modelfile with the base, parameters, template and system prompt of the definition."""
    lines = [f"FROM {definition.model}"]
    lines += [
        f"PARAMETER {' '.join(line.split(None, 1))}" for line in render_parameters(definition).splitlines()
    ]
    generation: Mapping[str, str] = {
        "TEMPLATE": definition.generation.template,
        "SYSTEM": definition.generation.system,
    }
    lines += [f"{name} {_TRIPLE_QUOTES}{text}{_TRIPLE_QUOTES}" for name, text in generation.items() if text]
    return "\n".join(lines) + "\n"
