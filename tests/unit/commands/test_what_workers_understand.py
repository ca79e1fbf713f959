"""Names as every worker understands them, and the percentage of an image whose layers are reported singly."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localai_cluster.gallery_index import default_backend_name
from localai_cluster.messaging.messages import (
    Gallery,
    InstallRequest,
    ProgressEvent,
    UpgradeRequest,
    decode,
    encode_galleries,
)
from nodes.commands.commands import with_plain_name
from nodes.commands.shared_commands import Layers

RECORDED = Path(__file__).parents[2] / "data" / "nats" / "install-progress.jsonl"
TWO = encode_galleries((Gallery("http://a", "one"), Gallery("http://b", "two")))


@pytest.mark.parametrize(
    ("uri", "name"),
    [
        ("oci://quay.io/org/engine:v1", "engine"),
        ("quay.io:5000/org/engine@sha256:00ff", "engine"),
        ("ocifile:///srv/images/engine.tar", "engine"),
        ("https://host:8443/g/engine.tar.gz?key=1#x", "engine"),
        ("cluster:engine.tgz", "engine"),
        ("/srv/with:colon/", "with:colon"),
        ("file:///srv/engine@2", "engine@2"),
        ("", ""),
        ("///", ""),
    ],
)
def test_an_address_alone_names_a_backend(uri: str, name: str) -> None:
    assert default_backend_name(uri) == name


@pytest.mark.rule("nats-4")
def test_an_address_goes_with_one_name_for_both_fields() -> None:
    """§4.1: `backend` is the intended name, together with `uri` and `name`."""
    for request in (
        InstallRequest("", uri="/srv/engine"),
        InstallRequest("engine", uri="/srv/other"),
        InstallRequest("x", uri="/srv/other", name="local@engine"),
    ):
        sent = with_plain_name(request)
        assert (sent.backend, sent.name, sent.uri) == ("engine", "engine", request.uri)


@pytest.mark.rule("nats-4")
def test_a_gallery_before_the_name_becomes_the_only_one_sent() -> None:
    """Never is the backend of another gallery installed in its place."""
    sent = with_plain_name(UpgradeRequest("two@engine", TWO))
    assert (sent.backend, json.loads(sent.backend_galleries)) == (
        "engine",
        [{"url": "http://b", "name": "two"}],
    )
    for galleries in (TWO, "", "[broken"):
        unknown = UpgradeRequest("three@engine", galleries)
        assert with_plain_name(unknown) == unknown
    plain = InstallRequest("engine", "m", TWO, replica_index=3, force=True, op_id="op")
    assert with_plain_name(plain) == plain


@given(
    st.lists(
        st.tuples(
            st.floats(allow_nan=False),
            st.sampled_from(
                [
                    "",
                    "Downloading 1/3 x",
                    "Downloading 2/3 x",
                    "Downloading 9999/3 x",
                    "Extracting x",
                    "other",
                ]
            ),
        ),
        max_size=40,
    )
)
def test_whatever_is_reported_the_percentage_shown_never_falls(reports: list[tuple[float, str]]) -> None:
    """I6."""
    layers = Layers()
    events = [ProgressEvent(percentage=share, file_name=name) for share, name in reports]
    shown = [layers.with_total_percentage(event).percentage for event in events]
    assert shown == sorted(shown)
    assert all(0 <= share <= 100 for share in shown)


@pytest.mark.rule("nats-4")
def test_the_recorded_image_of_three_layers_rises_in_each_of_them() -> None:
    """Seen for 16 + 57 + 5 MiB: 0 to 20, 0 to 74, 0 to 6, then extraction."""
    lines = [json.loads(line) for line in RECORDED.read_text().splitlines()]
    progress = [
        line["data"] for line in lines if line["subject"].endswith("progress") and "op_id" in line["data"]
    ]
    layers, shown = Layers(), []
    for data in progress:
        event = layers.with_total_percentage(decode(json.dumps(data).encode(), ProgressEvent))
        shown.append((event.phase, round(event.percentage, 1)))
    assert len(progress) == 13
    assert [share for _, share in shown] == sorted(share for _, share in shown)
    by_layer = {data["file_name"].split()[1]: share for data, (_, share) in zip(progress, shown, strict=True)}
    assert by_layer == {"1/3": 19.7, "2/3": 93.2, "3/3": 99.4, "images.example/prog:1": 100.0}
    assert [phase for phase, _ in shown] == ["downloading"] * 12 + ["extracting"]


def test_the_figures_of_our_worker_stay_as_they_are() -> None:
    """It names the bytes of the whole archive; a download that begins again is told as it is."""
    layers = Layers()
    for event in (ProgressEvent(percentage=80, seq=1), ProgressEvent(percentage=5, seq=2)):
        assert layers.with_total_percentage(event) is event
