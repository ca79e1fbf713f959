"""Causes of failures: errors without the parts that differ from node to node. Pure."""

import re
from collections.abc import Collection
from functools import lru_cache

LONGEST_ERROR = 500
"""Characters of an error that are read: a worker may answer with a whole log."""
LONGEST_CAUSE = 200
MOST_REMEMBERED = 16_384
"""Errors whose cause a process remembers: more than a page reads at once. About 20 MB at the most."""
UNKNOWN = "No reason given"
_GAP = "…"
_SHORT_NAME = 3
"""A name of fewer characters may be a word of the sentence; it counts only behind one of `_BEFORE_A_NAME`."""
_BEFORE_A_NAME = ("node ", "worker ", "on ", "to ", "from ")
_STATUS = (
    r"\b(?:HTTP(?:/\d(?:\.\d)?)?|status|code|answered|returned|signal)[ :=]{1,2}(?:code |status )?\d{1,3}\b"
)
"""A number that is part of the cause: an HTTP status, an exit code, a signal."""
_VARIABLE = re.compile(
    "|".join(
        (
            rf"(?P<kept>{_STATUS}|(?-i:\b[45]\d\d(?= [A-Z][a-z]{{2}})))",
            r"\b[a-z][a-z0-9+.-]{1,15}://[^\s\"'<>]+",
            # A host with a path, as in the errors of sources.
            r"\b(?:[a-z0-9-]+\.)+[a-z0-9-]+(?::\d{1,5})?/[^\s:,;\"'()<>]*",
            r"\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b",
            r"\bsha256:[0-9a-f]+\b",
            r"\b\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d(?:\.\d+)?)?(?: ?Z| UTC|[+-]\d\d:?\d\d)?)?",
            r"\[?(?:[0-9a-f]{0,4}:){2,7}[0-9a-f]{0,4}\]?(?::\d{1,5})?(?!\w)",
            r"\b\d{1,3}(?:\.\d{1,3}){3}(?::\d{1,5})?\b",
            r"\b[a-z0-9][\w.-]{0,62}:\d{2,5}\b",
            r"(?:(?<=[\s\"'(=:])|^)(?:~|\.{1,2}|…|[A-Za-z]:)?[/\\][^\s:,;\"'()]+",
            r"(?<!\w)\d+(?:[.,]\d+)*(?: ?(?:[KMGTP]i?)?B(?:/s)?\b| ?(?:ms|s|min|h|d)\b| ?%)?(?!\w)",
            # After numbers: eight digits with a unit are no hash.
            r"\b(?=[0-9a-f]{0,63}\d)[0-9a-f]{8,64}\b",
        )
    ),
    re.IGNORECASE,
)
_QUOTED_GAP = re.compile(rf"([\"']){_GAP}\1")
_LIST = re.compile(rf"{_GAP}(?:, {_GAP})+")


def cause_of(error: str, names: Collection[str] = (), *, every_name: bool = False) -> str:
    """Return the cause of an error, see `_cause_of`: rows are read far more often than they change.

    `every_name`: names count also where they may be words.
    """
    longest_first = tuple(sorted(filter(None, names), key=len, reverse=True))
    return _cause_of(error[:LONGEST_ERROR], longest_first, every_name)


@lru_cache(maxsize=MOST_REMEMBERED)
def _cause_of(error: str, names: tuple[str, ...], every_name: bool) -> str:
    """Return the cause of an error, a sentence of one line: two errors with one sentence have one cause.

    Numbers, ids, times, addresses, paths and `names`, such as those of the node and the model, are replaced.
    An HTTP status and an exit code are part of the cause.
    """
    text = " ".join(error.split())
    for name in names:
        text = _without_name(text, name, 1 if every_name else _SHORT_NAME)
    text = _VARIABLE.sub(lambda match: match["kept"] or _GAP, text)
    text = _LIST.sub(_GAP, _QUOTED_GAP.sub(_GAP, text)).strip()
    if len(text) > LONGEST_CAUSE:
        text = text[: LONGEST_CAUSE - 1] + _GAP
    return text or UNKNOWN


def _without_name(text: str, name: str, shortest: int) -> str:
    """Return the text with each occurrence of the name as a whole word replaced.

    One of fewer than `shortest` characters is replaced only behind one of `_BEFORE_A_NAME`.
    """
    kept, start, at = [], 0, text.find(name)
    while at >= 0:
        end = at + len(name)
        is_name = len(name) >= shortest or text[:at].endswith(_BEFORE_A_NAME)
        if is_name and _is_whole_word(text, at, end):
            kept += [text[start:at], _GAP]
            start = end
        at = text.find(name, end)
    return "".join([*kept, text[start:]])


def _is_whole_word(text: str, at: int, end: int) -> bool:
    before, after = text[at - 1 : at] if at else "", text[end : end + 1]
    return not (before.isalnum() or before in tuple("_.-") or after.isalnum() or after in tuple("_-"))
