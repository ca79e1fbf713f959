"""What senders sent to the reference's file server, sent to ours in the same order (worker.md §12).

The recordings leave bodies out and name them by their hashes: a body of ours stands for each. Compared are
status, every recorded header and the texts, with the names of files and hashes put in place of the recorded
ones. What differs has its row in `docs/deviations.md` and is listed here.
"""

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import eventually
from tests.support.file_client import Files, Got
from tests.support.worker_http import ENGINE_TOKEN, Served, worker

RECORDINGS = Path(__file__).resolve().parents[1] / "data" / "worker-http"
FINISHED = "complete partial"
"""D-FILE-FINISH: ours finishes it, the reference refuses it without end."""
LEFT = {
    "partial of other content": ("m5/f5.bin", 1_000_000, "a" * 64),
    "partial with right hash but wrong bytes": (
        "m6/f6.bin",
        1_000_000,
        "967521f2867ebe7e58f26baf12bfa0b7a5b6e428039887f2714741ba112fac37",
    ),
    FINISHED: (
        "m4/f4.bin",
        4_000_000,
        "c1fde9b74368efc79a4e422c0b567d72d2cda0496690c5747fef72df3c68630d",
    ),
}
"""What lay there before: file, bytes, hash of the target."""
_HASH = re.compile(r"\b[0-9a-f]{64}\b")
_GOT = re.compile(r"got ([0-9a-f]{64})")


def recorded(name: str) -> list[dict[str, Any]]:
    lines = (RECORDINGS / f"{name}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def body(named: str, size: int) -> bytes:
    """Ours for the one that had this hash."""
    return hashlib.shake_256(named.encode()).digest(size)


class Story:
    """The requests of a recording, one after the other."""

    def __init__(self, served: Served, steps: list[dict[str, Any]]) -> None:
        self._served = served
        self._files = Files(served.address)
        self._steps = steps
        self._hashes: dict[str, str] = {}

    def play(self) -> Iterator[tuple[dict[str, Any], Got]]:
        """Each request with our answer."""
        cases: set[str] = set()
        for number, step in enumerate(self._steps):
            case = step.get("case", "")
            if case in LEFT and case not in cases:
                self._leave(*LEFT[case])
            cases.add(case)
            if step["status"] is None:
                self._cut(step, self._steps[number + 1])
                continue
            headers, sent = self._request(step)
            yield step, self._files.ask(step["method"], step["path"], headers, sent)

    def expected(self, text: str) -> str:
        """A recorded text with our names."""
        text = text.replace("/srv/w1/models", str(self._served.folders.models))
        text = text.replace("/srv/w2/models", str(self._served.folders.models))
        return _HASH.sub(lambda found: self._hashes.get(found[0], found[0]), text)

    def _request(self, step: dict[str, Any]) -> tuple[dict[str, str], bytes]:
        headers: dict[str, str] = dict(step["request_headers"])
        if "Authorization" in headers:
            headers["Authorization"] = f"Bearer {ENGINE_TOKEN}"
        size = int(headers.get("Content-Length", 0))
        _, _, total = headers.get("Content-Range", "").rpartition("/")
        named = next((value for name, value in headers.items() if name.lower() == "x-content-sha256"), "none")
        answer = step.get("body")
        got = _GOT.search(answer) if isinstance(answer, str) else None
        whole = body(got[1] if got else named, int(total) if total.isdigit() else size)
        self._hashes.setdefault(got[1] if got else named, hashlib.sha256(whole).hexdigest())
        span = re.search(r"bytes (\d+)-", headers.get("Content-Range", ""))
        start = int(span[1]) if span else 0
        for name in headers:
            headers[name] = self.expected(headers[name])
        return headers, whole[start : start + size]

    def _leave(self, name: str, size: int, target: str) -> None:
        path = self._served.folders.models / name
        path.parent.mkdir(parents=True)
        path.write_bytes(body(target if size == 4_000_000 else "wrong bytes", size))
        self._hashes.setdefault(target, hashlib.sha256(body(target, 4_000_000)).hexdigest())
        path.with_name(path.name + ".sha256.target").write_text(self._hashes[target])

    def _cut(self, step: dict[str, Any], after: dict[str, Any]) -> None:
        """What had been sent and was not written when the connection ended is lost; here all of it was."""
        headers, sent = self._request(step)
        kept = int(after["response_headers"]["X-File-Size"])
        with self._files.connect() as link:
            self._files.send_head(link, "PUT", step["path"], headers)
            link.sendall(sent[:kept])
            path = self._served.folders.models / step["path"].removeprefix("/v1/files/models/")
            eventually(lambda: path.exists() and path.stat().st_size == kept)


@pytest.fixture
def served() -> Iterator[Served]:
    with worker() as one:
        yield one


@pytest.mark.rule("worker-12", "worker-12.2", "worker-12.3", "worker-12.4", "W28", "W29")
@pytest.mark.parametrize("name", ["upload", "staging"])
def test_answers_are_as_recorded(served: Served, name: str) -> None:
    story = Story(served, recorded(name))
    for step, got in story.play():
        what = f"{step['at']} {step.get('case')} {step['method']} {step['path']}: {got}"
        if step.get("case") == FINISHED and step["at"] > 18:
            finished(step, got)
            continue
        assert got.status == step["status"], what
        assert "location" not in got.headers, what
        if step["path"] == "/v1/x" or "invalid Content-Range" in str(step.get("body")):
            assert got.headers["content-type"] == step["response_headers"]["Content-Type"], what
            continue  # the words are ours
        compared = step["response_headers"].keys() - {"Connection"}
        if isinstance(step.get("body"), dict):
            compared -= {"Content-Length"}  # our paths are longer
        for header in compared:
            assert got.headers[header.lower()] == story.expected(step["response_headers"][header]), what
        same_text(story, step, got)


def same_text(story: Story, step: dict[str, Any], got: Got) -> None:
    text = step.get("body")
    if isinstance(text, dict):
        assert got.json == json.loads(story.expected(json.dumps(text)))
    elif text and step["path"].endswith("m6/f6.bin"):
        assert got.text.startswith("sha256 mismatch: expected ")  # the wrong bytes are ours
    elif text:
        assert got.text == story.expected(text)


def finished(step: dict[str, Any], got: Got) -> None:
    """The first PUT of the case completes the file, where the reference repeats its refusal."""
    if step["method"] == "HEAD":
        assert got.status == 200
    else:
        assert (got.status, step["status"]) in ((200, 416), (416, 416)), got


@pytest.mark.rule("worker-12.3")
def test_the_recorded_416_without_end_comes_from_headers_that_a_proxy_drops(served: Served) -> None:
    """The file is whole, so the same 416 is right; it says with `X-File-Size` that nothing is missing."""
    steps = recorded("staging-416")
    content = body(steps[0]["response_headers"]["X-Content-Sha256"], 8_000_000)
    assert Files(served.address).stage("models/glog/mock.bin", content) == 1
    story = Story(served, steps)
    for step, got in story.play():
        assert got.status == step["status"], got
        for header in ("X-File-Size", "Content-Range", "Accept-Ranges"):
            assert got.headers.get(header.lower()) == step["response_headers"].get(header), got
        if step["method"] == "HEAD":
            assert got.headers["x-content-sha256"] == hashlib.sha256(content).hexdigest()
        else:
            assert got.text == step["body"]
