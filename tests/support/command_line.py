"""`manage.py` as a test calls it: what a command prints, and why it is refused."""

import json
from io import StringIO
from typing import Any

import pytest
from django.core.management import CommandError, call_command


def run(*arguments: str) -> str:
    """What a command prints."""
    out = StringIO()
    call_command(*arguments, stdout=out)
    return out.getvalue()


def told(*arguments: str) -> Any:
    """What a command prints with `--json`."""
    return json.loads(run(*arguments, "--json"))


def refused(*arguments: str) -> str:
    """Why a command ends with exit code 1: one line."""
    with pytest.raises(CommandError) as caught:
        run(*arguments)
    assert caught.value.returncode == 1
    assert "\n" not in str(caught.value)
    return str(caught.value)
