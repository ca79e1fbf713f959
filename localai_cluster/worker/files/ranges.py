"""What `Content-Range`, `Range` and `X-Content-SHA256` say. Pure."""

import re
from dataclasses import dataclass

from localai_cluster.worker.exchange import Refusal

_CONTENT_RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18})", re.ASCII)
_RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})", re.ASCII)
_SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)


@dataclass(frozen=True)
class Part:
    """The bytes from `start` to `end`, both included, of a file of `total`."""

    start: int
    end: int
    total: int

    @property
    def length(self) -> int:
        """How many bytes it has."""
        return self.end - self.start + 1


def content_range(text: str) -> Part | None:
    """The part that an upload brings; None if it brings all. Refusal 400."""
    if not text:
        return None
    found = _CONTENT_RANGE.fullmatch(text)
    if not found:
        raise Refusal(400, "invalid Content-Range: bytes START-END/TOTAL in numbers is needed")
    part = Part(*map(int, found.groups()))
    if not part.start <= part.end < part.total:
        raise Refusal(400, "invalid Content-Range: START <= END < TOTAL is needed")
    return part


def wanted(text: str, size: int) -> Part | None:
    """The part of a file of `size` bytes that a reader wants; None: the whole, also if it asks for several.

    Refusal 416 for what lies behind its end.
    """
    found = _RANGE.fullmatch(text)
    if not found or not any(found.groups()):
        return None
    first, last = found.groups()
    start = int(first) if first else max(0, size - int(last))
    end = min(int(last), size - 1) if first and last else size - 1
    if first and last and int(last) < start:
        return None
    if start > end:
        raise Refusal(416, f"Range starts behind the end at {size}", {"content-range": f"bytes */{size}"})
    return Part(start, end, size)


def digest(text: str) -> str:
    """A SHA-256 in lower case, "" for no text. Refusal 400."""
    if text and not is_digest(text.lower()):
        raise Refusal(400, "invalid X-Content-SHA256: 64 hex digits are needed")
    return text.lower()


def is_digest(text: str) -> bool:
    """Whether it is a SHA-256 as side files hold it."""
    return _SHA256.fullmatch(text) is not None
