"""Headers of files at their sources, read by ranges: one megabyte contains the figures of a model.

The vocabulary of a GGUF file lies between its figures and its tensors and takes megabytes. The figures are
sufficient for an estimate. More is read only if the figures do not come first, or to find the chat template
of a file that is imported. Quantizations of one model have the same figures, so one header serves them all.
"""

import asyncio
import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from localai_cluster.kit import untrusted
from localai_cluster.kit.outbound import SourceError
from nodes.definitions.headers import (
    Header,
    UnreadableHeader,
    parse_config_json,
    parse_figures,
    parse_header,
    parse_json,
)
from nodes.definitions.sizes import tools_in_template
from nodes.sources.opening import SourceOpener
from nodes.sources.plans import SourceFile

log = logging.getLogger(__name__)

FIGURES_BYTES = 1024 * 1024
"""Bytes of a file that are read for its figures."""
TABLE_BYTES = 16 * 1024 * 1024
"""Bytes of a file that are read for the table of its tensors or its chat template."""
HEADER_LIMIT = 20.0
"""Seconds within which a header must have been read."""
_MIN_BYTES = 256
"""Bytes that are read to check that the source sends the file."""
_LFS_POINTER_START = b"version https://git-lfs"
_GGUF_CONTEXT_KEY = "context_length"
_ASSUMED_FILE_BYTES = 2**60
"""Size in bytes that is assumed for a file of unknown size."""


async def read_start(opener: SourceOpener, file: SourceFile, length: int) -> tuple[bytes, int]:
    """Return the first `length` bytes of a file, and its size; raise SourceError."""
    try:
        async with asyncio.timeout(HEADER_LIMIT), opener.open(file, 0, length) as body:
            content = await untrusted.read_at_most(body.pieces, length - 1)
            total = body.total
    except TimeoutError:
        raise SourceError(f"no answer within {HEADER_LIMIT:.0f} s", can_retry=True) from None
    return content, total


async def gguf_header(opener: SourceOpener, file: SourceFile) -> Header:
    """Return the header of a GGUF file; raise SourceError for any other file."""
    try:
        return (await _read_gguf(opener, file))[0]
    except UnreadableHeader as error:
        raise SourceError(f"{file.path}: {error}") from None


@dataclass(frozen=True)
class ProbedFile:
    """A file at its source: its size, 0 if unknown, and the header of a GGUF file."""

    size: int
    header: Header | None = None
    has_tools: bool = False
    """True if the file's chat template is known to support tools."""


async def probe_file(opener: SourceOpener, file: SourceFile, *, with_header: bool) -> ProbedFile:
    """Read the size of a file at its source, and the header of a GGUF file.

    Raise SourceError if the source does not send the file. The result has `header=None` if the header cannot
    be read.
    """
    if with_header:
        try:
            header, total, content = await _read_gguf(opener, file)
            return ProbedFile(total, header, await _has_tools(opener, file, header, content))
        except UnreadableHeader as error:
            log.warning("The header of %s is refused: %s", file.path, error)
    content, total = await read_start(opener, file, _MIN_BYTES)
    _check_length(content, total, file, _MIN_BYTES)
    return ProbedFile(total)


async def _has_tools(opener: SourceOpener, file: SourceFile, header: Header, content: bytes) -> bool:
    """Return True if the chat template of a GGUF file supports tools. `content` is the part already read.

    The template comes after the vocabulary, so more of the file may be read. If the source fails then, return
    False.
    """
    has_tools = tools_in_template(content)
    if has_tools is None and header.is_cut and len(content) == FIGURES_BYTES:
        with suppress(SourceError):
            content, _ = await read_start(opener, file, TABLE_BYTES)
            has_tools = tools_in_template(content)
    return bool(has_tools)


async def _read_gguf(opener: SourceOpener, file: SourceFile) -> tuple[Header, int, bytes]:
    """Return the header of a GGUF file, its size, and the bytes that were read.

    Raise UnreadableHeader and SourceError.
    """
    content, total = await read_start(opener, file, FIGURES_BYTES)
    _check_length(content, total, file, FIGURES_BYTES)
    header = parse_figures(content, total or file.size or _ASSUMED_FILE_BYTES)
    if "block_count" not in header.figures and len(content) >= FIGURES_BYTES:
        content, total = await read_start(opener, file, TABLE_BYTES)
        header = parse_header(content, total or file.size or _ASSUMED_FILE_BYTES)
    return header, total, content


def _check_length(content: bytes, total: int, file: SourceFile, read: int) -> None:
    """Raise SourceError for an LFS pointer, for missing bytes, and if the source states another size."""
    if content.startswith(_LFS_POINTER_START):
        raise SourceError(f"{file.path}: the source sends the pointer of a large file, not its content")
    if total and file.size and total != file.size:
        raise SourceError(f"{file.path}: the file has {total} bytes, but its source says {file.size}")
    if total and len(content) < min(total, read):
        raise SourceError(f"{file.path}: the file ends early", can_retry=True)


def config_header(content: bytes) -> tuple[Header, Mapping[str, object]]:
    """Return the header that a `config.json` describes, and its content; raise SourceError."""
    try:
        config = parse_json(content)
        return parse_config_json(config), config
    except UnreadableHeader as error:
        raise SourceError(f"config.json cannot be read: {error}") from None


def trained_context(header: Header | None, config: Mapping[str, object] | None = None) -> int:
    """Return the context length in tokens that a model was trained for; 0 if unknown."""
    value: object = header.figures.get(_GGUF_CONTEXT_KEY, 0) if header is not None else 0
    if not value and config is not None:
        inner = config.get("text_config")
        sections = (config, inner if isinstance(inner, dict) else {})
        value = next(
            (section[key] for section in sections for key in _CONFIG_CONTEXT_KEYS if key in section), 0
        )
    return value if isinstance(value, int) and 0 < value < 2**31 else 0


_CONFIG_CONTEXT_KEYS = ("max_position_embeddings", "model_max_length", "seq_length")
