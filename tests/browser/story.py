"""`make story`: plays docs/operators-story.md on five real workers, writes down what is said, takes pictures.

One worker is fine, one slow, one refuses, one is killed and one drained. Nothing is asserted: a person reads
`build/story.txt`, looks at the pictures and compares both with the document. Only a step that cannot go on
ends it.
"""

import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import httpx
from playwright.sync_api import expect, sync_playwright

from tests.browser import day, install, walkthrough
from tests.browser.conftest import ARGUMENTS
from tests.browser.fleet import Fleet, running_fleet, sign_in
from tests.browser.screen import settings
from tests.browser.shots import PATIENCE, WIDE
from tests.browser.story_teller import SAID, Teller
from tests.conftest import eventually
from tests.support.cluster import TOKEN

OTHERS = ("fine", "failing", "killed", "drained")
SLOW_RATE = "600000"
"""Bytes a second: an install takes 20 s, its time limit is 8 s."""
LIMITS = {
    "LOCALAI_NATS_BACKEND_INSTALL_TIMEOUT": "8s",
    "CLUSTER_NODE_STALE_AFTER": "15s",
    "CLUSTER_INSTALL_WAIT": "60s",
}


def one_install(one: Teller) -> None:
    """Asynchronous: the answer comes at once, the same request joins, another node is another operation."""
    job = one.on("slow", "install", "rolling")
    one.on("slow", "install", "rolling")
    one.on("fine", "install", "rolling")
    one.manage("operations", "list")
    refused = one.on("failing", "install", "rolling")
    one.until_ended(refused)
    time.sleep(6)
    one.manage("operations", "show", job[:8])
    one.until_ended(job)


def five_nodes(one: Teller) -> None:
    """One is killed and one drained after they were chosen; the dialog is closed in the middle."""
    page = one.show("/app/backends")
    page.get_by_role("button", name="Install calm…").click()
    dialog = page.get_by_role("dialog")
    for name in ("slow", *OTHERS):
        dialog.get_by_role("checkbox", name=f"Select {name}", exact=True).check()
    one.fleet.workers["killed"].kill()
    one.post(f"/api/nodes/{one.fleet.id('drained')}/drain", {"reason": "its disk is replaced"})
    dialog.get_by_role("button", name="Install on 5 nodes").click()
    expect(dialog.get_by_role("alert").first).to_contain_text("Nothing has started")
    dialog.get_by_role("button", name="Install on 4 nodes").click()
    time.sleep(5)
    one.picture("picker")
    dialog.get_by_role("button", name="Continue in background").click()
    expect(dialog).to_have_count(0)
    one.say("catalogue:", page.get_by_role("listitem").filter(has_text="Runs calm.").inner_text())
    job = one.job("calm", "backend_install")
    one.show("/app/activity")
    time.sleep(3)
    one.picture("activity", end=True)
    one.manage("operations", "list")
    time.sleep(12)
    one.manage("operations", "list")
    one.say(one.page.locator("main").inner_text())
    killed = [o for o in one.fleet.get("/api/operations").json()["operations"] if o["nodeName"] == "killed"]
    job = str(killed[0]["jobID"]) if killed else job
    one.manage("operations", "show", job[:8])
    one.until_ended(job)
    one.show("/app/activity/inbox")
    one.picture("inbox")
    one.manage("operations", "inbox")
    one.restart("killed")
    one.manage("operations", "retry", job[:8])
    time.sleep(4)
    one.manage("backends", "list")


def drained(one: Teller) -> None:
    """A request for a drained node, for all nodes, and for one that is drained while it waits."""
    one.post(f"/api/nodes/{one.fleet.id('drained')}/drain", {"reason": "its disk is replaced"})
    one.on("drained", "install", "batch")
    everywhere = one.post("/api/backends/install/batch", {})["jobID"]
    one.until_ended(everywhere)
    one.manage("operations", "show", everywhere[:8])
    one.fleet.workers["killed"].kill()
    eventually(lambda: one.fleet.node("killed")["status"] != "healthy", seconds=60, what="it is away")
    waiting = one.on("killed", "install", "closing")
    time.sleep(2)
    one.manage("operations", "show", waiting[:8])
    one.post(f"/api/nodes/{one.fleet.id('killed')}/drain", {"reason": "will not come back"})
    one.until_ended(waiting)
    one.post(f"/api/nodes/{one.fleet.id('killed')}/resume")
    one.restart("killed")


