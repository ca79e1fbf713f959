"""Backends of a node and the catalogue by REST (`contract/http-api.md` §2.10, §4.1)."""

import dataclasses
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import yaml
from django.db import connection
from django.test.utils import CaptureQueriesContext

from localai_cluster import gallery_index
from localai_cluster.api_document import document
from localai_cluster.kit import clock
from localai_cluster.messaging import messages as m
from nodes.backends import catalogue, inventory, node_commands
from nodes.models import BackendNode, NodeBackend
from tests.integration.api.test_document import fits
from tests.support import api, backends, hot
from tests.support import intents as wished

pytestmark = pytest.mark.django_db

ENTRIES: list[dict[str, Any]] = [
    {
        "name": "llama-cpp",
        "description": "Runs *GGUF* models",
        "license": "MIT",
        "version": "2",
        "icon": "https://pictures.test/llama.png",
        "urls": ["https://project.test"],
        "tags": ["text", "LLM"],
        "capabilities": {"nvidia": "cuda-llama-cpp", "default": "cpu-llama-cpp"},
    },
    {"name": "cpu-llama-cpp", "uri": "cpu", "license": "MIT", "version": "2"},
    {"name": "cuda-llama-cpp", "uri": "cuda", "license": "MIT"},
    {"name": "cpu-llama-cpp-development", "uri": "dev", "license": "Apache-2.0"},
    {"name": "whisper", "uri": "w", "description": "Speech", "tags": ["audio"], "license": "BSD"},
]

Galleries = Callable[..., None]


@pytest.fixture
def configured(settings: Any, monkeypatch: pytest.MonkeyPatch) -> Galleries:
    """Sets the galleries of this process, name to URL."""

    def configure(**urls: str) -> None:
        listed = [{"name": name, "url": url} for name, url in urls.items()]
        settings.CLUSTER = dataclasses.replace(settings.CLUSTER, galleries=listed)
        monkeypatch.setattr(catalogue, "reader", catalogue.Reader())

    return configure


@pytest.fixture
def local(tmp_path: Path, configured: Galleries) -> Path:
    """One gallery in a file."""
    file = tmp_path / "index.yaml"
    file.write_text(yaml.safe_dump(ENTRIES))
    configured(local=file.as_uri())
    return file


def offered(query: str = "") -> dict[str, Any]:
    answer = api.admin().get(f"/api/backends?{query}" if query else "/api/backends")
    assert answer.status_code == 200, answer.content
    shape = document()["paths"]["/api/backends"]["get"]["responses"]["200"]["content"]["application/json"]
    found: dict[str, Any] = answer.json()
    assert fits(shape["schema"], found) == []
    return found


def shown(query: str = "") -> list[str]:
    return [entry["name"] for entry in offered(query)["backends"]]


def element(name: str) -> dict[str, Any]:
    (entry,) = [entry for entry in offered()["backends"] if entry["name"] == name]
    return dict(entry)


def keep(node: BackendNode, *listed: m.InstalledBackend) -> None:
    assert inventory.store([inventory.InventoryReply(node, listed, clock.now())])


def begin(node: BackendNode, element: str, kind: str = wished.INSTALL) -> str:
    gallery, _, backend = element.rpartition("@")
    return str(wished.ask(kind, node, backend=backend, gallery=gallery).id)


ECHO = m.InstalledBackend(
    "echo",
    installed_at="2026-08-20T09:12:44Z",
    version="1",
    uri="/srv/echo",
    gallery_url="file:///srv",
    alias="parrot",
    size=2048,
)


@pytest.mark.rule("http-2.10", "H12")
def test_the_backends_of_a_node_come_from_rows_with_their_age() -> None:
    """The keys of the sheet, omitted if empty; when the list was made; the worker is not waited for."""
    node = api.make_node()
    at = f"/api/nodes/{node.id}/backends"
    first = api.admin().get(at)
    assert (first.json(), "X-As-Of" in first, "X-Inventory-Error" in first) == ([], False, False)
    keep(node, ECHO, m.InstalledBackend("system", is_system=True))
    answer = api.admin().get(at)
    assert answer.json() == [
        {
            "name": "echo",
            "is_system": False,
            "is_meta": False,
            "installed_at": "2026-08-20T09:12:44Z",
            "gallery_url": "file:///srv",
            "version": "1",
            "uri": "/srv/echo",
            "alias": "parrot",
            "size": 2048,
        },
        {"name": "system", "is_system": True, "is_meta": False},
    ]
    assert answer["X-As-Of"] == api.node(node.id).inventory_at.isoformat()
    shape = document()["paths"]["/api/nodes/{node_id}/backends"]["get"]["responses"]["200"]
    assert fits(shape["content"]["application/json"]["schema"], answer.json()) == []
    assert set(shape["headers"]) == {"X-As-Of", "X-Inventory-Error"}


