"""Answers as deltas, for the tests of dialects: any pieces in any order, split anywhere."""

from collections.abc import Sequence

from hypothesis import strategies as st

from nodes.gateway.generation import Dialect, Generation, Head, Sampling, TextDelta, ToolPiece, Usage

TEXTS = st.text(max_size=6)
PIECES = st.builds(ToolPiece, st.integers(0, 2), st.sampled_from(["", "id"]), st.just("f"), TEXTS)
ASKED = Generation("m", ("hi",), Sampling(), stream=True)
HEAD = Head("0123456789abcdef" * 2, 1_700_000_000, ASKED)


@st.composite
def answers(draw: st.DrawFn) -> list[TextDelta]:
    """Draw the deltas of one answer: thoughts, texts and calls mixed, and the end."""
    parts = draw(st.lists(st.tuples(TEXTS, TEXTS, st.lists(PIECES, max_size=2)), max_size=6))
    made = [TextDelta(0, text, thought, tuple(calls)) for text, thought, calls in parts]
    finish = draw(st.sampled_from(["stop", "length", "tool_calls"]))
    cached = draw(st.none() | st.integers(0, 3))
    return [*made, TextDelta(0, finish=finish, usage=Usage(3, len(parts), cached))]


def played(dialect: Dialect, deltas: Sequence[TextDelta], data: st.DataObject) -> bytes:
    """Return the whole stream, with the deltas bundled at random."""
    stream, told, left = dialect.events(HEAD), b"", list(deltas)
    while left:
        size = data.draw(st.integers(1, len(left)))
        told += stream.render(left[:size])
        left = left[size:]
    return told + stream.done
