"""The schema of a definition's YAML, and the check of a text before it is saved.

`files.parse_definition` decides whether a text is usable. The schema is built from the same tables; it finds
all wrong values with their positions, while the parser stops at the first. A text with a secret is refused,
because every reader of the definition, each revision and each worker would have the secret.
"""

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice
from typing import Any

import yaml
from jsonschema import Draft202012Validator  # type: ignore[import-untyped]

from localai_cluster.kit import names, untrusted
from localai_cluster.kit.errors import InvalidInput
from nodes.definitions.files import (
    DOWNLOAD_ON,
    FIELDS,
    LISTS,
    MAX_FILE_BYTES,
    MAX_NAME,
    NUMBERS,
    SECTION_FIELDS,
    TEMPLATES,
    USE_CASES,
    Definition,
    UnusableDefinition,
    parse_definition,
)

Schema = dict[str, Any]
Path = tuple[str | int, ...]
_SIZE_SCHEMA: Schema = {
    "type": ["integer", "string", "null"],
    "description": "Bytes, or a size such as `12GiB`.",
}
_SCHEMA_BY_TYPE: Mapping[type, Schema] = {
    # YAML reads `main_gpu: 0` and `flash_attention: on` as a number and a switch; both mean their text.
    str: {"type": ["string", "number", "boolean", "null"]},
    bool: {"type": ["boolean", "null"]},
    int: {"type": ["integer", "null"], "minimum": -(2**31), "maximum": 2**31 - 1},
    float: {"type": ["number", "null"]},
}
_ITEM_SCHEMA_BY_TYPE: Mapping[type, Schema] = {str: {"type": "string"}, float: {"type": "number"}}
_MAX_ERRORS = 50
_MAX_UNKNOWN_KEYS = 200
"""Maximum number of unknown keys for which a similar known key is searched."""
_CONTAINER_TYPES = (dict, list)


@cache
def definition_schema() -> Schema:
    """Return the JSON Schema of a definition. Settings that are not in it are permitted and ignored."""
    settings: Schema = {key: _SCHEMA_BY_TYPE[kind] for key, (_, kind) in FIELDS.items()}
    settings |= {key: _list_of(_ITEM_SCHEMA_BY_TYPE[kind]) for key, (_, kind) in LISTS.items()}
    layers = {"type": ["integer", "string", "null"], "minimum": -(2**31), "maximum": 2**31 - 1}
    settings["gpu_layers"] = layers | {"description": "A number, or `auto`: as many as fit."}
    text = {"type": "string", "minLength": 1, "maxLength": MAX_NAME}
    numbers: Schema = {key: _SCHEMA_BY_TYPE[kind] for key, kind in NUMBERS.items()}
    sections: dict[str, Schema] = {}
    for section, key in SECTION_FIELDS:
        sections.setdefault(section, {})[key] = _SCHEMA_BY_TYPE[str]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Model definition",
        "type": "object",
        "required": ["name", "backend", "parameters"],
        "properties": {
            **settings,
            **{name: {"type": ["object", "null"], "properties": keys} for name, keys in sections.items()},
            "name": text | {"description": "The name that clients request."},
            "backend": text,
            "parameters": {
                "type": "object",
                "required": ["model"],
                "properties": {
                    **settings,
                    **numbers,
                    "model": text | {"description": "A file or folder of the models folder."},
                },
            },
            "template": {
                "type": ["object", "null"],
                "properties": {
                    **{name: {"type": ["string", "null"]} for name in TEMPLATES},
                    "jinja_template": _SCHEMA_BY_TYPE[bool],
                    "use_tokenizer_template": _SCHEMA_BY_TYPE[bool],
                },
            },
            "system_prompt": {"type": ["string", "null"], "description": "Of conversations without one."},
            "stopwords": _list_of({"type": "string", "minLength": 1}),
            "known_usecases": _list_of(
                {"type": "string", "examples": [f"FLAG_{case.upper()}" for case in USE_CASES]}
            ),
            "concurrency_groups": _list_of({"type": "string"}),
            "token_ids": _SCHEMA_BY_TYPE[bool],
            "disabled": _SCHEMA_BY_TYPE[bool],
            "vram_needed": _SIZE_SCHEMA,
            "download_on": {"enum": [*DOWNLOAD_ON, None]},
        },
    }


