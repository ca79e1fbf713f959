"""`make run` with work under way: each of its processes killed during a cold load, then `make run` itself.

One cluster lives through all of it, because each start costs as much as everything that happens to it.
"""

import json
import os
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest

from examples.demo.figures import compare
from localai_cluster.embedded.bundled_servers import EmbeddedPostgres
from localai_cluster.embedded.layout import Layout
from localai_cluster.kit import clock, processes
from tests.conftest import eventually
from tests.support.cluster import engines_of
from tests.support.ports import free_port
from tests.support.run import CHILDREN, ROOT, Run, touching

DEMO = json.loads((ROOT / "examples" / "demo.json").read_text())
WAIT = 30
"""LOCALAI_MODEL_LOAD_WAIT in seconds: a request whose connection survives ends within it, and a moment."""
LATE = 60
"""The moment in seconds, on a machine that has something else to do."""
COPY_SECONDS = 4
SETTINGS = {
    "LOCALAI_MODEL_LOAD_WAIT": f"{WAIT}s",
    "CLUSTER_OPERATION_LEASE": "4s",
    "LOCALAI_HEARTBEAT_INTERVAL": "2s",
}


@pytest.fixture
def data(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "data"
    folder.mkdir()
    yield folder
    lock = folder / "run.lock"
    if lock.exists() and (text := lock.read_text()):
        processes.sweep(json.loads(text)["mark"])


class Asked:
    """Requests under way, each of which ends in an answer or in a broken connection."""

    def __init__(self, run: Run, body: Any, count: int = 5) -> None:
        self.begun = clock.monotonic()
        self._threads = ThreadPoolExecutor(count)
        self._answers = [self._threads.submit(ask, run, body) for _ in range(count)]

    def ended_well(self, *, cut: bool) -> None:
        """I8: success, or 503 with Retry-After, in time; a broken connection only where one was cut."""
        for answer in [future.result(WAIT + 2 * LATE) for future in self._answers]:
            if answer is None:
                assert cut
                continue
            assert answer.status_code in (200, 503), answer.text
            assert answer.status_code == 200 or int(answer.headers["Retry-After"]) >= 1
        self._threads.shutdown()
        assert clock.monotonic() - self.begun <= WAIT + LATE


def ask(run: Run, body: Any) -> httpx.Response | None:
    """One embeddings request; None when the connection breaks."""
    target = run.target
    with suppress(httpx.TransportError):
        return httpx.post(
            f"{target.url}/v1/embeddings",
            headers=target.headers,
            json=body,
            timeout=WAIT + LATE,
            trust_env=False,
        )
    return None


def answered(run: Run, body: Any) -> httpx.Response | None:
    """The answer if it is a success."""
    answer = ask(run, body)
    return answer if answer is not None and answer.status_code == 200 else None


def under_way(run: Run, kind: str, element: str) -> dict[str, Any] | None:
    """The running operation of that kind on that element, as the API tells it."""
    target = run.target
    listed = httpx.get(f"{target.url}/api/operations", headers=target.headers, timeout=30, trust_env=False)
    return next(
        (
            one
            for one in listed.json()["operations"]
            if (one["kind"], one["name"], one["status"]) == (kind, element, "processing")
        ),
        None,
    )


def slow_model(run: Run, name: str) -> dict[str, str]:
    """Defines a model whose load takes a second and a half; returns a request for it."""
    text = f"name: {name}\nbackend: echo\nparameters: {{model: {name}}}\nembeddings: true\n"
    draft = run.data / "models" / f"{name}.draft"
    draft.write_text(text + 'options: ["load_seconds:1.5"]\n')
    draft.rename(draft.with_suffix(".yaml"))
    target = run.target

    def served() -> bool:
        listed = httpx.get(f"{target.url}/v1/models", headers=target.headers, trust_env=False).json()
        return name in {one["id"] for one in listed["data"]}

    eventually(served, seconds=10, what=f"{name} is served")
    return {"model": name, "input": "a cat"}


def kill_during_a_load(run: Run, victim: str) -> None:
    """First requests for a new model, `kill -9` while it loads, and the cluster is whole again."""
    body = slow_model(run, f"while-{victim}-dies")
    pid = processes.reaper_of(run.mark) if victim == "reaper" else run.leaders()[victim]
    assert pid
    asked = Asked(run, body)
    eventually(
        lambda: under_way(run, "model_load", body["model"]), seconds=20, what=f"{victim}: the load began"
    )
    os.kill(pid, signal.SIGKILL)
    asked.ended_well(cut=victim == "web")
    again = r"restarted" if victim == "reaper" else r"restarting in \d+ s"
    said = re.compile(rf"\b{victim} ended \(signal SIGKILL\), {again}")
    eventually(lambda: said.search(run.output), seconds=10, what=f"the log names {victim}")
    eventually(run.works, seconds=40, what=f"ready again without {victim}")
    eventually(lambda: answered(run, body), seconds=40, what=f"{victim}: a repeated request succeeds")


def rows(data: Path, query: str, *values: Any) -> list[tuple[Any, ...]]:
    """What the database of this data says."""
    layout = Layout.of({"CLUSTER_DATA_DIR": str(data)})
    with psycopg.connect(EmbeddedPostgres(data / "postgres", layout.sockets).url) as link:
        return link.execute(query, values).fetchall()


def test_make_run_survives_kills_while_it_works(data: Path) -> None:
    """Issue 3, F4: no request hangs, no operation without an owner, no orphan in /proc, a clean end."""
    size = sum(path.stat().st_size for path in (ROOT / "build/gallery/minilm").rglob("*") if path.is_file())
    run = Run(data, free_port(), **SETTINGS, LOCALAI_WORKER_DOWNLOAD_RATE=str(size // COPY_SECONDS))
    main_job = DEMO["request"]["body"]
    try:
        run.wait_ready()
        assert "ERROR" not in run.output, "a first start shows no error"
        for victim in (*reversed(CHILDREN), "reaper"):
            kill_during_a_load(run, victim)
        asked, mark = Asked(run, main_job), run.mark
        eventually(
            lambda: (under_way(run, "backend_install", main_job["model"]) or {}).get("currentBytes"),
            seconds=20,
            what="the copy has begun",
        )
    finally:
        run.process.kill()
        run.process.wait()
    asked.ended_well(cut=True)
    eventually(
        lambda: not touching(data) and not list(processes.marked_processes(mark)),
        seconds=20,
        what="nothing is left",
    )

    run = Run(data, free_port(), **SETTINGS)
    try:
        run.wait_ready()
        answer = eventually(lambda: answered(run, main_job), seconds=60, what="the cut request succeeds")
        figures = compare(answer.json(), main_job["input"], DEMO["expect"])
        assert all(figure.holds for figure in figures), figures
        assert len(engines_of(data / "worker")) == 1
        orphans = "SELECT kind, element FROM operations WHERE status = 'processing' AND lease_until < %s"
        eventually(
            lambda: rows(data, orphans, clock.now()) == [], seconds=20, what="no operation without an owner"
        )
        mark = run.mark
    finally:
        run.process.terminate()
        code = run.process.wait(360)
    assert code == 0
    assert not touching(data)
    assert not list(processes.marked_processes(mark))
    assert "database system is shut down" in run.output
    assert "Traceback" not in run.output