@pytest.mark.rule("http-2.10")
def test_a_node_that_gave_no_list_keeps_its_rows_and_says_why() -> None:
    """The last list with its age and the reason, as one printable line."""
    node = api.make_node()
    keep(node, ECHO)
    asked = api.node(node.id)
    inventory.store_error(asked, "disk\r\nX: é gone", asked_at=clock.now(), pause=1)
    answer = api.admin().get(f"/api/nodes/{node.id}/backends")
    assert ([entry["name"] for entry in answer.json()], answer["X-Inventory-Error"]) == (
        ["echo"],
        "disk  X: ? gone",
    )


@pytest.mark.rule("http-2.10")
def test_nodes_without_a_list() -> None:
    """`[]` for an agent, 404 for an unknown node."""
    agent = api.make_node("a", node_type="agent", address="")
    answer = api.admin().get(f"/api/nodes/{agent.id}/backends")
    assert (answer.status_code, answer.json(), "X-As-Of" in answer) == (200, [], False)
    for unknown in (str(uuid4()), "nope", "%00"):
        refused = api.admin().get(f"/api/nodes/{unknown}/backends")
        assert (refused.status_code, refused.json()["error"]["type"]) == (404, "node_error")


def test_looking_at_an_old_list_makes_it_due() -> None:
    """A minute for a node, five for the catalogue."""
    node, now = api.make_node(), clock.now()
    rows = BackendNode.objects.filter(pk=node.pk)
    for path, age, due in [
        (f"/api/nodes/{node.id}/backends", 50, False),
        (f"/api/nodes/{node.id}/backends", 70, True),
        ("/api/backends", 290, False),
        ("/api/backends", 310, True),
    ]:
        rows.update(inventory_at=now - timedelta(seconds=age), inventory_due_at=now + timedelta(seconds=100))
        assert api.admin().get(path).status_code == 200
        assert (api.node(node.id).inventory_due_at <= clock.now()) is due, (path, age)


@pytest.mark.rule("http-4.1", "O109")
def test_the_fields_of_an_entry(local: Path) -> None:
    """All of §4.1; lists are never null."""
    assert element("llama-cpp") == {
        "id": "local@llama-cpp",
        "name": "llama-cpp",
        "description": "Runs *GGUF* models",
        "icon": "https://pictures.test/llama.png",
        "license": "MIT",
        "urls": ["https://project.test"],
        "tags": ["text", "LLM"],
        "gallery": "local",
        "version": "2",
        "installed": False,
        "nodes": [],
        "processing": False,
        "jobID": "",
        "isDeletion": False,
        "isMeta": True,
        "isAlias": False,
        "isDevelopment": False,
        "capabilities": {"nvidia": "cuda-llama-cpp", "default": "cpu-llama-cpp"},
        "metaBackendFor": "",
        "variants": [],
    }
    concrete = element("cuda-llama-cpp")
    told = [concrete[name] for name in ("isMeta", "isAlias", "metaBackendFor", "capabilities", "tags")]
    assert told == [False, True, "llama-cpp", None, []]
    assert element("cpu-llama-cpp-development")["isDevelopment"]
    reply = offered()
    assert (reply["allTags"], reply["repositories"]) == (
        ["LLM", "audio", "text"],
        [{"url": local.as_uri(), "name": "local"}],
    )
    assert (reply["availableBackends"], reply["installedBackends"]) == (5, 0)
    assert (reply["systemCapability"], reply["preferDevelopmentBackends"]) == ("", False)


