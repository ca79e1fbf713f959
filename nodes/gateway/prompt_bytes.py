"""The bytes of a prompt that its hash chain covers (R3.3, R3.6). Pure."""

from nodes.gateway.generation import Conversation, Prompt
from nodes.gateway.prompt_chains import LONGEST


def of(prompt: Prompt) -> bytes:
    """Return the beginning of the engine's prompt text.

    If the engine renders the messages, it is the role and content of each message. It is empty for token ids,
    because only the engine can decode them.
    """
    if isinstance(prompt, Conversation):
        return _message_bytes(prompt) if prompt.rendered is None else _text(prompt.rendered)
    return _text(prompt) if isinstance(prompt, str) else b""


def _text(prompt: str) -> bytes:
    return prompt[:LONGEST].encode()[:LONGEST]


def _message_bytes(conversation: Conversation) -> bytes:
    pieces, size = [], 0
    for message in conversation.messages:
        pieces.append(f"{message.role}\n{message.content[:LONGEST]}\n".encode())
        size += len(pieces[-1])
        if size >= LONGEST:
            break
    return b"".join(pieces)[:LONGEST]
