"""Safe reading of untrusted JSON, YAML and files.

`json_problem` limits depth and size of JSON before it is parsed. A parser builds an object for each level
and keeps all of them while it descends, so a few megabytes of brackets become hundreds. The scan counts
brackets outside strings only, in chunks and with the fast functions of `bytes`; most bodies have so few
brackets that their number is sufficient. It checks no syntax: a text that passes is at most `MAX_LEVELS` deep
if it is JSON, and the parser refuses it otherwise.

`load_yaml` raises one kind of error for any problem of a text, with the line of the value. PyYAML's
constructors let Python's own errors through: an impossible date is a ValueError, `!!bool maybe` a KeyError,
`!!int ""` an IndexError. A caller that catches only `YAMLError` would fail on more than that text.

`open_file` and `read_file` accept regular files only: a FIFO blocks its reader until there is a writer, a
device may never end. Neither is opened. `in_daemon_thread` and `SharedCalls` read from a folder that may
hang: on a mount whose server is down, a read returns late or never.
"""

import asyncio
import errno
import os
import stat
import threading
from array import array
from collections.abc import AsyncIterable, Callable, Hashable, Iterator
from concurrent.futures import Future
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO, Concatenate, ParamSpec, TypeVar

import yaml
from yaml.composer import Composer

from localai_cluster.kit import clock

P = ParamSpec("P")
T = TypeVar("T")

MAX_LEVELS = 64
"""Maximum nesting depth of lists and objects (`docs/configuration.md`)."""
MAX_CONTAINERS = 100_000
"""Maximum number of lists and objects in a text.

Four megabytes of empty lists take two hundred megabytes when they are parsed.
"""
TOO_DEEP_REASON = f"nested more than {MAX_LEVELS} levels deep"
TOO_MANY_REASON = f"made of more than {MAX_CONTAINERS} lists and objects"

_QUOTE_AND_BRACKETS = b'"[]{}'
_IGNORED_BYTES = bytes(byte for byte in range(256) if byte not in _QUOTE_AND_BRACKETS)
_DEPTH_CHANGE_BY_BRACKET = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")
"""Change of the nesting depth for each bracket, as signed bytes: 1 or -1."""
_SCAN_PIECE_BYTES = 64 * 1024


def json_problem(text: bytes) -> str:
    """Return the reason why `text` must not be parsed as JSON, or "".

    The reason is `TOO_DEEP_REASON` or `TOO_MANY_REASON`.
    """
    if text.count(b"[") + text.count(b"{") <= MAX_LEVELS:
        return ""
    level = count = 0
    for brackets in _outside_strings(text):
        steps = brackets.translate(_DEPTH_CHANGE_BY_BRACKET)
        count += steps.count(1)
        if count > MAX_CONTAINERS:
            return TOO_MANY_REASON
        levels = list(accumulate(array("b", steps), initial=level))
        if max(levels) > MAX_LEVELS:
            return TOO_DEEP_REASON
        level = levels[-1]
    return ""


def _outside_strings(text: bytes) -> Iterator[bytes]:
    """Yield the brackets of `text` outside of strings, in chunks."""
    # Remove escapes first, so that each remaining quote opens or closes a string; two in a row cancel out.
    marks = (
        text.replace(b"\\\\", b"").replace(b'\\"', b"").translate(None, _IGNORED_BYTES).replace(b'""', b"")
    )
    inside = 0
    for start in range(0, len(marks), _SCAN_PIECE_BYTES):
        pieces = marks[start : start + _SCAN_PIECE_BYTES].split(b'"')
        yield b"".join(pieces[inside::2])
        inside ^= (len(pieces) - 1) % 2


MAX_REASON_LENGTH = 400
"""Maximum characters of a message: it quotes the text, which may be megabytes long."""


class InvalidYAML(ValueError):
    """The text is not valid YAML. The message is one line that can be encoded.

    `line` and `column` count from 1; they are 0 if unknown.
    """

    def __init__(self, message: str, line: int = 0, column: int = 0) -> None:
        super().__init__(message)
        self.line, self.column = line, column


