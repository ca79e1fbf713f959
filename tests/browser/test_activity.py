"""Activity on simulated workers that are slow, refuse or are silent: parts, cancel, retry, inbox, history."""

import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from tests.browser import checks
from tests.browser.conftest import Opener
from tests.browser.crew import crew
from tests.browser.fleet import Cookies, Fleet, running_fleet, sign_in
from tests.browser.screen import Screen
from tests.conftest import eventually
from tests.support.simulator import Act, Script, SimulatedWorker

NAMES = ("fine", "slow", "refusing", "silent", "fifth")
Workers = dict[str, SimulatedWorker]


@pytest.fixture(scope="module")
def place(chromium: Browser) -> Iterator[tuple[Fleet, Workers]]:
    """A cluster whose time limit of an install is short, and its workers."""
    limited = running_fleet(webs=1, workers=(), LOCALAI_NATS_BACKEND_INSTALL_TIMEOUT="4s")
    with limited as running, crew(running, NAMES) as workers:
        yield running, workers


@pytest.fixture
def acting(place: tuple[Fleet, Workers]) -> Iterator[Workers]:
    """The workers, each doing at once what it is asked, and nothing under way before and after."""
    running, workers = place
    yield workers
    for worker in workers.values():
        worker.machine.script = Script()
    for operation in running.get("/api/operations").json()["operations"]:
        if operation["cancellable"]:
            running.post(f"/api/operations/{operation['jobID']}/cancel")
    running.settle()


@pytest.fixture(scope="module")
def admin(place: tuple[Fleet, Workers]) -> Cookies:
    """The session that all tests of this file share."""
    return sign_in(place[0].webs[0].url)


@pytest.fixture
def view(window: Opener, place: tuple[Fleet, Workers], admin: Cookies) -> Screen:
    """A wide, light window of a signed-in admin."""
    return window(place[0].webs[0].url, admin)


def everywhere(cluster: Fleet, backend: str, *nodes: str) -> str:
    """Asks for an install on these nodes as one operation, on all if there are none; its id."""
    body = {"nodes": [cluster.id(name) for name in nodes]} if nodes else {}
    reply = cluster.post(f"/api/backends/install/{backend}", body)
    assert reply.status_code == 200, reply.text
    return str(reply.json()["jobID"])


def live(screen: Screen, path: str) -> Page:
    """The page, once it is connected."""
    page = screen.go(path)
    expect(page.get_by_test_id("connection")).to_have_text("Live")
    return page


def part(page: Page, backend: str, node: str) -> Locator:
    """The line of a node in the table of parts."""
    return page.get_by_role("list", name=f"Nodes of {backend}").get_by_role("listitem").filter(has_text=node)


@pytest.mark.rule("O64", "UW24", "UW25", "E1", "E26", "O70")
def test_an_operation_on_several_nodes_says_of_each_how_it_is(
    view: Screen, place: tuple[Fleet, Workers], acting: Workers
) -> None:
    cluster, _ = place
    acting["slow"].machine.script = Script({"backend.install": Act(seconds=3, ticks=10)})
    acting["refusing"].machine.script = Script({"backend.install": Act(refuse="no space left on device")})
    acting["silent"].machine.script = Script({"backend.install": Act(seconds=1, silent=True)})
    page = live(view, "/app/activity")
    everywhere(cluster, "striped", "fine", "slow", "refusing", "silent")
    expect(part(page, "striped", "fine")).to_contain_text("done")
    expect(part(page, "striped", "refusing")).to_contain_text("no space left on device")
    bar = part(page, "striped", "slow").get_by_role("progressbar", name="striped on slow")
    expect(bar).to_have_attribute("aria-valuemax", "100")
    # The time limit of the silent one passes: it is amber, because its worker may still be at it.
    expect(part(page, "striped", "silent")).to_contain_text("running on the worker")
    expect(part(page, "striped", "silent")).to_contain_text("time limit passed")


@pytest.mark.rule("E1", "O54", "O57", "A67", "UW27", "E22")
def test_a_cancel_reaches_the_worker_and_says_so(
    view: Screen, place: tuple[Fleet, Workers], acting: Workers
) -> None:
    cluster, _ = place
    acting["slow"].machine.script = Script({"backend.install": Act(seconds=60, ticks=200)})
    page = live(view, "/app/activity")
    job = everywhere(cluster, "calm", "slow", "fine")
    expect(part(page, "calm", "fine")).to_contain_text("done")
    page.get_by_role("button", name=re.compile("^Cancel: Installing backend calm")).click()
    question = page.get_by_role("alertdialog")
    expect(question).to_contain_text("slow: the worker stops, removes its temporary files")
    expect(question).to_contain_text("1 node done: they stay as they are.")
    expect(question.get_by_role("button", name="Keep it")).to_be_focused()
    question.get_by_role("button", name="Cancel operation").click()
    expect(question).to_have_count(0)
    expect(page.get_by_role("region", name="Recently finished")).to_contain_text("cancelled")
    eventually(lambda: acting["slow"].count("backend.cancel") == 1, what="the worker is asked to stop")
    page = live(view, "/app/activity/history?backend=calm")
    page.get_by_role("button", name=re.compile("calm")).click()
    line = page.get_by_role("list", name="Nodes of calm").get_by_role("listitem").filter(has_text="slow")
    expect(line).to_contain_text("the worker stopped")
    assert cluster.get(f"/api/backends/job/{job}").json()["state"] == "cancelled"


