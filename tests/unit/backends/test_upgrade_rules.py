"""Which backends have an upgrade: the rules of R6.34, one by one and as properties."""

import dataclasses
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localai_cluster.gallery_index import GalleryEntry
from nodes.backends.installed import (
    InstalledBackend,
    InstalledOn,
    Offered,
    Upgrade,
    is_image,
    merge,
    upgrades,
)
from nodes.backends.upgrade_check import offered

OLD, NEW, THIRD = (f"sha256:{letter * 64}" for letter in "abc")
IMAGE = "oci://images.test/backends/minilm:latest"


def on(node: str, gallery_url: str = "", **said: str) -> InstalledOn:
    place = {"node_id": node, "node_name": node, "node_status": "healthy", **said}
    return InstalledOn(place, gallery_url=gallery_url)


def by_address(node: str) -> InstalledOn:
    return on(node, uri="/srv/minilm")


def system(node: str, **said: str) -> InstalledOn:
    return dataclasses.replace(on(node, **said), is_system=True)


def minilm(*places: InstalledOn, name: str = "minilm") -> list[InstalledBackend]:
    return merge((name, place) for place in places)


def told(installed: list[InstalledBackend], **offers: Offered) -> list[str]:
    return [found.backend.name for found in upgrades(installed, offers)]


def only(installed: list[InstalledBackend], offer: Offered) -> Upgrade:
    (found,) = upgrades(installed, {"minilm": offer})
    return found


@pytest.mark.rule("R6.32")
def test_backends_are_merged_by_name_with_what_the_first_node_says() -> None:
    """In the order of the rows; the first metadata is that of the first node that has any."""
    rows = [
        ("whisper", on("a", version="3")),
        ("minilm", on("a")),
        ("minilm", on("b", version="1", uri="/srv/1", installed_at="2026-01-01T00:00:00Z")),
        ("minilm", on("c", version="2")),
    ]
    first, second = merge(rows)
    assert (first.name, [place.node["node_name"] for place in first.places]) == ("minilm", ["a", "b", "c"])
    assert first.metadata == {"version": "1", "uri": "/srv/1", "installed_at": "2026-01-01T00:00:00Z"}
    assert (second.name, second.metadata) == ("whisper", {"version": "3"})


@pytest.mark.rule("R6.34")
@pytest.mark.parametrize(
    ("installed", "offer", "expected"),
    [
        ({"version": "1"}, Offered("1"), False),
        ({"version": "1"}, Offered("2"), True),
        # An older one in the gallery is a difference like any other.
        ({"version": "2"}, Offered("1"), True),
        ({"uri": "/srv", "gallery_url": "g"}, Offered("1"), True),
        # Versions decide where both sides have one, whatever the image.
        ({"version": "1", "digest": OLD}, Offered("1", IMAGE, (NEW,)), False),
        ({"digest": OLD}, Offered("", IMAGE, (OLD,)), False),
        ({"digest": OLD}, Offered("", IMAGE, (NEW,)), True),
        ({"digest": OLD}, Offered("", IMAGE, (NEW, OLD)), False),
        ({"uri": IMAGE, "gallery_url": "g"}, Offered("", IMAGE, (NEW,)), True),
        ({"digest": OLD}, Offered("", IMAGE), False),
        ({"uri": IMAGE, "gallery_url": "g"}, Offered("", IMAGE), False),
        ({"digest": OLD}, Offered("", "/srv/minilm"), False),
        ({"version": "1"}, Offered("", "https://files.test/minilm.tar.gz"), False),
    ],
)
def test_versions_come_first_then_the_digest_of_an_image(
    installed: dict[str, str], offer: Offered, expected: bool
) -> None:
    assert bool(told(minilm(on("a", **installed)), minilm=offer)) is expected


@pytest.mark.rule("R6.34", "O102")
@pytest.mark.parametrize(
    ("builds", "offer", "expected"),
    [
        # The majority has what the gallery offers; the third one has not.
        (({"version": "2"}, {"version": "2"}, {"version": "1"}), Offered("2"), True),
        (({"digest": NEW}, {"digest": NEW}, {"digest": OLD}), Offered("", IMAGE, (NEW,)), True),
        (({"digest": NEW}, {"digest": NEW}, {"digest": OLD}), Offered("", "/srv/minilm"), True),
        # The registry could not be asked: nothing is said (R6.34, lookup failure).
        (({"digest": NEW}, {"digest": NEW}, {"digest": OLD}), Offered("", IMAGE), False),
    ],
)
def test_nodes_that_disagree_make_an_upgrade_and_the_minority_is_named(
    builds: tuple[dict[str, str], ...], offer: Offered, expected: bool
) -> None:
    installed = minilm(*(on(f"n{number}", **build) for number, build in enumerate(builds)))
    assert bool(told(installed, minilm=offer)) is expected
    if expected:
        assert [place.node["node_name"] for place in only(installed, offer).drifted] == ["n2"]


