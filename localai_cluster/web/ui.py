"""The built page: the files of `static/dist` that it loads, and the id of the build.

Vite's manifest has both. It is cached and read again when the file changes, so that a new build is served
with the next page. The module uses no request and no model, so that views and sockets share it.
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
"""Entry point of the page, as the manifest names it."""
_ID_DIGITS = 16


@dataclass(frozen=True)
class PageBuild:
    """A build of the page; paths are relative to `static/dist`, in the order in which the page loads them."""

    id: str
    script: str
    styles: tuple[str, ...]
    preloads: tuple[str, ...]


def current_build() -> PageBuild | None:
    """Return the current build; None if there is none or it cannot be read."""
    manifest = settings.UI_DIST / "manifest.json"
    try:
        status = manifest.stat()
        return _read_manifest(manifest, status.st_mtime_ns, status.st_size)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.error("%s cannot be read: %s; build again", manifest, type(error).__name__)
        return None


def build_id() -> str:
    """Return the hash of the current build, "" without one: a page with another hash is out of date."""
    build = current_build()
    return build.id if build is not None else ""


@lru_cache(maxsize=1)
def _read_manifest(manifest: Path, changed_at: int, size: int) -> PageBuild:
    raw = manifest.read_bytes()
    chunks = json.loads(raw)
    needed = [chunks[ENTRY], *(chunks[key] for key in _imports(chunks, ENTRY, {ENTRY}))]
    return PageBuild(
        id=hashlib.sha256(raw).hexdigest()[:_ID_DIGITS],
        script=str(needed[0]["file"]),
        styles=tuple(dict.fromkeys(str(style) for chunk in needed for style in chunk.get("css", ()))),
        preloads=tuple(str(chunk["file"]) for chunk in needed[1:]),
    )


def _imports(chunks: dict[str, Any], key: str, visited: set[str]) -> Iterator[str]:
    """Yield the static imports of `key`, recursively, each chunk once; `visited` collects them."""
    for name in chunks[key].get("imports", ()):
        if name not in visited:
            visited.add(name)
            yield name
            yield from _imports(chunks, name, visited)
