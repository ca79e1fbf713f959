"""Causes of failures: error texts without what differs from node to node. Pure."""

import re
from collections.abc import Collection
from functools import lru_cache

MAX_ERROR_LENGTH = 500
"""Maximum characters of an error that are read, because a worker may send a whole log."""
MAX_CAUSE_LENGTH = 200
MAX_CACHED_CAUSES = 16_384
"""Maximum number of errors whose cause is cached, about 20 MB. A page reads fewer errors at once."""
UNKNOWN_CAUSE = "No reason given"
_PLACEHOLDER = "…"
_MIN_NAME_LENGTH = 3
"""Minimum characters of a name that is replaced anywhere.

A shorter name may be an ordinary word: it is replaced only after one of `_WORDS_BEFORE_NAME`.
"""
_WORDS_BEFORE_NAME = ("node ", "worker ", "on ", "to ", "from ")
_STATUS_PATTERN = (
    r"\b(?:HTTP(?:/\d(?:\.\d)?)?|status|code|answered|returned|signal)[ :=]{1,2}(?:code |status )?\d{1,3}\b"
)
"""Matches a number that belongs to the cause: an HTTP status, an exit code, a signal."""
_VARIABLE_PATTERN = re.compile(
    "|".join(
        (
            rf"(?P<kept>{_STATUS_PATTERN}|(?-i:\b[45]\d\d(?= [A-Z][a-z]{{2}})))",
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
_QUOTED_PLACEHOLDER_PATTERN = re.compile(rf"([\"']){_PLACEHOLDER}\1")
_LIST_PATTERN = re.compile(rf"{_PLACEHOLDER}(?:, {_PLACEHOLDER})+")


def cause_of(error: str, names: Collection[str] = (), *, every_name: bool = False) -> str:
    """Return the cause of an error (see `_cause_of`) from a cache, because a row is read many times.

    With `every_name`, short names are replaced anywhere too.
    """
    longest_first = tuple(sorted(filter(None, names), key=len, reverse=True))
    return _cause_of(error[:MAX_ERROR_LENGTH], longest_first, every_name)


@lru_cache(maxsize=MAX_CACHED_CAUSES)
def _cause_of(error: str, names: tuple[str, ...], every_name: bool) -> str:
    """Return the cause of an error as one line. Errors with the same text have the same cause.

    Numbers, ids, times, addresses, paths and `names`, such as the names of the node and the model, are
    replaced. HTTP statuses and exit codes stay, because they are part of the cause.
    """
    text = " ".join(error.split())
    for name in names:
        text = _replace_name(text, name, 1 if every_name else _MIN_NAME_LENGTH)
    text = _VARIABLE_PATTERN.sub(lambda match: match["kept"] or _PLACEHOLDER, text)
    text = _LIST_PATTERN.sub(_PLACEHOLDER, _QUOTED_PLACEHOLDER_PATTERN.sub(_PLACEHOLDER, text)).strip()
    if len(text) > MAX_CAUSE_LENGTH:
        text = text[: MAX_CAUSE_LENGTH - 1] + _PLACEHOLDER
    return text or UNKNOWN_CAUSE


def _replace_name(text: str, name: str, shortest: int) -> str:
    """Replace each occurrence of the name as a whole word.

    A name of fewer than `shortest` characters is replaced only after one of `_WORDS_BEFORE_NAME`.
    """
    kept, start, at = [], 0, text.find(name)
    while at >= 0:
        end = at + len(name)
        is_name = len(name) >= shortest or text[:at].endswith(_WORDS_BEFORE_NAME)
        if is_name and _is_whole_word(text, at, end):
            kept += [text[start:at], _PLACEHOLDER]
            start = end
        at = text.find(name, end)
    return "".join([*kept, text[start:]])


def _is_whole_word(text: str, at: int, end: int) -> bool:
    before, after = text[at - 1 : at] if at else "", text[end : end + 1]
    return not (before.isalnum() or before in tuple("_.-") or after.isalnum() or after in tuple("_-"))
