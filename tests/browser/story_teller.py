"""Who plays a story: the cluster, a browser, and the record of what was said."""

import subprocess
import sys
import time
from typing import Any

from playwright.sync_api import Page, expect

from localai_cluster.kit import clock
from tests.browser.fleet import Fleet
from tests.browser.shots import PICTURES, WIDE
from tests.conftest import eventually
from tests.support.cluster import ROOT

SAID = ROOT / "build" / "story.txt"


class Teller:
    """The cluster, a browser, and what was said; pictures go to this folder of `docs/pictures`."""

    def __init__(self, fleet: Fleet, page: Page, folder: str = "story") -> None:
        self.fleet, self.page, self.folder = fleet, page, folder
        self.began = clock.monotonic()
        SAID.write_text("")

    def say(self, *words: object) -> None:
        """A line of the record."""
        line = f"[{clock.monotonic() - self.began:6.1f}] {' '.join(map(str, words))}"
        print(line, flush=True)
        with SAID.open("a") as file:
            file.write(line + "\n")

    def post(self, path: str, body: Any = None) -> dict[str, Any]:
        """Asks over REST and says the answer."""
        begun = clock.monotonic()
        reply = self.fleet.post(path, body)
        self.say(f"POST {path} {body or ''} -> {reply.status_code} in {clock.monotonic() - begun:.2f} s")
        self.say(reply.text[:400])
        found: dict[str, Any] = reply.json()
        return found

    def on(self, node: str, verb: str, backend: str) -> str:
        """Asks for work of one backend on one node."""
        reply = self.post(f"/api/nodes/{self.fleet.id(node)}/backends/{verb}", {"backend": backend})
        return str(reply.get("jobID", ""))

    def manage(self, *words: str) -> None:
        """What the command line says."""
        done = subprocess.run(
            [sys.executable, "manage.py", *words],
            cwd=ROOT,
            env=dict(self.fleet.cluster.environment),
            capture_output=True,
            text=True,
            check=False,
        )
        self.say(f"$ manage.py {' '.join(words)} (exit code {done.returncode})\n{done.stdout}{done.stderr}")

    def operation(self, job: str) -> dict[str, Any]:
        """One operation as REST has it."""
        found: dict[str, Any] = self.fleet.get(f"/api/operations/{job}").json()
        return found

    def until_ended(self, job: str, seconds: float = 120.0) -> None:
        """Says each change of an operation until it has ended."""
        last = ""
        for _ in range(int(seconds * 2)):
            told = self.operation(job)
            parts = [
                (n["node_name"], n["status"], int(n["percentage"]) // 25 * 25) for n in told.get("nodes", ())
            ]
            line = f"{told['status']}: {told['message']} {parts}"
            if line != last:
                self.say(line)
            last = line
            if told["status"] in ("completed", "failed", "cancelled"):
                return
            time.sleep(0.5)

    def job(self, backend: str, kind: str) -> str:
        """The id of what runs."""
        found = self.fleet.get("/api/operations").json()["operations"]
        return next(str(one["jobID"]) for one in found if (one["name"], one["kind"]) == (backend, kind))

    def show(self, path: str) -> Page:
        """A page, once it is live."""
        self.page.goto(self.fleet.webs[0].url + path)
        expect(self.page.get_by_test_id("connection")).to_have_text("Live")
        time.sleep(1)
        return self.page

    def picture(self, name: str, *, end: bool = False) -> None:
        """A picture; `end`: of the end of the page."""
        if end:
            self.page.mouse.move(WIDE["width"] / 2, WIDE["height"] / 2)
            self.page.mouse.wheel(0, 5000)
        time.sleep(0.4)
        path = PICTURES / self.folder / f"{name}.png"
        path.parent.mkdir(exist_ok=True)
        self.page.screenshot(path=path, animations="disabled", caret="hide")
        self.say(f"picture {path.name}: {path.stat().st_size // 1024} kB")

    def clear(self) -> None:
        """Dismisses every failure."""
        for one in self.fleet.get("/api/operations/inbox").json()["operations"]:
            self.fleet.post(f"/api/operations/{one['jobID']}/dismiss")

    def restart(self, name: str) -> None:
        """Starts a worker that was killed."""
        self.fleet.workers[name] = self.fleet.worker(name)
        eventually(lambda: self.fleet.node(name)["status"] == "healthy", what="it is back")
