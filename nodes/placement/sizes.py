"""Format the sizes that appear in the reasons of placement. Pure."""

from collections.abc import Iterable, Sequence

from localai_cluster.kit.quantities import format_bytes, format_gib, gib_rounded_up
from nodes.placement.memory import UNKNOWN_PAYLOAD

QUOTA_HINT = "remove models there that are not used, or raise the quota"
STATED_NEED = "stated"
"""Source of a need that the definition states; also the name of its only term."""


def describe_disk_need(files: int, needed: int) -> str:
    """Format the needed disk space with its purpose; `files` bytes of it are for the model's files."""
    if files <= 0:
        return gib_rounded_up(needed) + (
            " assumed for files of unknown size" if needed == UNKNOWN_PAYLOAD else ""
        )
    size = format_bytes(files)
    return f"{size} of files and {gib_rounded_up(needed - files)} to spare" if needed > files else size


def describe_disk(available: int, total: int, promised: int) -> str:
    """Format the available bytes of a disk, and how many of them loads of other models will take."""
    text, taken = f"{format_gib(available)} of {format_gib(total)} free", min(promised, available)
    return f"{text}, of which other loads will take {format_bytes(taken)}" if taken else text


def describe_quota(used: int, quota: int, missing: int) -> str:
    """Format the figures of a disk quota that `missing` bytes would exceed."""
    return (
        f"{format_gib(used)} of {format_gib(quota)} of the quota for models are used,"
        f" {format_bytes(missing)} more are needed"
    )


def format_terms(terms: Iterable[tuple[str, int]]) -> str:
    """Format the terms of a need in GiB; omit terms that round to 0.0."""
    sizes = ((name, f"{size / 2**30:.1f}") for name, size in terms)
    return ", ".join(f"{name} {size}" for name, size in sizes if size != "0.0")


def describe_need(amount: str, terms: Sequence[tuple[str, int]], joint: str) -> str:
    """Format a need: `amount`, then `joint` and the terms. Without terms a note says that it is stated."""
    if [name for name, _ in terms] == [STATED_NEED]:
        return f"{amount} as its definition states"
    listed = format_terms(terms)
    return f"{amount}{joint}{listed}" if listed else amount
