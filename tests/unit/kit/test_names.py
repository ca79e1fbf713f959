"""Names and labels from strangers: which characters they may have, and when two look alike."""

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localai_cluster.kit import errors, names

VISIBLE = st.characters(
    codec="utf-8",
    exclude_categories=("C", "Z", "Mn"),
    exclude_characters="\u115f\u1160\u2800\u3164\uffa0\U0001d159",
)
UNSEEN = {
    "control": "\x00\x07\n\x1b\x7f\x85",
    "bidi": "\u200e\u200f\u202a\u202e\u2066\u2069\u061c",
    "zero width": "\u200b\u200c\u200d\u2060\ufeff\u00ad",
    "line separators": "\u2028\u2029",
    "blank letters": "\u115f\u1160\u2800\u3164\uffa0\U0001d159",
    "unseen marks": "\u034f\u17b4\u180b\ufe0f\U000e0100",
    "tags": "\U000e0041",
    "surrogates": "\ud800\udfff",
    "private": "\ue000\U000f0000",
    "unassigned": "\u0378\U000e0fff",
}
PAIRS = [
    ("GPU-1", "gpu-1"),
    ("straße", "STRASSE"),
    ("\uff47\uff50\uff55", "gpu"),
    ("ﬁsh", "fish"),
    ("é", "e\u0301"),
    ("\u212b", "å"),
    ("a\u00a0b", "a b"),
    ("ς", "Σ"),
    ("①", "1"),
    ("gpu-\u0430", "gpu-a"),
    ("\u0455\u0435r\u0475er", "server"),
    ("\u0420\u0410\u0423", "pay"),
    ("gpu\u20131", "gpu-1"),
    ("\u03bfne", "one"),
    ("caf\u0435\u0301", "caf\u00e9"),
    ("\u0451", "\u00eb"),
    ("\u0153uvre", "oeuvre"),
]


@pytest.mark.parametrize("kind", UNSEEN)
@given(before=st.text(VISIBLE, max_size=5), after=st.text(VISIBLE, max_size=5), data=st.data())
def test_what_cannot_be_seen_is_refused_wherever_it_stands(
    kind: str, before: str, after: str, data: st.DataObject
) -> None:
    """The refusal names field and character."""
    character = data.draw(st.sampled_from(UNSEEN[kind]))
    with pytest.raises(errors.InvalidInput) as refused:
        names.check_name(f"x{before}{character}{after}x")
    assert refused.value.field == "name"
    assert f"U+{ord(character):04X}" in refused.value.message


@given(st.characters(categories=("Cc", "Cf", "Cs", "Co", "Zl", "Zp")))
def test_no_control_or_format_character_gets_through(character: str) -> None:
    assert names.find_unprintable(f"a{character}b") == f"U+{ord(character):04X}"


@pytest.mark.rule("R1.29")
@given(st.text(VISIBLE, min_size=1, max_size=40))
def test_what_can_be_seen_is_a_name(name: str) -> None:
    """Also `/ : @ #`, accents and other scripts; nothing is changed on the way."""
    names.check_name(name)
    assert names.to_single_line(name) == name


@pytest.mark.rule("R1.29")
@pytest.mark.parametrize(
    "name",
    ["", " ", "\t", " a", "a ", "\u00a0a", "x" * 256, "\ufdfa" * 20],
    ids=["empty", "blank", "tab", "leading", "trailing", "no-break", "long", "long once it is normalised"],
)
def test_no_name(name: str) -> None:
    with pytest.raises(errors.InvalidInput) as refused:
        names.check_name(name)
    assert refused.value.field == "name"


def test_255_characters_are_a_name() -> None:
    names.check_name("ü" * 255)
    assert len(names.key("ü" * 255)) == 255


@pytest.mark.parametrize(("one", "other"), PAIRS, ids=[one for one, _ in PAIRS])
def test_these_look_alike(one: str, other: str) -> None:
    assert names.key(one) == names.key(other)


def test_these_do_not() -> None:
    distinct = [
        "gpu-1",
        "gpu-2",
        "gpu_1",
        "gpu 1",
        "gpü-1",
        "gpu-l",
        "gpu-i",
        "gpu-0",
        "gpu-o",
        "m-1",
        "rn-1",
    ]
    distinct += ["сервер", "сервис", "服务器一", "服务器二", "gpu.1", "gpu,1", "vv", "w", "d", "cl"]
    assert len({names.key(name) for name in distinct}) == len(distinct)


@given(st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=20))
def test_ascii_is_only_folded(name: str) -> None:
    """Operators number their machines: `l` and `1`, `o` and `0`, `m` and `rn` are different names."""
    assert names.key(name) == name.lower()


@given(st.text(VISIBLE, max_size=20))
def test_every_spelling_has_the_key_of_the_name(name: str) -> None:
    """Normalising and folding a name by itself never makes it another one."""
    key = names.key(name)
    assert names.key(unicodedata.normalize("NFKC", name)) == key
    assert names.key(unicodedata.normalize("NFD", name)) == key
    assert names.key(unicodedata.normalize("NFKC", name).casefold()) == key
    assert names.key(key) == key


@given(st.text(max_size=60))
def test_a_record_is_one_line_that_can_be_seen(text: str) -> None:
    """What a person wrote as a reason is kept, but for what no one could see."""
    plain = names.to_single_line(text)
    assert names.find_unprintable(plain) == ""
    assert plain.split() == "".join(" " if names.find_unprintable(c) else c for c in text).split()
