"""Chains of prompts (R3.3 to R3.6), as every process must make them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh64_intdigest

from nodes.gateway.generation import Conversation, ConversationMessage
from nodes.gateway.prefix_table import (
    BLOCK_BYTES,
    MAX_CHAIN_BLOCKS,
    MAX_PROMPT_BYTES,
    prompt_bytes,
    prompt_chain,
)


@pytest.mark.rule("R3.4", "nats-7.4", "C40")
def test_golden_values() -> None:
    """R3.4, nats-7.4: bit for bit what the reference sends."""
    assert (BLOCK_BYTES, MAX_CHAIN_BLOCKS, MAX_PROMPT_BYTES) == (256, 64, 16384)
    assert xxh64_intdigest(b"modelX") == 0xC0843F059B09D048
    assert prompt_chain("modelX", b"hello world") == (0x7D32CF95C6495399,)
    assert prompt_chain("m1", b"abc") == (0xBA3E693999A4C072,)
    assert prompt_chain("m2", b"abc") == (0xAE99FFE087BB6BDE,)
    prompt = b"system-rules-stable-prefix-that-exceeds-the-budget"
    assert prompt_chain("m", prompt, 4, 3) == (0xD21B1D90C7896421, 0x8118B678681BCB32, 0x400B11F0FBA5B1E9)
    assert prompt_chain("mock", b"hello there") == (17331527290905914158,)
    assert prompt_chain("glog", b"be brief\nhello there") == (9734356462830893203,)


@pytest.mark.rule("R3.3", "R3.4", "T-PFX-15", "T-PFX-16")
@pytest.mark.parametrize(("size", "blocks"), [(0, 0), (1, 1), (256, 1), (257, 2), (16384, 64), (16385, 64)])
def test_lengths(size: int, blocks: int) -> None:
    """R3.3: a short last block counts, and what comes after the first 16 KiB does not."""
    assert len(prompt_chain("m", b"x" * size)) == blocks
    assert len(prompt_chain("m", b"0123456789", 1, 4)) == 4


@pytest.mark.rule("R3.5", "T-PFX-12", "T-PFX-13", "T-PFX-14", "T-PFX-17")
@given(st.binary(max_size=60), st.binary(max_size=60))
def test_a_hash_stands_for_all_up_to_there(one: bytes, two: bytes) -> None:
    """R3.5: equal at a position exactly if the prompts are equal up to there; of another model never."""
    first, second = prompt_chain("m", one, 4, 8), prompt_chain("m", two, 4, 8)
    assert first == prompt_chain("m", one, 4, 8)
    for position, (left, right) in enumerate(zip(first, second, strict=False)):
        upto = min(4 * (position + 1), 32)
        assert (left == right) == (one[:upto] == two[:upto])
    assert not set(first) & set(prompt_chain("other", one, 4, 8))
    assert prompt_chain("m", one[:32] + b"x" * (32 - len(one[:32])) + two, 4, 8) == prompt_chain(
        "m", one[:32] + b"x" * (32 - len(one[:32])), 4, 8
    )


@pytest.mark.rule("R3.6", "R3.3")
def test_the_bytes_of_a_prompt() -> None:
    """R3.6: a text as it is; messages as role and content; nothing of token ids; no more than counts."""
    said = (ConversationMessage("system", "be brief"), ConversationMessage("user", "hällo"))
    assert prompt_bytes(Conversation(said)) == "system\nbe brief\nuser\nhällo\n".encode()
    assert prompt_bytes("hällo") == "hällo".encode()
    assert prompt_bytes((1, 2, 3)) == b""
    assert prompt_bytes("") == prompt_bytes(Conversation(())) == b""
    assert prompt_bytes("ä" * 20000) == ("ä" * 8192).encode()
    long = Conversation((ConversationMessage("user", "x" * 10000),) * 1000)
    assert len(prompt_bytes(long)) == MAX_PROMPT_BYTES
