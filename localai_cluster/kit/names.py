"""Validation of names and labels from clients: permitted characters, and names that look alike."""

import unicodedata
from functools import cache

from localai_cluster.kit import errors

MAX_NAME_LENGTH = 255
MAX_TEXT_LENGTH = 4000
"""Maximum characters of an error text from a worker or an engine."""
_REFUSED_CATEGORIES = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
"""Refused Unicode categories: control, format, surrogate, private, unassigned, line separators.

Format characters include the bidirectional controls and characters of zero width.
"""
_BLANK_CHARACTERS = frozenset("\u115f\u1160\u2800\u3164\uffa0\U0001d159")
"""Letters and symbols without a visible glyph."""
_INVISIBLE_MARKS = frozenset(
    map(
        chr, (0x34F, 0x17B4, 0x17B5, *range(0x180B, 0x1810), *range(0xFE00, 0xFE10), *range(0xE0100, 0xE01F0))
    )
)
"""Combining marks without a visible glyph, such as joiners and variation selectors.

Names that differ only in such marks look alike.
"""
_UNPRINTABLE_CHARACTERS = _BLANK_CHARACTERS | _INVISIBLE_MARKS


def key(name: str) -> str:
    """Return a key that is equal for names that a person cannot distinguish.

    The key is the name after NFKC, case folding, and the replacement of each non-ASCII character by the ASCII
    text that it looks like (Unicode TS 39): a Cyrillic letter that looks like `a` becomes `a`. ASCII
    characters are never replaced: `gpu-l` and `gpu-1` are different names, because operators number their
    machines.
    """
    folded = _fold_case(name)
    # A letter that was replaced may join an accent that follows it.
    while not folded.isascii():
        replaced = _fold_case(unicodedata.normalize("NFD", folded).translate(_load_look_alikes()))
        if replaced == folded:
            break
        folded = replaced
    return folded


def _fold_case(name: str) -> str:
    return unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", name).casefold())


@cache
def _load_look_alikes() -> dict[int, str]:
    """Return the ASCII text that each non-ASCII character looks like; loaded at the first call."""
    # The worker, which compares no names, has no such package.
    from confusable_homoglyphs.utils import load  # type: ignore[import-untyped]

    look_alikes = {}
    for character, confusables in load("confusables.json").items():
        if len(character) == 1 and not character.isascii():
            candidates = [confusable["c"] for confusable in confusables if confusable["c"].isascii()]
            if candidates:
                look_alikes[ord(character)] = min(candidates)
    return look_alikes


def find_unprintable(text: str) -> str:
    """Return the first character that a name must not contain, in the form `U+200B`; "" if there is none."""
    for character in text:
        if unicodedata.category(character) in _REFUSED_CATEGORIES or character in _UNPRINTABLE_CHARACTERS:
            return f"U+{ord(character):04X}"
    return ""


def to_single_line(text: str) -> str:
    """Return the text on one line and without invisible characters, for a record."""
    return "".join(" " if find_unprintable(character) else character for character in text).strip()


def to_readable_text(text: str) -> str:
    """Return an untrusted text for storage and display. Cut the middle of a long text; keep line breaks.

    The error is usually at the beginning, and an engine's last output at the end.
    """
    if len(text) > MAX_TEXT_LENGTH:
        text = f"{text[: MAX_TEXT_LENGTH // 4]} … {text[-3 * MAX_TEXT_LENGTH // 4 :]}"
    return "".join(
        " " if character not in "\n\t" and find_unprintable(character) else character for character in text
    )


def check_text(text: str, field: str) -> None:
    """Raise InvalidInput naming `field` for control, bidi, zero-width and unassigned characters."""
    if character := find_unprintable(text):
        raise errors.InvalidInput(f"{field} must not contain the character {character}", field=field)


def check_name(name: str) -> None:
    """Raise InvalidInput unless `name` is a valid node name: 1 to 255 visible characters, no outer blanks."""
    if not name.strip():
        raise errors.InvalidInput("name is required", field="name")
    check_text(name, "name")
    if name != name.strip():
        raise errors.InvalidInput("name must not begin or end with a blank", field="name")
    if max(len(name), len(key(name))) > MAX_NAME_LENGTH:
        raise errors.InvalidInput(f"name exceeds {MAX_NAME_LENGTH} characters", field="name")