@pytest.mark.rule("E3", "E7", "E28", "O52", "UW25", "UW31")
def test_the_inbox_retries_what_failed_and_dismisses_with_a_comment(
    view: Screen, place: tuple[Fleet, Workers], acting: Workers
) -> None:
    cluster, _ = place
    for name in ("refusing", "fifth"):
        acting[name].machine.script = Script({"backend.install": [Act(refuse="no image"), Act()]})
    before = {name: worker.count("backend.install") for name, worker in acting.items()}
    page = live(view, "/app/activity/inbox")
    everywhere(cluster, "quick", "fine", "refusing", "fifth")
    expect(page.get_by_role("link", name=re.compile("^Inbox.*1 failure$"))).to_be_visible()
    expect(part(page, "quick", "refusing")).to_contain_text("no image")
    page.get_by_role(
        "button", name="Retry all failed (2): Could not install backend quick on 2 nodes"
    ).click()
    expect(page.get_by_text("No failures").first).to_be_visible()
    eventually(lambda: not cluster.get("/api/operations").json()["operations"], what="the retry has ended")
    sent = {name: worker.count("backend.install") - before[name] for name, worker in acting.items()}
    assert sent == {"fine": 1, "slow": 0, "refusing": 2, "silent": 0, "fifth": 2}
    acting["fifth"].machine.script = Script({"backend.install": Act(refuse="image is broken")})
    for backend in ("present", "doomed"):
        everywhere(cluster, backend, "fifth")
    for backend in ("present", "doomed"):
        page.get_by_role("checkbox", name=f"Select: Could not install backend {backend} on fifth").check()
    page.get_by_role("button", name="Dismiss selected (2)…").click()
    page.get_by_label("Comment (optional)").fill("image is rebuilt upstream")
    page.get_by_role("dialog").get_by_role("button", name="Dismiss", exact=True).click()
    expect(page.get_by_text("No failures").first).to_be_visible()
    page = live(view, "/app/activity/history?outcome=failed&backend=doomed")
    page.get_by_role("button", name=re.compile("doomed")).click()
    expect(page.get_by_text("image is rebuilt upstream")).to_be_visible()


@pytest.mark.rule("UW25", "O52")
def test_a_failure_of_which_one_part_is_tried_again_stays_for_the_other(
    view: Screen, place: tuple[Fleet, Workers], acting: Workers
) -> None:
    cluster, _ = place
    for name in ("refusing", "fifth"):
        acting[name].machine.script = Script({"backend.install": [Act(refuse="no image"), Act()]})
    before = acting["fifth"].count("backend.install")
    page = live(view, "/app/activity/inbox")
    everywhere(cluster, "cutting", "refusing", "fifth")
    page.get_by_role("button", name="Retry cutting on refusing").click()
    eventually(lambda: acting["refusing"].machine.backends.get("cutting") is not None, what="it is installed")
    expect(part(page, "cutting", "fifth")).to_contain_text("no image")
    assert [one["name"] for one in cluster.get("/api/operations/inbox").json()["operations"]] == ["cutting"]
    assert acting["fifth"].count("backend.install") == before + 1


@pytest.mark.rule("UW26")
def test_a_failed_canary_asks_whether_to_go_on(
    view: Screen, place: tuple[Fleet, Workers], acting: Workers
) -> None:
    """The card names the wave and who waits; after *Continue* the next wave opens, *Stop* ends the rest."""
    cluster, _ = place
    names = ("fine", "refusing", "fifth")
    job = everywhere(cluster, "batch", *names)
    eventually(lambda: cluster.ended(job), what="it is installed")
    before = {name: acting[name].count("backend.upgrade") for name in names}
    for name in names:
        acting[name].machine.script = Script({"backend.upgrade": Act(refuse="no image")})
    page = live(view, "/app/activity")
    body = {"nodes": [cluster.id(name) for name in names], "waves": {}}
    reply = cluster.post("/api/backends/upgrade/batch", body)
    assert reply.status_code == 200, reply.text
    waves = page.get_by_role("region", name="Waves of batch")
    expect(waves).to_contain_text("Wave 1 of 3, the canary")
    expect(waves).to_contain_text("Wave 1 of 3 failed: 2 nodes wait for your choice.")
    waves.get_by_role("button", name="Continue upgrading batch…").click()
    page.get_by_role("alertdialog").get_by_role("button", name="Continue").click()
    expect(waves).to_contain_text("Wave 2 of 3 failed: 1 node waits for your choice.")
    waves.get_by_role("button", name="Stop upgrading batch…").click()
    page.get_by_role("alertdialog").get_by_role("button", name="Stop").click()
    expect(page.get_by_role("alertdialog")).to_have_count(0)
    expect(waves).to_have_count(0)
    sent = sorted(acting[name].count("backend.upgrade") - before[name] for name in names)
    assert sent == [0, 1, 1]


