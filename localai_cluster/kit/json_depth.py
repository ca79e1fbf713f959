"""Limits of the depth and the size of JSON from the network, checked before it is parsed.

A parser builds an object for every level and keeps all of them while it descends, so a few megabytes of
brackets become hundreds. The scan counts brackets outside strings only, in chunks and with the fast functions
of `bytes`; most bodies have so few brackets that their number is sufficient. It checks no syntax: a text that
passes is at most `LEVELS` deep if it is JSON, and the parser refuses it otherwise.
"""

from array import array
from collections.abc import Iterator
from itertools import accumulate

LEVELS = 64
"""Deepest accepted nesting of lists and objects (`docs/configuration.md`)."""
MOST = 100_000
"""Most lists and objects in a text. Four megabytes of empty ones need two hundred when they are parsed."""
TOO_DEEP = f"nested more than {LEVELS} levels deep"
TOO_MANY = f"made of more than {MOST} lists and objects"

_KEPT = b'"[]{}'
_OTHERS = bytes(byte for byte in range(256) if byte not in _KEPT)
_STEPS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")
"""As signed bytes: one level down, or one up."""
_PIECE = 64 * 1024


def problem(text: bytes) -> str:
    """Return the reason why `text` must not be parsed as JSON: `TOO_DEEP`, `TOO_MANY`, or "" if it may be."""
    if text.count(b"[") + text.count(b"{") <= LEVELS:
        return ""
    level = count = 0
    for brackets in _outside_strings(text):
        steps = brackets.translate(_STEPS)
        count += steps.count(1)
        if count > MOST:
            return TOO_MANY
        levels = list(accumulate(array("b", steps), initial=level))
        if max(levels) > LEVELS:
            return TOO_DEEP
        level = levels[-1]
    return ""


def _outside_strings(text: bytes) -> Iterator[bytes]:
    """Yield the brackets of `text` outside of strings, in chunks."""
    # Remove escapes first, so that each remaining quote opens or closes a string; two in a row cancel out.
    marks = text.replace(b"\\\\", b"").replace(b'\\"', b"").translate(None, _OTHERS).replace(b'""', b"")
    inside = 0
    for start in range(0, len(marks), _PIECE):
        pieces = marks[start : start + _PIECE].split(b'"')
        yield b"".join(pieces[inside::2])
        inside ^= (len(pieces) - 1) % 2
