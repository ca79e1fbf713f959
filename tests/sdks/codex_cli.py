"""Codex CLI: one turn that runs a command, and a second one that goes on from it."""

import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from playing import ASK, SAID, URL, play

CONFIG = f"""
model = "m"
model_provider = "cluster"
check_for_update_on_startup = false
[analytics]
enabled = false
[model_providers.cluster]
name = "cluster"
base_url = "{URL}/v1"
env_key = "SDK_KEY"
wire_api = "responses"
request_max_retries = 0
stream_max_retries = 0
"""
HOME = Path(tempfile.mkdtemp(prefix="codex-"))
(HOME / "config.toml").write_text(CONFIG)
UNSAFE = "--dangerously-bypass-approvals-and-sandbox"
"""The command is the test's own."""


def run(*words: str) -> list[dict[str, Any]]:
    """The events of one turn."""
    done = subprocess.run(
        [*json.loads(os.environ["SDK_COMMAND"]), "exec", *words],
        cwd=HOME,
        env={**os.environ, "HOME": str(HOME), "CODEX_HOME": str(HOME)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def items(events: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    """The completed items of a kind."""
    done = [event["item"] for event in events if event["type"] == "item.completed"]
    return [item for item in done if item["type"] == kind]


def turns() -> None:
    """The model's command is run, and the conversation goes on."""
    options = ("--skip-git-repo-check", "--json", UNSAFE)
    first = run(*options, ASK)
    (command,) = items(first, "command_execution")
    assert (command["exit_code"], command["aggregated_output"].strip()) == (0, "sunny")
    assert [item["text"] for item in items(first, "agent_message")] == [SAID]
    usage = next(event["usage"] for event in first if event["type"] == "turn.completed")
    assert usage["cached_input_tokens"] == 3
    second = run("resume", "--last", *options, "And now?")
    assert items(second, "agent_message")[-1]["text"] == SAID


play(turns)
