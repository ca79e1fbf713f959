"""Parsers for `Content-Range`, `Range` and `X-Content-SHA256`. Pure."""

import re
from dataclasses import dataclass

from localai_cluster.worker.exchange import Refusal

_CONTENT_RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18})", re.ASCII)
_RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})", re.ASCII)
_SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)


@dataclass(frozen=True)
class Part:
    """The bytes from `start` to `end`, both inclusive, of a file of `total` bytes."""

    start: int
    end: int
    total: int

    @property
    def length(self) -> int:
        """Number of bytes."""
        return self.end - self.start + 1


def content_range(text: str) -> Part | None:
    """Parse the `Content-Range` of an upload; return None for a complete file. Raise Refusal 400."""
    if not text:
        return None
    match = _CONTENT_RANGE.fullmatch(text)
    if not match:
        raise Refusal(400, "invalid Content-Range: bytes START-END/TOTAL in numbers is needed")
    part = Part(*map(int, match.groups()))
    if not part.start <= part.end < part.total:
        raise Refusal(400, "invalid Content-Range: START <= END < TOTAL is needed")
    return part


def wanted(text: str, size: int) -> Part | None:
    """Parse the `Range` of a download from a file of `size` bytes.

    Return None for the complete file, also if the client requests several ranges. Raise Refusal 416 if the
    range starts beyond the end.
    """
    match = _RANGE.fullmatch(text)
    if not match or not any(match.groups()):
        return None
    first, last = match.groups()
    start = int(first) if first else max(0, size - int(last))
    end = min(int(last), size - 1) if first and last else size - 1
    if first and last and int(last) < start:
        return None
    if start > end:
        raise Refusal(416, f"Range starts behind the end at {size}", {"content-range": f"bytes */{size}"})
    return Part(start, end, size)


def digest(text: str) -> str:
    """Validate a SHA-256 and return it in lower case; "" for no text. Raise Refusal 400."""
    if text and not is_digest(text.lower()):
        raise Refusal(400, "invalid X-Content-SHA256: 64 hex digits are needed")
    return text.lower()


def is_digest(text: str) -> bool:
    """Return True if the text is a SHA-256 in the form of side files."""
    return _SHA256.fullmatch(text) is not None