@pytest.mark.rule("http-4.1", "O109")
def test_where_an_entry_is_installed(local: Path) -> None:
    """On every approved node whose last list has it, offline ones too: their status says so."""
    one, two = api.make_node("one", secret="1" * 64), api.make_node("two", secret="2" * 64)
    pending = api.make_node("three", secret="3" * 64, approved=False)
    for node in (two, one, pending):
        keep(node, m.InstalledBackend("Whisper", version="1", digest="sha256:0"), ECHO)
    api.mark(two, "silent")
    entry = element("whisper")
    kept = {"version": "1", "digest": "sha256:0"}
    assert entry["nodes"] == [
        {"node_id": str(one.id), "node_name": "one", "node_status": "healthy"} | kept,
        {"node_id": str(two.id), "node_name": "two", "node_status": "offline"} | kept,
    ]
    assert (entry["installed"], element("llama-cpp")["installed"]) == (True, False)
    assert offered()["installedBackends"] == 2


@pytest.mark.rule("http-4.1", "O109")
def test_what_runs_on_an_entry(local: Path) -> None:
    """By `gallery@name` or by the bare name; another gallery's is another entry."""
    node = api.make_node()
    job = begin(node, "local@whisper")
    removal = begin(node, "cpu-llama-cpp", "backend_delete")
    begin(node, "other@cuda-llama-cpp")
    assert len(wished.claim(9)) == 3
    waiting = begin(node, "llama-cpp")
    told = {
        entry["name"]: (entry["processing"], entry["jobID"], entry["isDeletion"])
        for entry in offered()["backends"]
    }
    assert told == {
        "whisper": (True, job, False),
        "cpu-llama-cpp": (True, removal, True),
        "llama-cpp": (True, waiting, False),
        "cuda-llama-cpp": (False, "", False),
        "cpu-llama-cpp-development": (False, "", False),
    }
    reply = offered()
    assert reply["processingBackends"][node_commands.key(node.id, "llama-cpp")] == waiting
    assert sorted(reply["taskTypes"].values()) == ["Deletion", "Installation", "Installation", "Waiting"]


@pytest.mark.rule("http-4.1", "O109")
@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("", ["llama-cpp", "cpu-llama-cpp", "cuda-llama-cpp", "cpu-llama-cpp-development", "whisper"]),
        ("term=gguf", ["llama-cpp"]),
        ("term=SPEECH", ["whisper"]),
        ("term=llm", ["llama-cpp"]),
        ("term=nothing", []),
        ("tag=llm", ["llama-cpp"]),
        ("tag=ll", []),
        ("items=2&page=2", ["cuda-llama-cpp", "cpu-llama-cpp-development"]),
        ("items=2&page=9", []),
        ("items=2&sort=name", ["cpu-llama-cpp", "cpu-llama-cpp-development"]),
        ("items=2&sort=name&order=desc", ["whisper", "llama-cpp"]),
        ("items=1&sort=license", ["cpu-llama-cpp-development"]),
        ("items=2&sort=status", ["whisper", "cpu-llama-cpp"]),
        ("items=1&sort=repository&order=asc", ["cpu-llama-cpp"]),
    ],
)
def test_search_order_and_pages(local: Path, query: str, expected: list[str]) -> None:
    """`status` has installed ones first."""
    keep(api.make_node(), m.InstalledBackend("whisper"))
    assert shown(query) == expected


@pytest.mark.rule("http-4.1", "O109")
def test_pages_name_their_neighbours(local: Path) -> None:
    """Nine a page unless it is said; beyond the ends the nearest page."""

    def pages(query: str) -> list[int]:
        reply = offered(query)
        return [reply[name] for name in ("currentPage", "totalPages", "prevPage", "nextPage")]

    assert [pages(query) for query in ("items=2", "items=2&page=2", "items=2&page=3", "term=nothing")] == [
        [1, 3, 1, 2],
        [2, 3, 1, 3],
        [3, 3, 2, 3],
        [1, 0, 1, 1],
    ]
    local.write_text(yaml.safe_dump([{"name": f"n{number}"} for number in range(20)]))
    catalogue.reader = catalogue.Reader()
    assert len(shown()) == 9


