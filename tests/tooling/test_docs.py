"""The documents name files and pages that exist, and the pages about mechanisms stay short."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    page
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "docs/decisions").glob("*.md")]
)
MECHANISMS = (
    "backends",
    "changes",
    "cold-requests",
    "decision-records",
    "nodes",
    "pages",
    "prefix-routing",
    "replicas",
    "scheduling",
    "workers",
)
MOST_WORDS = 700


def _tree() -> list[str]:
    folders = ("localai_cluster", "nodes", "operations", "tests", "examples", "requirements")
    return [f"/{path.relative_to(ROOT)}" for folder in folders for path in (ROOT / folder).rglob("*.py")]


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.parent.name == "docs"], ids=lambda page: page.stem
)
def test_named_modules_exist(page: Path) -> None:
    """By their whole path, or by the end of it that the context leaves."""
    tree = _tree()
    named = set(re.findall(r"`([\w/]+\.py)`", page.read_text()))
    assert not {name for name in named if not any(path.endswith(f"/{name}") for path in tree)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", page.read_text())
    assert not [link for link in links if not (page.parent / link).exists()]


def test_pages_about_mechanisms_are_short() -> None:
    words = {name: len((ROOT / f"docs/{name}.md").read_text().split()) for name in MECHANISMS}
    assert not {name: count for name, count in words.items() if count > MOST_WORDS}
