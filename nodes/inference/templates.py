"""Prompts made by the Jinja template of a model's definition; without one the engine uses the model's own.

A template runs in a process of its own, which the kernel holds to a time and a size (`template_process`). A
web process keeps up to `MOST_AT_ONCE` of them, each started when it is first needed. One that has been ended
is replaced with the next prompt.
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

from localai_cluster import clock
from localai_cluster.errors import ClusterError, InvalidInput
from localai_cluster.procs import MARK_VARIABLE
from nodes.inference import template_process
from nodes.inference.generation import Conversation, Utterance
from nodes.inference.template_process import LARGEST_PROMPT, LENGTH, PROMPT, REFUSED, REPLY, TOO_MUCH

LONGEST = 5.0
"""Seconds of processor time that one prompt may take."""
LONGEST_WAIT = 30.0
"""Seconds until a process that neither answers nor ends is killed: it is stopped, or the machine is busy."""
MEMORY = 768 * 1024 * 1024
"""Bytes of addresses of a process; about 40 MB of them are Python's."""
MOST_AT_ONCE = 4
_PIECE = 64 * 1024
_ENVIRONMENT = ("PYTHONPATH", "LD_LIBRARY_PATH", MARK_VARIABLE)
"""Variables that Python needs to start, and the reaper to know its own; the processes get no secret."""


class TemplateUnusable(ClusterError):
    """The chat template of the model's definition cannot be used."""

    code = "template_unusable"


class _Ended(Exception):
    """The process ended before it answered."""


class _Silent(Exception):
    """The process neither answered nor ended in time."""


async def prompt(source: str, conversation: Conversation) -> str:
    """Return the prompt that the template makes.

    Raises InvalidInput for what the template refuses or makes too much of, else TemplateUnusable.
    """
    return await asyncio.get_running_loop().run_in_executor(_threads(), _render, source, conversation)


@lru_cache(maxsize=1)
def _threads() -> ThreadPoolExecutor:
    """Return the threads that wait for the processes."""
    return ThreadPoolExecutor(MOST_AT_ONCE, thread_name_prefix="templates")


def _render(source: str, conversation: Conversation) -> str:
    values = {
        "messages": [_message(said) for said in conversation.messages],
        "tools": orjson.Fragment(conversation.tools) if conversation.tools else None,
        "add_generation_prompt": True,
        "bos_token": "",
        "eos_token": "",
    }
    try:
        request = orjson.dumps({"source": source, "values": values, "seconds": LONGEST})
        result, text = _exchange(request)
    except (_Ended, _Silent, orjson.JSONEncodeError) as error:
        raise TemplateUnusable(f"the chat template of the model's definition fails: {error}") from error
    if result == TOO_MUCH:
        raise InvalidInput("the model's template makes too much of it", field="messages")
    if result == REFUSED:
        raise InvalidInput(text, field="messages")
    if result != PROMPT:
        raise TemplateUnusable(f"the chat template of the model's definition fails: {text}")
    return text


def _message(said: Utterance) -> Mapping[str, Any]:
    message: dict[str, Any] = {"role": said.role, "content": said.content}
    if said.name:
        message["name"] = said.name
    if said.reasoning:
        message["reasoning_content"] = said.reasoning
    if said.tool_call_id:
        message["tool_call_id"] = said.tool_call_id
    if said.tool_calls:
        message["tool_calls"] = orjson.Fragment(said.tool_calls)
    return message


_idle: "list[_Process]" = []
"""Processes that no thread uses; appending and popping are atomic."""


@atexit.register
def _end_idle() -> None:
    """End the processes with their web process; they would end by themselves when their input closes."""
    while _idle:
        _idle.pop().end()


def _exchange(request: bytes) -> tuple[int, str]:
    """Have an idle process answer the request, a new one if there is none or if somebody has ended it."""
    try:
        process = _idle.pop()
    except IndexError:
        return _answered(_Process(), request)
    try:
        return _answered(process, request)
    except _Ended:
        return _answered(_Process(), request)


def _answered(process: "_Process", request: bytes) -> tuple[int, str]:
    """Return the process's result and text, and keep the process for later requests if it goes on."""
    try:
        ends, result, text = process.exchange(request)
    except BaseException as error:
        if process.end() == -signal.SIGPROF and isinstance(error, _Ended):
            return TOO_MUCH, ""  # its timer has ended it
        raise
    if ends:
        process.end()
    else:
        _idle.append(process)
    return result, text.decode()


class _Process:
    """One process that runs templates, used by one thread at a time."""

    def __init__(self) -> None:
        self._child = subprocess.Popen(
            # -P: the modules beside the script must not stand for packages of the same name.
            [sys.executable, "-P", str(template_process.__file__), str(MEMORY)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
            start_new_session=True,
            bufsize=0,
        )
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._input, self._output = self._child.stdin.fileno(), self._child.stdout.fileno()
        os.set_blocking(self._input, False)

    def exchange(self, request: bytes) -> tuple[bool, int, bytes]:
        """Send a request and return the reply; raise _Ended or _Silent if there is none."""
        until = clock.monotonic() + LONGEST_WAIT
        left = memoryview(LENGTH.pack(len(request)) + request)
        while left:
            _wait(self._input, select.POLLOUT, until)
            try:
                left = left[os.write(self._input, left[:_PIECE]) :]
            except BrokenPipeError as error:
                raise _Ended("its process has ended") from error
        ends, result, length = REPLY.unpack(self._read(REPLY.size, until))
        if length > 4 * LARGEST_PROMPT:
            raise _Silent("its process answers too much")
        return ends, result, self._read(length, until)

    def _read(self, length: int, until: float) -> bytes:
        pieces, left = [], length
        while left:
            _wait(self._output, select.POLLIN, until)
            piece = os.read(self._output, min(left, 16 * _PIECE))
            if not piece:
                raise _Ended("its process has ended")
            pieces.append(piece)
            left -= len(piece)
        return b"".join(pieces)

    def end(self) -> int:
        """End the process if it still runs; return its exit code, for a signal the negative number of it."""
        for pipe in (self._child.stdin, self._child.stdout):
            if pipe is not None:
                pipe.close()
        self._child.kill()
        return self._child.wait()


def _wait(file: int, event: int, until: float) -> None:
    """Wait until the pipe is ready; raise _Silent when the time is over."""
    poll = select.poll()
    poll.register(file, event)
    if not poll.poll(max(0.0, until - clock.monotonic()) * 1000):
        raise _Silent(f"its process did not answer within {LONGEST_WAIT:g} s")
