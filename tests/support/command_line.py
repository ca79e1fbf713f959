"""Calls of `manage.py` by tests: the output of a command, or its refusal."""

import json
from io import StringIO
from typing import Any

import pytest
from django.core.management import CommandError, call_command


def run(*arguments: str) -> str:
    """Return the output of a command."""
    out = StringIO()
    call_command(*arguments, stdout=out)
    return out.getvalue()


def told(*arguments: str) -> Any:
    """Return the parsed output of a command with `--json`."""
    return json.loads(run(*arguments, "--json"))


def refused(*arguments: str) -> str:
    """Return the one line with which a command ends with exit code 1."""
    with pytest.raises(CommandError) as caught:
        run(*arguments)
    assert caught.value.returncode == 1
    assert "\n" not in str(caught.value)
    return str(caught.value)
