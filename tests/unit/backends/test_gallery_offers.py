"""Which galleries a node is told, where their entries are, and what a `cluster:` URL may name."""

import gzip
from pathlib import Path

import httpx
import pytest
from hypothesis import given

from localai_cluster import gallery_index
from localai_cluster.kit import conf
from localai_cluster.messaging.messages import Gallery
from nodes.backends.node_commands import GalleryOffer, is_loopback, offer
from tests.support.hostile_yaml import documents

RAW = gallery_index.GITHUB_URL
WEB = Gallery("https://example.com/index.yaml", "web")
FILE = Gallery("file:///srv/index.yaml", "file")
PATH = Gallery("/srv/index.yaml", "path")
SERVED = Gallery("cluster:index.yaml", "served")
DOTTED = [
    *("github:../r/x", "github:o/../x", "github:o/r/../../p/q/x", "github:o/r/a/./x", "github:o/r/x@.."),
    *(
        "github:o/r/x@b/../../..",
        "github:o/r/%2e%2E/x",
        "github:o/r/..%2fx",
        "github:o/r//x",
        "github:o/r/a/..",
    ),
]
ALL = (WEB, FILE, PATH, SERVED)


@pytest.mark.parametrize(
    ("same_machine", "own_identity", "sent"),
    [
        (True, True, (WEB, FILE, PATH, SERVED)),
        (False, True, (WEB, SERVED)),
        (True, False, (WEB, FILE, PATH)),
        (False, False, (WEB,)),
    ],
)
def test_a_node_is_told_the_galleries_that_its_worker_can_read(
    same_machine: bool, own_identity: bool, sent: tuple[Gallery, ...]
) -> None:
    """Files go to the server's own machine, its gallery to nodes with a secret; the rest is named."""
    offered = offer(ALL, same_machine=same_machine, own_identity=own_identity)
    assert offered.galleries == sent
    explained = offered.explained("no backend called x")
    assert explained.startswith("no backend called x")
    for gallery in ALL:
        assert (f"gallery {gallery.name} was not sent" in explained) == (gallery not in sent)


async def test_a_compressed_index_is_refused() -> None:
    """A kilobyte can unpack to gigabytes in one step."""

    def answer(request: httpx.Request) -> httpx.Response:
        assert request.headers["accept-encoding"] == "identity"
        return httpx.Response(
            200, content=gzip.compress(b"- name: one"), headers={"content-encoding": "gzip"}
        )

    async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as client:
        with pytest.raises(ValueError, match="compressed"):
            await gallery_index.read_url("https://example.com/index.yaml", client, Path)


def test_if_none_is_left_the_worker_uses_its_own() -> None:
    """nats.md §4.1: an omitted field, not an empty list, which would replace the worker's list by nothing."""
    assert offer((FILE, SERVED), same_machine=False, own_identity=False).encoded == ""
    assert offer((), same_machine=True, own_identity=True) == GalleryOffer()
    assert '"cluster:index.yaml"' in offer(ALL, same_machine=False, own_identity=True).encoded


def test_an_address_without_a_name_is_shown_without_its_credentials() -> None:
    hidden = Gallery("cluster:index.yaml?key=hidden")
    assert "hidden" not in offer((hidden,), same_machine=True, own_identity=False).explained("x")


@pytest.mark.parametrize(
    ("address", "same"),
    [
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("192.0.2.1", False),
        ("::ffff:192.0.2.1", False),
        ("", False),
        ("localhost", False),
        ("127.0.0.1.example.com", False),
    ],
)
def test_which_addresses_are_the_servers_own_machine(address: str, same: bool) -> None:
    assert is_loopback(address) == same


@pytest.mark.parametrize(
    ("uri", "index", "where"),
    [
        ("one.tar", "cluster:index.yaml", "cluster:one.tar"),
        ("./one.tar", "cluster:index.yaml", "cluster:one.tar"),
        ("../one.tar", "cluster:index.yaml", "cluster:../one.tar"),
        ("one.tar", "https://example.com/g/index.yaml?key=1", "https://example.com/g/one.tar"),
        ("../one.tar", "https://example.com/g/index.yaml", "https://example.com/one.tar"),
        ("one", "file:///srv/g/index.yaml", "/srv/g/one"),
        ("one", "/srv/g/index.yaml", "/srv/g/one"),
        ("/abs/one", "https://example.com/index.yaml", "/abs/one"),
        ("https://other.example/x.tar", "cluster:index.yaml", "https://other.example/x.tar"),
        ("", "cluster:index.yaml", ""),
        ("quay.io/org/one:v1", "https://example.com/index.yaml", "quay.io/org/one:v1"),
        ("oci://images.test/one", "https://example.com/index.yaml", "oci://images.test/one"),
        ("github:org/repo/a/b.tar@v1", "cluster:index.yaml", f"{RAW}/org/repo/v1/a/b.tar"),
        ("b.tar", "github:org/repo/a/index.yaml@v1", f"{RAW}/org/repo/v1/a/b.tar"),
    ],
)
def test_where_the_source_of_an_entry_is(uri: str, index: str, where: str) -> None:
    """Relative to the index, unless it stands for itself."""
    assert gallery_index.resolve_source(uri, index) == where


