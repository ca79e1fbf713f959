"""Prompts rendered by the Jinja template of a model's definition. Without one the engine uses its own.

Templates run in separate processes with CPU and memory limits of the kernel (`template_process`). A web
process keeps up to `MAX_PROCESSES` of them, each started when first needed. A terminated process is replaced
with the next prompt.
"""

import asyncio
import atexit
import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any

import orjson

from localai_cluster.kit import clock
from localai_cluster.kit.errors import ClusterError, InvalidInput
from localai_cluster.kit.processes import MARK_VARIABLE
from nodes.gateway import template_process
from nodes.gateway.generation import Conversation, ConversationMessage
from nodes.gateway.template_process import (
    MAX_PROMPT_BYTES,
    PROMPT_RENDERED,
    PROMPT_TOO_LONG,
    REPLY_HEADER,
    REQUEST_HEADER,
    TEMPLATE_REFUSED,
)

CPU_LIMIT_SECONDS = 5.0
"""Maximum CPU seconds for rendering one prompt."""
MAX_WAIT_SECONDS = 30.0
"""Seconds after which a process that does not reply is killed. It may be stopped, or the machine is busy."""
MEMORY_LIMIT_BYTES = 768 * 1024 * 1024
"""Maximum address space of a process in bytes. Python itself needs about 40 MB."""
MAX_PROCESSES = 4
"""Maximum number of processes that render templates."""
_PIECE_BYTES = 64 * 1024
_ENVIRONMENT_VARIABLES = ("PYTHONPATH", "LD_LIBRARY_PATH", MARK_VARIABLE)
"""Environment variables that a process gets. Secrets are not among them.

Python needs them to start, and the process reaper to identify its children.
"""


class TemplateUnusable(ClusterError):
    """The chat template of the model's definition cannot be used."""

    code = "template_unusable"


class _ProcessEnded(Exception):
    """The process ended before it replied."""


class _ProcessSilent(Exception):
    """The process did not reply in time."""


def has_tools(source: str) -> bool:
    """Return True if the chat template uses the tools of a request."""
    return "tools" in source


async def render(source: str, conversation: Conversation) -> str:
    """Return the prompt that the chat template renders for a conversation.

    Raise InvalidInput if the template refuses the messages or the prompt is too long, TemplateUnusable for
    any other failure.
    """
    return await asyncio.get_running_loop().run_in_executor(
        _thread_pool(), _render_in_thread, source, conversation
    )


@lru_cache(maxsize=1)
def _thread_pool() -> ThreadPoolExecutor:
    """Return the executor whose threads wait for processes."""
    return ThreadPoolExecutor(MAX_PROCESSES, thread_name_prefix="templates")


def _render_in_thread(source: str, conversation: Conversation) -> str:
    values = {
        "messages": [_template_message(message) for message in conversation.messages],
        "tools": orjson.Fragment(conversation.tools) if conversation.tools else None,
        "add_generation_prompt": True,
        "bos_token": "",
        "eos_token": "",
    }
    try:
        request = orjson.dumps(
            {"source": source, "values": values, "seconds": CPU_LIMIT_SECONDS, "now": clock.now()}
        )
        result, text = _send_request(request)
    except (_ProcessEnded, _ProcessSilent, orjson.JSONEncodeError) as error:
        raise TemplateUnusable(f"the chat template of the model's definition fails: {error}") from error
    if result == PROMPT_TOO_LONG:
        raise InvalidInput("the model's template makes too much of it", field="messages")
    if result == TEMPLATE_REFUSED:
        raise InvalidInput(text, field="messages")
    if result != PROMPT_RENDERED:
        raise TemplateUnusable(f"the chat template of the model's definition fails: {text}")
    return text


def _template_message(utterance: ConversationMessage) -> Mapping[str, Any]:
    message: dict[str, Any] = {"role": utterance.role, "content": utterance.content}
    if utterance.name:
        message["name"] = utterance.name
    if utterance.reasoning:
        message["reasoning_content"] = utterance.reasoning
    if utterance.tool_call_id:
        message["tool_call_id"] = utterance.tool_call_id
    if utterance.tool_calls:
        message["tool_calls"] = orjson.Fragment(utterance.tool_calls)
    return message


