"""Sizes in the reasons of placement: needs are rounded up, what is free is rounded down. Pure."""

from collections.abc import Iterable, Sequence

from nodes.placement.memory import UNKNOWN_PAYLOAD

QUOTA_HINT = "remove models there that are not used, or raise the quota"
STATED = "stated"
"""The source, and the only term, of a need that its definition states."""
_UNITS = ((20, "MiB"), (10, "KiB"), (0, "B"))


def format_gib(amount: int) -> str:
    """Format bytes as GiB, rounded down: free memory never looks as large as a need."""
    return f"{max(amount, 0) * 10 // 2**30 / 10:.1f} GiB"


def gib_rounded_up(amount: int) -> str:
    """Format bytes as GiB, rounded up: a need never looks as small as what is free."""
    return f"{-(-amount * 10 // 2**30) / 10:.1f} GiB"


def format_bytes(size: int) -> str:
    """Format a size rounded up: in GiB, or in the largest smaller unit of which there is one."""
    if size >= 2**30:
        return gib_rounded_up(size)
    return next((f"{-(-size // 2**n)} {u}" for n, u in _UNITS if size >= 2**n), "0 B")


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
    if [name for name, _ in terms] == [STATED]:
        return f"{amount} as its definition states"
    listed = format_terms(terms)
    return f"{amount}{joint}{listed}" if listed else amount
