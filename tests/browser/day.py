"""`make story ARGS=day`: plays docs/operators-day.md in a browser and takes its pictures.

Two dozen simulated workers, one web process and one controller. Each scene is what an operator does, by the
pages alone; what happens to the machines is the script's. Nothing is asserted but that a scene can go on.
"""

import re
import time
from collections.abc import Sequence

from playwright.sync_api import Locator, expect

from tests.browser.crew import crew
from tests.browser.fleet import Fleet
from tests.browser.story_teller import Teller
from tests.conftest import eventually
from tests.support.simulator import Act, Script, SimulatedWorker

GIBIBYTE = 1024**3
NAMES = tuple(f"rack-{number:02}" for number in range(1, 25))
FULL, WORN, AWAY = "rack-07", "rack-12", "rack-20"
FORBIDDEN = NAMES[2:6]
TIGHT = NAMES[8:10]
SLOW = Script({"backend.install": Act(seconds=60, ticks=200), "backend.upgrade": Act(seconds=4, ticks=20)})

Workers = dict[str, SimulatedWorker]


class Day(Teller):
    """The operator's browser, and the machines."""

    workers: Workers

    def equip(self) -> None:
        """Gives every machine a GPU, one of them a failing one, and fills a disk."""
        for number, worker in enumerate(self.workers.values()):
            failing = worker.name == WORN
            gpu = {
                "index": 0,
                "uuid": f"GPU-{number:04}",
                "name": "NVIDIA L4",
                "total_vram": 24 * GIBIBYTE,
                "free_vram": (24 - number % 9) * GIBIBYTE,
                "utilization": 10 * (number % 9),
                "temperature": 88 if failing else 40 + number % 9,
                "power": 60,
                "ecc_errors": 3 if failing else 0,
            }
            worker.sizes |= {
                "total_vram": gpu["total_vram"],
                "available_vram": gpu["free_vram"],
                "gpus": [gpu],
                "available_disk": GIBIBYTE if worker.name == FULL else 128 * GIBIBYTE,
            }

    def play(self, name: str, script: Script) -> None:
        """Lets a machine act so from now on."""
        self.workers[name].machine.script = script


def refusing(error: str) -> Script:
    """A machine whose installs fail."""
    return Script({"backend.install": Act(seconds=1, ticks=2, refuse=error)})


def morning(day: Day) -> None:
    """The overview names a full disk and a failing GPU; the GPU's node is drained."""

    def is_reported() -> bool:
        found = day.fleet.get("/api/overview").json()["attention"]
        return {"gpu_errors", "full_disks"} <= {group["cause"] for group in found}

    eventually(is_reported, what="the overview knows")
    page = day.show("/app/overview")
    attention = page.get_by_role("list", name="Needs attention")
    expect(attention).to_contain_text(FULL)
    expect(attention).to_contain_text(WORN)
    day.say(attention.inner_text())
    day.picture("overview")
    attention.get_by_role("link", name="The models disk is full").click()
    expect(page.get_by_role("heading", level=1)).to_contain_text("Capacity")
    page = day.show(f"/app/nodes/{day.fleet.id(WORN)}")
    page.get_by_role("button", name="Drain…").first.click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Reason").fill("its GPU reports memory errors")
    day.picture("drain")
    dialog.get_by_role("button", name="Drain", exact=True).click()
    expect(dialog).to_have_count(0)


def picked(day: Day, backend: str) -> Locator:
    """The picker of a backend with every healthy node chosen."""
    page = day.show("/app/backends")
    page.get_by_role("button", name=f"Install {backend}…").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_role("button", name="Select all healthy").click()
    return dialog


