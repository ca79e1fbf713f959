"""Sizes in the reasons of placement. Pure."""

from collections.abc import Iterable, Sequence

from localai_cluster.kit.quantities import format_bytes, format_gib, gib_rounded_up
from nodes.placement.memory import UNKNOWN_PAYLOAD

QUOTA_HINT = "remove models there that are not used, or raise the quota"
STATED_NEED = "stated"
"""The source, and the only term, of a need that its definition states."""


def describe_disk_need(files: int, needed: int) -> str:
    """Return the disk space that is needed and what it is for: `files` bytes of it are the model's files."""
    if files <= 0:
        return gib_rounded_up(needed) + (
            " assumed for files of unknown size" if needed == UNKNOWN_PAYLOAD else ""
        )
    size = format_bytes(files)
    return f"{size} of files and {gib_rounded_up(needed - files)} to spare" if needed > files else size


def describe_quota(used: int, quota: int, missing: int) -> str:
    """Return the figures of a disk quota that the missing bytes exceed."""
    return (
        f"{format_gib(used)} of {format_gib(quota)} of the quota for models are used,"
        f" {format_bytes(missing)} more are needed"
    )


def format_terms(terms: Iterable[tuple[str, int]]) -> str:
    """List the terms of a need in GiB, without those that are too small for it."""
    sizes = ((name, f"{size / 2**30:.1f}") for name, size in terms)
    return ", ".join(f"{name} {size}" for name, size in sizes if size != "0.0")


def describe_need(amount: str, terms: Sequence[tuple[str, int]], joint: str) -> str:
    """Return the amount of a need with its terms after `joint`, or that its definition states it."""
    if [name for name, _ in terms] == [STATED_NEED]:
        return f"{amount} as its definition states"
    listed = format_terms(terms)
    return f"{amount}{joint}{listed}" if listed else amount