@pytest.mark.rule("UW24", "UW25", "UW32")
def test_one_operation_has_a_page_that_holds_after_its_end(
    view: Screen, place: tuple[Fleet, Workers], acting: Workers
) -> None:
    """Live while it runs, one node can be cancelled there; a reload after the end finds the record."""
    cluster, _ = place
    acting["slow"].machine.script = Script({"backend.install": Act(seconds=3600, ticks=10)})
    acting["fifth"].machine.script = Script({"backend.install": Act(refuse="no space left")})
    page = live(view, "/app/activity")
    job = everywhere(cluster, "closing", "slow", "fifth")
    page.get_by_role("link", name="Installing backend closing").click()
    expect(page).to_have_url(re.compile(f"/app/operations/{job}$"))
    table = page.get_by_role("list", name="Nodes of closing").first
    expect(table.get_by_role("listitem").filter(has_text="fifth")).to_contain_text("no space left")
    table.get_by_role("button", name="Cancel closing on slow").click()
    question = page.get_by_role("alertdialog")
    expect(question).to_contain_text("The other nodes continue.")
    question.get_by_role("button", name="Cancel on this node").click()
    expect(question).to_have_count(0)
    heading = page.get_by_role("heading", level=1)
    expect(heading).to_contain_text("Could not install backend closing")
    eventually(lambda: acting["slow"].count("backend.cancel") >= 1, what="the worker is asked to stop")
    assert cluster.post(f"/api/operations/{job}/dismiss", {"comment": "known"}).is_success
    page = live(view, f"/app/operations/{job}")
    expect(page.get_by_role("region", name="Request")).to_contain_text("127.0.0.1")
    changes = page.get_by_role("region", name="Changes by people")
    for did in ("asked", "cancelled on one node: on slow", "dismissed: known"):
        expect(changes).to_contain_text(did)
    expect(page.get_by_role("region", name="Timeline")).to_contain_text("the worker")
    assert checks.violations(page) == []


@pytest.mark.rule("UW29", "UW32", "E10", "E29", "E14", "O98")
def test_history_is_filtered_in_the_address_paged_and_cleared(
    view: Screen, place: tuple[Fleet, Workers], acting: Workers
) -> None:
    cluster, _ = place
    page = live(view, "/app/activity/history?outcome=completed")
    everywhere(cluster, "rolling", "fine")
    line = page.get_by_role("button", name=re.compile("rolling"))
    # It comes by itself when it ends.
    expect(line).to_contain_text("installed")
    line.click()
    expect(page.get_by_text("Request ID")).to_be_visible()
    expect(page.get_by_text("127.0.0.1")).to_be_visible()
    expect(part(page, "rolling", "fine")).to_contain_text("ran")
    checks.choose(page, "Kind", "Backend removal")
    expect(page).to_have_url(re.compile("kind=backend_delete"))
    expect(page.get_by_text("No matching operations")).to_be_visible()
    page.go_back()
    page.go_forward()
    page.get_by_role("button", name="Clear history…").click()
    question = page.get_by_role("alertdialog")
    question.get_by_role("textbox").fill("clear")
    question.get_by_role("button", name="Clear history").click()
    expect(question).to_have_count(0)
    page = live(view, "/app/activity/history")
    expect(page.get_by_text("No history")).to_be_visible()


@pytest.mark.rule("UI-9.7", "UI-9.10")
@pytest.mark.parametrize("narrow", [False, True], ids=["wide", "phone"])
@pytest.mark.parametrize("which", ["", "/inbox", "/history"])
def test_axe_finds_nothing_serious(
    window: Opener, place: tuple[Fleet, Workers], acting: Workers, admin: Cookies, which: str, narrow: bool
) -> None:
    cluster, _ = place
    acting["fifth"].machine.script = Script({"backend.install": Act(refuse="E" * 3000)})
    job = everywhere(cluster, "renewed", "fine", "fifth")
    eventually(lambda: cluster.ended(job), what="it has failed")
    if which == "/history":
        assert cluster.post(f"/api/operations/{job}/dismiss", {"comment": "known"}).is_success
    page = live(window(cluster.webs[0].url, admin, narrow=narrow), f"/app/activity{which}")
    if which == "/history":
        page.get_by_role("button", name=re.compile("renewed")).first.click()
        expect(page.get_by_text("Requested", exact=True)).to_be_visible()
    else:
        expect(page.get_by_text("renewed").first).to_be_visible()
    assert checks.sideways(page) == []
    assert checks.violations(page) == []