def bulk(day: Day) -> None:
    """An install on all nodes: one is refused by name, six fail for two reasons, the rest has it."""
    for name in FORBIDDEN:
        day.play(name, refusing(f"registry answered 403 for https://registry.example/striped/{name}"))
    for number, name in enumerate(TIGHT):
        day.play(name, refusing(f"no space left on device: {40 + number} MiB missing in /srv/{name}"))
    dialog = picked(day, "striped")
    # Somebody else drains a node between the choice and the press.
    day.post(f"/api/nodes/{day.fleet.id(AWAY)}/drain", {"reason": "moves to another rack"})
    button = dialog.get_by_role("button", name=re.compile(r"^Install on \d+ nodes$"))
    button.click()
    expect(dialog.get_by_role("alert").first).to_contain_text("Nothing has started")
    dialog.get_by_role("searchbox").fill(AWAY)
    time.sleep(1)
    day.picture("refused")
    dialog.get_by_role("searchbox").fill("")
    button.click()
    expect(dialog.get_by_test_id("picker-tally")).to_contain_text(re.compile(r"\d+ of \d+ done, 6 failed"))
    dialog.get_by_role("button", name="Close").last.click()
    page = day.show("/app/activity/inbox")
    causes = page.get_by_role("list", name="Causes of the failure of striped")
    expect(causes).to_contain_text("4 nodes: registry answered 403")
    day.picture("inbox")
    day.say(causes.inner_text())
    for name in FORBIDDEN:
        day.play(name, Script())
    causes.get_by_role("button", name=re.compile(r"^Retry \(4\)")).click()
    expect(causes).not_to_contain_text("403")
    page.get_by_role("button", name=re.compile("^Dismiss striped")).click()
    question = page.get_by_role("dialog")
    question.get_by_label("Comment (optional)").fill("larger disks are ordered")
    question.get_by_role("button", name="Dismiss").click()
    expect(page.get_by_text("No failures").first).to_be_visible()


def load(day: Day) -> None:
    """A load that installs its backend first is cancelled on its card."""
    for name in NAMES:
        day.play(name, SLOW)
    assert day.fleet.post("/backend/load", {"model": "echo"}).status_code < 500
    page = day.show("/app/activity")
    card = page.get_by_role("article").filter(has_text="Loading model echo")
    expect(card).to_contain_text("installing")
    time.sleep(4)
    card.get_by_role("button", name=re.compile("^Cancel")).click()
    time.sleep(1)
    day.picture("cancel-load")
    page.get_by_role("alertdialog").get_by_role("button", name="Cancel operation").click()
    ended = page.get_by_role("region", name="Recently finished")
    expect(ended).to_contain_text("cancelled")
    day.say(ended.inner_text())


def wave(day: Day) -> None:
    """An upgrade in waves of a quarter of the nodes; one more is cancelled in the middle."""
    for name in NAMES:
        day.play(name, SLOW)
    day.play(NAMES[0], Script({"backend.upgrade": Act(seconds=2, refuse="image is broken")}))
    day.fleet.publish("striped", "2.0.0")
    page = day.show("/app/backends?view=installed")
    page.get_by_role("button", name="Check for updates").click()
    page.get_by_role("button", name="Upgrade striped…").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Nodes at a time").fill("25%")
    dialog.get_by_label("Pause in minutes").fill("0.2")
    dialog.get_by_label("Stop at failures").fill("2")
    dialog.get_by_label("Pause in minutes").scroll_into_view_if_needed()
    day.picture("waves")
    dialog.get_by_role("button", name=re.compile("^Upgrade .* nodes$")).click()
    expect(dialog).to_have_count(0)
    page = day.show("/app/activity")
    waves = page.get_by_role("region", name="Waves of striped")
    expect(waves).to_contain_text("Pause until")
    expect(waves).to_contain_text(re.compile("Wave [2-5] of"), timeout=120_000)
    time.sleep(2)
    day.picture("wave")
    page.get_by_role("button", name=re.compile("^Cancel now: Upgrading backend striped")).click()
    page.get_by_role("alertdialog").get_by_role("button", name="Cancel operation").click()
    ended = page.get_by_role("region", name="Recently finished")
    expect(ended).to_contain_text("had already finished")
    day.say(ended.inner_text())


def evening(day: Day) -> None:
    """The history of the day, on a phone."""
    day.page.set_viewport_size({"width": 390, "height": 700})
    day.show("/app/activity/history")
    day.picture("history-phone")


SCENES = (morning, bulk, load, wave, evening)


def play(fleet: Fleet, day: Day, names: Sequence[str]) -> None:
    """Plays the scenes of these names, all if there are none."""
    with crew(fleet, NAMES) as workers:
        day.workers = workers
        day.equip()
        for scene in SCENES:
            if names and scene.__name__ not in names:
                continue
            day.say(f"== {scene.__name__}: {scene.__doc__}")
            try:
                scene(day)
            except Exception as error:
                day.say(f"THE SCENE BROKE OFF: {error!r}")