def endless(one: Teller) -> None:
    """Heartbeats come, and nobody listens on the bus: neither a loop nor silence."""
    fleet = one.fleet
    id, secret = (
        fleet.id("killed"),
        (fleet.cluster.home / "worker-killed" / "node-secret").read_text().strip(),
    )
    fleet.workers["killed"].kill()
    with beating(f"{fleet.webs[0].url}/api/node/{id}/heartbeat", secret):
        job = one.on("killed", "install", "doomed")
        for _ in range(50):
            time.sleep(4)
            if one.operation(job)["status"] == "failed":
                break
            told = one.operation(job)
            one.say(
                fleet.node("killed")["status"],
                told["status"],
                told["nodes"][0].get("attempts"),
                told["message"],
            )
        one.manage("operations", "show", job[:8])
    one.restart("killed")


@contextmanager
def beating(url: str, secret: str) -> Iterator[None]:
    """A heartbeat a second of a worker that is not there."""
    with always(lambda: httpx.post(url, json={}, headers={"Authorization": f"Bearer {secret}"}), 1.0):
        yield


@contextmanager
def always(act: Callable[[], object], seconds: float) -> Iterator[None]:
    """Does it again and again until the end of the block."""
    over = threading.Event()

    def run() -> None:
        while not over.wait(seconds):
            with suppress(httpx.HTTPError):
                act()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def agents(one: Teller) -> None:
    """An agent runs no backends: it is refused by name and left out of all nodes."""
    body = {"name": "helper", "node_type": "agent", "token": TOKEN}
    headers = {"Authorization": f"Bearer {TOKEN}", "X-LocalAI-Node-Secret": "0123456789abcdef" * 4}
    reply = httpx.post(f"{one.fleet.webs[0].url}/api/node/register", json=body, headers=headers)
    one.say("an agent registers:", reply.status_code, reply.text[:200])
    one.fleet.post("/api/nodes/approve", {"ids": [one.fleet.id("helper")]})
    one.on("helper", "install", "batch")
    job = one.post("/api/backends/install/renewed", {})["jobID"]
    one.until_ended(job)
    one.say([part["node_name"] for part in one.operation(job)["nodes"]])
    one.fleet.remove("helper")


def upgrade(one: Teller) -> None:
    """An upgrade in waves on the page, with progress; both controllers are killed in the middle."""
    one.fleet.publish("batch", "2.0.0")
    page = one.show("/app/backends?view=installed")
    page.get_by_role("button", name="Check for updates").click()
    named = page.get_by_role("link", name="batch", exact=True)
    lines = page.get_by_role("table", name="Installed backends").get_by_role("row")
    line = lines.filter(has=named).first
    expect(line).to_contain_text("update to v2.0.0")
    one.say("before:", line.inner_text())
    line.get_by_role("button", name="Upgrade batch…").click()
    question = page.get_by_role("dialog")
    one.say(question.inner_text())
    question.get_by_role("button", name=re.compile("^Upgrade .* nodes$")).click()
    expect(question).to_have_count(0)
    time.sleep(3)
    one.picture("installed")
    job = one.job("batch", "backend_upgrade")
    eventually(
        lambda: any(n["node_name"] == "slow" and n["percentage"] > 25 for n in one.operation(job)["nodes"]),
        seconds=60,
        what="slow is at it",
    )
    one.show("/app/activity")
    one.picture("upgrade")
    for process in one.fleet.cluster.processes:
        if process.name == "controller" and process.alive:
            process.kill()
    time.sleep(25)
    one.say("both controllers are killed:", one.operation(job)["message"])
    one.picture("no-controller")
    one.fleet.controller = one.fleet.cluster.controller()
    one.until_ended(job)
    one.manage("operations", "show", job[:8])
    one.show("/app/backends?view=installed")
    one.say("after:", line.inner_text())
    one.until_ended(one.on("fine", "upgrade", "batch"))
    one.manage("operations", "history", "--backend", "batch", "--limit", "3")


def cancelled(one: Teller) -> None:
    """A cancel holds although everything is started again."""
    folder = one.fleet.cluster.home / "worker-slow" / "backends"
    job = one.on("slow", "install", "cutting")
    time.sleep(4)
    one.say(sorted(os.listdir(folder)))
    one.manage("operations", "cancel", job[:8])
    time.sleep(2)
    one.say(sorted(os.listdir(folder)))
    one.fleet.controller.kill()
    one.fleet.webs[1].kill()
    one.fleet.webs[1] = one.fleet.cluster.web()
    one.fleet.controller = one.fleet.cluster.controller()
    time.sleep(6)
    one.manage("operations", "list")
    one.show(f"/app/operations/{job}")
    one.picture("cancelled")


