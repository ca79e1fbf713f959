"""Edits of a definition's YAML by a form; comments, order and quotes of unchanged settings stay.

`ruamel.yaml` preserves them. It reads YAML 1.2, but the parser of definitions reads YAML 1.1. So that parser
reads the result again: if the result is not the edited document, the document is rewritten without comments.
A text of more than `MAX_EDITED_LENGTH` bytes is also rewritten, because the library is slow.
"""

import io
import re
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import yaml
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError
from ruamel.yaml.scalarstring import DoubleQuotedScalarString, LiteralScalarString

from localai_cluster.kit import names
from localai_cluster.kit.errors import InvalidInput
from nodes.definitions.files import TEMPLATES, Definition, UnusableDefinition, load_document

MAX_PARALLEL = 1024
"""Maximum number of parallel requests in the form; an entry with another number is one of `options`."""
MAX_OPTIONS = 200
MAX_OPTION_LENGTH = 4096
MAX_TEMPLATE_LENGTH = 65_536
MAX_EDITED_LENGTH = 65_536
"""Maximum bytes of a text whose comments are preserved by an edit."""
FORM = ("context_size", "parallel", "gpu_layers", "template", "options", "max_tokens")
"""The settings that the form has."""
Document = dict[str, Any]


def form_of(definition: Definition) -> dict[str, Any]:
    """Return the definition's values in the form; None for a setting that it does not state."""
    options, own = definition.options, []
    parallel = None
    for entry in options.get("Options", ()):
        number = _parallel_of(entry)
        if number is None:
            own.append(entry)
        else:
            parallel = number
    layers = options.get("NGPULayers")
    return {
        "context_size": options.get("ContextSize"),
        "parallel": parallel,
        "gpu_layers": "auto" if definition.auto_layers else layers if layers != _ALL_LAYERS else None,
        "template": definition.generation.template,
        "options": own,
        "max_tokens": definition.generation.defaults.get("max_tokens"),
    }


_ALL_LAYERS = 99_999_999
"""Number of layers on the GPU in a definition that states none (`files.py`)."""
_PARALLEL_PATTERN = re.compile(r"\s*(?:n_)?parallel\s*:\s*(\d{1,4})\s*", re.ASCII)


def _parallel_of(entry: object) -> int | None:
    """Return the number of parallel requests that an entry of `options` sets; None for any other entry."""
    match = _PARALLEL_PATTERN.fullmatch(entry) if isinstance(entry, str) else None
    return int(match[1]) if match and 1 <= int(match[1]) <= MAX_PARALLEL else None


def apply_changes(text: str, changes: Mapping[str, Any]) -> str:
    """Return the text with these values from the form; None removes a setting. Raise InvalidInput."""
    for name, value in changes.items():
        _check_change(name, value)
    return _edit_text(text, lambda document: _change(document, changes))


def rename(text: str, name: str) -> str:
    """Return the text with another model name. Raise InvalidInput."""
    names.check_text(name, "name")
    return _edit_text(text, lambda document: document.__setitem__("name", _scalar(name)))


def merge(text: str, settings: Mapping[str, Any]) -> str:
    """Return the text with these settings in place of its own; sections are merged. Raise InvalidInput."""

    def change(document: Document) -> None:
        for key, value in settings.items():
            if isinstance(value, Mapping) and isinstance(document.get(key), dict):
                document[key].update({name: _scalar(each) for name, each in value.items()})
            else:
                document[key] = _scalar(value)

    return _edit_text(text, change)


def _check_change(name: str, value: Any) -> None:
    limits = dict.fromkeys(("context_size", "max_tokens", "gpu_layers"), 2**31 - 1)
    limits["parallel"] = MAX_PARALLEL
    if name not in FORM:
        raise _invalid(name[:64], f"is not a setting of the form: {', '.join(FORM)}")
    if value is None or (name == "gpu_layers" and value == "auto"):
        return
    if name in limits:
        least = 0 if name == "gpu_layers" else 1
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= limits[name]:
            raise _invalid(name, f"must be a whole number from {least} to {limits[name]}")
    elif name == "template":
        if not isinstance(value, str) or len(value) > MAX_TEMPLATE_LENGTH:
            raise _invalid(name, f"must be a text of at most {MAX_TEMPLATE_LENGTH} characters")
    elif (
        not isinstance(value, list)
        or len(value) > MAX_OPTIONS
        or not all(isinstance(entry, str) and 0 < len(entry) <= MAX_OPTION_LENGTH for entry in value)
    ):
        raise _invalid(
            name, f"must be a list of at most {MAX_OPTIONS} texts of at most {MAX_OPTION_LENGTH} characters"
        )
    for text in [value] if isinstance(value, str) else value if isinstance(value, list) else ():
        _check_encodable(name, text)


