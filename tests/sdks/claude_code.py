"""Claude Code: one turn that runs a command, and a second one that goes on from it."""

import json
import os
import subprocess
import tempfile
from typing import Any

from playing import ASK, KEY, SAID, URL, play

HOME = tempfile.mkdtemp(prefix="claude-")
MODELS = ("ANTHROPIC_MODEL", "ANTHROPIC_SMALL_FAST_MODEL", "ANTHROPIC_DEFAULT_HAIKU_MODEL")
ENVIRONMENT = {
    "HOME": HOME,
    "CLAUDE_CONFIG_DIR": HOME,
    "ANTHROPIC_BASE_URL": URL,
    "ANTHROPIC_API_KEY": KEY,
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "CLAUDE_CODE_MAX_RETRIES": "0",
    "DISABLE_AUTOUPDATER": "1",
    **dict.fromkeys(MODELS, "m"),
}


def run(*words: str) -> list[dict[str, Any]]:
    """The messages of one turn; the last one is its result."""
    output = ("--output-format", "stream-json", "--verbose", "--allowedTools", "Bash")
    done = subprocess.run(
        [*json.loads(os.environ["SDK_COMMAND"]), "-p", *words, *output],
        cwd=HOME,
        env={**os.environ, **ENVIRONMENT},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def turns() -> None:
    """The model's command is run, and the conversation goes on."""
    first = run(ASK)
    assert (first[-1]["is_error"], first[-1]["result"]) == (False, SAID), first[-1]
    results = [
        block
        for message in first
        if message["type"] == "user"
        for block in message["message"]["content"]
        if isinstance(block, dict) and block["type"] == "tool_result"
    ]
    assert [(block["content"], block["is_error"]) for block in results] == [("sunny", False)]
    second = run("--continue", "And now?")
    assert (second[-1]["is_error"], second[-1]["result"]) == (False, SAID), second[-1]


play(turns)
