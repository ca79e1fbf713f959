"""From a JSON schema to GBNF, the grammars of llama.cpp, which engines read in `Grammar`. Pure.

Start reading at `of`. Every answer that follows the grammar is JSON of the schema's shape: types, properties
in the schema's order, lists and their lengths, values to choose from, references, texts of a known form. One
that leaves no value by its `const` and `enum` is refused. What
takes a grammar too many words is left out: bounds of numbers (but the sign), `pattern`, `not`, `uniqueItems`.
An engine that knows better finds the schema beside the grammar.
"""

import contextlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from localai_cluster.errors import InvalidInput
from nodes.inference import schemas
from nodes.inference.gbnf_text import All, Any_, Chars, Grammar, Many, Reference, Text, written

MOST_REPEATS = 1000
"""A larger bound counts as none: llama.cpp refuses a grammar that repeats a thing more often."""
MOST_STEPS = 20_000
"""Parts of a schema, each counted as often as choices beside it repeat it."""
MOST_COPIED = 1_000_000
"""Characters that a grammar repeats from its schema, and entries that are put together, in all. References
and choices repeat them, so a small schema could become a grammar that no memory holds.
"""
MOST_CHARACTERS = 20_000
"""Places of all texts together whose lengths are bounded; engines make a rule for each. The bounds of texts
beyond that are left out.
"""


_HEX = Chars("0-9a-fA-F")
_DIGIT = Chars("0-9")
_SPACE = Reference("space")
_COMMA = All((Text(","), _SPACE))
_NOTHING = Text("")


def _digits(count: int) -> Grammar:
    return Many(_DIGIT, count, count)


def _quoted(*parts: Grammar) -> Grammar:
    return All((Text('"'), *parts, Text('"')))


def _optional(part: Grammar) -> Grammar:
    return Many(part, 0, 1)


def _enclosed(opening: str, inside: Grammar, closing: str) -> Grammar:
    return All((Text(opening), _SPACE, inside, _SPACE, Text(closing)))


def _listed(item: Grammar, least: int, most: int | None) -> Grammar:
    """Items with commas between them."""
    if most == 0:
        return _NOTHING
    most = None if most is None else max(most, least)
    more = All((item, Many(All((_COMMA, item)), max(least - 1, 0), None if most is None else most - 1)))
    return more if least else _optional(more)


_DATE = (_digits(4), Text("-"), Chars("01"), _DIGIT, Text("-"), Chars("0-3"), _DIGIT)
_ZONE = Any_((Text("Z"), All((Chars("-+"), Chars("0-2"), _DIGIT, Text(":"), Chars("0-5"), _DIGIT))))
_TIME = (
    *(Chars("0-2"), _DIGIT, Text(":"), Chars("0-5"), _DIGIT, Text(":"), Chars("0-5"), _DIGIT),
    *(_optional(All((Text("."), Many(_DIGIT, 1, 9)))), _ZONE),
)
_UUID = (
    *(part for count in (8, 4, 4, 4) for part in (Many(_HEX, count, count), Text("-"))),
    Many(_HEX, 12, 12),
)
_FORMATS: Mapping[str, Grammar] = {
    "date": _quoted(*_DATE),
    "time": _quoted(*_TIME),
    "date-time": _quoted(*_DATE, Text("T"), *_TIME),
    "uuid": _quoted(*_UUID),
}
_WHOLE = Any_((Text("0"), All((Chars("1-9"), Many(_DIGIT, 0, 15)))))
_PLAIN: Mapping[str, Grammar] = {
    # Few of them: free to write spaces, a small model may write nothing else until its tokens are spent.
    "space": _optional(Any_((Text(" "), All((Text("\n"), Many(Text(" "), 0, 16)))))),
    "character": Any_(
        (
            Chars('^"\\\\\\x00-\\x1F\\x7F'),
            All((Text("\\"), Any_((Chars('"\\\\/bfnrt'), All((Text("u"), Many(_HEX, 4, 4))))))),
        )
    ),
    "string": _quoted(Many(Reference("character"))),
    "whole": _WHOLE,
    "integer": All((_optional(Text("-")), Reference("whole"))),
    "fraction": All(
        (
            _optional(All((Text("."), Many(_DIGIT, 1, 16)))),
            _optional(All((Chars("eE"), _optional(Chars("-+")), Many(_DIGIT, 1, 3)))),
        )
    ),
    "number": All((Reference("integer"), Reference("fraction"))),
    "boolean": Any_((Text("true"), Text("false"))),
    "null": Text("null"),
    "member": All((Reference("string"), Text(":"), _SPACE, Reference("value"))),
    "object": _enclosed("{", _listed(Reference("member"), 0, None), "}"),
    "array": _enclosed("[", _listed(Reference("value"), 0, None), "]"),
    "value": Any_(tuple(map(Reference, ("object", "array", "string", "number", "boolean", "null")))),
}
_BESIDE = frozenset({"$ref", "$defs", "definitions", "title", "description", "default", "examples"})
"""What may stand beside a reference and changes nothing."""
_OF_OBJECTS = ("properties", "required", "additionalProperties")
_JOINED = frozenset({"properties", "required", "allOf"})
_CHOICES = frozenset({"anyOf", "oneOf"})
_OF_ARRAYS = ("items", "prefixItems", "minItems", "maxItems")


