"""Every kind of operation has its words on the pages, and every sort of change its filter."""

import re
from pathlib import Path

import pytest

from operations.models import KINDS

ROOT = Path(__file__).resolve().parents[3]
WORDS = ROOT / "static/src/operations/words.ts"
FILTERS = ROOT / "static/src/operations/changes-query.ts"


def test_every_kind_has_its_words() -> None:
    """A kind without a line in `WORDS` would be shown as an installation."""
    table = WORDS.read_text(encoding="utf-8").partition("const WORDS:")[2].partition("\n};")[0]
    assert set(re.findall(r"^  (\w+): \{ label", table, re.MULTILINE)) == set(KINDS)


@pytest.mark.rule("UW32")
def test_every_sort_of_change_can_be_filtered() -> None:
    """The audit log had no filter for changes of definitions."""
    sources = [
        path.read_text(encoding="utf-8")
        for package in ("localai_cluster", "nodes", "operations")
        for path in (ROOT / package).rglob("*.py")
    ]
    recorded = set(re.findall(r"[Cc]hange\(\s*f?\"(\w+)\.", "\n".join(sources)))
    table = FILTERS.read_text(encoding="utf-8").partition("const SORTS:")[2].partition("\n];")[0]
    assert set(re.findall(r"^  \[\"(\w+)\"", table, re.MULTILINE)) == recorded
