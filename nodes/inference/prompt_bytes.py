"""The bytes of a prompt that its chain is made of (R3.3, R3.6). Pure."""

from nodes.inference.generation import Conversation, Prompt
from nodes.routing.chains import LONGEST


def of(prompt: Prompt) -> bytes:
    """The beginning of the text that the engine is given; of messages, if the engine makes a text of them,
    role and content of each. Nothing of token ids: only the engine knows their text.
    """
    if isinstance(prompt, Conversation):
        return _said(prompt) if prompt.rendered is None else _text(prompt.rendered)
    return _text(prompt) if isinstance(prompt, str) else b""


def _text(prompt: str) -> bytes:
    return prompt[:LONGEST].encode()[:LONGEST]


def _said(conversation: Conversation) -> bytes:
    made, size = [], 0
    for said in conversation.messages:
        made.append(f"{said.role}\n{said.content[:LONGEST]}\n".encode())
        size += len(made[-1])
        if size >= LONGEST:
            break
    return b"".join(made)[:LONGEST]
