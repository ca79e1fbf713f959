"""Leads generated cases behind the first check; schemathesis loads this (`hooks` in its configuration)."""

import os
from typing import Any

import schemathesis

MINIMAL = "0"
"""What the coverage phase, which knows no dictionaries, writes into every required text."""
HEADER = "X-LocalAI-Node-Secret"


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: dict[str, Any]) -> None:
    """Puts a value that leads somewhere where a valid one stands that does not."""
    body, token = case.body, os.environ["FUZZ_TOKEN"]
    if not isinstance(body, dict):
        return
    for name, value in {"token": token, "model": "echo", "backend": "echo"}.items():
        if body.get(name) == MINIMAL:
            body[name] = value
    if body.get("token") == token:
        body["address"] = body.get("address") or "127.0.0.1:1"
        if case.headers.get(HEADER, MINIMAL) == MINIMAL:
            case.headers[HEADER] = os.environ["FUZZ_SECRET"]
