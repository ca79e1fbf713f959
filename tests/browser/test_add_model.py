"""Adding a model: from a pasted name to the answer of a real engine, with the choices counted."""

import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Locator, expect

from tests.browser import checks, walkthrough
from tests.browser.conftest import Opener
from tests.browser.fleet import Cookies, Fleet, sign_in
from tests.browser.screen import Screen
from tests.support.effort import swept

pytestmark = swept
CHOICES = 3
"""How many a person makes at most between the pasted name and the first word of the answer."""


@pytest.fixture(scope="module")
def place(chromium: Browser) -> Iterator[Fleet]:
    """A cluster with one worker, llama.cpp, a hub and a gallery of models."""
    with walkthrough.cluster_with_models() as running:
        yield running


@pytest.fixture(scope="module")
def admin(place: Fleet) -> Cookies:
    """The session of this file."""
    return sign_in(place.webs[0].url)


@pytest.fixture
def view(window: Opener, place: Fleet, admin: Cookies) -> Iterator[Screen]:
    """A wide, light window of a signed-in admin; the models that a test adds are deleted."""
    yield window(place.webs[0].url, admin)
    for name in (walkthrough.IMPORTED, walkthrough.ENTRY):
        place.delete(f"/api/definitions/{name}?files=true")
    place.settle()


class Person:
    """Makes choices one after the other and counts them."""

    choices = 0

    def press(self, button: Locator) -> None:
        button.click()
        self.choices += 1


@pytest.mark.rule("UI-8.8", "UI-9.7")
@pytest.mark.parametrize(
    ("pasted", "model"),
    [(walkthrough.REPO, walkthrough.IMPORTED), (f"models@{walkthrough.ENTRY}", walkthrough.ENTRY)],
    ids=["hub", "gallery"],
)
def test_a_pasted_name_answers_after_three_choices(
    view: Screen, place: Fleet, pasted: str, model: str
) -> None:
    person, page = Person(), view.go("/app/models/add")
    expect(page.get_by_test_id("connection")).to_have_text("Live")
    page.get_by_label("Name, address or definition").fill(pasted)
    button = page.get_by_role("button", name=re.compile("^Download .* and load$"))
    expect(button).to_be_visible()
    expect(page.get_by_label("Name of the model")).to_have_value(model)
    assert checks.violations(page) == []
    person.press(button)
    panel = page.get_by_role("region", name="Your model")
    expect(panel.get_by_role("progressbar", name=re.compile(model))).to_be_visible()
    assert checks.violations(page) == []
    person.press(panel.get_by_role("link", name="Chat", exact=True))
    expect(page.get_by_role("combobox", name="Model")).to_contain_text(model)
    page.get_by_role("textbox", name="Message").fill("What is the capital of France?")
    person.press(page.get_by_role("button", name="Send"))
    answer = page.get_by_role("log", name="Conversation").get_by_role("article").last
    expect(answer.locator(".chat-text").first).to_have_text(re.compile(r"\w"))
    # A model this small may ramble without end.
    page.get_by_role("textbox", name="Message").press("Escape")
    figures = answer.get_by_role("list", name="Figures of this answer")
    expect(figures).to_contain_text("first token after")
    expect(figures.get_by_role("link")).to_have_text("fine")
    assert checks.violations(page) == []
    assert person.choices <= CHOICES