def _check_encodable(name: str, text: str) -> None:
    """Raise InvalidInput for half of a surrogate pair: JSON can contain one, a stored text cannot."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise _invalid(name, f"must not contain the character U+{ord(text[error.start]):04X}") from None


def _invalid(name: str, complaint: str) -> InvalidInput:
    return InvalidInput(f"changes: {name} {complaint}", field="changes")


def _change(document: Document, changes: Mapping[str, Any]) -> None:
    """Write the changes into the document; a setting that it has is changed in place."""
    parameters = document.setdefault("parameters", {})
    if not isinstance(parameters, dict):
        raise _invalid("parameters", "is not a mapping in the text")
    for name in ("context_size", "gpu_layers"):
        if name in changes:
            is_parameter = name in parameters and name not in document
            _set(parameters if is_parameter else document, name, changes[name])
            if not is_parameter:
                parameters.pop(name, None)  # it would count where the document says nothing
    if "max_tokens" in changes:
        _set(parameters, "max_tokens", changes["max_tokens"])
    if "template" in changes:
        _set_template(document, changes["template"] or "")
    if "options" in changes or "parallel" in changes:
        _set_options(
            document if "options" in document or "options" not in parameters else parameters, changes
        )


def _set(section: Document, name: str, value: Any) -> None:
    if value is None:
        section.pop(name, None)
    else:
        section[name] = _scalar(value)


def _set_template(document: Document, template: str) -> None:
    """Set the Jinja template for chats; an empty one stands for the model's own."""
    section = document.get("template")
    section = section if isinstance(section, dict) else {}
    for name in (*TEMPLATES, "jinja_template", "use_tokenizer_template"):
        section.pop(name, None)
    if template:
        section.update({"jinja_template": True, "chat": _scalar(template)})
    if section:
        document["template"] = section
    else:
        document.pop("template", None)


def _set_options(section: Document, changes: Mapping[str, Any]) -> None:
    stated = section.get("options")
    stated = stated if isinstance(stated, list) else []
    parallel = [str(entry) for entry in stated if _parallel_of(entry)]
    if "parallel" in changes:
        parallel = [f"parallel:{changes['parallel']}"] if changes["parallel"] is not None else []
    own = [entry for entry in stated if not _parallel_of(entry)]
    if "options" in changes:
        own = [_scalar(entry) for entry in changes["options"] or () if not _parallel_of(entry)]
    # The list itself stays: its comments belong to it.
    stated[:] = [*own, *parallel]
    if stated:
        section["options"] = stated
    else:
        section.pop("options", None)


def _scalar(value: Any) -> Any:
    """Return the value in a form that YAML 1.1 and 1.2 read as the same type."""
    if isinstance(value, list):
        return [_scalar(entry) for entry in value]
    if isinstance(value, Mapping):
        return {key: _scalar(entry) for key, entry in value.items()}
    if not isinstance(value, str):
        return value
    if "\n" in value and all(character.isprintable() or character == "\n" for character in value):
        return LiteralScalarString(value)
    tag = _YAML_RESOLVER.resolve(yaml.ScalarNode, value, (True, False))  # type: ignore[no-untyped-call]
    return value if tag == _TEXT_TAG else DoubleQuotedScalarString(value)


_YAML_RESOLVER = yaml.resolver.Resolver()
"""Resolver that finds the type of an unquoted value by YAML 1.1: text, number, date or boolean."""
_TEXT_TAG = "tag:yaml.org,2002:str"
"""YAML's tag of a text."""


def _edit_text(text: str, change: Any) -> str:
    """Return the text after `change` has edited its document; raise InvalidInput unless it is a mapping."""
    try:
        document = load_document(text.encode())
    except (UnusableDefinition, UnicodeEncodeError) as error:
        raise InvalidInput(f"text: {error}", field="text") from error
    if not isinstance(document, dict):
        raise InvalidInput("text: is not a mapping of settings", field="text")
    wanted = deepcopy(document)
    change(wanted)
    wanted = _plain(wanted)
    kept = _edit_in_place(text, change) if len(text.encode()) <= MAX_EDITED_LENGTH else None
    if kept is not None and _is_document(kept, wanted):
        return kept
    return str(yaml.dump(wanted, Dumper=_YAML_DUMPER, sort_keys=False, allow_unicode=True, width=110))


_YAML_DUMPER: Any = yaml.CSafeDumper if yaml.__with_libyaml__ else yaml.SafeDumper


def _edit_in_place(text: str, change: Any) -> str | None:
    """Return the edited text with its comments; None if the library fails."""
    editor = YAML()
    editor.preserve_quotes, editor.width, editor.allow_unicode = True, 4096, True
    editor.indent(mapping=2, sequence=_sequence_indent(text), offset=_sequence_indent(text) - 2)
    try:
        document = editor.load(text)
        change(document)
        written = io.StringIO()
        editor.dump(document, written)
    except (YAMLError, ValueError, TypeError, AttributeError, RecursionError):
        return None
    return written.getvalue()


def _sequence_indent(text: str) -> int:
    """Return the indentation of lists in the text: 4 if their dashes are indented, else 2."""
    return 4 if any(line.startswith("  - ") for line in text.splitlines()) else 2


def _is_document(text: str, wanted: Document) -> bool:
    try:
        return bool(load_document(text.encode()) == wanted)
    except (UnusableDefinition, UnicodeEncodeError):
        return False


def _plain(value: Any) -> Any:
    """Return the value with plain strings in place of the library's subclasses of `str`."""
    if isinstance(value, dict):
        return {_plain(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_plain(entry) for entry in value]
    return str.__str__(value) if isinstance(value, str) else value
