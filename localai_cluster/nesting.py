"""How deeply JSON of the network may be nested, and of how much it may consist, found before it is parsed.

A parser builds an object for every level and keeps them all while it goes down, so a few megabytes of
brackets become hundreds. The scan looks at brackets outside strings only, a piece at a time and with the fast
functions of `bytes`; most bodies have so few brackets that counting them is enough. It judges no syntax: what
it lets through is at most `LEVELS` deep if it is JSON, and the parser refuses it otherwise.
"""

from array import array
from collections.abc import Iterator
from itertools import accumulate

LEVELS = 64
"""Lists and objects inside each other that are accepted (`docs/configuration.md`)."""
MOST = 100_000
"""Lists and objects of one text. Four megabytes of empty ones take two hundred when they are parsed."""
TOO_DEEP = f"nested more than {LEVELS} levels deep"
TOO_MANY = f"made of more than {MOST} lists and objects"

_KEPT = b'"[]{}'
_OTHERS = bytes(byte for byte in range(256) if byte not in _KEPT)
_STEPS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")
"""As signed bytes: one level down, or one up."""
_PIECE = 64 * 1024


def problem(text: bytes) -> str:
    """Why `text`, if it is JSON, must not be parsed: `TOO_DEEP`, `TOO_MANY`, or "" if it may be."""
    if text.count(b"[") + text.count(b"{") <= LEVELS:
        return ""
    level = found = 0
    for brackets in _outside_strings(text):
        steps = brackets.translate(_STEPS)
        found += steps.count(1)
        if found > MOST:
            return TOO_MANY
        levels = list(accumulate(array("b", steps), initial=level))
        if max(levels) > LEVELS:
            return TOO_DEEP
        level = levels[-1]
    return ""


def _outside_strings(text: bytes) -> Iterator[bytes]:
    """The brackets of `text` that stand in no string, in pieces."""
    # Escapes go first, so that each quote that is left opens or closes a string; two in a row cancel out.
    marks = text.replace(b"\\\\", b"").replace(b'\\"', b"").translate(None, _OTHERS).replace(b'""', b"")
    inside = 0
    for start in range(0, len(marks), _PIECE):
        pieces = marks[start : start + _PIECE].split(b'"')
        yield b"".join(pieces[inside::2])
        inside ^= (len(pieces) - 1) % 2