@pytest.mark.rule("R6.34")
def test_what_has_no_upgrade_whatever_the_gallery_says() -> None:
    """System backends, rows without metadata, unknown names, a stable build beside its development twin."""
    new = Offered("2")
    assert told(minilm(system("a", version="1")), minilm=new) == []
    assert told(minilm(on("a")), minilm=new) == []
    assert told(minilm(on("a", version="1")), other=new) == []
    twins = minilm(on("a", version="1")) + minilm(on("b", version="1"), name="minilm-development")
    assert told(twins, **{"minilm": new, "minilm-development": new}) == ["minilm-development"]


@pytest.mark.rule("R6.34")
def test_a_gallerys_alias_is_not_the_name_of_a_backend() -> None:
    """Only entries' own names are compared; of two entries of a name the first counts, as for an install."""
    entries = [
        GalleryEntry("cpu-MiniLM", alias="minilm", version="9"),
        GalleryEntry("cpu-minilm", version="8"),
        GalleryEntry("other", version="7"),
    ]
    assert offered(entries, {"minilm", "cpu-minilm"}) == {"cpu-minilm": Offered("9")}


@pytest.mark.rule("R6.34")
def test_a_system_backend_of_one_node_is_no_drift_of_the_others() -> None:
    installed = minilm(on("a", version="1"), on("b", version="1"), system("c"))
    assert told(installed, minilm=Offered("1")) == []
    assert not installed[0].is_system


@pytest.mark.rule("R6.34")
def test_a_place_that_refuses_upgrades_is_neither_offered_one_nor_counted() -> None:
    """A node refuses to upgrade an install by an address; the others decide about theirs."""
    assert told(minilm(by_address("a")), minilm=Offered("2")) == []
    several = minilm(by_address("a"), by_address("b"), on("c", version="1"))
    assert told(several, minilm=Offered("1")) == []
    upgrade = only(several, Offered("2"))
    assert [place.node["node_name"] for place in upgrade.backend.places] == ["c"]
    assert upgrade.backend.majority.version == "1"


def test_two_platforms_of_one_image_are_no_drift() -> None:
    """Each node has the digest of its own platform's build; one with an older build is behind."""
    image = Offered("", IMAGE, (THIRD, NEW, OLD))
    assert told(minilm(on("a", digest=NEW), on("b", digest=OLD)), minilm=image) == []
    newer = Offered("", IMAGE, (THIRD, NEW))
    assert only(minilm(on("a", digest=NEW), on("b", digest=OLD)), newer).drifted


@pytest.mark.parametrize(
    ("uri", "expected"),
    [
        (IMAGE, True),
        ("images.test/backends/minilm:latest-cpu", True),
        ("images.test:5000/minilm@" + OLD, True),
        ("minilm-1.0/minilm.tar.gz", False),
        ("/srv/images.test/minilm:latest", False),
        ("https://images.test/minilm.tar.gz", False),
        ("cluster:minilm.tar.gz", False),
        ("", False),
    ],
)
def test_an_image_is_known_by_its_form(uri: str, expected: bool) -> None:
    assert is_image(uri) is expected


_TEXTS = st.sampled_from(["", "1", "2"])
_BUILDS = st.lists(
    st.fixed_dictionaries(
        {"version": _TEXTS, "digest": st.sampled_from(["", OLD, NEW]), "gallery_url": st.just("x")}
    ),
    min_size=1,
    max_size=7,
)
_OFFERS = st.builds(Offered, _TEXTS, st.sampled_from(["", "/srv/x", IMAGE]), st.sampled_from([(), (NEW,)]))


@pytest.mark.rule("R6.34")
@given(_BUILDS, _OFFERS)
def test_the_majority_is_what_most_have_and_the_verdict_follows_from_it(
    builds: list[dict[str, Any]], offer: Offered
) -> None:
    """The minority is as small as it can be; after an upgrade of all nodes nothing is left to do."""
    (backend,) = minilm(*(on(f"n{number}", **build) for number, build in enumerate(builds)))
    counts = Counter((build["version"], build["digest"]) for build in builds)
    majority = (backend.majority.version, backend.majority.digest)
    assert counts[majority] == max(counts.values())
    assert len(backend.drifted) == len(builds) - counts[majority]
    found = upgrades([backend], {"minilm": offer})
    if backend.drifted and not (not offer.version and is_image(offer.uri) and not offer.digests):
        assert found
    now = {"version": offer.version, "digest": "".join(offer.digests[:1]), "gallery_url": "x"}
    after = minilm(*(on(f"n{number}", **now) for number in range(len(builds))))
    assert not upgrades(after, {"minilm": offer})
    assert [one.backend.majority for one in upgrades([backend], {"minilm": offer})] == [
        one.backend.majority for one in upgrades(minilm(*reversed(backend.places)), {"minilm": offer})
    ]