@pytest.mark.parametrize(
    "query",
    [
        "page=0",
        "page=x",
        "items=0",
        "items=10000",
        "items=-1",
        "sort=size",
        "order=up",
        "term=",
        "term=%00",
        "tag=" + "x" * 256,
        "page=1&page=2",
        "x=1",
    ],
)
def test_parameters_that_cannot_be_are_400_and_named(local: Path, query: str) -> None:
    """Flat, as everything here."""
    refused = api.admin().get(f"/api/backends?{query}")
    assert refused.status_code == 400
    assert query.partition("=")[0] in refused.json()["error"]


@pytest.mark.rule("http-4.1")
def test_without_galleries_the_catalogue_is_empty(configured: Galleries) -> None:
    """Which is no failure."""
    configured()
    reply = offered()
    assert (reply["backends"], reply["repositories"], reply["allTags"]) == ([], [], [])


@pytest.mark.parametrize("scalar", ["!!bool maybe", "!!int ''", "2026-13-45", "0x" + "f" * 6000])
def test_a_hostile_index_hides_no_other_gallery(
    scalar: str, local: Path, tmp_path: Path, configured: Galleries
) -> None:
    """Review X2: one value that is no YAML error made the catalogue and every install a 500."""
    bad = tmp_path / "bad.yaml"
    bad.write_text(f"- name: one\n  x: {scalar}\n  version: {scalar}\n")
    configured(local=local.as_uri(), bad=bad.as_uri())
    reply = offered()
    assert {"whisper", "cuda-llama-cpp"} <= {entry["name"] for entry in reply["backends"]}
    (problem,) = reply["galleryErrors"]
    assert (problem["name"], "line 2" in problem["error"]) == ("bad", True)


