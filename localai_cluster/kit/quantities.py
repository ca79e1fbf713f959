"""Numbers in sentences: counts and sizes. Needs are rounded up, free memory is rounded down."""

_BYTE_UNITS = ((20, "MiB"), (10, "KiB"), (0, "B"))


def human_bytes(count: int) -> str:
    """Format a size as the reference does (`contract/nats.md` §4.3): `512 B`, `1.2 GiB`."""
    value, unit = float(count), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB", "PiB"):
        if value < 1024 or unit == "PiB":
            break
        value /= 1024
    return f"{count} B" if unit == "B" else f"{value:.1f} {unit}"


def counted(number: int, singular: str, plural: str = "") -> str:
    """Format a number with its noun: `1 node`, `2 nodes`."""
    return f"{number} {singular if number == 1 else plural or singular + 's'}"


def format_gib(amount: int) -> str:
    """Format bytes as GiB, rounded down, so that free memory never looks sufficient if it is not."""
    return f"{max(amount, 0) * 10 // 2**30 / 10:.1f} GiB"


def gib_rounded_up(amount: int) -> str:
    """Format bytes as GiB, rounded up, so that a need never looks satisfied if it is not."""
    return f"{-(-amount * 10 // 2**30) / 10:.1f} GiB"


def format_bytes(size: int) -> str:
    """Format a size rounded up: in GiB, or below one GiB in the largest unit that fits."""
    if size >= 2**30:
        return gib_rounded_up(size)
    return next((f"{-(-size // 2**n)} {u}" for n, u in _BYTE_UNITS if size >= 2**n), "0 B")
