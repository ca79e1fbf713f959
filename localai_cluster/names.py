"""Names and labels as strangers send them: which characters they may have, and when two look alike."""

import unicodedata
from functools import cache

from confusable_homoglyphs.utils import load  # type: ignore[import-untyped]

from localai_cluster import errors

LONGEST_NAME = 255
LONGEST_TEXT = 4000
"""Characters kept of what a worker or an engine says went wrong."""
_REFUSED = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
"""Unicode categories: control, format (bidi, zero width), surrogate, private, unassigned, separators."""
_BLANKS = frozenset("\u115f\u1160\u2800\u3164\uffa0\U0001d159")
"""Letters and symbols that show nothing."""
_UNSEEN_MARKS = frozenset(
    map(
        chr, (0x34F, 0x17B4, 0x17B5, *range(0x180B, 0x1810), *range(0xFE00, 0xFE10), *range(0xE0100, 0xE01F0))
    )
)
"""Marks that show nothing of their own: joiners and variation selectors. Two names would look the same."""
_UNPRINTABLE = _BLANKS | _UNSEEN_MARKS


def key(name: str) -> str:
    """What two names have in common that a person cannot tell apart.

    NFKC, case folding, and for each character outside ASCII the ASCII that it looks like, if any (Unicode TS
    39): a Cyrillic "\u0430" counts as "a". Characters of ASCII are never taken for each other. `gpu-l` and
    `gpu-1`, `m` and `rn` are different names, because operators number their machines.
    """
    folded = _folded(name)
    # A letter that was replaced may join an accent that follows it.
    while not folded.isascii():
        seen = _folded(unicodedata.normalize("NFD", folded).translate(_look_alikes()))
        if seen == folded:
            break
        folded = seen
    return folded


def _folded(name: str) -> str:
    return unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", name).casefold())


@cache
def _look_alikes() -> dict[int, str]:
    """Characters outside ASCII -> the ASCII that they look like. Read once it is needed: that takes time."""
    found = {}
    for character, others in load("confusables.json").items():
        if len(character) == 1 and not character.isascii():
            seen = [other["c"] for other in others if other["c"].isascii()]
            if seen:
                found[ord(character)] = min(seen)
    return found


def unprintable(text: str) -> str:
    """The first character that must not stand in a name or a label as `U+200B`, "" if there is none."""
    for character in text:
        if unicodedata.category(character) in _REFUSED or character in _UNPRINTABLE:
            return f"U+{ord(character):04X}"
    return ""


def plain(text: str) -> str:
    """The text as it may stand in a record: one line, nothing that cannot be seen."""
    return "".join(" " if unprintable(character) else character for character in text).strip()


def readable(text: str) -> str:
    """A stranger's text of several lines as it may be stored and shown, cut in its middle.

    Its beginning says what happened, its end is an engine's last words.
    """
    if len(text) > LONGEST_TEXT:
        text = f"{text[: LONGEST_TEXT // 4]} … {text[-3 * LONGEST_TEXT // 4 :]}"
    return "".join(" " if one not in "\n\t" and unprintable(one) else one for one in text)


def check_text(text: str, field: str) -> None:
    """Raise InvalidInput naming `field` for control, bidi, zero-width and unassigned characters."""
    if found := unprintable(text):
        raise errors.InvalidInput(f"{field} must not contain the character {found}", field=field)


def check_name(name: str) -> None:
    """Raise InvalidInput unless `name` can be a node's: 1 to 255 visible characters, no blanks around."""
    if not name.strip():
        raise errors.InvalidInput("name is required", field="name")
    check_text(name, "name")
    if name != name.strip():
        raise errors.InvalidInput("name must not begin or end with a blank", field="name")
    if max(len(name), len(key(name))) > LONGEST_NAME:
        raise errors.InvalidInput(f"name exceeds {LONGEST_NAME} characters", field="name")