def of(schema: Mapping[str, Any]) -> str:
    """The grammar's text; its rule `root` is what the schema describes, which `schemas.check` has passed."""
    return "\n".join(f"{name} ::= {written(part)}" for name, part in rules(schema).items())


def rules(schema: Mapping[str, Any]) -> dict[str, Grammar]:
    """The rules by name; raises InvalidInput if there would be too many."""
    made = _Rules(schema)
    made.add("root", made.of(schema))
    return made.rules


class _Contradiction(InvalidInput):
    """response_format: the schema leaves no value that all of its `const` and `enum` name."""

    def __init__(self) -> None:
        super().__init__(field="response_format")


class _Rules:
    """The rules that the parts of one schema need."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self._schema = schema
        self.rules = dict(_PLAIN)
        self._references: dict[str, Reference] = {}
        self._steps = self._copied = self._characters = 0

    def add(self, name: str, part: Grammar) -> Reference:
        self.rules[name] = part
        return Reference(name)

    def _named(self, part: Grammar) -> Reference:
        return self.add(f"r{len(self.rules)}", part)

    def _check(self) -> None:
        if self._steps > MOST_STEPS or self._copied > MOST_COPIED:
            raise InvalidInput("the schema combines too many choices", field="response_format")

    def _exactly(self, value: Any) -> Text:
        text = _json(value)
        self._copied += len(text)
        self._check()
        return Text(text)

    def _text(self, part: Mapping[str, Any]) -> Grammar:
        known = part.get("format")
        if isinstance(known, str) and known in _FORMATS:
            return _FORMATS[known]
        least, most = _bound(part.get("minLength")) or 0, _bound(part.get("maxLength"))
        self._characters += max(least, most or 0)
        if (not least and most is None) or self._characters > MOST_CHARACTERS:
            return Reference("string")
        return _quoted(Many(Reference("character"), least, None if most is None else max(most, least)))

    def of(self, part: Any) -> Grammar:
        """What a schema, or a part of one, describes; anything where it is not to be understood."""
        self._steps += 1
        self._check()
        if not isinstance(part, Mapping):
            return Reference("value")
        if isinstance(part.get("$ref"), str):
            alone = part.keys() <= _BESIDE
            return self._referred(part["$ref"]) if alone else self.of(self._unfolded(part))
        for name in ("anyOf", "oneOf"):
            if isinstance(part.get(name), list) and part[name]:
                return self._choice({key: value for key, value in part.items() if key != name}, part[name])
        if isinstance(part.get("allOf"), list):
            rest = {key: value for key, value in part.items() if key != "allOf"}
            return self.of(self._both((rest, *part["allOf"])))
        if lists := _values(part):
            return Any_(tuple(map(self._exactly, self._common(lists))))
        return self._of_type(part, part.get("type"))

    def _choice(self, rest: Mapping[str, Any], options: Iterable[Any]) -> Grammar:
        """One of the options that the rest leaves possible."""
        possible: list[Grammar] = []
        for option in options:
            with contextlib.suppress(_Contradiction):
                possible.append(self.of(self._both((rest, option))))
        if not possible:
            raise _Contradiction
        return Any_(tuple(possible))

    def _common(self, lists: Iterable[Iterable[Any]]) -> list[Any]:
        """The values that are in all lists."""
        first, *others = [{_key(value): value for value in values} for values in lists]
        self._copied += sum(len(key) for values in (first, *others) for key in values)
        self._check()
        common = [value for key, value in first.items() if all(key in values for values in others)]
        if not common:
            raise _Contradiction
        return common

    def _of_type(self, part: Mapping[str, Any], kind: Any) -> Grammar:
        if isinstance(kind, list) and kind:
            return Any_(tuple(self._of_type(part, one) for one in kind))
        if kind == "object" or (kind is None and any(name in part for name in _OF_OBJECTS)):
            return self._object(part)
        if kind == "array" or (kind is None and any(name in part for name in _OF_ARRAYS)):
            return self._array(part)
        if kind == "string":
            return self._text(part)
        if kind in ("integer", "number") and _at_least_zero(part):
            return (
                Reference("whole") if kind == "integer" else All((Reference("whole"), Reference("fraction")))
            )
        return Reference(kind if kind in ("integer", "number", "boolean", "null") else "value")

    def _referred(self, reference: str) -> Reference:
        if reference not in self._references:
            self._references[reference] = self._named(self.of(schemas.referred(self._schema, reference)))
        return self._references[reference]

    def _both(self, parts: Iterable[Any]) -> Mapping[str, Any]:
        """One schema that says what all of them say, as far as they do not contradict each other."""
        given = [part for part in parts if isinstance(part, Mapping) and part]
        if len(given) == 1:
            return given[0]
        both: Mapping[str, Any] = {}
        for part in given:
            both = self._joined(both, self._unfolded(part))
        return both

    def _unfolded(self, part: Mapping[str, Any]) -> Mapping[str, Any]:
        """The same without a reference, which would hide what stands beside it."""
        if not isinstance(part.get("$ref"), str):
            return part
        found = schemas.referred(self._schema, part["$ref"])
        beside = {key: value for key, value in part.items() if key != "$ref"}
        return self._joined(self._unfolded(found), beside) if isinstance(found, Mapping) else beside

    def _joined(self, one: Mapping[str, Any], other: Mapping[str, Any]) -> Mapping[str, Any]:
        joined = {**one, **other}
        for name in _JOINED & one.keys() & other.keys():
            if isinstance(one[name], Mapping) and isinstance(other[name], Mapping):
                joined[name] = {**one[name], **other[name]}
            elif isinstance(one[name], list) and isinstance(other[name], list):
                joined[name] = [*one[name], *other[name]]
        for name in _CHOICES & one.keys() & other.keys():
            joined[name] = one[name]
            joined["allOf"] = [*joined.get("allOf", ()), {name: other[name]}]
        if (lists := _values(one)) and (more := _values(other)):
            joined.pop("const", None)
            joined["enum"] = self._common((*lists, *more))
        self._copied += len(joined) + sum(
            len(joined[name]) for name in _JOINED & joined.keys() if isinstance(joined[name], Mapping | list)
        )
        self._check()
        return joined

    def _object(self, part: Mapping[str, Any]) -> Grammar:
        properties = part.get("properties")
        required = part.get("required")
        listed = properties if isinstance(properties, Mapping) else {}
        needed = {name for name in required if isinstance(name, str)} if isinstance(required, list) else set()
        known = {**listed, **dict.fromkeys(sorted(needed - listed.keys()), True)}
        extra = part.get("additionalProperties", not known)
        members = [
            (name in needed, All((self._exactly(str(name)), Text(":"), _SPACE, self.of(value))))
            for name, value in known.items()
            if value is not False
        ]
        others = None
        if extra is not False:
            others = self._named(All((Reference("string"), Text(":"), _SPACE, self.of(extra))))
        return _enclosed("{", self._members(members, others), "}")

    def _members(self, members: Sequence[tuple[bool, Grammar]], others: Reference | None) -> Grammar:
        """From the last to the first: what may follow with a member before it, and with none."""
        begun: Grammar = Many(All((_COMMA, others))) if others else _NOTHING
        fresh: Grammar = _listed(others, 0, None) if others else _NOTHING
        for needed, member in reversed(members):
            here = self._named(member)
            # Rules of their own: written out, what follows would double with each that may be left out.
            follows = self._named(begun)
            after, first = All((_COMMA, here, follows)), All((here, follows))
            if needed:
                begun, fresh = after, first
            else:
                begun, fresh = Any_((after, follows)), Any_((first, self._named(fresh)))
        return fresh

    def _array(self, part: Mapping[str, Any]) -> Grammar:
        firsts = part.get("prefixItems")
        items = part.get("items", True)
        least, most = _bound(part.get("minItems")) or 0, _bound(part.get("maxItems"))
        if isinstance(firsts, list) and firsts:
            exact = [item for one in firsts for item in (_COMMA, self.of(one))][1:]
            more = max(least - len(firsts), 0)
            rest = _NOTHING if items is False else Many(All((_COMMA, self._named(self.of(items)))), more)
            return _enclosed("[", All((*exact, rest)), "]")
        if items is False:
            return _enclosed("[", _NOTHING, "]")
        return _enclosed("[", _listed(self._named(self.of(items)), least, most), "]")


def _at_least_zero(part: Mapping[str, Any]) -> bool:
    bounds = (part.get("minimum"), part.get("exclusiveMinimum"))
    return any(
        isinstance(bound, int | float) and not isinstance(bound, bool) and bound >= 0 for bound in bounds
    )


def _values(part: Mapping[str, Any]) -> list[list[Any]]:
    """The lists, one for `const` and one for `enum`, that a value has to be in."""
    enum = part.get("enum")
    lists = [[part["const"]]] if "const" in part else []
    return [*lists, enum] if isinstance(enum, list) and enum else lists


def _key(value: Any) -> str:
    """The same for values that are equal in JSON, where 1 is 1.0 and not true."""
    whole = isinstance(value, float) and value.is_integer()
    return json.dumps(int(value) if whole else value, sort_keys=True)


def _bound(value: Any) -> int | None:
    known = isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MOST_REPEATS
    return value if known else None


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(", ", ": "))
