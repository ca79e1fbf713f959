"""Headers of models that are not here: read by ranges, a megabyte for the figures of a model.

The vocabulary of a GGUF file lies between its figures and its tensors and takes megabytes. The figures are
sufficient for an estimate, so the rest is read only where they do not come first, and for the chat template
of a file that is imported. Quantizations of one model have the same figures, so one header serves them all.
"""

import asyncio
import json
import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from localai_cluster.kit import untrusted
from localai_cluster.kit.outbound import SourceError
from nodes.definitions.headers import (
    MOST_CONFIG_BYTES,
    Header,
    UnreadableHeader,
    parse_config,
    parse_figures,
    parse_header,
)
from nodes.definitions.sizes import tools_in_template
from nodes.sources.opening import SourceOpener
from nodes.sources.plans import SourceFile

log = logging.getLogger(__name__)

FIGURES_BYTES, TABLE_BYTES = 1024 * 1024, 16 * 1024 * 1024
"""Bytes of a file that are read for its figures, and for the table of its tensors or its chat template."""
HEADER_LIMIT = 20.0
"""Seconds for one header."""
_LEAST_BYTES = 256
"""Bytes of a file that are read to see that its source sends it."""
_POINTER = b"version https://git-lfs"
_CONTEXT_KEY = "context_length"
_UNKNOWN = 2**60
"""Bytes of a file whose size is not known."""


async def read_start(opener: SourceOpener, file: SourceFile, length: int) -> tuple[bytes, int]:
    """Return the first bytes of a file, and its size; raise SourceError."""
    content = bytearray()
    try:
        async with asyncio.timeout(HEADER_LIMIT), opener.open(file, 0, length) as body:
            async for piece in body.pieces:
                content += piece
                if len(content) >= length:
                    break
            total = body.total
    except TimeoutError:
        raise SourceError(f"no answer within {HEADER_LIMIT:.0f} s", can_retry=True) from None
    return bytes(content[:length]), total


async def gguf_header(opener: SourceOpener, file: SourceFile) -> Header:
    """Return the header of a GGUF file; raise SourceError if it is no GGUF file."""
    try:
        return (await _read_gguf(opener, file))[0]
    except UnreadableHeader as error:
        raise SourceError(f"{file.path}: {error}") from None


@dataclass(frozen=True)
class ProbedFile:
    """A file at its source: its size, 0 if that is not known, and of a GGUF file what its header says."""

    size: int
    header: Header | None = None
    has_tools: bool = False
    """True if its chat template is known to have a place for tools."""


async def probe_file(opener: SourceOpener, file: SourceFile, *, with_header: bool) -> ProbedFile:
    """Read the size of a file at its source, and the header of a GGUF file.

    Raise SourceError if the source does not send the file. A header that cannot be read is None.
    """
    if with_header:
        try:
            header, total, content = await _read_gguf(opener, file)
            return ProbedFile(total, header, await _has_tools(opener, file, header, content))
        except UnreadableHeader as error:
            log.warning("The header of %s is refused: %s", file.path, error)
    content, total = await read_start(opener, file, _LEAST_BYTES)
    _check_length(content, total, file, _LEAST_BYTES)
    return ProbedFile(total)


async def _has_tools(opener: SourceOpener, file: SourceFile, header: Header, content: bytes) -> bool:
    """Return True if the chat template of a GGUF file, of which this was read, has a place for tools.

    It follows the vocabulary, so more may have to be read. A source that does not send that is no error.
    """
    has_tools = tools_in_template(content)
    if has_tools is None and header.is_cut and len(content) == FIGURES_BYTES:
        with suppress(SourceError):
            content, _ = await read_start(opener, file, TABLE_BYTES)
            has_tools = tools_in_template(content)
    return bool(has_tools)


async def _read_gguf(opener: SourceOpener, file: SourceFile) -> tuple[Header, int, bytes]:
    """Return the header of a GGUF file, its size and what was read.

    Raise UnreadableHeader and SourceError.
    """
    content, total = await read_start(opener, file, FIGURES_BYTES)
    _check_length(content, total, file, FIGURES_BYTES)
    header = parse_figures(content, total or file.size or _UNKNOWN)
    if "block_count" not in header.figures and len(content) >= FIGURES_BYTES:
        content, total = await read_start(opener, file, TABLE_BYTES)
        header = parse_header(content, total or file.size or _UNKNOWN)
    return header, total, content


def _check_length(content: bytes, total: int, file: SourceFile, read: int) -> None:
    """Refuse the pointer of a large file in its place, and a file of another length than its source says."""
    if content.startswith(_POINTER):
        raise SourceError(f"{file.path}: the source sends the pointer of a large file, not its content")
    if total and file.size and total != file.size:
        raise SourceError(f"{file.path}: the file has {total} bytes, but its source says {file.size}")
    if total and len(content) < min(total, read):
        raise SourceError(f"{file.path}: the file ends early", can_retry=True)


def config_header(content: bytes) -> tuple[Header, Mapping[str, object]]:
    """Return the header that a `config.json` describes, and its content; raise SourceError."""
    problem = "too large" if len(content) > MOST_CONFIG_BYTES else untrusted.json_problem(content)
    if problem:
        raise SourceError(f"config.json is {problem}")
    try:
        config = json.loads(content)
        return parse_config(config), config
    except (ValueError, RecursionError) as error:
        raise SourceError(f"config.json cannot be read: {str(error)[:100]}") from None


def trained_context(header: Header | None, config: Mapping[str, object] | None = None) -> int:
    """Return the tokens of context that a model was made for; 0 if it does not say."""
    value: object = header.figures.get(_CONTEXT_KEY, 0) if header is not None else 0
    if not value and config is not None:
        inner = config.get("text_config")
        sections = (config, inner if isinstance(inner, dict) else {})
        value = next((section[key] for section in sections for key in _CONTEXTS if key in section), 0)
    return value if isinstance(value, int) and 0 < value < 2**31 else 0


_CONTEXTS = ("max_position_embeddings", "model_max_length", "seq_length")
