"""The chain of a prompt: one hash per block, over the block and everything before it. Pure.

Two prompts for one model have equal hashes at a position if and only if they are equal up to there. Every
process computes equal hashes for equal prompts: processes exchange them (R3.4).
"""

from xxhash import xxh64_intdigest

Chain = tuple[int, ...]

WINDOW, DEPTH = 256, 64
"""Bytes of a block, and the number of blocks that count (C40)."""
LONGEST = WINDOW * DEPTH
"""Bytes of a prompt that count."""


def chain(model: str, prompt: bytes, window: int = WINDOW, depth: int = DEPTH) -> Chain:
    """Return the hashes of the prompt's blocks (R3.3, R3.4). The last block may be short."""
    hashes, last = [], xxh64_intdigest(model.encode())
    for start in range(0, min(len(prompt), window * depth), window):
        last = xxh64_intdigest(last.to_bytes(8, "little") + prompt[start : start + window])
        hashes.append(last)
    return tuple(hashes)
