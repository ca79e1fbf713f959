"""Kill -9 in the middle of streamed answers, with real processes: an end that clients can understand."""

import json
import os
import threading
from typing import Any

import httpx
import pytest

from localai_cluster.kit import clock
from tests.acceptance.test_cold_load import write_model
from tests.conftest import eventually
from tests.support.cluster import ADMIN_KEY, Cluster, Process, engines_of, running_cluster
from tests.support.effort import swept

STREAMS = 3
WORDS = " ".join(["word"] * 3000)
"""At 50 ms a word far longer than the test."""
COUNTED = "SELECT coalesce(sum(in_flight), 0) FROM node_models"


class Reader:
    """One streamed answer, read in a thread; `events` are the data so far, `broken` what ended it early."""

    def __init__(self, web: Process) -> None:
        self.events: list[Any] = []
        self.broken: httpx.TransportError | None = None
        self.status = 0
        self._thread = threading.Thread(target=self._read, args=(web,))
        self._thread.start()

    def _read(self, web: Process) -> None:
        body = {"model": "slow", "messages": [{"role": "user", "content": WORDS}], "stream": True}
        headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
        url = f"{web.url}/v1/chat/completions"
        try:
            with httpx.stream("POST", url, json=body, headers=headers, timeout=120) as answer:
                self.status = answer.status_code
                for line in answer.iter_lines():
                    if line.startswith("data: "):
                        said = line.removeprefix("data: ")
                        self.events.append(said if said == "[DONE]" else json.loads(said))
        except httpx.TransportError as error:
            self.broken = error

    def ended(self) -> bool:
        """Whether nothing comes any more."""
        return not self._thread.is_alive()

    def told_of_the_end(self) -> bool:
        """Whether the end is the dialect's error event."""
        *before, last, done = self.events
        assert done == "[DONE]"
        assert all("error" not in event for event in before)
        error = last["error"]
        return bool(error["message"]) and error["type"] == "server_error"


def kill(victim: str, cluster: Cluster, web: Process, worker: Process) -> None:
    """SIGKILL to one process."""
    if victim == "engine":
        (engine,) = engines_of(cluster.home / "worker-one")
        os.kill(engine, 9)
    else:
        {"web": web, "worker": worker}[victim].kill()


@pytest.mark.parametrize(
    "victim", ["engine", pytest.param("worker", marks=swept), pytest.param("web", marks=swept)]
)
@pytest.mark.rule("I8")
def test_streams_end_when_something_dies(victim: str) -> None:
    """An error event, or a connection that ends without [DONE]; counts are true in 30 s, nothing is left."""
    with running_cluster() as cluster:
        web, other = cluster.web(), cluster.web()
        cluster.controller()
        cluster.tasks()
        worker = cluster.worker("one", web)
        write_model(cluster, "slow", delay_ms=50)
        readers = [Reader(web) for _ in range(STREAMS)]
        eventually(lambda: all(len(one.events) > 3 for one in readers), seconds=60, what="words come")
        assert cluster.rows(COUNTED) == [(STREAMS,)]
        kill(victim, cluster, web, worker)
        died = clock.monotonic()
        eventually(lambda: all(one.ended() for one in readers), seconds=30, what="every stream ends")
        for one in readers:
            assert one.status == 200
            if victim == "web":
                assert one.broken is not None
                assert "[DONE]" not in one.events
            else:
                assert one.broken is None
                assert one.told_of_the_end()
        eventually(lambda: cluster.rows(COUNTED) == [(0,)], seconds=30, what="the counts are true")
        print(f"{victim}: streams have ended and counts are true after {clock.monotonic() - died:.1f} s")
        left = 1 if victim == "web" else 0
        home = cluster.home / "worker-one"
        eventually(lambda: len(engines_of(home)) == left, seconds=30, what="no engine is orphaned")
        if victim != "worker":
            short = {"model": "slow", "messages": [{"role": "user", "content": "still here"}]}
            answer = cluster.post(other, "/v1/chat/completions", short, timeout=120)
            assert answer.json()["choices"][0]["message"]["content"] == "still here"
