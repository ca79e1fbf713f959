"""One cause for errors that differ in what changes from node to node, for any of them."""

import string
from uuid import UUID

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from operations.causes import MAX_CAUSE_LENGTH, UNKNOWN_CAUSE, cause_of

words = st.text(string.ascii_lowercase, min_size=1, max_size=8)
names = st.from_regex(r"[a-z]{1,6}-?[0-9]{1,4}", fullmatch=True)
numbers = st.integers(0, 10**12)
paths = st.lists(words, min_size=1, max_size=4).map(lambda parts: "/" + "/".join(parts))
addresses = st.builds("{}:{}".format, st.ip_addresses(v=4), st.integers(1, 65535))


@pytest.mark.parametrize(
    ("error", "known", "cause"),
    [
        ("registry answered 403 for https://reg.io/v2/x", (), "registry answered 403 for …"),
        ("registry answered 404 for https://reg.io/v2/x", (), "registry answered 404 for …"),
        ("12.5 GiB needed, 3 GiB free on gpu-17", ("gpu-17",), "… needed, … free on …"),
        ("dial tcp 10.0.0.3:50051: connection refused", (), "dial tcp …: connection refused"),
        ("cannot reach worker.example.com:8080: exit code 137", (), "cannot reach …: exit code 137"),
        ("minio.corp.internal/b/m.gguf: HTTP status 503: busy", (), "…: HTTP status 503: busy"),
        ("a1 and a2: no memory", ("a1", "a2"), "a1 and a2: no memory"),
        (
            "node a is unhealthy since 2026-11-23 19:22:46 UTC: a fault",
            ("a",),
            "node … is unhealthy since …: a fault",
        ),
        (
            'backend "echo": /srv/echo is outside of its roots',
            ("echo",),
            "backend …: … is outside of its roots",
        ),
        ("failed on gpu-1, gpu-2", ("gpu-1", "gpu-2"), "failed on …"),
        ("and/or none", (), "and/or none"),
        ("", (), UNKNOWN_CAUSE),
        ("two\n lines", (), "two lines"),
    ],
)
def test_an_error_and_its_cause(error: str, known: tuple[str, ...], cause: str) -> None:
    assert cause_of(error, known) == cause


def test_what_must_not_be_read_has_no_short_name_either() -> None:
    """A name that may be a word counts for people who may not see nodes."""
    assert cause_of("a1 and a2: no memory", ("a1", "a2"), every_name=True) == "… and …: no memory"


@given(st.text(), st.lists(st.text(max_size=20), max_size=3))
@example("x.y-z." * 500, ["x.y"])
@example("a:" * 300, ["a"])
def test_every_text_has_a_cause_of_one_bounded_line(error: str, known: list[str]) -> None:
    cause = cause_of(error, known)
    assert 0 < len(cause) <= MAX_CAUSE_LENGTH
    assert cause == " ".join(cause.split())


@given(st.data())
def test_numbers_ids_paths_addresses_and_node_names_are_no_part_of_it(data: st.DataObject) -> None:
    def error(node: str) -> str:
        size, path = data.draw(numbers), data.draw(paths)
        at, id = data.draw(addresses), data.draw(st.uuids().map(UUID.__str__))
        return f"node {node} at {at}: {size} MiB missing below {path} (request {id}) after {size} s"

    one, other = data.draw(names), data.draw(names)
    assert cause_of(error(one), [one]) == cause_of(error(other), [other])


@given(st.integers(400, 599), st.integers(400, 599))
def test_a_status_is_part_of_it(one: int, other: int) -> None:
    causes = {cause_of(f"the server answered {status}") for status in (one, other)}
    assert len(causes) == len({one, other})
