"""The log of an engine: live from a real worker, searched, paused, downloaded; ten thousand lines; ends."""

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Locator, Page, WebSocketRoute, expect

from tests.browser import checks
from tests.browser.conftest import Opener
from tests.browser.fleet import Cookies, Fleet
from tests.browser.screen import Screen
from tests.conftest import eventually

MODEL = "org/talking"
_SOCKET = re.compile("/ws/nodes/.*/backend-logs/")
_START = """#!/bin/sh
echo "warming up" >&2
tail -n +1 -F {said} &
exec "$(dirname "$0")/engine.sh" "$@"
"""


@dataclass
class Engine:
    """An engine on `fine` that prints what the test has it say."""

    fleet: Fleet
    said: Path

    def says(self, *lines: str) -> None:
        with self.said.open("a") as file:
            file.write("".join(f"{line}\n" for line in lines))

    def address(self, of: str = "") -> str:
        return f"/app/nodes/{self.fleet.id('fine')}/logs{of}"


@pytest.fixture(scope="module")
def engine(fleet: Fleet) -> Iterator[Engine]:
    """Loaded once for all tests here, on `fine`; the other workers take no loads meanwhile."""
    cluster = fleet.cluster
    said = cluster.home / "said"
    said.touch()
    source = fleet.sources / "talking"
    shutil.copytree(cluster.gallery / "echo", source)
    (source / "run.sh").rename(source / "engine.sh")
    (source / "run.sh").write_text(_START.format(said=said))
    (source / "run.sh").chmod(0o755)
    request = {"uri": str(source), "name": "talking"}
    installed = fleet.post(f"/api/nodes/{fleet.id('fine')}/backends/install", request).json()["jobID"]
    eventually(lambda: fleet.ended(installed), seconds=60, what="talking is installed")
    for name in ("slow", "failing"):
        assert fleet.post(f"/api/nodes/{fleet.id(name)}/drain").is_success
    definition = {"name": MODEL, "backend": "talking", "parameters": {"model": MODEL}, "embeddings": True}
    (cluster.models / "talking.yaml").write_text(json.dumps(definition))
    eventually(lambda: cluster.embed(fleet.webs[0], model=MODEL).is_success, seconds=60, what="it is loaded")
    yield Engine(fleet, said)
    for name in ("talking.yaml", "once.yaml"):
        (cluster.models / name).unlink(missing_ok=True)
    at = f"/api/nodes/{fleet.id('fine')}/backends"
    for name in [row["name"] for row in fleet.get(at).json() if row["name"] in ("talking", "dies")]:
        job = fleet.post(f"{at}/delete", {"backend": name}).json()["jobID"]
        eventually(partial(fleet.ended, job), seconds=60, what=f"{name} is deleted")
    fleet.resume_all()
    fleet.settle()


def log_of(page: Page) -> Locator:
    return page.get_by_role("log")


@pytest.mark.rule("UI-4.8", "UI-5.1", "UI-5.2", "UI-5.3", "E69")
def test_from_the_node_to_the_live_log_of_a_replica(screen: Screen, engine: Engine) -> None:
    """By keyboard; what the engine prints shows at once, as text, without the colours of a terminal."""
    page = screen.go(f"/app/nodes/{engine.fleet.id('fine')}/replicas")
    page.get_by_role("link", name=f"Logs of {MODEL}, replica 0").press("Enter")
    expect(page.get_by_role("heading", level=2)).to_have_text(f"Logs of {MODEL}#0")
    expect(page.get_by_text("Live", exact=True).first).to_be_visible()
    expect(log_of(page)).to_contain_text("warming up")
    engine.says("a <b>bold</b> line", "\x1b[31mred\x1b[0m and plain")
    expect(log_of(page)).to_contain_text("a <b>bold</b> line")
    expect(log_of(page)).to_contain_text("red and plain")
    assert log_of(page).get_attribute("aria-live") == "off"
    page.get_by_role("radio", name="All merged").check()
    expect(page.get_by_role("heading", level=2)).to_have_text(f"Logs of {MODEL}")
    expect(log_of(page)).to_contain_text("red and plain")
    assert checks.violations(page) == []
    page.get_by_role("link", name="Overview").last.press("Enter")
    expect(page.get_by_role("region", name="Memory")).to_be_visible()
    expect(page.get_by_role("heading", level=1, name="fine")).to_be_visible()


