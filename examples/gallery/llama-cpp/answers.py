"""What llama.cpp says while it answers, as pieces of the contract (`Reply`). Pure.

Every piece counts the tokens so far; the last one has no text and the final figures. What `Reply` has no
field for travels as trailing metadata: tokens of the prompt that were remembered, and why the answer ended.
"""

import json
import secrets
from typing import Any

from localai_backend import pb
from questions import Question

CACHED = "localai-cached-tokens"
FINISH = "localai-finish-reason"


class Answer:
    """One answer. `tool` is the function whose arguments the text is, `choice` how the model came to it."""

    def __init__(self, asked: Question, *, tool: str = "", choice: "Answer | None" = None) -> None:
        self._asked, self._tool = asked, tool
        self._begun = False
        self._finish = ""
        self._spent = choice.tokens if choice else 0
        self.cached = choice.cached if choice else None
        self.tokens = self._spent
        self.text = ""

    def piece(self, chunk: dict[str, Any]) -> pb.Reply | None:
        """What a client should see of this chunk."""
        if "prompt_progress" in chunk:
            return None
        reply = pb.Reply()
        self._count(reply, chunk)
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
        finish = "tool_calls" if self._tool and self._finish == "stop" else self._finish
        told = {CACHED: None if self.cached is None else str(self.cached), FINISH: finish}
        return {name: value for name, value in told.items() if value}

    def _count(self, reply: pb.Reply, chunk: dict[str, Any]) -> None:
        if usage := chunk.get("usage"):
            reply.prompt_tokens = usage["prompt_tokens"]
            self.tokens = self._spent + usage["completion_tokens"]
            if self.cached is None:
                self.cached = usage["prompt_tokens_details"]["cached_tokens"]
        if timings := chunk.get("timings"):
            reply.prompt_tokens = timings["cache_n"] + timings["prompt_n"]
            self.tokens = self._spent + timings["predicted_n"]
            reply.timing_prompt_processing = timings["prompt_ms"]
            reply.timing_token_generation = timings["predicted_ms"]
        reply.tokens = self.tokens

    def _say(self, reply: pb.Reply, choice: dict[str, Any]) -> None:
        delta = choice.get("delta", {})
        text = (delta.get("content") if self._asked.chat else choice["text"]) or ""
        self.text += text
        if self._tool:
            if text:
                reply.chat_deltas.add().tool_calls.append(self._argument(text))
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

    def _argument(self, text: str) -> pb.ToolCallDelta:
        """The first piece of a call names it."""
        call = pb.ToolCallDelta(arguments=text)
        if not self._begun:
            self._begun = True
            call.id, call.name = f"call_{secrets.token_hex(12)}", self._tool
        return call

    def _cut(self, token: dict[str, Any]) -> dict[str, Any]:
        return {**token, "top_logprobs": token["top_logprobs"][: self._asked.top_logprobs]}
