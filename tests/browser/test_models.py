"""The pages of models: the list, a model's page with its definition, by keyboard and on a phone."""

import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import Locator, Page, expect

from tests.browser import checks
from tests.browser.conftest import Opener
from tests.browser.fleet import Cookies, Fleet
from tests.browser.screen import Screen

FILED, STORED = "from-a-file", "stored"
TEXT = "name: {name}\nbackend: echo\ncontext_size: 8192\nparameters:\n  model: {name}\n"


@pytest.fixture
def models(settled: Fleet) -> Iterator[Fleet]:
    """A model that a file defines, one that is stored, and a file that defines nothing."""
    folder = settled.cluster.models
    (folder / f"{FILED}.yaml").write_text(TEXT.format(name=FILED))
    (folder / "broken.yaml").write_text("name: broken\nbackend: [\n")
    created = settled.post("/api/definitions", {"text": TEXT.format(name=STORED)})
    assert created.status_code == 201, created.text
    yield settled
    for name in (f"{FILED}.yaml", "broken.yaml"):
        (folder / name).unlink()
    for name in (STORED, f"{STORED}-copy"):
        settled.delete(f"/api/definitions/{name}")
    settled.settle()


def revision_of(models: Fleet) -> int:
    """The revision of the stored model: a model that replaces a deleted one continues its numbers."""
    revision: int = models.get(f"/api/definitions/{STORED}").json()["revision"]
    return revision


def row(page: Page, name: str) -> Locator:
    """The row of a model."""
    header = page.get_by_role("rowheader", name=re.compile(f"^{name}"))
    return page.get_by_role("grid", name="Models").get_by_role("row").filter(has=header)


def opened(screen: Screen, path: str) -> Page:
    page = screen.go(path)
    expect(page.get_by_test_id("connection")).to_have_text("Live")
    return page


def test_what_came_while_another_page_was_open_is_there_on_return(screen: Screen, models: Fleet) -> None:
    """A page that is not open does not follow the feed."""
    page = opened(screen, "/app/models")
    expect(row(page, STORED)).to_have_count(1)
    navigation = page.get_by_role("navigation").first
    navigation.get_by_role("link", name="Nodes").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Nodes")
    copy = f"{STORED}-copy"
    assert models.post("/api/definitions", {"text": TEXT.format(name=copy)}).status_code == 201
    navigation.get_by_role("link", name="Models").click()
    expect(row(page, copy)).to_have_count(1)


@pytest.mark.rule("UI-8.1", "UI-8.2", "UI-8.4", "UI-9.7")
def test_a_model_is_found_loaded_on_a_node_and_unloaded(screen: Screen, models: Fleet) -> None:
    page = opened(screen, f"/app/models?q={FILED}")
    broken = page.get_by_role("region", name="Definitions that cannot be used")
    expect(broken).to_contain_text(re.compile(r"broken\.yaml line \d"))
    expect(row(page, FILED)).to_contain_text("not running")
    row(page, FILED).focus()
    page.keyboard.press("Enter")
    expect(page).to_have_url(re.compile(f"/app/models/{FILED}$"))
    page.get_by_role("button", name="Load…").click()
    dialog = page.get_by_role("dialog", name=f"Load {FILED}")
    dialog.get_by_label("Node").fill("fine")
    dialog.get_by_role("button", name="Load", exact=True).click()
    expect(dialog).to_have_count(0)
    replicas = page.get_by_role("table", name=f"Replicas of {FILED}").get_by_role("row")
    expect(replicas.filter(has_text="fine")).to_contain_text("loaded")
    expect(replicas).to_have_count(2)
    assert checks.violations(page) == []
    page.get_by_role("button", name="More", exact=True).click()
    page.get_by_role("menuitem", name="Unload all…").click()
    page.get_by_role("alertdialog").get_by_role("button", name="Unload", exact=True).click()
    expect(page.get_by_text("Not running. The first request loads the model.")).to_be_visible()


