"""The built page: which files of `static/dist` it loads, and the name by which a build is known.

Vite's manifest says both. It is read once and again when the file changes, so that a build made while the
product runs is served with the next page. Knows no request and no model, so that views and sockets share it.
"""

import hashlib
import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from django.conf import settings

log = logging.getLogger(__name__)

ENTRY = "src/main.tsx"
"""What the page starts with, as the manifest calls it."""
_ID_DIGITS = 16


@dataclass(frozen=True)
class PageBuild:
    """One build; paths as under `static/dist`, in the order in which the page names them."""

    id: str
    script: str
    styles: tuple[str, ...]
    preloads: tuple[str, ...]


def current() -> PageBuild | None:
    """The build that is there now; None without one, or with one that cannot be read."""
    manifest = settings.UI_DIST / "manifest.json"
    try:
        found = manifest.stat()
        return _read(manifest, found.st_mtime_ns, found.st_size)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.error("%s cannot be read: %s; build again", manifest, type(error).__name__)
        return None


def build_id() -> str:
    """The hash of the build that is there now, "" without one: a page with another one is out of date."""
    build = current()
    return build.id if build is not None else ""


@lru_cache(maxsize=1)
def _read(manifest: Path, changed_at: int, size: int) -> PageBuild:
    raw = manifest.read_bytes()
    chunks = json.loads(raw)
    needed = [chunks[ENTRY], *(chunks[key] for key in _imports(chunks, ENTRY, {ENTRY}))]
    return PageBuild(
        id=hashlib.sha256(raw).hexdigest()[:_ID_DIGITS],
        script=str(needed[0]["file"]),
        styles=tuple(dict.fromkeys(str(style) for chunk in needed for style in chunk.get("css", ()))),
        preloads=tuple(str(chunk["file"]) for chunk in needed[1:]),
    )


def _imports(chunks: dict[str, Any], key: str, seen: set[str]) -> Iterator[str]:
    """What `key` imports at once, each chunk once; `seen` grows."""
    for name in chunks[key].get("imports", ()):
        if name not in seen:
            seen.add(name)
            yield name
            yield from _imports(chunks, name, seen)
