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


def cancels(worker: SimulatedWorker, job: str) -> int:
    """Returns how often the worker was asked to stop this operation."""
    received = worker.machine.received
    return sum(one.verb == "backend.cancel" and one.body["op_id"] == job for one in received)


@pytest.mark.rule("O64", "UW24", "UW25", "E1", "E26", "O70")
def test_an_operation_on_several_nodes_says_of_each_how_it_is(
    view: Screen, place: tuple[Fleet, Workers], acting: Workers
) -> None:
    cluster, _ = place
    acting["slow"].machine.script = Script({"backend.install": Act(seconds=60, ticks=200)})
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
    expect(question).to_contain_text("1 node done: nothing is undone.")
    expect(question.get_by_role("button", name="Keep it")).to_be_focused()
    question.get_by_role("button", name="Cancel operation").click()
    expect(question).to_have_count(0)
    expect(page.get_by_role("region", name="Recently finished")).to_contain_text("cancelled")
    eventually(lambda: cancels(acting["slow"], job) == 1, what="the worker is requested to stop")
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
    page.get_by_role("button", name="Retry all failed (2): quick on 2 nodes").click()
    expect(page.get_by_text("No failures").first).to_be_visible()
    eventually(lambda: not cluster.get("/api/operations").json()["operations"], what="the retry has ended")
    sent = {name: worker.count("backend.install") - before[name] for name, worker in acting.items()}
    assert sent == {"fine": 1, "slow": 0, "refusing": 2, "silent": 0, "fifth": 2}
    acting["fifth"].machine.script = Script({"backend.install": Act(refuse="image is broken")})
    for backend in ("present", "doomed"):
        everywhere(cluster, backend, "fifth")
    # Two operations that failed for one cause are one card.
    page.get_by_role("checkbox", name="Select: Could not install backend in 2 operations").check()
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
    expect(page.get_by_role("heading", name="Could not install backend cutting on fifth")).to_be_visible()
    expect(page.get_by_role("list", name="Failures")).to_contain_text("no image")
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
    expect(waves).to_contain_text("Wave 1 of 3 failed: 2 nodes wait for your decision.")
    # The actions are in one row, and their texts say how they differ.
    texts = ["Continue with the next wave…", "Stop after this wave…", "Cancel now…"]
    proceed = page.get_by_role("button", name="Continue with the next wave: batch…")
    buttons = proceed.locator("xpath=..").get_by_role("button")
    expect(buttons).to_have_text(texts)
    assert len(set(buttons.evaluate_all("all => all.map((each) => each.offsetTop)"))) == 1
    proceed.click()
    page.get_by_role("alertdialog").get_by_role("button", name="Continue").click()
    expect(waves).to_contain_text("Wave 2 of 3 failed: 1 node waits for your decision.")
    page.get_by_role("button", name="Stop after this wave: batch…").click()
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
    eventually(lambda: cancels(acting["slow"], job) >= 1, what="the worker is requested to stop")
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


_FAILURES = """
from uuid import uuid4
from localai_cluster.kit import clock
from operations.models import Operation, OperationTarget
now = clock.now()
failed = {"kind": "backend_install", "status": "failed", "finished_at": now, "actor": "ann"}
for number in range(300):
    error = f"{number} MiB free on lone-{number}"
    one = Operation.objects.create(key=f"lone {number}", element="lone", error=error, **failed)
many = Operation.objects.create(key="many", element="many", by_parts=True, error="…", **failed)
OperationTarget.objects.bulk_create(
    OperationTarget(
        operation=many, node_id=uuid4(), node_name=f"gpu-{number}", status="error", finished_at=now,
        error=f"registry answered {403 if number < 290 else 500} for https://r.example/{uuid4()}",
    )
    for number in range(300)
)
"""


@pytest.mark.rule("UW25", "O52")
def test_300_equal_failures_are_one_card(view: Screen, place: tuple[Fleet, Workers], acting: Workers) -> None:
    """Of one operation, and of 300; each cause is opened, retried and dismissed on its own (P10)."""
    cluster, _ = place
    cluster.cluster.manage("shell", "--no-imports", "-c", _FAILURES)
    page = live(view, "/app/activity/inbox")
    failures = page.get_by_role("list", name="Failures")
    cards = failures.get_by_role("article")
    expect(cards).to_have_count(2)
    expect(failures).to_contain_text("Could not install backend lone in 300 operations")
    causes = page.get_by_role("list", name="Causes of the failure of many")
    toggle = causes.get_by_role("button", name="290 nodes: registry answered 403 for …")
    toggle.click()
    rows = causes.get_by_role("list", name="Nodes of many").get_by_role("listitem")
    expect(rows.first).to_contain_text("gpu-0")
    assert rows.count() < 50, "rows are virtual"
    assert page.evaluate("document.documentElement.scrollHeight") < 3000
    assert checks.violations(page) == []
    toggle.click()
    causes.get_by_role("button", name="Dismiss (10): registry answered 500 for …").click()
    expect(page.get_by_role("heading", name="Could not install backend many on 290 nodes")).to_be_visible()
    page.get_by_role("button", name=re.compile("^Dismiss many on 290 nodes")).click()
    page.get_by_role("dialog").get_by_role("button", name="Dismiss", exact=True).click()
    expect(cards).to_have_count(1)
    put_away = "UPDATE operations SET dismissed_at = finished_at WHERE element = 'lone' RETURNING id"
    assert len(cluster.cluster.rows(put_away)) == 300


