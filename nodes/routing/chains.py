"""From a prompt to its chain: a hash for each of its blocks, over the block and all that came before. Pure.

Two prompts for one model have the same hash at a position exactly if they are the same up to there. Every
process makes the same numbers of the same prompt: they travel between them (R3.4).
"""

from xxhash import xxh64_intdigest

Chain = tuple[int, ...]

WINDOW, DEPTH = 256, 64
"""C40: bytes of a block, and how many blocks count."""
LONGEST = WINDOW * DEPTH
"""Bytes of a prompt that count."""


def chain(model: str, prompt: bytes, window: int = WINDOW, depth: int = DEPTH) -> Chain:
    """R3.3, R3.4: the hashes of the prompt's blocks, the last of which may be short; none of an empty one."""
    made, last = [], xxh64_intdigest(model.encode())
    for start in range(0, min(len(prompt), window * depth), window):
        last = xxh64_intdigest(last.to_bytes(8, "little") + prompt[start : start + window])
        made.append(last)
    return tuple(made)
