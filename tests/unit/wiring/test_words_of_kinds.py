"""Every kind of operation has its words on the pages."""

import re
from pathlib import Path

from operations.models import KINDS

WORDS = Path(__file__).resolve().parents[3] / "static/src/operations/words.ts"


def test_every_kind_has_its_words() -> None:
    """A kind without a line in `WORDS` would be shown as an installation."""
    table = WORDS.read_text(encoding="utf-8").partition("const WORDS:")[2].partition("\n};")[0]
    assert set(re.findall(r"^  (\w+): \{ label", table, re.MULTILINE)) == set(KINDS)