@pytest.mark.rule("UI-5.4", "UI-5.5", "E69")
def test_a_log_is_searched_paused_and_downloaded(screen: Screen, engine: Engine) -> None:
    """The choice is in the address; a download is what is shown; paused, it counts what has come."""
    page = screen.go(engine.address())
    engine.says("needle one", "hay", "NEEDLE two")
    expect(log_of(page)).to_contain_text("NEEDLE two")
    page.keyboard.press("f")
    search = page.get_by_role("searchbox", name="Search the log")
    expect(search).to_be_focused()
    search.fill("needle")
    expect(log_of(page).locator("p")).to_have_count(2)
    expect(log_of(page).locator("mark")).to_have_text(["needle", "NEEDLE"])
    expect(page.get_by_test_id("log-count")).to_contain_text("2 of ")
    with page.expect_download() as started:
        page.get_by_role("button", name="Download").click()
    assert re.fullmatch(r"fine-org-talking-[\dT-]+\.log", started.value.suggested_filename)
    lines = Path(started.value.path()).read_text().splitlines()
    assert [line.split(" ", 2)[1:] for line in lines] == [["stdout", "needle one"], ["stdout", "NEEDLE two"]]
    page.reload()
    expect(search).to_have_value("needle")
    expect(log_of(page).locator("p")).to_have_count(2)

    page.get_by_role("button", name="Pause").click()
    engine.says("needle three")
    resume = page.get_by_role("button", name=re.compile(r"Resume \(1 new\)"))
    expect(resume).to_be_visible()
    expect(log_of(page).locator("p")).to_have_count(2)
    resume.click()
    expect(log_of(page).locator("p")).to_have_count(3)
    page.get_by_role("radio", name="stderr").check()
    expect(page.get_by_text("No matching lines")).to_be_visible()
    page.get_by_role("button", name="Show all").click()
    expect(log_of(page)).to_contain_text("warming up")
    page.get_by_role("button", name="Clear").click()
    engine.says("after the clear")
    expect(log_of(page).locator("p")).to_have_text([re.compile("after the clear")])


@pytest.mark.rule("UI-5.6", "UI-9.10", "UI-9.7")
def test_on_a_phone_and_in_the_dark(window: Opener, fleet: Fleet, session: Cookies, engine: Engine) -> None:
    engine.says("long " + "x" * 500, "مرحبا")
    for how in ({"narrow": True}, {"dark": True}):
        page = window(fleet.webs[0].url, session, **how).go(engine.address("?q=x"))
        expect(log_of(page).locator("mark").first).to_be_visible()
        assert checks.sideways(page) == []
        assert checks.violations(page) == []


@pytest.mark.rule("UI-5.6")
def test_the_end_of_an_engine_can_be_read(screen: Screen, engine: Engine) -> None:
    """The worker says how it ended; its lines are still there for who comes later."""
    page = screen.go(engine.address("?of=org%2Fonce"))
    expect(page.get_by_text("No output yet")).to_be_visible()
    expect(page.get_by_text("No engine of this model is running")).to_be_visible()
    definition = {"name": "org/once", "backend": "dies", "parameters": {"model": "x"}, "embeddings": True}
    source = engine.fleet.sources / "dies"
    source.mkdir()
    (source / "run.sh").write_text("#!/bin/sh\necho 'no such weights' >&2\nexit 7\n")
    (source / "run.sh").chmod(0o755)
    request = {"uri": str(source), "name": "dies"}
    fine = engine.fleet.id("fine")
    installed = engine.fleet.post(f"/api/nodes/{fine}/backends/install", request).json()["jobID"]
    eventually(lambda: engine.fleet.ended(installed), seconds=60, what="dies is installed")
    (engine.fleet.cluster.models / "once.yaml").write_text(json.dumps(definition))
    eventually(
        lambda: engine.fleet.cluster.embed(engine.fleet.webs[0], model="org/once").status_code >= 500,
        seconds=60,
        what="the load fails",
    )
    expect(log_of(page)).to_contain_text("no such weights")
    expect(log_of(page)).to_contain_text("[engine ended: exit 7]")
    page.reload()
    expect(log_of(page)).to_contain_text("no such weights")
    expect(page.get_by_text("This engine is not running. These are its last lines.")).to_be_visible()
    checks.choose(page, "Model", MODEL)
    expect(log_of(page)).to_contain_text("warming up")


