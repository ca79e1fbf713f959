"""The elements of llama.cpp grammars (GBNF) and their text. Pure; `gbnf.py` builds grammars from them."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Text:
    """A literal text."""

    text: str


@dataclass(frozen=True, slots=True)
class Chars:
    """One character of a class; `members` is the class without its brackets, for example `a-z`."""

    members: str


@dataclass(frozen=True, slots=True)
class Reference:
    """A reference to the rule of this name."""

    name: str


@dataclass(frozen=True, slots=True)
class All:
    """A sequence of parts."""

    parts: tuple["Grammar", ...]


@dataclass(frozen=True, slots=True)
class Any_:
    """A choice of one of the options."""

    options: tuple["Grammar", ...]


@dataclass(frozen=True, slots=True)
class Many:
    """From `least` to `most` repetitions of the part; without an upper bound if `most` is None."""

    part: "Grammar"
    least: int = 0
    most: int | None = None


Grammar = Text | Chars | Reference | All | Any_ | Many


_ESCAPES = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r", "\t": "\\t"})


def written(part: Grammar) -> str:
    """Return the text of a rule's right-hand side."""
    match part:
        case Text(text):
            return f'"{text.translate(_ESCAPES)}"'
        case Chars(members):
            return f"[{members}]"
        case Reference(name):
            return name
        case All(parts):
            return " ".join(map(_inner, parts)) or '""'
        case Any_(options):
            return " | ".join(map(_inner, options))
        case Many(inside, least, most):
            return f"{_inner(inside)}{_times(least, most)}"


def _inner(part: Grammar) -> str:
    return f"({written(part)})" if isinstance(part, All | Any_) else written(part)


def _times(least: int, most: int | None) -> str:
    if most is None:
        return "*" if least == 0 else f"{{{least},}}"
    return "?" if (least, most) == (0, 1) else f"{{{least},{most}}}"
