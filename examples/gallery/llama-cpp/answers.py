"""What llama.cpp says while it answers, as pieces of the contract (`Reply`). Pure.

Every piece counts the tokens so far; the last one has no text and the final figures. What `Reply` has no
field for travels as trailing metadata: tokens of the prompt that were remembered, why the answer ended, and
the stop word that it ended with, as JSON.
"""

import json
import re
import secrets
from collections.abc import Iterator
from typing import Any

from localai_backend import pb
from questions import Question

CACHED = "localai-cached-tokens"
FINISH = "localai-finish-reason"
STOP = "localai-stop-word"


class Answer:
    """One answer. Its text is what the model says, or calls of tools."""

    def __init__(self, asked: Question) -> None:
        self._asked = asked
        self._calls = Calls(asked.named) if asked.named or asked.calls else None
        self._finish = self._stop = ""
        self._cached: int | None = None
        self._tokens = 0

    def piece(self, chunk: dict[str, Any]) -> pb.Reply | None:
        """What a client should see of this chunk."""
        if "prompt_progress" in chunk:
            return None
        reply = pb.Reply()
        self._count(reply, chunk)
        self._stop = chunk.get("__verbose", {}).get("stopping_word") or self._stop
        for choice in chunk["choices"]:
            self._finish = choice.get("finish_reason") or self._finish
            self._say(reply, choice)
            if logprobs := choice.get("logprobs"):
                reply.logprobs = json.dumps(
                    {"content": [self._cut(one) for one in logprobs["content"]]}
                ).encode()
        said = reply.message or reply.chat_deltas or reply.logprobs or "usage" in chunk
        return reply if said else None

    def trailers(self) -> dict[str, str]:
        """The trailing metadata."""
        finish = "tool_calls" if self._calls and (self._finish == "stop" or self.is_over) else self._finish
        stop = json.dumps(self._stop) if self._stop and finish == "stop" else None
        told = {CACHED: None if self._cached is None else str(self._cached), FINISH: finish, STOP: stop}
        return {name: value for name, value in told.items() if value}

    @property
    def is_over(self) -> bool:
        """Whether the model has nothing more to say although it goes on."""
        return self._calls is not None and self._calls.is_over

    def _count(self, reply: pb.Reply, chunk: dict[str, Any]) -> None:
        if usage := chunk.get("usage"):
            reply.prompt_tokens = usage["prompt_tokens"]
            self._tokens = usage["completion_tokens"]
            self._cached = usage["prompt_tokens_details"]["cached_tokens"]
        if timings := chunk.get("timings"):
            reply.prompt_tokens = timings["cache_n"] + timings["prompt_n"]
            self._tokens = timings["predicted_n"]
            self._cached = timings["cache_n"] if self._cached is None else self._cached
            reply.timing_prompt_processing = timings["prompt_ms"]
            reply.timing_token_generation = timings["predicted_ms"]
        reply.tokens = self._tokens

    def _say(self, reply: pb.Reply, choice: dict[str, Any]) -> None:
        delta = choice.get("delta", {})
        text = (delta.get("content") if self._asked.chat else choice["text"]) or ""
        if self._calls:
            if calls := list(self._calls.read(text)):
                reply.chat_deltas.add().tool_calls.extend(calls)
            return
        reply.message = text.encode()
        if not self._asked.chat:
            return
        told = pb.ChatDelta(content=text, reasoning_content=delta.get("reasoning_content") or "")
        for call in delta.get("tool_calls") or ():
            function = call.get("function", {})
            told.tool_calls.add(
                index=call.get("index", 0),
                id=call.get("id") or "",
                name=function.get("name") or "",
                arguments=function.get("arguments") or "",
            )
        if told.ByteSize():
            reply.chat_deltas.append(told)

    def _cut(self, token: dict[str, Any]) -> dict[str, Any]:
        return {**token, "top_logprobs": token["top_logprobs"][: self._asked.top_logprobs]}


_OPENING = re.compile(r'[\[}, ]*\{"name": ("(?:[^"\\]|\\.)*"), "arguments": ')


class Calls:
    """Takes apart the text of an answer that is calls: `[{"name": …, "arguments": {…}}, …]`.

    Of a named tool it is the arguments alone. The first piece of a call names it. The first call is told
    while it is made, each later one whole, and one that repeats another is not told and ends the answer.
    """

    def __init__(self, named: str) -> None:
        self.is_over = False
        self._named = named
        self._rest = ""
        self._index = -1
        self._depth = 0
        self._within = self._in_text = self._escaped = False
        self._made: list[tuple[str, str]] = []
        """Name and arguments of the calls so far."""

    def read(self, text: str) -> Iterator[pb.ToolCallDelta]:
        """The pieces of calls in the next piece of text."""
        self._rest += text
        while self._rest and not self.is_over:
            if not self._within:
                if not self._begins():
                    return
                if self._index == 0:
                    yield self._head()
            end = self._end()
            name, arguments = self._made[-1]
            self._made[-1] = name, arguments + self._rest[:end]
            if self._index == 0 and end:
                yield pb.ToolCallDelta(index=0, arguments=self._rest[:end])
            self._rest = self._rest[end:]
            if self._within:
                return
            self.is_over = self._made[-1] in self._made[:-1]
            if self._index and not self.is_over:
                head = self._head()
                head.arguments = self._made[-1][1]
                yield head

    def _begins(self) -> bool:
        """Whether the rest begins with a call; takes everything before its arguments off."""
        opening = _OPENING.match(self._rest)
        if not (opening or (self._named and self._index < 0)):
            return False
        self._within, self._index = True, self._index + 1
        self._made.append((json.loads(opening[1]) if opening else self._named, ""))
        self._rest = self._rest[opening.end() :] if opening else self._rest
        return True

    def _head(self) -> pb.ToolCallDelta:
        return pb.ToolCallDelta(index=self._index, id=f"call_{secrets.token_hex(12)}", name=self._made[-1][0])

    def _end(self) -> int:
        """How much of the rest belongs to the arguments of this call; they are an object."""
        for place, sign in enumerate(self._rest):
            if self._in_text:
                self._in_text = self._escaped or sign != '"'
                self._escaped = sign == "\\" and not self._escaped
            elif sign == '"':
                self._in_text = True
            elif sign in "{[":
                self._depth += 1
            elif sign in "}]":
                self._depth -= 1
                if not self._depth:
                    self._within = False
                    return place + 1
        return len(self._rest)
