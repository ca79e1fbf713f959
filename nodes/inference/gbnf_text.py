"""What grammars of llama.cpp (GBNF) consist of, and how they are written. Pure; `gbnf.py` makes them."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Text:
    """Exactly this."""

    text: str


@dataclass(frozen=True, slots=True)
class Chars:
    """One of these characters, written as the inside of a class, as `a-z`."""

    members: str


@dataclass(frozen=True, slots=True)
class Reference:
    """What the rule of this name says."""

    name: str


@dataclass(frozen=True, slots=True)
class All:
    """One after the other."""

    parts: tuple["Grammar", ...]


@dataclass(frozen=True, slots=True)
class Any_:
    """One of them."""

    options: tuple["Grammar", ...]


@dataclass(frozen=True, slots=True)
class Many:
    """At least `least` and at most `most` of them; None: without end."""

    part: "Grammar"
    least: int = 0
    most: int | None = None


Grammar = Text | Chars | Reference | All | Any_ | Many


_ESCAPES = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r", "\t": "\\t"})


def written(part: Grammar) -> str:
    """The right side of a rule."""
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