_idle_processes: "list[_TemplateProcess]" = []
"""Processes without a request; appending and popping are atomic."""


@atexit.register
def _end_idle_processes() -> None:
    """End the idle processes when the web process exits. Busy processes end when their input closes."""
    while _idle_processes:
        _idle_processes.pop().end()


def _send_request(request: bytes) -> tuple[int, str]:
    """Send the request to an idle process. Start a process if none is idle or the idle process has ended."""
    try:
        process = _idle_processes.pop()
    except IndexError:
        return _run_in_process(_TemplateProcess(), request)
    try:
        return _run_in_process(process, request)
    except _ProcessEnded:
        return _run_in_process(_TemplateProcess(), request)


def _run_in_process(process: "_TemplateProcess", request: bytes) -> tuple[int, str]:
    """Return the result code and the text. A process that can be used again becomes idle."""
    try:
        is_last, result, text = process.exchange(request)
    except BaseException as error:
        if process.end() == -signal.SIGPROF and isinstance(error, _ProcessEnded):
            return PROMPT_TOO_LONG, ""  # its timer ended it
        raise
    if is_last:
        process.end()
    else:
        _idle_processes.append(process)
    return result, text.decode()


class _TemplateProcess:
    """A process that renders templates, used by one thread at a time."""

    def __init__(self) -> None:
        self._child = subprocess.Popen(
            # -P: the modules beside the script must not stand for packages of the same name.
            [sys.executable, "-P", str(template_process.__file__), str(MEMORY_LIMIT_BYTES)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={name: os.environ[name] for name in _ENVIRONMENT_VARIABLES if name in os.environ},
            start_new_session=True,
            bufsize=0,
        )
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._input, self._output = self._child.stdin.fileno(), self._child.stdout.fileno()
        os.set_blocking(self._input, False)

    def exchange(self, request: bytes) -> tuple[bool, int, bytes]:
        """Send a request and return the reply. Raise _ProcessEnded or _ProcessSilent without a reply."""
        deadline = clock.monotonic() + MAX_WAIT_SECONDS
        remaining = memoryview(REQUEST_HEADER.pack(len(request)) + request)
        while remaining:
            _wait_until_ready(self._input, select.POLLOUT, deadline)
            try:
                remaining = remaining[os.write(self._input, remaining[:_PIECE_BYTES]) :]
            except BrokenPipeError as error:
                raise _ProcessEnded("its process has ended") from error
        is_last, result, length = REPLY_HEADER.unpack(self._read(REPLY_HEADER.size, deadline))
        if length > 4 * MAX_PROMPT_BYTES:
            raise _ProcessSilent("its process answers too much")
        return is_last, result, self._read(length, deadline)

    def _read(self, length: int, deadline: float) -> bytes:
        pieces, remaining = [], length
        while remaining:
            _wait_until_ready(self._output, select.POLLIN, deadline)
            piece = os.read(self._output, min(remaining, 16 * _PIECE_BYTES))
            if not piece:
                raise _ProcessEnded("its process has ended")
            pieces.append(piece)
            remaining -= len(piece)
        return b"".join(pieces)

    def end(self) -> int:
        """Kill the process. Return its exit code, or the negative number of a signal."""
        for pipe in (self._child.stdin, self._child.stdout):
            if pipe is not None:
                pipe.close()
        self._child.kill()
        return self._child.wait()


def _wait_until_ready(file: int, event: int, deadline: float) -> None:
    """Wait until the pipe can be read or written; raise _ProcessSilent after the deadline."""
    poll = select.poll()
    poll.register(file, event)
    if not poll.poll(max(0.0, deadline - clock.monotonic()) * 1000):
        raise _ProcessSilent(f"its process did not answer within {MAX_WAIT_SECONDS:g} s")