def test_a_defect_of_ours_in_one_gallery_hides_no_other(
    local: Path, configured: Galleries, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Review X2: whatever escapes the reader of one index is the error of that gallery."""
    configured(local=local.as_uri(), bad="https://example.invalid/index.yaml")
    read = gallery_index.fetch

    async def failing(gallery: Any, *rest: Any, **options: Any) -> Any:
        if gallery.name == "bad":
            raise KeyError("unforeseen")
        return await read(gallery, *rest, **options)

    monkeypatch.setattr(gallery_index, "fetch", failing)
    reply = offered()
    assert (len(reply["backends"]), [one["name"] for one in reply["galleryErrors"]]) == (5, ["bad"])


@pytest.mark.rule("http-4.1")
def test_a_broken_gallery_is_named_beside_what_the_others_offer(
    local: Path, tmp_path: Path, configured: Galleries
) -> None:
    """Only if none can be read there is nothing to show: 503, naming each."""
    bad = tmp_path / "bad.yaml"
    bad.write_text("just: text")
    configured(local=local.as_uri(), bad=bad.as_uri())
    reply = offered()
    assert len(reply["backends"]) == 5
    (problem,) = reply["galleryErrors"]
    assert (problem["name"], "not a YAML list" in problem["error"]) == ("bad", True)
    configured(bad=bad.as_uri(), gone=(tmp_path / "gone").as_uri())
    refused = api.admin().get("/api/backends")
    assert (refused.status_code, int(refused["Retry-After"]) > 0) == (503, True)
    assert all(name in refused.json()["error"] for name in ("gallery bad", "gallery gone"))


def test_hostile_entries_are_shown_or_left_out(tmp_path: Path, configured: Galleries) -> None:
    """All that YAML can say ends in an answer that fits the document."""
    file = tmp_path / "index.yaml"
    file.write_text(
        "- 5\n- {name: []}\n- {name: {a: b}}\n- {description: nameless}\n"
        "- {name: odd, tags: text, urls: {a: b}, capabilities: [x], version: 1.0, license: 2024-01-01}\n"
        '- {name: "<script>\\u202e", tags: [[x], 5, null, ok], capabilities: {default: [], cpu: b}}\n'
    )
    configured(odd=file.as_uri())
    odd, script = offered()["backends"]
    assert (odd["tags"], odd["urls"], odd["capabilities"], odd["version"], odd["license"]) == (
        [],
        [],
        None,
        "1.0",
        "",
    )
    assert (script["name"], script["tags"], script["capabilities"]) == (
        "<script>\u202e",
        ["5", "ok"],
        {"cpu": "b"},
    )


def test_a_small_list_does_not_become_a_huge_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """YAML's aliases repeat what stands once: texts, their number and entries are bounded."""
    tags = "[" + ",".join("t" * 3 for _ in range(300)) + "]"
    text = f"- &one {{name: first, description: {'d' * 100_000}, tags: {tags}}}\n" + "- *one\n" * 30_000
    builds = gallery_index.parse(text.encode(), m.Gallery())
    assert (len(builds), len(builds[0].tags), len(builds[0].description)) == (
        gallery_index.MAX_ENTRIES,
        gallery_index.MAX_TEXTS_PER_FIELD,
        gallery_index.MAX_TEXT_LENGTH,
    )


def test_a_catalogue_costs_the_same_for_any_number_of_nodes(local: Path) -> None:
    """3 and 30 nodes, with operations on all of them."""
    counts = []
    offered()  # the first view of a gallery asks for an upgrade check
    for total in (3, 30):
        for number in range(BackendNode.objects.count(), total):
            node = api.make_node(f"w{number}", secret=f"{number:064x}")
            keep(node, m.InstalledBackend("whisper"), ECHO)
            begin(node, "llama-cpp")
        with CaptureQueriesContext(connection) as queries:
            assert len(offered()["backends"][4]["nodes"]) == total
        counts.append(len(queries))
    assert counts[0] == counts[1] <= 8


class Server(BaseHTTPRequestHandler):
    """A gallery over HTTP that counts its readers and takes its time."""

    asked = 0
    gate = threading.Event()

    def do_GET(self) -> None:
        """The list."""
        type(self).asked += 1
        self.gate.wait(60)
        self.send_response(200)
        self.end_headers()
        self.wfile.write(yaml.safe_dump(ENTRIES).encode())

    def log_message(self, format: str, *args: Any) -> None:
        """Silence."""


@pytest.fixture
def server() -> Iterator[str]:
    """Its address, with a password in it."""
    Server.asked = 0
    Server.gate.clear()
    web = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    thread = threading.Thread(target=web.serve_forever)
    thread.start()
    yield f"http://user:secret@127.0.0.1:{web.server_port}/index.yaml?key=1"
    Server.gate.set()
    web.shutdown()
    web.server_close()
    thread.join()


@pytest.mark.rule("worker-18.3")
def test_a_gallery_that_is_away_is_listed_from_its_last_good_copy(
    server: str, configured: Galleries, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the error and the time of the copy, in every process; the next read replaces it."""
    Server.gate.set()
    configured(web=server)
    assert (len(offered()["backends"]), offered()["galleryErrors"]) == (5, [])
    monkeypatch.setattr(Server, "do_GET", lambda self: self.send_error(503))
    configured(web=server)  # another process: nothing is kept in its memory
    reply = offered()
    (problem,) = reply["galleryErrors"]
    assert (len(reply["backends"]), problem["name"]) == (5, "web")
    assert "503" in problem["error"]
    assert "secret" not in problem["error"]
    assert abs(datetime.fromisoformat(problem["readAt"]) - clock.now()) < timedelta(minutes=1)


@pytest.mark.rule("worker-18.4")
def test_which_kinds_of_nodes_can_run_an_entry_and_why(local: Path) -> None:
    nodes = [api.make_node(name) for name in "abc"]
    for node, capability in zip(nodes, ("nvidia", "amd", "amd"), strict=True):
        BackendNode.objects.filter(pk=node.pk).update(capability=capability)
    reply = offered()
    assert reply["nodesByCapability"] == {"amd": 2, "nvidia": 1}
    by_name = {entry["name"]: entry["variants"] for entry in reply["backends"]}
    assert by_name["llama-cpp"] == [
        {"capability": "amd", "build": "cpu-llama-cpp", "reason": "amd is not listed, so the default"},
        {"capability": "nvidia", "build": "cuda-llama-cpp", "reason": "listed for nvidia"},
    ]
    assert by_name["cuda-llama-cpp"] == [
        {"capability": "nvidia", "build": "cuda-llama-cpp", "reason": "named for cuda, as nvidia is"}
    ]
    assert [one["capability"] for one in by_name["whisper"]] == ["amd", "nvidia"]


@pytest.fixture
def without_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads of one test cannot write the same row: the test's transaction holds it."""
    monkeypatch.setattr(catalogue, "store_copy", lambda *_, **__: None)


@pytest.mark.usefixtures("without_copies")
def test_a_gallery_is_read_once_for_all_who_ask_at_the_same_time(server: str) -> None:
    """And then kept for a minute; other galleries are read at once."""
    reader, listed = catalogue.Reader(), [m.Gallery(url=server, name="web")]
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(reader.read, listed) for _ in range(4)]
        Server.gate.set()
        offers = [one.result() for one in asked]
    assert (Server.asked, {len(offer.builds) for offer in offers}) == (1, {5})
    reader.read(listed)
    assert Server.asked == 1
    _expire(reader)
    reader.read(listed)
    reader.read([m.Gallery(url=server, name="other")])
    assert Server.asked == 3


def _expire(reader: catalogue.Reader) -> None:
    reader._known = dataclasses.replace(reader._known, good_until=0)


@pytest.mark.usefixtures("without_copies")
def test_who_asks_while_a_gallery_is_read_gets_what_was_known(server: str) -> None:
    """Only the one who reads it waits for a slow gallery; only without anything do all."""
    reader, listed = catalogue.Reader(), [m.Gallery(url=server, name="web")]
    Server.gate.set()
    known = reader.read(listed)
    Server.gate.clear()
    _expire(reader)
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(reader.read, listed)
        while Server.asked < 2:
            assert not reading.done()
        assert reader.read(listed) is known
        Server.gate.set()
        assert reading.result() is not known


@pytest.mark.django_db(transaction=True)
def test_who_waits_for_a_gallery_holds_no_database_connection(
    server: str, configured: Galleries, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are few of them in a web process, and a gallery may take ten seconds."""
    configured(web=server)
    Server.gate.set()
    held: list[bool] = []
    read = catalogue.read_all

    def looked(listed: Any) -> Any:
        held.append(connection.connection is not None)
        return read(listed)

    monkeypatch.setattr(catalogue, "read_all", looked)
    offered()
    assert held == [False]


def test_a_gallery_that_takes_too_long_is_given_up(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And tried again soon."""
    monkeypatch.setattr(catalogue, "READ_WITHIN", 0.1)
    reader = catalogue.Reader()
    offer = reader.read([m.Gallery(url=server, name="web")])
    assert "gallery web cannot be read" in offer.problems["web"]
    assert reader._known.good_until < clock.monotonic() + 10


def test_addresses_are_shown_without_their_secrets(server: str, configured: Galleries) -> None:
    """Neither a password nor a query leaves."""
    Server.gate.set()
    configured(web=server)
    (repository,) = offered()["repositories"]
    assert repository["url"] == gallery_index.public_url(server)
    assert not any(word in repository["url"] for word in ("secret", "key=1"))


def test_the_demo_gallery_has_something_to_show(configured: Galleries) -> None:
    """Each entry with description, version, license and tags."""
    configured(local=(backends.gallery() / "index.yaml").as_uri())
    found = offered()["backends"]
    assert [entry["name"] for entry in found] == ["minilm", "llama-cpp", "echo"]
    assert all(entry[name] for entry in found for name in ("description", "version", "license", "tags"))


def test_a_node_that_is_removed_takes_its_list_with_it() -> None:
    """No entry is installed on a node that is not there."""
    node = hot.node()
    keep(node, ECHO)
    assert api.admin().delete(f"/api/nodes/{node.id}").status_code == 200
    assert not NodeBackend.objects.exists()


@pytest.mark.rule("O11")
@pytest.mark.usefixtures("local")
def test_a_build_for_one_kind_of_hardware_is_not_installed_everywhere() -> None:
    """The refusal names what to install instead; on chosen nodes, and as the parent, it is installed."""
    node = api.make_node()
    path = "/api/backends/install/"
    refused = api.admin().post(f"{path}local@cuda-llama-cpp", {})
    body = refused.json()
    assert (refused.status_code, body["code"]) == (409, "concrete_backend_requires_target")
    assert (body["meta_alternative"], "choose its nodes" in body["error"]) == ("llama-cpp", True)
    assert api.admin().post(f"{path}cuda-llama-cpp", {"nodes": [str(node.id)]}).status_code == 200
    assert api.admin().post(f"{path}llama-cpp", {}).status_code == 200
