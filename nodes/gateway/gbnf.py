"""Conversion of a JSON schema to GBNF, the grammars of llama.cpp that engines read in `Grammar`. Pure.

The entry point is `from_schema`. Every text that the grammar accepts is JSON of the schema's shape: types,
properties in the schema's order and no others unless it permits them, lists and their lengths, enumerated
values, references, texts of a supported format. A schema whose `const` and `enum` exclude every value raises
InvalidInput. Constraints that would need a huge grammar are omitted: bounds of numbers (except the sign),
`pattern`, patterns of names, `not`, `uniqueItems`. An engine with better support for schemas can read the
schema, which is sent in addition to the grammar.
"""

import contextlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from localai_cluster.kit.errors import InvalidInput
from nodes.gateway import schemas


@dataclass(frozen=True, slots=True)
class Text:
    """Grammar of a fixed text."""

    text: str


@dataclass(frozen=True, slots=True)
class Chars:
    """Grammar of one character of a class; `members` is the class without brackets, for example `a-z`."""

    members: str


@dataclass(frozen=True, slots=True)
class Reference:
    """Grammar that refers to the rule with this name."""

    name: str


@dataclass(frozen=True, slots=True)
class Concatenation:
    """Grammar of several parts in a row."""

    parts: tuple["Grammar", ...]


@dataclass(frozen=True, slots=True)
class Alternatives:
    """Grammar that accepts one of several options."""

    options: tuple["Grammar", ...]


@dataclass(frozen=True, slots=True)
class Repetition:
    """Grammar of `least` to `most` repetitions of a part; there is no maximum if `most` is None."""

    part: "Grammar"
    least: int = 0
    most: int | None = None


Grammar = Text | Chars | Reference | Concatenation | Alternatives | Repetition


_ESCAPE_TABLE = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r", "\t": "\\t"})


def to_text(part: Grammar) -> str:
    """Return a grammar in GBNF, as the right-hand side of a rule."""
    match part:
        case Text(text):
            return f'"{text.translate(_ESCAPE_TABLE)}"'
        case Chars(members):
            return f"[{members}]"
        case Reference(name):
            return name
        case Concatenation(parts):
            return " ".join(map(_parenthesized_text, parts)) or '""'
        case Alternatives(options):
            return " | ".join(map(_parenthesized_text, options))
        case Repetition(inside, least, most):
            return f"{_parenthesized_text(inside)}{_repetition_suffix(least, most)}"


def _parenthesized_text(part: Grammar) -> str:
    return f"({to_text(part)})" if isinstance(part, Concatenation | Alternatives) else to_text(part)


def _repetition_suffix(least: int, most: int | None) -> str:
    if most is None:
        return "*" if least == 0 else f"{{{least},}}"
    return "?" if (least, most) == (0, 1) else f"{{{least},{most}}}"


MAX_REPEATS = 1000
"""Largest bound of a repetition. Larger bounds are ignored, because llama.cpp refuses them."""
MAX_SCHEMA_PARTS = 20_000
"""Limit on the parts of a schema. A part is counted once for each copy that a neighbouring choice causes."""
MAX_COPIED_CHARACTERS = 1_000_000
"""Limit on the characters and entries that are read or copied, in total. A part counts at every reference
and choice. Without the limit a small schema could take hours, or expand to a grammar that exceeds the memory.
"""
MAX_TOTAL_TEXT_LENGTH = 20_000
"""Limit on the sum of the length bounds of all texts, because engines create a rule for each character.
Further length bounds are omitted."""


_HEX_DIGIT = Chars("0-9a-fA-F")
_DIGIT = Chars("0-9")
_SPACE = Reference("space")
_COMMA = Concatenation((Text(","), _SPACE))
_EMPTY_TEXT = Text("")


def _digits(count: int) -> Grammar:
    return Repetition(_DIGIT, count, count)


def _quoted(*parts: Grammar) -> Grammar:
    return Concatenation((Text('"'), *parts, Text('"')))


def _optional(part: Grammar) -> Grammar:
    return Repetition(part, 0, 1)


