"""The tables of settings in `docs/configuration.md` are generated from the tables that the programs read.

`python -m tests.checks.settings` exits with 1 if the document is not up to date; `--write` writes it.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from localai_cluster.kit import env, settings_table
from localai_cluster.worker import config

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "configuration.md"
TABLES: dict[str, type[env.Table]] = {
    "server": settings_table.ClusterSettings,
    "bootstrap": settings_table.Bootstrap,
    "worker": config.Config,
}


def table(settings: type[env.Table], *, flags: bool) -> str:
    """Return the settings of a table in Markdown, a section for each group."""
    entries, texts = env.declared_settings(settings), env.read_field_docstrings(settings)
    parts = []
    for group in dict.fromkeys(entry.group for entry in entries):
        rows = [_row(entry, texts[entry.key], flags=flags) for entry in entries if entry.group == group]
        head = _line("variable", *(["flag"] if flags else []), "default", "meaning")
        title = f"### {group}{' of the worker' if flags else ''}\n\n" if group else ""
        parts.append(title + "".join([head, re.sub(r"[^|\n]+", "---", head), *rows]))
    return "\n".join(parts)


def _row(entry: env.Setting, text: str, *, flags: bool) -> str:
    own_flag = [f"`{config.flag(entry)}`"] if flags else []
    shown = f"`{entry.shown}`" if entry.shown and entry.shown == entry.default else entry.shown
    return _line(", ".join(f"`{name}`" for name in entry.names), *own_flag, shown or "-", text)


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |\n"


def document(text: str) -> str:
    """Return the document with its tables as the programs have them."""
    for name, settings in TABLES.items():
        begin, end = f"<!-- generated: {name} -->\n", f"<!-- end: {name} -->"
        before, found, rest = text.partition(begin)
        _, closed, after = rest.partition(end)
        if not (found and closed):
            raise SystemExit(f"{DOCUMENT} has no place for the table {name!r}")
        text = f"{before}{begin}\n{table(settings, flags=name == 'worker')}\n{end}{after}"
    return text


def problems() -> Iterator[str]:
    """Return what is wrong: nothing, or that the document is out of date."""
    text = DOCUMENT.read_text(encoding="utf-8")
    if document(text) != text:
        yield f"{DOCUMENT} is out of date: run `python -m tests.checks.settings --write`"


def main() -> int:
    """Check or write the document."""
    if "--write" in sys.argv[1:]:
        DOCUMENT.write_text(document(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
    found = list(problems())
    for problem in found:
        print(problem)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
