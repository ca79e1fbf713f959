"""The documents name files, pages, commands and routes that exist; pages about mechanisms stay short."""

import argparse
import re
from pathlib import Path

import pytest
from django.core.management import get_commands, load_command_class
from django.urls import Resolver404, resolve

from localai_cluster import edge

ROOT = Path(__file__).resolve().parents[2]
OPERATING = ROOT / "docs/operating"
FOR_OPERATORS = sorted([ROOT / "README.md", *OPERATING.glob("*.md")])
PAGES = sorted({*FOR_OPERATORS, *(ROOT / "docs").glob("*.md"), *(ROOT / "docs/decisions").glob("*.md")})
MECHANISMS = (
    "backends",
    "changes",
    "cold-requests",
    "decision-records",
    "figures",
    "inference",
    "killed-workers",
    "nodes",
    "pages",
    "prefix-routing",
    "replicas",
    "scheduling",
    "staging",
    "workers",
)
MAX_WORDS = 700


def _page_id(page: Path) -> str:
    return str(page.relative_to(ROOT))


def _tree() -> list[str]:
    folders = ("localai_cluster", "nodes", "operations", "tests", "examples", "requirements")
    return [f"/{path.relative_to(ROOT)}" for folder in folders for path in (ROOT / folder).rglob("*.py")]


@pytest.mark.parametrize("page", [page for page in PAGES if page.parent.name == "docs"], ids=_page_id)
def test_named_modules_exist(page: Path) -> None:
    """By their whole path, or by the end of it that the context leaves."""
    tree = _tree()
    named = set(re.findall(r"`([\w/]+\.py)`", page.read_text()))
    assert not {name for name in named if not any(path.endswith(f"/{name}") for path in tree)}


@pytest.mark.parametrize("page", PAGES, ids=_page_id)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", page.read_text())
    assert not [link for link in links if not (page.parent / link).exists()]


def test_pages_about_mechanisms_are_short() -> None:
    words = {name: len((ROOT / f"docs/{name}.md").read_text().split()) for name in MECHANISMS}
    assert not {name: count for name, count in words.items() if count > MAX_WORDS}


def test_pages_for_operators_are_listed() -> None:
    """The index names every page of `docs/operating`."""
    index = (OPERATING / "README.md").read_text()
    pages = {page.name for page in OPERATING.glob("*.md")} - {"README.md"}
    assert not {name for name in pages if f"({name})" not in index}


@pytest.mark.parametrize("page", PAGES, ids=_page_id)
def test_anchors_exist(page: Path) -> None:
    missing = []
    for path, anchor in re.findall(r"\]\(([^)#:\s]*)#([^)\s]+)\)", page.read_text()):
        target = page.parent / path if path else page
        if anchor not in _anchors(target):
            missing.append(f"{path}#{anchor}")
    assert not missing


def _anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in headings)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("page", FOR_OPERATORS, ids=_page_id)
def test_named_commands_exist(page: Path) -> None:
    named = set(re.findall(r"manage\.py (\w+) ([a-z][a-z-]*)", page.read_text()))
    assert not {(command, verb) for command, verb in named if verb not in (_verbs(command) or {verb})}


def _verbs(command: str) -> set[str]:
    """Return the verbs of a command, if it has any."""
    parser = load_command_class(get_commands()[command], command).create_parser("manage.py", command)
    choices = [action.choices for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return set(*choices)


@pytest.mark.parametrize("page", FOR_OPERATORS, ids=_page_id)
def test_named_routes_exist(page: Path) -> None:
    routes = re.findall(r"(?:GET|POST|PUT|PATCH|DELETE) (/[^\s`?…]+)", page.read_text())
    unknown = []
    for route in routes:
        path = re.sub(r":\w+|<\w+>|\bID\b|\bMODEL\b", "x", route).rstrip(".,)")
        try:
            assert edge.find_route(path) or resolve(path)
        except Resolver404:
            unknown.append(route)
    assert not unknown