def _enclosed(opening: str, inside: Grammar, closing: str) -> Grammar:
    return Concatenation((Text(opening), _SPACE, inside, _SPACE, Text(closing)))


def _comma_separated_list(item: Grammar, least: int, most: int | None) -> Grammar:
    """Return the grammar of `least` to `most` items that commas separate."""
    if most == 0:
        return _EMPTY_TEXT
    most = None if most is None else max(most, least)
    items = Concatenation(
        (
            item,
            Repetition(Concatenation((_COMMA, item)), max(least - 1, 0), None if most is None else most - 1),
        )
    )
    return items if least else _optional(items)


_DATE_PARTS = (_digits(4), Text("-"), Chars("01"), _DIGIT, Text("-"), Chars("0-3"), _DIGIT)
_ZONE = Alternatives(
    (Text("Z"), Concatenation((Chars("-+"), Chars("0-2"), _DIGIT, Text(":"), Chars("0-5"), _DIGIT)))
)
_TIME_PARTS = (
    *(Chars("0-2"), _DIGIT, Text(":"), Chars("0-5"), _DIGIT, Text(":"), Chars("0-5"), _DIGIT),
    *(_optional(Concatenation((Text("."), Repetition(_DIGIT, 1, 9)))), _ZONE),
)
_UUID_PARTS = (
    *(part for count in (8, 4, 4, 4) for part in (Repetition(_HEX_DIGIT, count, count), Text("-"))),
    Repetition(_HEX_DIGIT, 12, 12),
)
_GRAMMAR_BY_FORMAT: Mapping[str, Grammar] = {
    "date": _quoted(*_DATE_PARTS),
    "time": _quoted(*_TIME_PARTS),
    "date-time": _quoted(*_DATE_PARTS, Text("T"), *_TIME_PARTS),
    "uuid": _quoted(*_UUID_PARTS),
}
_WHOLE_NUMBER = Alternatives((Text("0"), Concatenation((Chars("1-9"), Repetition(_DIGIT, 0, 15)))))
_COMMON_RULES: Mapping[str, Grammar] = {
    # Bounded: with unlimited white space a small model may emit nothing else until its tokens are used up.
    "space": _optional(Alternatives((Text(" "), Concatenation((Text("\n"), Repetition(Text(" "), 0, 16)))))),
    "character": Alternatives(
        (
            Chars('^"\\\\\\x00-\\x1F\\x7F'),
            Concatenation(
                (
                    Text("\\"),
                    Alternatives(
                        (Chars('"\\\\/bfnrt'), Concatenation((Text("u"), Repetition(_HEX_DIGIT, 4, 4))))
                    ),
                )
            ),
        )
    ),
    "string": _quoted(Repetition(Reference("character"))),
    "whole": _WHOLE_NUMBER,
    "integer": Concatenation((_optional(Text("-")), Reference("whole"))),
    "fraction": Concatenation(
        (
            _optional(Concatenation((Text("."), Repetition(_DIGIT, 1, 16)))),
            _optional(Concatenation((Chars("eE"), _optional(Chars("-+")), Repetition(_DIGIT, 1, 3)))),
        )
    ),
    "number": Concatenation((Reference("integer"), Reference("fraction"))),
    "boolean": Alternatives((Text("true"), Text("false"))),
    "null": Text("null"),
    "member": Concatenation((Reference("string"), Text(":"), _SPACE, Reference("value"))),
    "object": _enclosed("{", _comma_separated_list(Reference("member"), 0, None), "}"),
    "array": _enclosed("[", _comma_separated_list(Reference("value"), 0, None), "]"),
    "value": Alternatives(tuple(map(Reference, ("object", "array", "string", "number", "boolean", "null")))),
}
_ANNOTATION_KEYWORDS = frozenset(
    {"$ref", "$defs", "definitions", "title", "description", "default", "examples"}
)
"""Keywords beside a reference that do not change its meaning."""
_OBJECT_KEYWORDS = ("properties", "patternProperties", "required", "additionalProperties")
_MERGED_KEYWORDS = frozenset({"properties", "patternProperties", "required", "allOf"})
_CHOICE_KEYWORDS = frozenset({"anyOf", "oneOf"})
_ARRAY_KEYWORDS = ("items", "prefixItems", "minItems", "maxItems")


