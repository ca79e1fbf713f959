"""The process that renders the chat templates of definitions; `templates` starts it and uses pipes to it.

Definitions, and so their templates, come from galleries. One filter or operator can block an interpreter for
a minute or allocate gigabytes in a single step, which no check between steps can stop. So the kernel enforces
the limits: a CPU timer for each prompt ends the process, and an allocation beyond its memory limit fails. The
process has no environment, writes no file and ends when its input closes.

Run as a script, it imports nothing of this project. A request is a header with its length, and JSON. A reply
is `REPLY_HEADER` and a text.
"""

import json
import resource
import signal
import struct
import sys
from collections.abc import Iterator
from datetime import datetime
from functools import lru_cache
from typing import Any, BinaryIO

import jinja2
import jinja2.ext
import jinja2.sandbox
import orjson

REQUEST_HEADER = struct.Struct(">Q")
REPLY_HEADER = struct.Struct(">?BQ")
"""Header of a reply: True if the process then ends, the result code, and the number of bytes of the text."""
PROMPT_RENDERED, TEMPLATE_REFUSED, TEMPLATE_UNUSABLE, PROMPT_TOO_LONG = range(4)
"""Result codes. The text is the prompt, the template's refusal, the template's error, or empty."""
MAX_PROMPT_BYTES = 32 * 1024 * 1024
"""Maximum number of characters of a rendered prompt."""
_MAX_ERROR_LENGTH = 500
_MAX_REUSE_MEMORY_KIB = 256 * 1024
"""Peak memory in KiB above which the process ends after its reply, to free the memory."""

_TEMPLATE_ERRORS = (
    *(jinja2.TemplateError, ArithmeticError, AssertionError, AttributeError, LookupError),
    *(RuntimeError, SyntaxError, TypeError, ValueError),
)
"""Exceptions that mean that the template is unusable."""


class _TemplateRefusal(Exception):
    """The template called `raise_exception`, because it does not accept the messages."""


class _PromptLimitExceeded(Exception):
    """The rendered prompt has more than `MAX_PROMPT_BYTES` characters."""


def serve(requests: BinaryIO, replies: BinaryIO) -> None:
    """Process requests until the input closes or a reply has the end flag."""
    is_last = False
    while not is_last and len(header := requests.read(REQUEST_HEADER.size)) == REQUEST_HEADER.size:
        result, text = _process_request(orjson.loads(requests.read(REQUEST_HEADER.unpack(header)[0])))
        is_last = result == PROMPT_TOO_LONG or _peak_memory() > _MAX_REUSE_MEMORY_KIB
        replies.write(REPLY_HEADER.pack(is_last, result, len(text)))
        replies.write(text)
        replies.flush()


def _peak_memory() -> int:
    """Return the peak memory of this process in KiB.

    `getrusage` would include the memory of the parent process before the start of this one.
    """
    with open("/proc/self/status", "rb") as status:
        return next((int(line.split()[1]) for line in status if line.startswith(b"VmHWM:")), 0)


def _process_request(request: Any) -> tuple[int, bytes]:
    """Return the result code and the text for one request. A timer ends the process if it takes too long."""
    signal.setitimer(signal.ITIMER_PROF, request["seconds"])
    try:
        now = datetime.fromisoformat(request["now"])
        values = request["values"] | {"raise_exception": _raise_refusal, "strftime_now": now.strftime}
        return PROMPT_RENDERED, "".join(
            _check_length(_compile_template(request["source"]).generate(values))
        ).encode()
    except _TemplateRefusal as error:
        return TEMPLATE_REFUSED, _error_bytes(error)
    except (MemoryError, _PromptLimitExceeded):
        return PROMPT_TOO_LONG, b""
    except _TEMPLATE_ERRORS as error:
        return TEMPLATE_UNUSABLE, _error_bytes(error)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _check_length(pieces: Iterator[str]) -> Iterator[str]:
    size = 0
    for piece in pieces:
        size += len(piece)
        if size > MAX_PROMPT_BYTES:
            raise _PromptLimitExceeded
        yield piece


def _error_bytes(error: Exception) -> bytes:
    return str(error)[:_MAX_ERROR_LENGTH].encode("utf-8", "backslashreplace")


def _raise_refusal(message: object) -> None:
    raise _TemplateRefusal(str(message))


@lru_cache(maxsize=64)
def _compile_template(source: str) -> jinja2.Template:
    return _build_environment().from_string(source)


@lru_cache(maxsize=1)
def _build_environment() -> jinja2.sandbox.SandboxedEnvironment:
    # Templates of models expect these options.
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationTag]
    )
    environment.filters["tojson"] = _to_json
    return environment


class _GenerationTag(jinja2.ext.Extension):
    """The tag `generation`, which marks the model's own text for its training. Its content is rendered."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """Return the statements inside of the tag."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return the value as JSON in the form in which models were trained on it: that of `transformers`."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _limit_process(memory: int) -> None:
    """Limit this process to `memory` bytes of address space. Forbid file writes and core dumps.

    SIGPROF of the request's timer ends the process.
    """
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)


if __name__ == "__main__":
    _limit_process(int(sys.argv[1]))
    serve(sys.stdin.buffer, sys.stdout.buffer)
