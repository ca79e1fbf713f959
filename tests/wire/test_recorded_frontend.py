"""The scripted stock frontend answers what LocalAI's frontend was recorded to answer to a worker."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.wire.servers import NEVER, Call, StockFrontend

DATA = Path(__file__).parents[1] / "data" / "http"
REPEATED = re.compile(r"(\w) repeated (\d+) times\Z")
FILES = ("register", "heartbeat", "node-self-service")


def examples(name: str) -> list[dict[str, Any]]:
    recorded = json.loads((DATA / f"{name}.json").read_text(encoding="utf-8"))["examples"]
    return [example for example in recorded if example["path"].startswith("/api/node/")]


def written_out(body: Any) -> Any:
    """A body with its abbreviated texts in full."""
    if not isinstance(body, dict):
        return body
    matches = {name: REPEATED.match(str(value)) for name, value in body.items()}
    return {name: m[1] * int(m[2]) if (m := matches[name]) else value for name, value in body.items()}


def play(example: dict[str, Any]) -> tuple[int, Any]:
    """What the scripted frontend answers, with the node that the recorded one had."""
    frontend = StockFrontend(token="tok", auto_approve=False)
    headers = {name.lower(): value for name, value in example["request_headers"].items()}
    node_id = example["path"].split("/")[3]
    is_again = example["status"] == 201 and example["body"]["created_at"] == NEVER
    if node_id != "register" or is_again:
        body = {"name": "w", "address": "h:1", "token": "tok"}
        frontend.answer(Call("POST", "/api/node/register", {"authorization": "Bearer tok"}, body, 0.0))
        if is_again:
            frontend.approve()
    path = example["path"]
    if example["status"] != 404 and node_id not in ("register", "nope"):
        path = path.replace(node_id, frontend.node_id)
    body = written_out(example["request_body"])
    status, text = frontend.answer(Call(example["method"], path, headers, body, 0.0))
    return status, json.loads(text)


def shape(body: Any) -> Any:
    """A body without the values that differ from one run to the next."""
    if not isinstance(body, dict):
        return body
    return {
        name: type(value).__name__ if name in ("id", "created_at") else value for name, value in body.items()
    }


@pytest.mark.parametrize(
    "example",
    [pytest.param(example, id=f"{name}: {example['name']}") for name in FILES for example in examples(name)],
)
def test_the_scripted_frontend_answers_as_recorded(example: dict[str, Any]) -> None:
    status, body = play(example)
    assert (status, shape(body)) == (example["status"], shape(example["body"]))
    assert isinstance(body, list) or body.get("created_at", NEVER) == NEVER or status == 201


def test_each_recorded_refusal_is_among_them() -> None:
    played = [play(example) for name in FILES for example in examples(name)]
    assert [error for error in examples("errors") if (error["status"], error["body"]) not in played] == []