@pytest.mark.rule("worker-18.6")
def test_github_addresses_are_those_of_raw_files() -> None:
    """On the branch `main` unless it is named; a setting leads to a mirror."""
    assert gallery_index.web_address("github:o/r/x.yaml") == f"{RAW}/o/r/main/x.yaml"
    assert (
        gallery_index.web_address("github://o/r/x.yaml@b/c", "http://m/raw") == "http://m/raw/o/r/b/c/x.yaml"
    )
    for other in ("github:o/r", "github:o/r/x?y", "https://github.test/x", "x", *DOTTED):
        assert gallery_index.web_address(other) == other


async def test_an_index_may_be_named_by_a_ref_file_and_come_from_a_mirror() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        texts = {
            "/g/latest.ref": b"v2/index.yaml\n",
            "/g/v2/index.yaml": b"- name: one",
            "/bad.ref": b"/etc/x",
        }
        found = request.url.path in texts
        return httpx.Response(200 if found else 404, content=texts.get(request.url.path, b""))

    async def unserved(name: str) -> bytes:
        raise ValueError

    async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as client:
        good = Gallery(
            "https://a.test/gone.yaml", "g", ("github:g/v2/index.yaml@x", "https://a.test/g/latest.ref")
        )
        index = await gallery_index.fetch(good, client, served=unserved)
        assert [entry.name for entry in index.entries] == ["one"]
        for url in ("https://a.test/bad.ref", "ftp://a.test/x"):
            with pytest.raises(gallery_index.GalleryUnreadable):
                await gallery_index.fetch(Gallery(url, "g"), client, served=unserved)


def test_anchors_and_merges_are_expanded_up_to_a_number_of_values() -> None:
    """LocalAI's own indexes use them heavily."""
    real = b"""
- &llama {name: llama-cpp, tags: [llm], capabilities: {default: cpu-llama-cpp}}
- !!merge <<: *llama
  name: cpu-llama-cpp
  uri: quay.io/org/backends:cpu
  capabilities: null
- name: linked
  url: oci://images.test/linked
"""
    meta, concrete, linked = gallery_index.parse(real, WEB)
    assert (meta.is_meta, concrete.is_meta, concrete.tags, concrete.uri) == (
        True, False, ("llm",), "quay.io/org/backends:cpu"
    )  # fmt: skip
    assert linked.uri == "oci://images.test/linked"
    (model,) = gallery_index.parse(b"- {name: m, url: 'github:o/r/gallery/m.yaml@master'}", WEB)
    assert (model.uri, model.config_url) == ("", "github:o/r/gallery/m.yaml@master"), "D-ENTRY-URL"
    (odd,) = gallery_index.parse(b"- {name: m, url: 'http://[/x.yaml?a'}", WEB)
    assert odd.config_url == "http://[/x.yaml?a", "an address that cannot be read costs its own entry only"
    wide = b"- &a {" + b", ".join(b"k%d: 1" % n for n in range(500)) + b"}\n" + b"- {<<: *a, name: x}\n" * 200
    with pytest.raises(gallery_index.GalleryUnreadable, match="more than 100000 values"):
        gallery_index.parse(wide, WEB)


@pytest.mark.parametrize(
    "name", ["../x", "a/b", "", ".hidden", "a b", "a\n", "a\0", "é", "x" * 201, "/etc/x"]
)
def test_a_cluster_url_names_a_file_of_the_folder_and_nothing_else(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cluster:"):
        gallery_index.served_name(f"cluster:{name}")
    with pytest.raises(ValueError, match="name of a file"):
        gallery_index.open_served(tmp_path, name)
    assert gallery_index.served_name("cluster:index-1.2+x.yaml") == "index-1.2+x.yaml"
    assert gallery_index.served_name("https://x/y") is None


def test_a_cluster_gallery_needs_its_folder() -> None:
    """The error names the setting and what to do."""
    galleries = {"LOCALAI_BACKEND_GALLERIES": '[{"name":"a","url":"cluster:index.yaml"}]'}
    settings, read = conf.load(galleries)
    (problem,) = read.problems
    assert (problem.setting, "CLUSTER_GALLERY_DIR" in problem.hint) == ("LOCALAI_BACKEND_GALLERIES", True)
    settings, read = conf.load({**galleries, "CLUSTER_GALLERY_DIR": "gallery"})
    assert (read.problems, settings.gallery_dir) == ([], Path("gallery").absolute())


@given(documents())
def test_no_text_breaks_the_reader_of_an_index(content: bytes) -> None:
    """Review X2: any index is a list of entries that can be sent, or `GalleryUnreadable`."""
    try:
        sent = [str(entry) for entry in gallery_index.parse(content, WEB)]
    except gallery_index.GalleryUnreadable as error:
        sent = [error.message]
        long = len(error.message) > 1000
    else:
        long = False
    "".join(sent).encode()
    assert not long
