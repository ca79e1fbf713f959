"""The upgrade check: who makes it and when, what stays of it, and the routes that answer from it.

PostgreSQL is real, galleries are files, registries of images are played.
"""

import asyncio
import dataclasses
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from django.db import connection
from django.test.utils import CaptureQueriesContext

from localai_cluster.api_document import document
from localai_cluster.kit import clock
from localai_cluster.messaging import messages as m
from nodes.backends import catalogue, inventory, upgrade_check, upgrade_state
from nodes.backends.installed import Offered
from nodes.models import BackendNode, BackendOffer, NodeBackend, UpgradeCheck
from nodes.reconcilers import tasks
from nodes.reconcilers.tasks import SCHEDULES
from operations.executor.work import in_thread
from tests.integration.api.test_document import fits
from tests.support import api
from tests.support.intents import DELETE, INSTALL, ask

pytestmark = pytest.mark.django_db(transaction=True)

IMAGE = "oci://images.test/backends/minilm:latest"
OLD, NEW = f"sha256:{'a' * 64}", f"sha256:{'b' * 64}"

Write = Callable[..., None]


@pytest.fixture
def gallery(tmp_path: Path, settings: Any, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Writes the one gallery: name to version, or to the whole entry."""
    file = tmp_path / "index.yaml"
    settings.CLUSTER = dataclasses.replace(
        settings.CLUSTER, galleries=[{"name": "local", "url": file.as_uri()}]
    )
    monkeypatch.setattr(catalogue, "reader", catalogue.Reader())
    monkeypatch.setattr("nodes.api.catalogue._checked_fingerprint", "")

    def write(**entries: Any) -> None:
        listed = [
            {"name": name, **(one if isinstance(one, dict) else {"version": one, "uri": f"/srv/{name}"})}
            for name, one in entries.items()
        ]
        file.write_text(yaml.safe_dump(listed))

    return write


def keep(node: BackendNode, *listed: m.InstalledBackend) -> None:
    assert inventory.store([inventory.InventoryReply(node, listed, clock.now())])


def minilm(version: str = "1.0.0", **more: Any) -> m.InstalledBackend:
    return m.InstalledBackend("minilm", installed_at="2026-08-20T09:12:44Z", version=version, **more)


def check() -> bool:
    """What a controller does when something is due."""
    return asyncio.run(upgrade_check.UpgradeChecker("here:1").check())


def answer(path: str, method: str = "get") -> Any:
    """What the route answers; it fits the API document."""
    reply = getattr(api.admin(), method)(path)
    assert reply.status_code == 200, reply.content
    shape = document()["paths"][path][method]["responses"]["200"]["content"]["application/json"]["schema"]
    assert fits(shape, reply.json()) == []
    return reply.json()


def upgrades() -> Any:
    return answer("/api/backends/upgrades")


@pytest.mark.rule("R6.34", "R6.35", "O101", "http-4.4")
def test_a_check_finds_what_the_gallery_offers(gallery: Write) -> None:
    """Before it nothing is known; the keys are those of the sheet, and empty ones are left out."""
    gallery(minilm="1.1.0", whisper="3")
    keep(api.make_node("a"), minilm(), m.InstalledBackend("unknown", version="1"))
    assert upgrades() == {}
    assert check()
    assert upgrades() == {
        "minilm": {"backend_name": "minilm", "installed_version": "1.0.0", "available_version": "1.1.0"}
    }
    assert answer("/backends/upgrades") == upgrades()
    assert set(BackendOffer.objects.values_list("name", flat=True)) == {"minilm"}


@pytest.mark.rule("O102", "R6.34", "http-4.4")
def test_a_node_with_another_build_is_named(gallery: Write) -> None:
    gallery(minilm="1.0.0")
    nodes = [api.make_node(f"w{number}", secret=f"{number:064x}") for number in range(3)]
    for node in nodes[:2]:
        keep(node, minilm())
    keep(nodes[2], minilm("0.9.0", digest=OLD))
    check()
    (found,) = upgrades().values()
    assert found["node_drift"] == [
        {"node_id": str(nodes[2].id), "node_name": "w2", "version": "0.9.0", "digest": OLD}
    ]
    assert (found["installed_version"], found["available_version"]) == ("1.0.0", "1.0.0")


@pytest.mark.rule("R6.34", "http-4.4")
def test_an_install_by_an_address_has_no_upgrade_and_its_node_says_why(gallery: Write) -> None:
    """Its worker would refuse it: `test_upgrading_deleting.py` has that."""
    gallery(minilm="1.1.0")
    keep(api.make_node("a"), m.InstalledBackend("minilm", uri="/srv/minilm"))
    assert check()
    assert upgrades() == {}
    (backend,) = answer("/backends")
    assert "upgrade_available" not in backend
    assert [node["from_address"] for node in backend["nodes"]] == [True]


@pytest.mark.rule("A87", "O101", "http-4.4")
def test_a_new_version_is_visible_at_once(gallery: Write) -> None:
    """The check reads the gallery, and so does every process's catalogue after it; nothing is restarted."""
    gallery(minilm="1.0.0")
    keep(api.make_node("a"), minilm())
    check()
    assert api.admin().get("/api/backends").json()["backends"][0]["version"] == "1.0.0"
    gallery(minilm="2.0.0")
    assert answer("/api/backends/upgrades/check", "post") == {}, "what was known before"
    assert check()
    assert upgrades()["minilm"]["available_version"] == "2.0.0"
    assert api.admin().get("/api/backends").json()["backends"][0]["version"] == "2.0.0"


@pytest.mark.rule("A51", "O101")
def test_an_upgrade_is_gone_with_the_workers_next_list(gallery: Write) -> None:
    """Before any further check: the list that follows an operation makes the verdict."""
    gallery(minilm="2.0.0")
    node = api.make_node("a")
    keep(node, minilm())
    check()
    assert set(upgrades()) == {"minilm"}
    keep(node, minilm("2.0.0"))
    assert upgrades() == {}
    (listed,) = answer("/backends")
    assert (listed["Metadata"]["version"], "upgrade_available" in listed) == ("2.0.0", False)


@pytest.mark.rule("R6.34")
def test_an_image_is_compared_by_digest(gallery: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked only for what is installed and has no version; what cannot be found out says nothing."""
    asked: list[str] = []

    async def played(uris: list[str]) -> dict[str, tuple[str, ...]]:
        asked.extend(uris)
        return {IMAGE: (NEW,)}

    monkeypatch.setattr(upgrade_check, "image_digests", played)
    gallery(minilm={"uri": IMAGE}, whisper={"uri": IMAGE + "-whisper"}, echo={"uri": IMAGE, "version": "1"})
    keep(api.make_node("a"), minilm("", digest=OLD), m.InstalledBackend("echo", version="1"))
    check()
    assert asked == [IMAGE]
    assert upgrades() == {
        "minilm": {
            "backend_name": "minilm",
            "installed_version": "",
            "available_version": "",
            "installed_digest": OLD,
            "available_digest": NEW,
        }
    }


@pytest.mark.rule("R6.34")
def test_a_registry_that_cannot_be_read_once_hides_no_known_upgrade(
    gallery: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The digests of an earlier check stay, as long as the gallery offers the same image."""
    played: dict[str, tuple[str, ...]] = {IMAGE: (NEW,)}

    async def read(uris: list[str]) -> dict[str, tuple[str, ...]]:
        return {uri: played[uri] for uri in uris if uri in played}

    monkeypatch.setattr(upgrade_check, "image_digests", read)
    gallery(minilm={"uri": IMAGE})
    keep(api.make_node("a"), minilm("", digest=OLD))
    check()
    known = upgrades()
    assert known["minilm"]["available_digest"] == NEW
    played.clear()
    upgrade_state.request_check()
    check()
    assert upgrades() == known
    gallery(minilm={"uri": IMAGE + "-2"})
    upgrade_state.request_check()
    check()
    assert upgrades() == {}


def test_a_hostile_gallery_ends_no_check(gallery: Write, tmp_path: Path) -> None:
    """Texts that no column can keep or has room for, and a reason that quotes one."""
    gallery(minilm="2\x00\u202e" + "x" * 1000, echo={"version": "1", "uri": "\x00" * 5000})
    keep(api.make_node("a"), minilm(), m.InstalledBackend("echo", version="1"))
    assert check()
    assert not upgrade_state.read_state().checking
    assert len(upgrades()["minilm"]["available_version"]) <= 255
    (tmp_path / "index.yaml").write_text('"\\0": {' + "x" * 5000)
    upgrade_state.request_check()
    assert check()
    assert upgrade_state.read_state().problems


@pytest.mark.rule("R6.35", "O101")
def test_requests_during_a_check_become_one_more() -> None:
    now = clock.now()
    upgrade_state.request_check()
    first = upgrade_state.claim("one", now=now)
    assert first is not None
    for _ in range(5):
        upgrade_state.request_check()
    assert upgrade_state.claim("two", now=now) is None, "somebody is at it"
    assert upgrade_state.finish(first, {}, problems={}, galleries="", now=now)
    second = upgrade_state.claim("two", now=now)
    assert second is not None
    assert upgrade_state.finish(second, {}, problems={}, galleries="", now=now)
    assert upgrade_state.claim("one", now=now) is None


@pytest.mark.rule("R6.35")
def test_of_many_controllers_one_makes_the_check() -> None:
    """Real transactions at the same time, the first request of all among them."""

    def at_once(work: Callable[[int], Any]) -> list[Any]:
        def one(number: int) -> Any:
            try:
                return work(number)
            finally:
                connection.close()

        with ThreadPoolExecutor(8) as pool:
            return list(pool.map(one, range(8)))

    at_once(lambda _: upgrade_state.request_check())
    assert UpgradeCheck.objects.get().requested == 8
    now = clock.now()
    claims = at_once(lambda number: upgrade_state.claim(str(number), now=now))
    assert [claim is not None for claim in claims].count(True) == 1


@pytest.mark.rule("R6.35")
def test_a_dead_controllers_check_is_taken_over() -> None:
    """Its claim runs out; what it finds afterwards is thrown away."""
    now = clock.now()
    upgrade_state.request_check()
    late = upgrade_state.claim("dead", now=now)
    later = now + timedelta(seconds=upgrade_state.CLAIM_SECONDS)
    assert upgrade_state.claim("next", now=later - timedelta(seconds=1)) is None
    mine = upgrade_state.claim("next", now=later)
    assert late is not None
    assert mine is not None
    assert not upgrade_state.finish(late, {"x": Offered("9")}, problems={}, galleries="", now=later)
    assert upgrade_state.finish(mine, {"x": Offered("1")}, problems={}, galleries="", now=later)
    assert upgrade_state.offers() == {"x": Offered("1")}


def test_offers_of_a_gallery_that_cannot_be_read_stay(gallery: Write, tmp_path: Path) -> None:
    """The page is told which; the check is made again after five minutes and forgets what is gone then."""
    gallery(minilm="2.0.0")
    keep(api.make_node("a"), minilm())
    check()
    (tmp_path / "index.yaml").write_text("{")
    upgrade_state.request_check()
    check()
    assert set(upgrades()) == {"minilm"}
    standing = upgrade_state.read_state()
    assert "is not valid YAML" in standing.problems["local"]
    assert standing.checked_at is not None
    assert not check()
    gallery(other="1")
    again = standing.checked_at + timedelta(seconds=upgrade_state.RETRY_AFTER)
    mine = upgrade_state.claim("x", now=again)
    assert mine is not None
    found, problems, galleries = asyncio.run(upgrade_check.read_offers())
    assert upgrade_state.finish(mine, found, problems=problems, galleries=galleries, now=again)
    assert (upgrades(), upgrade_state.read_state().problems) == ({}, {})


@pytest.mark.rule("O101")
def test_a_changed_gallery_is_checked_when_a_page_sees_it(
    gallery: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The catalogue of any process notices; it asks once, not with every view."""
    gallery(minilm="1.0.0")
    keep(api.make_node("a"), minilm())
    check()
    asked = upgrade_state.read_state().requested
    monkeypatch.setattr(catalogue, "OFFER_SECONDS", -1.0)
    api.admin().get("/api/backends")
    assert upgrade_state.read_state().requested == asked, "nothing has changed"
    gallery(minilm="2.0.0")
    for _ in range(3):
        api.admin().get("/api/backends")
    assert upgrade_state.read_state().requested == asked + 1


@pytest.mark.rule("O101", "R6.35")
def test_a_list_that_changed_asks_for_a_check_and_one_that_did_not_does_not() -> None:
    node = api.make_node("a")
    before = upgrade_state.read_state()
    keep(node, minilm())
    after = upgrade_state.read_state()
    assert (after.revision, after.requested) == (before.revision + 1, before.requested + 1)
    keep(node, minilm())
    assert upgrade_state.read_state() == after


@pytest.mark.rule("R6.35", "O101", "C47")
def test_the_schedule_asks_and_a_controller_checks(gallery: Write) -> None:
    """Every six hours; the task itself only asks, so it is short."""
    (schedule,) = [one for one in SCHEDULES if one.function == "nodes.reconcilers.tasks.check_upgrades"]
    assert schedule.cron.split()[1] == "*/6"
    gallery(minilm="2")
    tasks.check_upgrades()
    assert upgrade_state.read_state().checking
    assert check()
    assert not upgrade_state.read_state().checking


@pytest.mark.rule("R6.35", "O101", "C47")
async def test_a_controller_checks_after_its_start_and_when_it_is_told(gallery: Write) -> None:
    """C47, with ten seconds made short."""
    assert upgrade_check.FIRST_CHECK_DELAY == 10.0
    gallery(minilm="2")
    checker = upgrade_check.UpgradeChecker("here:1", first_after=0.0, rest=0.0)
    running = asyncio.create_task(checker.run())

    async def answered(least: int) -> None:
        async with asyncio.timeout(60):
            while (await in_thread(upgrade_state.read_state)).completed < least:
                checker.wake()
                await asyncio.sleep(0.05)

    await answered(1)
    await in_thread(upgrade_state.request_check)
    await answered(2)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_a_defect_ends_the_check_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not stay due, and the page does not say that all is well."""

    async def broken() -> Any:
        raise RuntimeError("a defect")

    monkeypatch.setattr(upgrade_check, "read_offers", broken)
    await in_thread(upgrade_state.request_check)
    assert await upgrade_check.UpgradeChecker("here:1").check()
    standing = await in_thread(upgrade_state.read_state)
    assert not standing.checking
    assert "internal error" in standing.problems[""]


@pytest.mark.rule("R6.31", "R6.32", "http-4.3", "R1.110")
def test_the_installed_list_of_the_cluster(gallery: Write) -> None:
    """Keys as in the recording; what a pending node claims to have is not there."""
    gallery(minilm="2.0.0")
    first = api.make_node("a")
    second = api.make_node("b", secret=api.OTHER_SECRET)
    keep(first, minilm(uri="/srv/minilm", gallery_url="file:///srv/index.yaml"))
    keep(second, minilm(), m.InstalledBackend("sys", is_system=True))
    pending = api.make_node("c", secret="c" * 64, approved=False)
    NodeBackend.objects.create(node=pending, name="hidden")
    check()
    found, system = answer("/backends")
    place = {"node_status": "healthy", "version": "1.0.0", "installed_at": "2026-08-20T09:12:44Z"}
    assert found == {
        "Name": "minilm",
        "RunFile": "",
        "IsMeta": False,
        "IsSystem": False,
        "Metadata": {
            "name": "minilm",
            "gallery_url": "file:///srv/index.yaml",
            "installed_at": "2026-08-20T09:12:44Z",
            "version": "1.0.0",
            "uri": "/srv/minilm",
        },
        "upgrade_available": True,
        "available_version": "2.0.0",
        "nodes": [
            {"node_id": str(first.id), "node_name": "a", "uri": "/srv/minilm", **place},
            {"node_id": str(second.id), "node_name": "b", **place},
        ],
    }
    assert (system["Name"], system["IsSystem"], system["Metadata"]) == ("sys", True, None)
    for kind in (DELETE, INSTALL):
        ask(kind, first, second, backend="minilm")
    assert [one.get("pending_operations") for one in answer("/backends")] == [4, None]


@pytest.mark.rule("http-4.3", "R6.31")
def test_lists_cost_the_same_for_500_nodes(gallery: Write) -> None:
    """Queries, for the list and for the upgrades."""
    gallery(minilm="2.0.0")
    counts = []
    for total in (2, 500):
        known = BackendNode.objects.count()
        made = BackendNode.objects.bulk_create(
            BackendNode(
                name=f"n{number}", name_key=f"n{number}", address="10.0.0.1:1", approved_at=clock.now()
            )
            for number in range(known, total)
        )
        NodeBackend.objects.bulk_create(
            NodeBackend(node=node, name=name, version="1.0.0") for node in made for name in ("minilm", "echo")
        )
        upgrade_state.request_check()
        assert check()
        with CaptureQueriesContext(connection) as queries:
            assert len(api.admin().get("/backends").json()[1]["nodes"]) == total
            assert set(api.admin().get("/api/backends/upgrades").json()) == {"minilm"}
        counts.append(len(queries))
    assert counts[0] == counts[1]