def compose_and_load_yaml(text: str | bytes, loader: Any) -> tuple[Any, Any]:
    """Return the root node and the value of a YAML document, which is read once. Raise InvalidYAML."""

    def read(text: str | bytes, *, Loader: Any) -> tuple[Any, Any]:
        reader = Loader(text)
        try:
            tree = reader.get_single_node()
            return tree, None if tree is None else reader.construct_document(tree)
        finally:
            reader.dispose()

    found: tuple[Any, Any] = load_yaml(text, loader, read)
    return found


def load_yaml(text: str | bytes, loader: Any, read: Callable[..., Any] = yaml.load) -> Any:
    """Return what `read` makes of the YAML text with `loader`. Raise InvalidYAML for any error."""
    try:
        return read(text, Loader=loader)
    except RecursionError as error:
        raise InvalidYAML("is nested too deeply") from error
    except Exception as error:
        mark = error.problem_mark if isinstance(error, yaml.MarkedYAMLError) else None
        place = (mark.line + 1, mark.column + 1) if mark is not None else (0, 0)
        # libyaml places what is missing at the end behind the last line.
        lines = text.count("\n" if isinstance(text, str) else b"\n") + 1  # type: ignore[arg-type]
        place = place if place[0] <= lines else (lines, 1)
        raise InvalidYAML(f"is not valid YAML: {yaml_reason(error)}", *place) from error


def yaml_reason(error: Exception) -> str:
    """Return the text of a YAML error, or its type, on one short line that can be encoded as UTF-8."""

    text = str(error)
    if isinstance(error, yaml.MarkedYAMLError) and error.problem and error.problem_mark:
        mark = error.problem_mark
        text = f"{error.problem} (line {mark.line + 1}, column {mark.column + 1})"
    text = " ".join((text or type(error).__name__).split())
    if len(text) > MAX_REASON_LENGTH:
        text = f"{text[: MAX_REASON_LENGTH // 2]} … {text[-MAX_REASON_LENGTH // 2 :]}"
    return text.encode("utf-8", "backslashreplace").decode()


def open_file(path: Path, *, follow_links: bool = True) -> BinaryIO:
    """Open a regular file for reading. Raise OSError, also for any other kind of file."""
    _check_regular_file(os.stat(path, follow_symlinks=follow_links))
    # Another file may have replaced it since; O_NONBLOCK opens a FIFO without waiting for a writer.
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
    file = os.fdopen(os.open(path, flags if follow_links else flags | os.O_NOFOLLOW), "rb")
    try:
        _check_regular_file(os.fstat(file.fileno()))
    except OSError:
        file.close()
        raise
    return file


def read_file(path: Path, limit: int) -> bytes:
    """Read at most `limit` + 1 bytes of a regular file, so that the caller detects a longer file.

    Raise OSError, also for any other kind of file.
    """
    with open_file(path) as file:
        return file.read(limit + 1)


def _check_regular_file(status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "not a regular file")


async def read_at_most(pieces: AsyncIterable[bytes], limit: int) -> bytes:
    """Return the joined pieces; of longer content, return the first `limit` + 1 bytes."""
    content = bytearray()
    async for piece in pieces:
        content += piece
        if len(content) > limit:
            break
    return bytes(content[: limit + 1])


def in_daemon_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> "Future[T]":
    """Call the function in a new thread, which does not keep the process alive; return a future.

    The call cannot be cancelled, so several callers may wait for it, each by `asyncio.wrap_future`.
    """

    def run(result: "Future[T]") -> None:
        try:
            result.set_result(function(*args, **kwargs))
        except Exception as error:
            result.set_exception(error)

    return start_daemon_thread(run)


def start_daemon_thread(
    run: "Callable[Concatenate[Future[T], P], None]", *args: P.args, **kwargs: P.kwargs
) -> "Future[T]":
    """Call `run` in a new thread as `in_daemon_thread` does; `run` must complete the future that it gets."""
    result: Future[T] = Future()
    result.set_running_or_notify_cancel()  # no caller that gives up cancels it for the others
    threading.Thread(target=run, args=(result, *args), kwargs=kwargs, daemon=True).start()
    return result


async def wait_until_done(call: "Future[Any]", *, timeout: float) -> bool:
    """Wait until the call has ended; return False if it has not ended within `timeout` seconds."""
    if timeout <= 0:  # a call that hangs would keep every waiter
        return call.done()
    waiter = asyncio.wrap_future(call)
    try:
        await asyncio.wait([waiter], timeout=timeout)
    finally:
        waiter.cancel()
    return call.done()


