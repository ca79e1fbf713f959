"""YAML on which PyYAML raises unusual errors, or that expands to much more than its length."""

from hypothesis import strategies as st

HOSTILE_SCALARS = (
    "2026-13-45",
    "0000-00-00",
    "2026-01-01T99:99:99Z",
    "2026-01-01T00:00:00+99:99",
    "0x_",
    "0b_",
    "0x" + "f" * 6000,
    "0x" + "f" * 1000,
    "1:" * 3000 + "1",
    "9" * 5000,
    "1e99999",
    ".nan",
    "99:99:99:99.9",
    '"\\ud800"',
    '"\\UFFFFFFFF"',
    "!!int x",
    "!!int ''",
    "!!bool maybe",
    "!!float ''",
    "!!float .",
    "!!timestamp never",
    "!!timestamp ''",
    "!!binary '%%%'",
    "!!binary \u00e9",
    "!!null x",
    "!!map x",
    "!!seq x",
    "!!set [a]",
    "!!omap {a: b}",
    "!!pairs x",
    "!!python/name:os.system",
    "!unknown x",
    "? [a]\n: b",
    "<<: x",
    "<<: [x]",
    "=",
    "!!value =",
    "*nowhere",
    "\x85",
    "\ufeff",
)
"""Values that Python cannot represent, tags that do not fit, keys that are not hashable."""

_TAGS = ("int", "bool", "float", "timestamp", "binary", "null", "map", "seq", "set", "omap", "pairs", "merge")
_TAGGED = st.builds(
    "!!{} {}".format, st.sampled_from(_TAGS), st.text("0123456789abxyz_-:.+%'\"{}[] \\", max_size=12)
)
_VALUES = st.sampled_from(HOSTILE_SCALARS) | _TAGGED | st.text(max_size=20)
_KEYS = st.sampled_from(
    (
        "name",
        "backend",
        "parameters",
        "threads",
        "options",
        "rope_freq_base",
        "stopwords",
        "template",
        "<<",
        "x",
    )
)


def documents() -> st.SearchStrategy[bytes]:
    """Return a strategy for whole files: usable beginnings with hostile lines, lists of these, and noise."""
    lines = st.lists(st.builds("{}: {}".format, _KEYS, _VALUES), max_size=5).map("\n".join)
    begun = st.sampled_from(("", "name: x\nbackend: y\nparameters: {model: m}\n"))
    mappings = st.builds("{}{}\n".format, begun, lines)
    items = st.lists(st.builds("- name: {}\n  uri: {}".format, _VALUES, _VALUES), max_size=4).map("\n".join)
    return (mappings | items).map(lambda text: text.encode("utf-8", "surrogatepass")) | st.binary(
        max_size=200
    )
