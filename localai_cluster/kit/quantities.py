"""Numbers in sentences: counts and sizes; needs are rounded up, what is free is rounded down."""

_UNITS = ((20, "MiB"), (10, "KiB"), (0, "B"))


def human_bytes(count: int) -> str:
    """Format a size like the reference (`contract/nats.md` §4.3): `512 B`, `1.2 GiB`."""
    value, unit = float(count), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB", "PiB"):
        if value < 1024 or unit == "PiB":
            break
        value /= 1024
    return f"{count} B" if unit == "B" else f"{value:.1f} {unit}"


def counted(number: int, singular: str, plural: str = "") -> str:
    """Return the number with the noun: `1 node`, `2 nodes`."""
    return f"{number} {singular if number == 1 else plural or singular + 's'}"


def format_gib(amount: int) -> str:
    """Format bytes as GiB, rounded down: free memory never looks as large as a need."""
    return f"{max(amount, 0) * 10 // 2**30 / 10:.1f} GiB"


def gib_rounded_up(amount: int) -> str:
    """Format bytes as GiB, rounded up: a need never looks as small as what is free."""
    return f"{-(-amount * 10 // 2**30) / 10:.1f} GiB"


def format_bytes(size: int) -> str:
    """Format a size rounded up: in GiB or, below one GiB, in the largest unit that it reaches."""
    if size >= 2**30:
        return gib_rounded_up(size)
    return next((f"{-(-size // 2**n)} {u}" for n, u in _UNITS if size >= 2**n), "0 B")