class SharedCalls:
    """Calls that may hang, each on its own thread, one at a time for each key. Thread-safe, for any loop."""

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self._lock = threading.Lock()
        self._running: dict[Hashable, tuple[float, Future[Any]]] = {}
        """The running calls and when they began, by key."""

    async def call(self, key: Hashable, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return the function's result, or that of the running call of this key.

        Raise TimeoutError `limit` seconds after the call began, and at once for later callers.
        """

        def run() -> T:
            try:
                return function(*args, **kwargs)
            finally:
                with self._lock:
                    del self._running[key]

        with self._lock:
            if key not in self._running:
                self._running[key] = clock.monotonic(), in_daemon_thread(run)
            began_at, call = self._running[key]
        remaining = max(began_at + self.limit - clock.monotonic(), 0)
        if not await wait_until_done(call, timeout=remaining):
            raise TimeoutError
        result: T = call.result()
        return result


MAX_YAML_VALUES = 100_000
"""Maximum number of values in one text, counting each copy that a merge (`<<`) makes."""
MAX_NUMBER_LENGTH = 1024
"""Maximum characters of a number.

Python formats each whole number that fits. PyYAML builds one to base 60 (`1:30:00`) in quadratic time.
"""
_NUMBER_TAGS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
_LOADER_BASES: tuple[Any, ...] = (Composer, yaml.CSafeLoader) if yaml.__with_libyaml__ else (yaml.SafeLoader,)


class BoundedLoader(*_LOADER_BASES):  # type: ignore[misc]
    """Loader of safe YAML with bounded depth and size. An error in a value has the value's line.

    libyaml splits the text into events and Python composes the nodes: libyaml's own composer recurses on the
    C stack, which a deeply nested text would overflow.
    """

    accepts_aliases = True

    def __init__(self, stream: str | bytes) -> None:
        super().__init__()
        _LOADER_BASES[-1].__init__(self, stream)
        self._level, self._left = 0, MAX_YAML_VALUES

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Read one YAML node. Raise YAMLError if it is nested too deeply, or if there are too many nodes."""
        if not self.accepts_aliases and self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("aliases are not accepted")
        self._level += 1
        self._count_nodes(1)
        if self._level > MAX_LEVELS:
            raise yaml.YAMLError(TOO_DEEP_REASON)
        node = super().compose_node(parent, index)
        self._level -= 1
        return node

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        """Convert one YAML node to a Python value.

        Raise YAMLError for a value that Python cannot represent, and for a number that is too long.
        """
        try:
            if node.tag in _NUMBER_TAGS and len(self.construct_scalar(node)) > MAX_NUMBER_LENGTH:
                raise yaml.constructor.ConstructorError(None, None, "a number is too long", node.start_mark)
            return super().construct_object(node, deep)
        except (yaml.YAMLError, RecursionError):
            raise
        except Exception as error:
            reason = f"not a value of {str(node.tag).rpartition(':')[2]}: {error}"
            raise yaml.constructor.ConstructorError(None, None, reason, node.start_mark) from error

    def flatten_mapping(self, node: Any) -> None:
        """Apply the merges (`<<`) of a mapping. Raise YAMLError if they copy too many values."""
        for merged in _merged_mappings(node):
            self.flatten_mapping(merged)
            self._count_nodes(2 * len(merged.value))
        super().flatten_mapping(node)

    def _count_nodes(self, nodes: int) -> None:
        self._left -= nodes
        if self._left < 0:
            raise yaml.YAMLError(f"it has more than {MAX_YAML_VALUES} values, those of merges included")


class PlainLoader(BoundedLoader):
    """Loader of bounded YAML without aliases: a few hundred bytes of aliases can expand to gigabytes."""

    accepts_aliases = False


def _merged_mappings(node: Any) -> list[Any]:
    """Return the mappings that `<<` merges into this mapping."""
    named = [value for key, value in node.value if key.tag == "tag:yaml.org,2002:merge"]
    parts = [part for value in named for part in (value.value if value.id == "sequence" else [value])]
    return [part for part in parts if getattr(part, "id", "") == "mapping"]