@pytest.mark.rule("UI-5.7", "UI-5.2")
def test_ten_thousand_lines_stay_usable(screen: Screen, fleet: Fleet) -> None:
    """The newest line stays in sight until the reader scrolls up; a search is drawn at once."""
    lines: list[dict[str, Any]] = [
        {"timestamp": "2026-11-21T00:00:00Z", "stream": "stdout", "text": f"line {number} of many"}
        for number in range(10_000)
    ]
    sockets: list[WebSocketRoute] = []

    def serve(socket: WebSocketRoute) -> None:
        sockets.append(socket)
        socket.send(json.dumps({"type": "initial", "lines": lines}))

    screen.page.route_web_socket(_SOCKET, serve)
    page = screen.go(f"/app/nodes/{fleet.id('fine')}/logs?of=many")
    expect(log_of(page).get_by_text("line 9999 of many")).to_be_in_viewport()
    sockets[0].send(json.dumps({"type": "line", "line": {**lines[0], "text": "the newest"}}))
    expect(log_of(page).get_by_text("the newest")).to_be_in_viewport()
    expect(page.get_by_test_id("log-count")).to_have_text("10000 lines")
    expect(log_of(page).get_by_text("line 0 of many", exact=True)).to_have_count(0)
    page.get_by_role("searchbox", name="Search the log").fill("line 777")
    expect(log_of(page).locator("p")).to_have_count(11)
    page.get_by_role("searchbox", name="Search the log").fill("")
    expect(log_of(page).get_by_text("the newest")).to_be_in_viewport()
    log_of(page).press("Home")
    expect(page.get_by_role("checkbox", name="Follow")).not_to_be_checked()
    sockets[0].send(json.dumps({"type": "line", "line": {**lines[0], "text": "unseen"}}))
    expect(page.get_by_text("unseen")).not_to_be_in_viewport()
    page.get_by_role("checkbox", name="Follow").check()
    expect(log_of(page).get_by_text("unseen")).to_be_in_viewport()


@pytest.mark.rule("UI-5.6", "UI-9.5", "UI-9.9")
def test_a_worker_that_is_away_is_said_where_the_log_would_be(screen: Screen, fleet: Fleet) -> None:
    """And tried again, by itself and by a button; a node that is not there is told apart."""
    screen.expect("status of 50[24]", "status of 404", "WebSocket connection to")
    process = fleet.worker("gone-for-logs")
    assert fleet.post("/api/nodes/approve", {"ids": [fleet.id("gone-for-logs")]}).status_code == 200
    process.kill()
    page = screen.go(f"/app/nodes/{fleet.id('gone-for-logs')}/logs?of=m")
    problem = page.get_by_role("alert").filter(has_text="its worker does not answer")
    expect(problem).to_be_visible()
    expect(page.get_by_text("Reconnecting", exact=True)).to_be_visible()
    problem.get_by_role("button", name="Try again").press("Enter")
    expect(problem).to_be_visible()
    screen.go("/app/nodes/00000000-0000-4000-8000-00000000dead/logs?of=m")
    expect(page.get_by_role("heading", name="Node not found")).to_be_visible()
    fleet.remove("gone-for-logs")
