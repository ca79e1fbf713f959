"""What an automatic upgrade does about each node: the table, line by line, and what holds for any nodes."""

from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodes.backends.installed import Build, Offered
from nodes.backends.upgrade_check import BackendOnNode, Verdict, identity, plan, verdict

OLD, NEW, THIRD = (f"sha256:{letter * 64}" for letter in "abc")
TWO = Offered("2", "/srv/2")


def place(status: str = "healthy", version: str = "1", digest: str = "", **more: object) -> BackendOnNode:
    return BackendOnNode(UUID(int=1), "a", status, Build(version, digest), **more)  # type: ignore[arg-type]


@pytest.mark.rule("O103")
@pytest.mark.parametrize(
    ("there", "offer", "expected"),
    [
        (place(), TWO, Verdict.UPGRADE),
        (place(version=""), TWO, Verdict.UPGRADE),
        (place(version="2"), TWO, Verdict.NOTHING),
        (place(decided=True), TWO, Verdict.NOTHING),
        (place(from_address=True), TWO, Verdict.NOTHING),
        (place("draining"), TWO, Verdict.AWAY),
        (place("offline"), TWO, Verdict.AWAY),
        (place("unhealthy"), TWO, Verdict.AWAY),
        (place("offline", last_of=("m",)), TWO, Verdict.AWAY),
        (place("offline", decided=True), TWO, Verdict.NOTHING),
        (place(last_of=("m",)), TWO, Verdict.LAST_REPLICA),
        (place(last_of=("m",), decided=True), TWO, Verdict.NOTHING),
        (place(version="2", last_of=("m",)), TWO, Verdict.NOTHING),
        (place(digest=OLD), Offered("", "oci://i/b", (NEW, THIRD)), Verdict.UPGRADE),
        (place(digest=THIRD), Offered("", "oci://i/b", (NEW, THIRD)), Verdict.NOTHING),
        (place(digest=OLD), Offered("", "oci://i/b"), Verdict.NOTHING),
        (place(), Offered("", "/srv/2"), Verdict.NOTHING),
    ],
)
def test_the_table(there: BackendOnNode, offer: Offered, expected: Verdict) -> None:
    """What cannot be compared with the offer is left alone: nodes that differ are no reason by themselves."""
    assert verdict(there, offer) is expected


places = st.lists(
    st.builds(
        BackendOnNode,
        id=st.uuids(),
        name=st.text(max_size=3),
        status=st.sampled_from(["healthy", "unhealthy", "offline", "draining"]),
        build=st.builds(Build, st.sampled_from(["", "1", "2"]), st.sampled_from(["", OLD, NEW])),
        last_of=st.sampled_from([(), ("m",)]),
        from_address=st.booleans(),
        decided=st.booleans(),
    ),
    max_size=20,
    unique_by=lambda one: one.id,
)
offers = st.sampled_from([TWO, Offered("1"), Offered("", "oci://i/b", (NEW,)), Offered("", "oci://i/b")])


@pytest.mark.rule("O103")
@given(places, offers)
def test_nobody_is_upgraded_without_need_or_twice(there: list[BackendOnNode], offer: Offered) -> None:
    found = plan(there, offer)
    assert len({one.id for one in (*found.decided, *found.away)}) == len(found.decided) + len(found.away)
    for one in found.upgrade:
        assert one.status == "healthy"
        assert not any((one.last_of, one.decided, one.from_address))
        assert one.build.version != offer.version or one.build.digest not in offer.digests
    if not identity(offer):
        assert not found.decided, "what has no identity would be asked for again and again"
