"""How deep JSON is, found without parsing it."""

import json
import tracemalloc
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from localai_cluster import gallery_index, model_documents
from localai_cluster.gallery_index import GalleryUnreadable
from localai_cluster.kit import untrusted
from localai_cluster.kit.errors import InvalidInput
from localai_cluster.kit.untrusted import MAX_LEVELS
from localai_cluster.messaging import messages
from localai_cluster.messaging import messages as m
from localai_cluster.web import wire
from nodes.sources import galleries


def depth(text: bytes) -> int:
    """The slow way: a byte at a time."""
    level = deepest = 0
    inside = escaped = False
    for byte in text:
        if inside:
            if escaped:
                escaped = False
            elif byte == ord("\\"):
                escaped = True
            elif byte == ord('"'):
                inside = False
        elif byte == ord('"'):
            inside = True
        elif byte in b"[{":
            level += 1
            deepest = max(deepest, level)
        elif byte in b"]}":
            level -= 1
    return deepest


TEXTS = st.text(st.sampled_from('[]{}"\\\u00e9\n,:a'), max_size=20)
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.integers() | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=30,
)


@given(VALUES, st.integers(0, MAX_LEVELS + 5), st.booleans(), st.booleans())
def test_json_is_judged_as_by_a_slow_reader(value: Any, more: int, lists: bool, escaped: bool) -> None:
    """With any strings, at the limit and around it; and beside many brackets that are not deep."""
    for _ in range(more):
        value = [TEXT, value, [[]] * 40] if lists else {TEXT: value, "": {"[": [{}] * 40}}
    text = json.dumps(value, ensure_ascii=escaped).encode()
    assert untrusted.json_problem(text) == (untrusted.TOO_DEEP_REASON if depth(text) > MAX_LEVELS else "")


TEXT = 'a"[{\\'


@given(st.binary(max_size=300) | st.text(st.sampled_from('[]{}"\\,')).map(str.encode), st.integers(0, 200))
def test_what_passes_is_refused_by_the_parser_or_is_not_deep(rest: bytes, opened: int) -> None:
    """Bytes that are no JSON: never more than the limit gets to a parser, and nothing is raised."""
    text = b"[" * opened + rest
    if not untrusted.json_problem(text):
        assert depth(text) <= MAX_LEVELS or not _is_json(text)


def _is_json(text: bytes) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


@pytest.mark.parametrize("quotes", [b'"[",', b'"",', b'"\\"[",', b'"\\\\",'])
def test_strings_over_the_edge_of_a_piece_stay_strings(quotes: bytes) -> None:
    """Long texts are split in pieces; a string does not end with one."""
    flat = b"[" + quotes * 100_000 + b'"' + b"[" * 200_000 + b'"' + b",[]" * MAX_LEVELS + b"]"
    assert untrusted.json_problem(flat) == ""
    deep = flat[:-1] + b"," + b"[" * MAX_LEVELS + b"]" * MAX_LEVELS + b"]"
    assert untrusted.json_problem(deep) == untrusted.TOO_DEEP_REASON


def nested(levels: int, opening: str = "[", closing: str = "]") -> bytes:
    return (opening * levels + closing * levels).encode()


def test_every_reader_of_the_network_refuses_before_it_parses(monkeypatch: pytest.MonkeyPatch) -> None:
    """REST and workers' bodies, inference, messages of the bus: 64 levels pass, 65 are named as too deep."""
    fits, deep = b'{"a":' + nested(MAX_LEVELS - 1) + b"}", b'{"a":' + nested(MAX_LEVELS) + b"}"
    assert wire.parse_json(fits)
    assert wire.parse_json_object(fits)
    assert messages.decode(fits, m.ListReply) == m.ListReply()

    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("it was parsed")

    monkeypatch.setattr(json, "loads", never)
    monkeypatch.setattr(orjson, "loads", never)
    for read in (wire.parse_json, wire.parse_json_object):
        with pytest.raises(InvalidInput, match="nested more than 64 levels"):
            read(deep)
    with pytest.raises(messages.DecodeError, match="nested more than 64 levels"):
        messages.decode(deep, m.ListReply)
    with pytest.raises(messages.DecodeError, match="nested more than 64 levels"):
        messages.decode_galleries(nested(MAX_LEVELS + 1).decode())