def commands(one: Teller) -> None:
    """What is independent does not wait, a different request for the same backend runs afterwards."""
    one.until_ended(one.on("fine", "delete", "cutting"))
    one.until_ended(one.on("slow", "install", "batch"))
    upgraded = one.on("slow", "upgrade", "batch")
    one.on("slow", "install", "quick")
    time.sleep(4)
    one.manage("operations", "list")
    deletion = one.on("slow", "delete", "batch")
    one.manage("operations", "show", deletion[:8])
    one.until_ended(upgraded)
    one.until_ended(deletion)
    one.manage("operations", "history", "--limit", "12")


def unload(one: Teller) -> None:
    """A model is unloaded while its worker is frozen: the replica goes when the worker confirms."""
    for name in ("fine", "slow", "failing", "drained"):
        one.fleet.post(f"/api/nodes/{one.fleet.id(name)}/drain")
    one.say("a request:", one.fleet.cluster.embed(one.fleet.webs[0]).status_code)
    for name in ("fine", "slow", "failing", "drained"):
        one.fleet.post(f"/api/nodes/{one.fleet.id(name)}/resume")
    one.fleet.workers["killed"].child.send_signal(signal.SIGSTOP)
    body = {"model_name": "echo", "deadline_seconds": 0, "wait": False}
    job = one.post("/api/nodes/models/unload", body)["jobID"]
    time.sleep(5)
    left = one.fleet.get(f"/api/nodes/{one.fleet.id('killed')}/models").json()
    one.say([(replica["model_name"], replica["state"]) for replica in left])
    one.manage("operations", "list")
    one.fleet.workers["killed"].child.send_signal(signal.SIGCONT)
    one.until_ended(job)
    one.say(one.fleet.get(f"/api/nodes/{one.fleet.id('killed')}/models").json())


SCENES = (one_install, five_nodes, drained, upgrade, agents, commands, unload, cancelled, endless)


def main() -> int:
    """Plays the scenes that are named, all if none is; `day` and `models` play other documents."""
    program = install.chromium()
    if not program:
        print(install.LEFT_OUT)
        return 1
    SAID.parent.mkdir(exist_ok=True)
    chosen = sys.argv[1] if len(sys.argv) > 1 else ""
    if chosen == "day":
        started = running_fleet(webs=1, workers=(), tasks=True)
    elif chosen == "models":
        started = walkthrough.cluster_with_models()
    else:
        started = running_fleet(webs=2, workers=OTHERS, tasks=True, **LIMITS)
    with started as fleet, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=ARGUMENTS)
        context = browser.new_context(**settings(still=True) | {"viewport": WIDE})
        context.set_default_timeout(PATIENCE)
        context.add_cookies(sign_in(fleet.webs[0].url))
        if chosen == "day":
            day.play(fleet, day.Day(fleet, context.new_page(), "day"), sys.argv[2:])
        elif chosen == "models":
            walkthrough.play(Teller(fleet, context.new_page(), "models"), sys.argv[2:])
        else:
            add_slow(fleet)
            play(fleet, Teller(fleet, context.new_page()))
        browser.close()
    return 0


def play(fleet: Fleet, one: Teller) -> None:
    """Plays the scenes, while a script asks both web processes for the list of operations."""
    answers: dict[int, int] = {}

    def look() -> None:
        for web in fleet.webs:
            code = fleet.cluster.get(web, "/api/operations").status_code
            answers[code] = answers.get(code, 0) + 1

    with always(look, 0.2):
        for scene in SCENES:
            if len(sys.argv) < 2 or scene.__name__ in sys.argv[1:]:
                one.say(f"== {scene.__name__}: {scene.__doc__}")
                try:
                    scene(one)
                    fleet.resume_all()
                    one.clear()
                except Exception as error:
                    one.say(f"THE SCENE BROKE OFF: {error!r}")
    one.say("answers of GET /api/operations while it played:", answers)


def add_slow(fleet: Fleet) -> None:
    """The fifth worker; slower than that of the tests, to be watched."""
    roots = f"{fleet.gallery.parent}:{fleet.sources}:{fleet.cluster.gallery}"
    more = {
        "LOCALAI_HEARTBEAT_INTERVAL": "1s",
        "LOCALAI_WORKER_SOURCE_ROOTS": roots,
        "LOCALAI_WORKER_DOWNLOAD_RATE": SLOW_RATE,
    }
    fleet.workers["slow"] = fleet.cluster.worker("slow", fleet.webs[0], wait=True, **more)
    assert fleet.post("/api/nodes/approve", {"ids": [fleet.id("slow")]}).is_success
    fleet.cluster.controller()


if __name__ == "__main__":
    sys.exit(main())