def _list_of(item: Schema) -> Schema:
    return {"type": ["array", "null"], "items": item}


@dataclass(frozen=True)
class TextProblem:
    """An error in a text with its position; line and column count from 1, 0 = unknown."""

    message: str
    path: str = ""
    line: int = 0
    column: int = 0


@dataclass(frozen=True)
class CheckedText:
    """The result of checking a text: the definition, or the errors."""

    definition: Definition | None
    errors: Sequence[TextProblem] = ()
    warnings: Sequence[str] = ()


def require_usable(text: str, source: str) -> CheckedText:
    """Check the text; raise InvalidInput for the field `text`, with line and reason, unless it is usable."""
    checked = check_text(text, source)
    if not checked.errors:
        return checked
    first = checked.errors[0]
    place = f"line {first.line}: " if first.line and "(line" not in first.message else ""
    message = f"text: {place}{first.message}"
    raise InvalidInput(message, field="text", line=first.line, column=first.column)


def check_text(text: str, source: str) -> CheckedText:
    """Check the text of a definition."""
    try:
        content = text.encode()
    except UnicodeEncodeError:
        return CheckedText(None, [TextProblem("has half of a surrogate pair")])
    if len(content) > MAX_FILE_BYTES:
        return CheckedText(None, [TextProblem(f"is larger than {MAX_FILE_BYTES} bytes")])
    try:
        tree, document = untrusted.compose_and_load_yaml(text, untrusted.PlainLoader)
    except untrusted.InvalidYAML as error:
        return CheckedText(None, [TextProblem(str(error), "", error.line, error.column)])
    found = [*islice(_find_secrets(text, document, tree), _MAX_ERRORS)]
    violations = [*_find_violations(document, tree)] if isinstance(document, Mapping) else []
    try:
        definition = parse_definition(document, source)
    except UnusableDefinition as error:
        stop = _parser_problem(error, tree)
        rest = [problem for problem in violations if problem.path != stop.path]
        found += [stop, *rest] if len(rest) == len(violations) else violations
        return CheckedText(None, sorted(found, key=lambda problem: (problem.line, problem.column)))
    except Exception as error:
        return CheckedText(None, [*found, TextProblem(f"cannot be used: {untrusted.yaml_reason(error)}")])
    hints = [f"line {problem.line}: {problem.message}" for problem in violations]
    warnings = [*definition.generation.warnings, *hints, *_find_misspellings(document)]
    return CheckedText(definition, found, warnings) if not found else CheckedText(None, found, warnings)


_QUOTED_NAME_PATTERN = re.compile(r"`([\w.]+)`")


def _parser_problem(error: UnusableDefinition, tree: yaml.Node | None) -> TextProblem:
    """Return the parser's error, at the position of the key that its message names."""
    match = _QUOTED_NAME_PATTERN.search(str(error))
    path: Path = tuple(match[1].split(".")) if match else ()
    return TextProblem(names.to_single_line(str(error)), ".".join(map(str, path)), *_position_of(tree, path))


def _find_violations(document: object, tree: yaml.Node | None) -> Iterator[TextProblem]:
    found = Draft202012Validator(definition_schema()).iter_errors(document)
    try:
        errors = list(islice(found, _MAX_ERRORS))
    except ValueError:
        return  # a whole number of thousands of digits has no text; the parser refuses it
    for error in errors:
        path: Path = tuple(error.absolute_path)
        if error.validator == "required":
            path = (*path, error.message.split("'")[1])
        yield TextProblem(
            _describe_violation(error, path), ".".join(map(str, path)), *_position_of(tree, path)
        )