@pytest.mark.rule("UI-8.6", "UI-9.7")
def test_a_definition_is_edited_restored_cloned_and_deleted(screen: Screen, models: Fleet) -> None:
    first = revision_of(models)
    page = opened(screen, f"/app/models/{STORED}/definition")
    page.get_by_role("button", name="Edit").click()
    page.get_by_label("Context, tokens").fill("4096")
    expect(page.get_by_role("group", name="Difference")).to_contain_text("-context_size: 8192")
    assert checks.violations(page) == []
    page.get_by_role("button", name="YAML", exact=True).click()
    area = page.get_by_label(f"YAML of {STORED}")
    expect(area).to_have_value(re.compile("context_size: 4096"))
    area.fill("name: [\n")
    expect(page.get_by_role("button", name=re.compile("^Line [12]"))).to_be_visible()
    expect(page.get_by_role("button", name="Save")).to_have_attribute("aria-disabled", "true")
    area.fill(TEXT.format(name=STORED).replace("8192", "2048"))
    page.get_by_label("Reason").fill("smaller")
    expect(page.get_by_role("button", name="Save")).not_to_have_attribute("aria-disabled", "true")
    page.get_by_role("button", name="Save").click()
    expect(page.get_by_label(f"Definition of {STORED}")).to_have_value(re.compile("2048"))

    page.get_by_role("link", name="Revisions").click()
    expect(page.get_by_text("smaller")).to_be_visible()
    page.get_by_role("button", name=f"Restore revision {first}").click()
    page.get_by_role("alertdialog").get_by_role("button", name="Restore").click()
    expect(page.get_by_text(f"Revision {first + 2}", exact=True)).to_be_visible()
    assert checks.violations(page) == []

    page.get_by_role("button", name="More", exact=True).click()
    page.get_by_role("menuitem", name="Clone…").click()
    page.get_by_role("dialog").get_by_role("button", name="Clone").click()
    expect(page).to_have_url(re.compile(f"/app/models/{STORED}-copy/definition$"))
    # The page may ask for the definition once more before the list says that it is deleted.
    screen.expect(rf"status of 404 .*/api/definitions/{STORED}-copy\)$")
    page.get_by_role("button", name="More", exact=True).click()
    page.get_by_role("menuitem", name="Delete…").click()
    page.get_by_role("alertdialog").get_by_role("button", name="Delete").click()
    expect(page).to_have_url(re.compile("/app/models$"))
    expect(page.get_by_role("heading", level=1)).to_have_text("Models")
    expect(page.get_by_role("link", name=f"{STORED}-copy", exact=True)).to_have_count(0)


@pytest.mark.rule("UI-8.6")
def test_a_change_by_somebody_else_keeps_what_is_typed(screen: Screen, models: Fleet) -> None:
    page = opened(screen, f"/app/models/{STORED}/definition")
    page.get_by_role("button", name="Edit").click()
    page.get_by_label("Context, tokens").fill("4096")
    first = revision_of(models)
    other = {"changes": {"parallel": 2}, "revision": first}
    assert models.put(f"/api/definitions/{STORED}", other).status_code == 200
    expect(page.get_by_role("group", name="Difference").last).to_contain_text("4096")
    # The feed tells; a save before that is refused by 409, as `model-page.test.tsx` has it.
    moved = page.get_by_role("region", name="Change by another user")
    expect(moved).to_contain_text(f"revision {first + 1}")
    moved.get_by_role("button", name=f"Apply my changes to revision {first + 1}").click()
    expect(page.get_by_label("Parallel slots")).to_have_value("2")
    expect(page.get_by_label("Context, tokens")).to_have_value("4096")
    page.get_by_role("button", name="Save").click()
    expect(page.get_by_label(f"Definition of {STORED}")).to_have_value(re.compile("4096"))


@pytest.mark.rule("UI-9.10", "UI-9.7", "UI-8.8")
@pytest.mark.parametrize(
    "path", ["", "/add", *(f"/{STORED}/{tab}" for tab in ("overview", "definition", "files", "try"))]
)
def test_it_fits_a_phone(window: Opener, models: Fleet, session: Cookies, path: str) -> None:
    screen = window(models.webs[0].url, session, narrow=True)
    screen.page.set_viewport_size({"width": 360, "height": 740})
    page = opened(screen, f"/app/models{path}")
    waiting = page.get_by_role("status").filter(has_text=re.compile(r"^\s*Loading .*…$"))
    expect(waiting).to_have_count(0)
    if path.endswith("definition"):
        page.get_by_role("button", name="Edit").click()
        expect(page.get_by_label("Context, tokens")).to_be_visible()
    assert checks.sideways(page) == []
    assert checks.violations(page) == []


@pytest.mark.rule("UI-9.10")
def test_the_reason_of_a_revision_is_readable_on_a_phone(
    window: Opener, models: Fleet, session: Cookies
) -> None:
    """An import's reason is an address without blanks: beside the other words it had one letter a line."""
    reason = (
        "imported from hf://owner/a-repository-with-a-long-name-GGUF@91cad51170dc346986eccefdc2dd33a9da36ead9"
    )
    changed = {"changes": {"max_tokens": 77}, "reason": reason}
    assert models.put(f"/api/definitions/{STORED}", changed).status_code == 200
    screen = window(models.webs[0].url, session, narrow=True)
    text = opened(screen, f"/app/models/{STORED}/revisions").get_by_text(reason)
    expect(text).to_be_visible()
    box = text.bounding_box()
    assert box is not None
    assert box["width"] > 200
    assert checks.sideways(screen.page) == []