@pytest.mark.rule("UW25")
def test_nodes_that_cannot_take_an_install_are_refused_by_name_and_the_others_go_on_in_waves(
    view: Screen, place: tuple[Fleet, Workers], acting: Workers
) -> None:
    cluster, _ = place
    acting["fine"].machine.script = Script({"backend.install": Act(seconds=3, ticks=5)})
    before = {name: worker.count("backend.install") for name, worker in acting.items()}
    view.expect("status of 409")
    page = live(view, "/app/backends")
    page.get_by_role("button", name="Install aged…").click()
    dialog = page.get_by_role("dialog", name="Install aged")
    for name in ("fine", "slow", "fifth"):
        dialog.get_by_role("checkbox", name=f"Select {name}", exact=True).check()
    dialog.get_by_text("All at once", exact=True).click()
    dialog.get_by_role("radio", name=re.compile("^In waves")).check()
    dialog.get_by_label("Nodes at a time").fill("50%")
    assert cluster.post(f"/api/nodes/{cluster.id('slow')}/drain").is_success
    try:
        dialog.get_by_role("button", name="Install on 3 nodes").click()
        expect(dialog.get_by_role("alert").first).to_contain_text("Nothing has started")
        row = dialog.get_by_role("row").filter(has=page.get_by_text("slow", exact=True))
        expect(row).to_contain_text("node slow is draining")
        assert {name: worker.count("backend.install") for name, worker in acting.items()} == before
        assert checks.violations(page) == []
        dialog.get_by_role("button", name="Install on 2 nodes").click()
        waiting = dialog.get_by_role("row").filter(has=page.get_by_text("fine", exact=True))
        expect(waiting.or_(dialog.get_by_text("waits for wave 2 of 2")).first).to_be_visible()
        expect(dialog.get_by_test_id("picker-tally")).to_contain_text("2 of 3 done, 1 failed")
    finally:
        assert cluster.post(f"/api/nodes/{cluster.id('slow')}/resume").is_success
    assert acting["slow"].count("backend.install") == before["slow"]
    (ended,) = cluster.get("/api/operations/history?backend=aged&limit=1").json()["operations"]
    assert (ended["waves"]["maxUnavailable"], ended["waves"]["count"]) == (1, 2)


@pytest.mark.rule("UW27")
def test_a_cancel_of_many_nodes_says_how_many_had_already_finished(
    view: Screen, place: tuple[Fleet, Workers], acting: Workers
) -> None:
    cluster, _ = place
    for name in ("slow", "silent", "refusing"):
        acting[name].machine.script = Script({"backend.install": Act(seconds=60, ticks=200)})
    page = live(view, "/app/activity")
    job = everywhere(cluster, "parted", *NAMES)
    expect(page.get_by_role("region", name="In progress")).to_contain_text("2 done")
    page.get_by_role("button", name=re.compile("^Cancel: Installing backend parted")).click()
    page.get_by_role("alertdialog").get_by_role("button", name="Cancel operation").click()
    ended = page.get_by_role("region", name="Recently finished")
    expect(ended).to_contain_text("3 cancelled, 2 had already finished")
    assert cluster.get(f"/api/backends/job/{job}").json()["state"] == "cancelled"


@pytest.mark.rule("UI-9.10")
def test_on_a_phone_history_shows_what_the_outcome_and_when(
    window: Opener, place: tuple[Fleet, Workers], acting: Workers, admin: Cookies
) -> None:
    """Nothing of them is cut, and the filters do not come first (P14)."""
    cluster, _ = place
    job = everywhere(cluster, "byhand", "fine")
    eventually(lambda: cluster.ended(job), what="it is installed")
    page = live(window(cluster.webs[0].url, admin, narrow=True), "/app/activity/history?backend=byhand")
    line = page.get_by_role("button", name=re.compile("byhand")).first
    for words in ("byhand", "installed", "ago"):
        expect(line).to_contain_text(words)
    cut = line.evaluate(
        "line => [...line.querySelectorAll('.name, .history-when')].filter((each) => each.offsetWidth > 0"
        " && each.scrollWidth > each.clientWidth + 1).map((each) => each.textContent)"
    )
    assert cut == []
    expect(line.locator(".ended-actor")).to_be_hidden()
    expect(page.get_by_text("Filters", exact=True)).to_be_visible()
    assert checks.sideways(page) == []


@pytest.mark.rule("UI-9.7", "UI-9.8", "UI-9.10", "E10")
@pytest.mark.parametrize("narrow", [False, True], ids=["wide", "phone"])
def test_a_day_is_chosen_from_the_calendar_by_keys(
    window: Opener, place: tuple[Fleet, Workers], admin: Cookies, narrow: bool
) -> None:
    """The time that the field has is kept, and the focus returns to the button."""
    cluster, _ = place
    at = "/app/activity/changes?from=2026-08-02T12:30:00.000Z"
    page = live(window(cluster.webs[0].url, admin, narrow=narrow), at)
    field = page.get_by_label("After", exact=True)
    expect(field).to_have_value(re.compile(r"^2026-08-0\d \d\d:\d\d$"))
    day, time = field.input_value().split(" ")
    button = page.get_by_role("button", name="After: choose a day")
    button.press("Enter")
    calendar = page.get_by_role("dialog", name="After: calendar")
    expect(calendar.get_by_role("button", name=re.compile("selected$"))).to_be_focused()
    assert checks.violations(page) == []
    assert checks.sideways(page) == []
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    expect(calendar).to_have_count(0)
    expect(field).to_have_value(f"2026-08-{int(day[8:]) + 7:02} {time}")
    expect(page).to_have_url(re.compile(r"from=2026-08-(08|09|10)"))
    expect(button).to_be_focused()