def _describe_violation(error: Any, path: Path) -> str:
    """Describe the violation without the value, which may be large."""
    key = f"`{'.'.join(map(str, path))}` "
    match error.validator:
        case "required":
            return f"does not say {key.strip()}"
        case "type":
            kinds = (
                [error.validator_value] if isinstance(error.validator_value, str) else error.validator_value
            )
            return f"{key}is not {' or '.join(_TYPE_NAMES[kind] for kind in kinds if kind != 'null')}"
        case "minimum" | "maximum":
            return f"{key}is out of range"
        case "minLength":
            return f"{key}is empty"
        case "maxLength":
            return f"{key}has more than {error.validator_value} characters"
    return f"{key}is not valid"


_TYPE_NAMES = {
    "array": "a list",
    "boolean": "true or false",
    "integer": "a whole number",
    "number": "a number",
    "object": "a mapping",
    "string": "a text",
}


def _find_misspellings(document: Mapping[Any, Any]) -> Iterator[str]:
    """Yield a warning for each unknown setting whose name is similar to that of a known one."""
    known = definition_schema()["properties"]
    unknown = [key for key in document if isinstance(key, str) and key not in known]
    for key in unknown[:_MAX_UNKNOWN_KEYS]:
        if close := difflib.get_close_matches(key[:MAX_NAME], known, 1, 0.85):
            yield f"`{names.to_single_line(key[:64])}` is not used; did you mean `{close[0]}`?"


def _position_of(tree: yaml.Node | None, path: Path) -> tuple[int, int]:
    """Return line and column of the value at this path, or of the nearest part of the path that exists."""
    node, mark = tree, tree.start_mark if tree is not None else None
    for part in path:
        child = None
        if isinstance(node, yaml.MappingNode):
            pairs = [pair for pair in node.value if pair[0].value == part]
            child, mark = (pairs[-1][1], pairs[-1][0].start_mark) if pairs else (None, mark)
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
            child = node.value[part]
            mark = child.start_mark
        if child is None:
            break
        node = child
    return (mark.line + 1, mark.column + 1) if mark is not None else (0, 0)


_SECRET_VALUE_PATTERN = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|AKIA[0-9A-Z]{16})\b"
    r"|\bBearer\s+[A-Za-z0-9._~+/-]{8,}|-----BEGIN [A-Z ]*PRIVATE KEY-----|://[^/\s:@]+:[^/\s:@]+@"
)
_SECRET_KEY_PATTERN = re.compile(
    r"(?:.*[_-])?(?:api[_-]?key|password|passwd|secret|secret[_-]?(?:access[_-]?)?key|private[_-]?key|authorization)"
    r"|(?:(?:hf|hub|huggingface|access|auth|bearer|api|github)[_-]?)?token",
    re.IGNORECASE,
)
_SECRET_PROBLEM = "is a secret; definitions are readable and go to workers: use the server's settings"


def _find_secrets(text: str, document: object, tree: yaml.Node | None) -> Iterator[TextProblem]:
    """Yield an error for each secret in the text, also in its comments."""
    if (match := _SECRET_VALUE_PATTERN.search(text)) is not None:
        line = text.count("\n", 0, match.start()) + 1
        column = match.start() - text.rfind("\n", 0, match.start())
        yield TextProblem(
            f"what begins with `{match[0][:3]}` looks like a token and {_SECRET_PROBLEM}", "", line, column
        )
    pending: list[tuple[Path, object]] = [((), document)]
    while pending:
        path, value = pending.pop()
        items = (
            value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        )
        for key, child in items:
            # An entry of `options` is `name:value`.
            name, _, rest = (
                child.partition(":") if isinstance(key, int) and isinstance(child, str) else (key, "", child)
            )
            is_stated = bool(rest.strip()) if isinstance(rest, str) else isinstance(rest, int | float)
            if isinstance(name, str) and is_stated and _SECRET_KEY_PATTERN.fullmatch(name.strip()):
                shown = ".".join(map(str, (*path, key)))
                yield TextProblem(
                    f"`{names.to_single_line(shown[:64])}` {_SECRET_PROBLEM}",
                    shown,
                    *_position_of(tree, (*path, key)),
                )
            elif isinstance(child, _CONTAINER_TYPES):
                pending.append(((*path, key), child))