def from_schema(schema: Mapping[str, Any]) -> str:
    """Return the text of the grammar for a schema, with the root rule `root`.

    Call `schemas.check_schemas` first. Raise InvalidInput if a limit is exceeded.
    """
    try:
        return "\n".join(f"{name} ::= {to_text(part)}" for name, part in build_rules(schema).items())
    except RecursionError:
        raise _too_many_choices_error() from None


def build_rules(schema: Mapping[str, Any]) -> dict[str, Grammar]:
    """Return the grammar's rules by name."""
    builder = _RuleBuilder(schema)
    builder.add("root", builder.grammar_of(schema))
    return builder.rules


def _too_many_choices_error() -> InvalidInput:
    return InvalidInput("the schema combines too many choices", field="response_format")


class _Contradiction(InvalidInput):
    """The `const` and `enum` keywords of a schema have no common value."""

    message = "response_format: the schema leaves no value that all of its `const` and `enum` name."

    def __init__(self) -> None:
        super().__init__(field="response_format")


class _RuleBuilder:
    """Builds the rules of one schema within the limits of this module."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self._schema = schema
        self.rules = dict(_COMMON_RULES)
        self._references: dict[str, Reference] = {}
        self._steps = self._copied = self._characters = 0

    def add(self, name: str, part: Grammar) -> Reference:
        self.rules[name] = part
        return Reference(name)

    def _add_rule(self, part: Grammar) -> Reference:
        return self.add(f"r{len(self.rules)}", part)

    def _check_limits(self) -> None:
        if self._steps > MAX_SCHEMA_PARTS or self._copied > MAX_COPIED_CHARACTERS:
            raise _too_many_choices_error()

    def _literal(self, value: Any) -> Text:
        text = _to_json(value)
        self._copied += len(text)
        self._check_limits()
        return Text(text)

    def _string_rule(self, part: Mapping[str, Any]) -> Grammar:
        format_name = part.get("format")
        if isinstance(format_name, str) and format_name in _GRAMMAR_BY_FORMAT:
            return _GRAMMAR_BY_FORMAT[format_name]
        least, most = _parse_bound(part.get("minLength")) or 0, _parse_bound(part.get("maxLength"))
        self._characters += max(least, most or 0)
        if (not least and most is None) or self._characters > MAX_TOTAL_TEXT_LENGTH:
            return Reference("string")
        return _quoted(Repetition(Reference("character"), least, None if most is None else max(most, least)))

    def grammar_of(self, part: Any) -> Grammar:
        """Return the grammar of a part of the schema. An unsupported part accepts any value."""
        self._steps += 1
        if not isinstance(part, Mapping):
            self._check_limits()
            return Reference("value")
        entries = (len(value) for value in part.values() if isinstance(value, Mapping | list))
        self._copied += len(part) + sum(entries)
        self._check_limits()
        if isinstance(part.get("$ref"), str):
            has_no_siblings = part.keys() <= _ANNOTATION_KEYWORDS
            return (
                self._reference_rule(part["$ref"])
                if has_no_siblings
                else self.grammar_of(self._resolve_reference(part))
            )
        for name in ("anyOf", "oneOf"):
            if isinstance(part.get(name), list) and part[name]:
                return self._choice_rule(
                    {key: value for key, value in part.items() if key != name}, part[name]
                )
        if isinstance(part.get("allOf"), list):
            siblings = {key: value for key, value in part.items() if key != "allOf"}
            return self.grammar_of(self._merge_all((siblings, *part["allOf"])))
        if lists := _allowed_value_lists(part):
            return Alternatives(tuple(map(self._literal, self._common_values(lists))))
        return self._type_rule(part, part.get("type"))

    def _choice_rule(self, siblings: Mapping[str, Any], options: Iterable[Any]) -> Grammar:
        """Return the grammar of those options that do not contradict the keywords beside the choice."""
        alternatives: list[Grammar] = []
        for option in options:
            with contextlib.suppress(_Contradiction):
                alternatives.append(self.grammar_of(self._merge_all((siblings, option))))
        if not alternatives:
            raise _Contradiction
        return Alternatives(tuple(alternatives))

    def _common_values(self, lists: Iterable[Iterable[Any]]) -> list[Any]:
        """Return the values that every list contains; raise _Contradiction if there are none."""
        first, *other_lists = [{_comparison_key(value): value for value in values} for values in lists]
        self._copied += sum(len(key) for values in (first, *other_lists) for key in values)
        self._check_limits()
        common = [value for key, value in first.items() if all(key in values for values in other_lists)]
        if not common:
            raise _Contradiction
        return common

    def _type_rule(self, part: Mapping[str, Any], kind: Any) -> Grammar:
        if isinstance(kind, list) and kind:
            kinds = dict.fromkeys(option if isinstance(option, str) else "value" for option in kind)
            return Alternatives(tuple(self._type_rule(part, option) for option in kinds))
        if kind == "object" or (kind is None and any(name in part for name in _OBJECT_KEYWORDS)):
            return self._object_rule(part)
        if kind == "array" or (kind is None and any(name in part for name in _ARRAY_KEYWORDS)):
            return self._array_rule(part)
        if kind == "string":
            return self._string_rule(part)
        if kind in ("integer", "number") and _at_least_zero(part):
            return (
                Reference("whole")
                if kind == "integer"
                else Concatenation((Reference("whole"), Reference("fraction")))
            )
        return Reference(kind if kind in ("integer", "number", "boolean", "null") else "value")

    def _reference_rule(self, reference: str) -> Reference:
        if reference not in self._references:
            self._references[reference] = self._add_rule(
                self.grammar_of(schemas.resolve_reference(self._schema, reference))
            )
        return self._references[reference]

    def _merge_all(self, parts: Iterable[Any]) -> Mapping[str, Any]:
        """Return one schema with the constraints of all parts, except those that conflict."""
        schemas_to_merge = [part for part in parts if isinstance(part, Mapping) and part]
        if len(schemas_to_merge) == 1:
            return schemas_to_merge[0]
        merged: Mapping[str, Any] = {}
        for part in schemas_to_merge:
            merged = self._merge(merged, self._resolve_reference(part))
        return merged

    def _resolve_reference(self, part: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the part to which the schema refers, merged with the keywords beside the reference."""
        if not isinstance(part.get("$ref"), str):
            return part
        target = schemas.resolve_reference(self._schema, part["$ref"])
        siblings = {key: value for key, value in part.items() if key != "$ref"}
        return (
            self._merge(self._resolve_reference(target), siblings)
            if isinstance(target, Mapping)
            else siblings
        )

    def _merge(self, first: Mapping[str, Any], second: Mapping[str, Any]) -> Mapping[str, Any]:
        merged = {**first, **second}
        for name in _MERGED_KEYWORDS & first.keys() & second.keys():
            if isinstance(first[name], Mapping) and isinstance(second[name], Mapping):
                merged[name] = {**first[name], **second[name]}
            elif isinstance(first[name], list) and isinstance(second[name], list):
                merged[name] = [*first[name], *second[name]]
        for name in _CHOICE_KEYWORDS & first.keys() & second.keys():
            merged[name] = first[name]
            merged["allOf"] = [*merged.get("allOf", ()), {name: second[name]}]
        if (lists := _allowed_value_lists(first)) and (second_lists := _allowed_value_lists(second)):
            merged.pop("const", None)
            merged["enum"] = self._common_values((*lists, *second_lists))
        self._copied += len(merged) + sum(
            len(merged[name])
            for name in _MERGED_KEYWORDS & merged.keys()
            if isinstance(merged[name], Mapping | list)
        )
        self._check_limits()
        return merged

    def _object_rule(self, part: Mapping[str, Any]) -> Grammar:
        properties = part.get("properties")
        required = part.get("required")
        listed = properties if isinstance(properties, Mapping) else {}
        needed = {name for name in required if isinstance(name, str)} if isinstance(required, list) else set()
        all_properties = {**listed, **dict.fromkeys(sorted(needed - listed.keys()), True)}
        extra = self._extra_members_schema(part)
        members = [
            (
                name in needed,
                Concatenation((self._literal(str(name)), Text(":"), _SPACE, self.grammar_of(value))),
            )
            for name, value in all_properties.items()
            if value is not False
        ]
        extra_member = None
        if extra is not False:
            extra_member = self._add_rule(
                Concatenation((Reference("string"), Text(":"), _SPACE, self.grammar_of(extra)))
            )
        return _enclosed("{", self._members_rule(members, extra_member), "}")

    def _extra_members_schema(self, part: Mapping[str, Any]) -> Any:
        """Return the schema of members that `properties` does not name, False if they are not allowed.

        An object with named members has no others unless the schema permits them, because a small model would
        invent some. GBNF has no patterns of names, so a further member must fit all `patternProperties`.
        """
        patterns = part.get("patternProperties")
        if isinstance(patterns, Mapping) and patterns:
            values = (part.get("additionalProperties"), *patterns.values())
            with contextlib.suppress(_Contradiction):
                return False not in values and self._merge_all(values)
            return False
        is_named = "properties" in part or "patternProperties" in part or bool(part.get("required"))
        return part.get("additionalProperties", not is_named)

    def _members_rule(
        self, members: Sequence[tuple[bool, Grammar]], extra_member: Reference | None
    ) -> Grammar:
        """Return the grammar of an object's members. It is built from the last member to the first.

        Each member has two variants: `after_member` if another member precedes it, `at_start` otherwise.
        """
        after_member: Grammar = (
            Repetition(Concatenation((_COMMA, extra_member))) if extra_member else _EMPTY_TEXT
        )
        at_start: Grammar = _comma_separated_list(extra_member, 0, None) if extra_member else _EMPTY_TEXT
        for is_required, member in reversed(members):
            member_rule = self._add_rule(member)
            # Separate rules: written inline, the tail would double with each optional member.
            tail = self._add_rule(after_member)
            continued, first = Concatenation((_COMMA, member_rule, tail)), Concatenation((member_rule, tail))
            if is_required:
                after_member, at_start = continued, first
            else:
                after_member, at_start = (
                    Alternatives((continued, tail)),
                    Alternatives((first, self._add_rule(at_start))),
                )
        return at_start

    def _array_rule(self, part: Mapping[str, Any]) -> Grammar:
        firsts = part.get("prefixItems")
        items = part.get("items", True)
        least, most = _parse_bound(part.get("minItems")) or 0, _parse_bound(part.get("maxItems"))
        if isinstance(firsts, list) and firsts:
            exact = [item for item_schema in firsts for item in (_COMMA, self.grammar_of(item_schema))][1:]
            missing = max(least - len(firsts), 0)
            further_items = (
                _EMPTY_TEXT
                if items is False
                else Repetition(Concatenation((_COMMA, self._add_rule(self.grammar_of(items)))), missing)
            )
            return _enclosed("[", Concatenation((*exact, further_items)), "]")
        if items is False:
            return _enclosed("[", _EMPTY_TEXT, "]")
        return _enclosed("[", _comma_separated_list(self._add_rule(self.grammar_of(items)), least, most), "]")


def _at_least_zero(part: Mapping[str, Any]) -> bool:
    bounds = (part.get("minimum"), part.get("exclusiveMinimum"))
    return any(
        isinstance(bound, int | float) and not isinstance(bound, bool) and bound >= 0 for bound in bounds
    )


def _allowed_value_lists(part: Mapping[str, Any]) -> list[list[Any]]:
    """Return the lists of allowed values from `const` and `enum`; a value must be in every list."""
    enum = part.get("enum")
    lists = [[part["const"]]] if "const" in part else []
    return [*lists, enum] if isinstance(enum, list) and enum else lists


def _comparison_key(value: Any) -> str:
    """Return equal keys for equal JSON values: 1 equals 1.0, but not true."""
    is_whole = isinstance(value, float) and value.is_integer()
    return json.dumps(int(value) if is_whole else value, sort_keys=True)


def _parse_bound(value: Any) -> int | None:
    is_supported = isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_REPEATS
    return value if is_supported else None


def _to_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(", ", ": "))
