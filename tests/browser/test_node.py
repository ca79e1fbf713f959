"""The page of one node: its parts, values set and handed back, labels, a drain that counts down, removal."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from playwright.sync_api import Route, expect

from localai_cluster.kit import clock
from tests.browser import checks, week
from tests.browser.conftest import Opener
from tests.browser.fleet import Cookies, Fleet
from tests.browser.screen import Screen
from tests.conftest import eventually

_REPLICA = """
WITH process AS (
    INSERT INTO web_processes (id, host, pid, started_at, seen_at, hearing_since, version)
    VALUES (gen_random_uuid(), 'a-test', 1, %(now)s, %(now)s + interval '1 day', %(now)s, '') RETURNING id
), replica AS (
    INSERT INTO node_models (id, node_id, model_name, replica_index, address, phase, in_flight, last_used,
      backend_type, model_options, config_revision, effective_options_hash, created_at, updated_at)
    VALUES (gen_random_uuid(), %(node)s, 'busy-model', 0, '127.0.0.1:1', 'serving', 3, %(now)s,
      %(backend)s, '{}', '', '', %(now)s, %(now)s) RETURNING id
), uses AS (
    INSERT INTO replica_uses (process_id, replica_id, count)
    SELECT process.id, replica.id, 3 FROM process, replica
)
SELECT replica.id, process.id FROM replica, process
"""
"""A replica with three requests in flight, and the web process that carries them: a count that no process
carries is put right by the next recount."""
_RUNNING = """
WITH uses AS (UPDATE replica_uses SET count = %s WHERE replica_id = %s RETURNING count, replica_id)
UPDATE node_models SET in_flight = uses.count FROM uses WHERE id = uses.replica_id RETURNING id
"""


_COLOURED = """(canvases) => canvases.map((canvas) => {
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  let coloured = 0;
  for (let at = 0; at < data.length; at += 4) {
    const [least, most] = [Math.min(...data.slice(at, at + 3)), Math.max(...data.slice(at, at + 3))];
    coloured += data[at + 3] > 128 && most - least > 60;
  }
  return coloured;
})"""
"""How many pixels of each canvas are neither text nor grid."""


_TOP = "(element) => element.getBoundingClientRect().top + window.scrollY"


@contextmanager
def busy_replica(fleet: Fleet, node: str, backend: str = "echo") -> Iterator[str]:
    """The id of a replica of `busy-model` with three requests in flight; it is gone afterwards."""
    planted = fleet.cluster.rows(_REPLICA, node=fleet.id(node), backend=backend, now=clock.now())
    ((replica, process),) = planted
    try:
        yield str(replica)
    finally:
        fleet.cluster.rows("DELETE FROM node_models WHERE id = %s RETURNING id", replica)
        fleet.cluster.rows("DELETE FROM replica_uses WHERE process_id = %s RETURNING id", process)
        fleet.cluster.rows("DELETE FROM web_processes WHERE id = %s RETURNING id", process)


@pytest.fixture
def leaver(fleet: Fleet) -> str:
    """A registered worker that is not there any more."""
    process = fleet.worker("leaver")
    process.kill()
    return "leaver"


@pytest.fixture
def busy(fleet: Fleet) -> Iterator[str]:
    """The id of a replica on `fine` with three requests in flight."""
    with busy_replica(fleet, "fine") as replica:
        yield replica
    fleet.resume_all()


@pytest.fixture
def charted(settled: Fleet) -> Iterator[str]:
    """The id of `slow`, which has eight GPUs and a week of figures."""
    node = settled.id("slow")
    week.plant(settled.cluster, node, clock.now())
    yield node
    settled.cluster.execute("DELETE FROM figure_days WHERE subject = %s", f"node/{node}")
    settled.cluster.execute(
        "UPDATE backend_nodes SET gpus = '[]', total_vram = 0, available_vram = 0, revision = revision + 1"
        " WHERE id = %s",
        node,
    )


@pytest.mark.rule("UW13", "UW14", "UI-4.16", "UI-4.17", "UI-9.7", "UI-9.10")
@pytest.mark.parametrize("narrow", [False, True], ids=["desktop", "phone"])
def test_gpus_and_their_charts_come_first(
    window: Opener, settled: Fleet, session: Cookies, charted: str, narrow: bool
) -> None:
    """A week of eight GPUs, read by keyboard and zoomed; nothing overlaps, and the failing one is named."""
    page = window(settled.webs[0].url, session, narrow=narrow).go(f"/app/nodes/{charted}?range=week")
    gpus = page.get_by_role("region", name="GPUs")
    expect(gpus.get_by_role("listitem").nth(5)).to_contain_text("3 uncorrected memory errors")
    expect(gpus).to_contain_text("80% busy, 60 °C, 500 of 700 W")
    charts = page.get_by_role("region", name="Over time")
    expect(page.get_by_role("button", name="Week")).to_have_attribute("aria-pressed", "true")
    busy = charts.get_by_role("slider", name="GPU busy")
    expect(busy).to_have_attribute("aria-valuetext", re.compile("GPU 0 .*GPU 7 "))
    expect(charts.get_by_role("slider")).to_have_count(6)
    canvases = charts.locator("canvas")
    # A flat line of one series has about a pixel for each column, of which a phone has fewer than 300.
    fewest = 100 if narrow else 300
    eventually(lambda: min(canvases.evaluate_all(_COLOURED)) > fewest, what="every chart has its lines")
    busy.press("Home")
    busy.press("PageUp")
    expect(busy).to_have_attribute("aria-valuetext", re.compile(r"GPU 0 \d+%"))
    assert (checks.sideways(page), checks.violations(page)) == ([], [])
    busy.press("+")
    expect(page.get_by_role("button", name="Reset zoom")).to_be_visible()
    hardware = page.get_by_role("region", name="Hardware")
    expect(hardware).to_contain_text(week.DRIVER)
    expect(hardware).to_contain_text("thread")
    tops = page.evaluate("() => [...document.querySelectorAll('main h2')].map((title) => title.textContent)")
    assert tops == ["GPUs", "Memory", "Over time", "Conditions", "Hardware"]


@pytest.mark.rule("UI-4.16")
def test_charts_keep_their_places_while_their_figures_load(
    window: Opener, settled: Fleet, session: Cookies, charted: str
) -> None:
    """What stands below them does not move when the figures come."""
    page = window(settled.webs[0].url, session).page
    held: list[Route] = []
    page.route("**/api/figures?*", lambda route: held.append(route))
    page.goto(f"{settled.webs[0].url}/app/nodes/{charted}?range=week")
    hardware = page.get_by_role("region", name="Hardware")
    expect(hardware).to_contain_text(week.DRIVER)
    expect(page.get_by_role("region", name="GPUs")).to_contain_text("80% busy, 60 °C, 500 of 700 W")
    charts = page.get_by_role("region", name="Over time")
    expect(charts).to_contain_text("Loading the figures over time")
    before = hardware.evaluate(_TOP)
    page.route("**/api/figures?*", lambda route: route.continue_())
    for route in held:
        route.continue_()
    expect(charts.get_by_role("slider")).to_have_count(6)
    assert hardware.evaluate(_TOP) == before


@pytest.mark.rule("UI-4.1")
def test_parts_have_addresses_and_keep_the_focus(screen: Screen, fleet: Fleet) -> None:
    page = screen.go(f"/app/nodes/{fleet.id('fine')}")
    parts = page.get_by_role("navigation", name="Sections of fine").get_by_role("link")
    for name, region in (("Replicas", "Replicas"), ("Timeline", "Timeline"), ("Settings", "Labels")):
        link = parts.filter(has_text=name)
        link.press("Enter")
        expect(page).to_have_url(re.compile(f"/{name.lower()}$"))
        expect(link).to_be_focused()
        expect(page.get_by_role("region", name=region)).to_be_visible()
    page.go_back()
    expect(page.get_by_role("region", name="Timeline")).to_be_visible()
    page.reload()
    expect(page.get_by_role("region", name="Timeline")).to_be_visible()


@pytest.mark.rule("UI-4.3", "UI-4.5", "UW6")
def test_a_value_is_set_in_place_and_handed_back(screen: Screen, fleet: Fleet) -> None:
    page = screen.go(f"/app/nodes/{fleet.id('fine')}/settings")
    panel = page.get_by_role("region", name="Capacity")
    panel.get_by_role("button", name="Edit maximum replicas per model").click()
    box = panel.get_by_role("textbox", name="maximum replicas per model")
    box.fill("7")
    box.press("Enter")
    expect(box).to_have_count(0)
    expect(panel.get_by_text("override", exact=True)).to_be_visible()
    expect(panel).to_contain_text("admin")
    assert fleet.node("fine")["max_replicas_per_model"] == 7
    panel.get_by_role("button", name="Reset Maximum replicas per model to worker default").click()
    expect(panel.get_by_text("override", exact=True)).to_have_count(0)
    assert not fleet.node("fine")["max_replicas_per_model_manually_set"]


@pytest.mark.rule("UI-4.3", "UI-4.6")
def test_a_bad_value_is_refused_at_its_field_and_escape_cancels(screen: Screen, fleet: Fleet) -> None:
    """A node without VRAM has the field as long as a budget is set."""
    budget = (
        "UPDATE backend_nodes SET vram_budget = %s, revision = revision + 1 WHERE name = 'fine' RETURNING id"
    )
    fleet.cluster.rows(budget, "80%")
    page = screen.go(f"/app/nodes/{fleet.id('fine')}/settings")
    panel = page.get_by_role("region", name="Capacity")
    panel.get_by_role("button", name="Edit VRAM budget").click()
    box = panel.get_by_role("textbox", name="VRAM budget")
    box.fill("plenty")
    box.press("Enter")
    expect(box).to_have_attribute("aria-invalid", "true")
    expect(box).to_have_value("plenty")
    box.press("Escape")
    expect(box).to_have_count(0)
    expect(panel.get_by_role("button", name="Edit VRAM budget")).to_be_focused()
    fleet.cluster.rows(budget, "")
    expect(panel.get_by_text("there is nothing to limit")).to_be_visible()


@pytest.mark.rule("UI-4.4")
def test_a_cap_is_a_whole_number_from_one(screen: Screen, fleet: Fleet) -> None:
    page = screen.go(f"/app/nodes/{fleet.id('fine')}/settings")
    panel = page.get_by_role("region", name="Capacity")
    panel.get_by_role("button", name="Edit maximum replicas per model").click()
    box = panel.get_by_role("textbox", name="maximum replicas per model")
    for wrong in ("0", "1.5", "many"):
        box.fill(wrong)
        box.press("Enter")
        expect(panel.get_by_role("alert")).to_be_visible()
        expect(box).to_have_value(wrong)


@pytest.mark.rule("UI-4.13", "UI-4.18")
def test_labels_are_added_by_enter_and_removed(screen: Screen, fleet: Fleet) -> None:
    page = screen.go(f"/app/nodes/{fleet.id('slow')}/settings")
    panel = page.get_by_role("region", name="Labels")
    expect(panel).not_to_contain_text("node.replica-slots")
    panel.get_by_label("Key").fill("rack")
    panel.get_by_label("Value").fill("b7")
    panel.get_by_label("Value").press("Enter")
    expect(panel.get_by_text("rack=b7")).to_be_visible()
    assert fleet.node("slow")["labels"]["rack"] == "b7"
    label = panel.get_by_role("button", name=re.compile("^Remove label rack=b7"))
    label.click()
    panel.get_by_role("button", name="Undo: restore label rack=b7").click()
    expect(panel.get_by_role("button", name="Undo")).to_have_count(0)
    label.click()
    expect(label).to_have_count(0)


@pytest.mark.rule("UI-4.1", "UW16")
def test_a_drain_counts_down_to_safe(screen: Screen, fleet: Fleet, busy: str) -> None:
    page = screen.go(f"/app/nodes/{fleet.id('fine')}")
    page.get_by_role("button", name="Drain…").click()
    dialog = page.get_by_role("dialog", name="Drain fine")
    dialog.get_by_label("Reason").fill("power work")
    dialog.get_by_role("button", name="Drain", exact=True).click()
    expect(page.get_by_text("3 requests in flight, 1 replica left")).to_be_visible()
    fleet.cluster.rows(_RUNNING, 1, busy)
    expect(page.get_by_text("1 request in flight, 1 replica left")).to_be_visible()
    fleet.cluster.rows(_RUNNING, 0, busy)
    expect(page.get_by_text("Safe to power off", exact=True)).to_be_visible(timeout=120_000)
    page.get_by_role("button", name="Resume…").click()
    page.get_by_role("dialog").get_by_role("button", name="Resume", exact=True).click()
    expect(page.get_by_text("Safe to power off", exact=True)).to_have_count(0)


@pytest.mark.rule("UI-4.9")
def test_a_replica_is_unloaded_from_its_row_and_shown_while_it_leaves(
    screen: Screen, fleet: Fleet, busy: str
) -> None:
    page = screen.go(f"/app/nodes/{fleet.id('fine')}/replicas")
    panel = page.get_by_role("region", name="Replicas")
    row = panel.get_by_role("row").filter(has=page.get_by_role("rowheader", name="busy-model"))
    row.get_by_role("button", name="Unload busy-model, replica 0").press("Enter")
    question = page.get_by_role("alertdialog", name="Unload busy-model, replica 0, from fine")
    expect(question).to_contain_text("3 requests in flight may finish before it stops")
    expect(question.get_by_role("button", name="Cancel")).to_be_focused()
    page.keyboard.press("Escape")
    expect(question).to_have_count(0)
    expect(row).to_contain_text("loaded")
    row.get_by_role("button", name="Unload busy-model, replica 0").click()
    question.get_by_role("button", name="Unload", exact=True).click()
    expect(row).to_contain_text("unloading")
    expect(row).to_contain_text("Waiting for 3 requests")
    expect(row.get_by_role("button", name="Unload busy-model")).to_have_attribute("aria-disabled", "true")
    fleet.cluster.rows(_RUNNING, 1, busy)
    expect(row).to_contain_text("Waiting for 1 request")
    fleet.cluster.rows(_RUNNING, 0, busy)
    expect(row).to_have_count(0)


@pytest.fixture
def renewed(settled: Fleet) -> Iterator[Fleet]:
    """The cluster with the backend `renewed` on `slow`, and a busy replica that runs on it."""
    job = settled.install("slow", "renewed")
    eventually(lambda: settled.ended(job), what="renewed is installed")
    with busy_replica(settled, "slow", "renewed"):
        yield settled


@pytest.mark.rule("UI-4.10", "UI-4.11", "A39", "A52")
def test_a_backend_is_upgraded_and_deleted_from_its_row(screen: Screen, renewed: Fleet) -> None:
    page = screen.go(f"/app/nodes/{renewed.id('slow')}/backends")
    panel = page.get_by_role("region", name="Installed backends")
    row = panel.get_by_role("row").filter(has=page.get_by_role("rowheader", name="renewed"))
    row.get_by_role("button", name="Upgrade renewed").click()
    question = page.get_by_role("alertdialog", name="Upgrade backend renewed on slow")
    expect(question).to_contain_text("1 replica with 3 requests in flight stops immediately")
    expect(question).to_contain_text("busy-model, replica 0")
    question.get_by_role("button", name="Upgrade", exact=True).press("Enter")
    expect(row.get_by_role("progressbar", name="Upgrading backend renewed")).to_be_visible()
    expect(row.get_by_role("button", name="Delete renewed")).to_have_attribute("aria-disabled", "true")
    expect(row.get_by_role("progressbar")).to_have_count(0)
    parts = page.get_by_role("navigation", name="Sections of slow").get_by_role("link")
    parts.filter(has_text="Replicas").click()
    expect(page.get_by_role("region", name="Replicas")).not_to_contain_text("busy-model")
    parts.filter(has_text="Backends").click()

    row.get_by_role("button", name="Delete renewed").press("Enter")
    question = page.get_by_role("alertdialog", name="Delete backend renewed on slow")
    expect(question.get_by_role("button", name="Cancel")).to_be_focused()
    page.keyboard.press("Escape")
    expect(question).to_have_count(0)
    expect(row.get_by_role("button", name="Delete renewed")).to_be_focused()
    page.keyboard.press("Enter")
    question.get_by_role("button", name="Delete", exact=True).click()
    # While the question is open, nothing behind it has a role.
    expect(question).to_have_count(0)
    expect(row).to_have_count(0)
    left = renewed.get(f"/api/nodes/{renewed.id('slow')}/backends").json()
    assert "renewed" not in [backend["name"] for backend in left]


@pytest.mark.rule("UI-4.1", "UW19")
def test_a_node_is_deregistered_behind_its_typed_name(screen: Screen, fleet: Fleet, leaver: str) -> None:
    page = screen.go(f"/app/nodes/{fleet.id(leaver)}")
    page.get_by_role("button", name=f"More actions for {leaver}").click()
    page.get_by_role("menuitem", name="Remove…").click()
    question = page.get_by_role("alertdialog")
    press = question.get_by_role("button", name="Remove")
    expect(press).to_have_attribute("aria-disabled", "true")
    question.get_by_role("textbox").fill(leaver)
    press.click()
    expect(page).to_have_url(re.compile("/app/nodes$"))
    assert fleet.cluster.node(fleet.webs[0], leaver) is None


@pytest.mark.rule("UI-4.14")
def test_an_unknown_node_is_said_to_be_unknown(screen: Screen) -> None:
    screen.expect(r"status of 404")
    page = screen.go("/app/nodes/00000000-0000-4000-8000-000000000000")
    expect(page.get_by_role("heading", name="Node not found")).to_be_visible()
    page.get_by_role("link", name="Show all nodes").click()
    expect(page).to_have_url(re.compile("/app/nodes$"))