def test_a_refusal_takes_no_more_than_a_few_copies() -> None:
    """The memory of the scan is that of the body, of any brackets and strings."""
    for unit in (b"[" * 63 + b"]" * 63 + b",", b'"[",[],', b'{"":{}},', b"[],"):
        body = b"[" + unit * (2_000_000 // len(unit)) + b"0]"
        tracemalloc.start()
        assert untrusted.json_problem(body) == untrusted.TOO_MANY_REASON
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 4 * len(body), unit


# YAML of galleries


@pytest.mark.parametrize("deep", [b"- " * 200_000 + b"x", b"[" * 500 + b"]" * 500, b"{a: " * 50_000])
def test_a_deep_index_is_refused(deep: bytes) -> None:
    """The library's own reader goes down on the stack of the process, until that is gone."""
    with pytest.raises(GalleryUnreadable, match="nested more than 64 levels"):
        gallery_index.parse(deep, m.Gallery("g", "u"))


def test_a_bomb_of_merges_is_refused_and_real_ones_are_read() -> None:
    """`<<` copies what it names: nine lines of it stand for a billion entries."""
    entry = b"- &base\n  name: one\n  tags: [a]\n- <<: *base\n  name: two\n"
    one, two = gallery_index.parse(entry, m.Gallery("g", "u"))
    assert (one.name, two.name, two.tags) == ("one", "two", ("a",))
    lines = [b"- &a0 {name: x}"]
    lines += [b"- &a%d {<<: [%s]}" % (n, b", ".join([b"*a%d" % (n - 1)] * 10)) for n in range(1, 10)]
    with pytest.raises(GalleryUnreadable, match="merges"):
        gallery_index.parse(b"\n".join(lines), m.Gallery("g", "u"))


def ladder(levels: int, last: str) -> str:
    """Return lists of ten aliases each, which stand for ten to the power of `levels` values."""
    lines = [f"    a0: &a0 {last}"]
    lines += [f"    a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, levels)]
    return "\n".join(lines)


def test_a_use_case_that_is_no_text_is_none() -> None:
    """Lists of aliases that were turned into text stopped the whole process."""
    text = f"- name: one\n  overrides:\n{ladder(40, '[x]')}\n    known_usecases: [*a39]\n"
    (entry,) = gallery_index.parse(text.encode(), m.Gallery("g", "u"))
    assert galleries.task_of(entry) == ""


def test_a_text_that_an_alias_repeats_is_kept_once() -> None:
    long = "x" * 20_000
    text = f"- name: &n {long}\n" + "- name: *n\n" * 1000
    entries = gallery_index.parse(text.encode(), m.Gallery("g", "u"))
    assert len({id(entry.name) for entry in entries}) == 1


def rungs(letter: str) -> str:
    """Return a mapping whose sections stand for two to the power of 39 sections."""
    steps = [f"&{letter}0 {{k: 1}}"]
    steps += [f"&{letter}{n} {{a: *{letter}{n - 1}, b: *{letter}{n - 1}}}" for n in range(1, 40)]
    return f"{{x: [{', '.join(steps)}], y: *{letter}39}}"


@pytest.mark.parametrize(
    ("config", "overrides"),
    [(rungs("c"), rungs("o")), ("&c {k: *c}", "&o {k: *o}")],
    ids=["ladder", "cycle"],
)
async def test_sections_that_aliases_multiply_are_refused(config: str, overrides: str) -> None:
    text = f"- name: one\n  config_file: {config}\n  overrides: {overrides}\n"
    (entry,) = gallery_index.parse(text.encode(), m.Gallery("g", "u"))
    with pytest.raises(GalleryUnreadable, match="too many values, or too deep ones"):
        await model_documents.model_document(entry, httpx.AsyncClient(), resolve=Path, github_url="")


@pytest.mark.parametrize("loader", [untrusted.BoundedLoader, untrusted.PlainLoader])
@pytest.mark.parametrize("tag", ["{}", "!!int '{}'", "!!float '{}'", "!!int {{=: '{}'}}"])
def test_a_long_number_is_refused_before_it_is_built(loader: Any, tag: str) -> None:
    """YAML 1.1 has numbers to base 60; PyYAML takes a minute for one of half a megabyte."""
    number = "1:" * 511 + "1"
    assert untrusted.load_yaml("x: !!int " + number, loader) == {"x": (60**512 - 1) // 59}
    with pytest.raises(untrusted.InvalidYAML, match=r"a number is too long \(line 2, column"):
        untrusted.load_yaml("a: 1\nx: " + tag.format(number + ":1"), loader)
