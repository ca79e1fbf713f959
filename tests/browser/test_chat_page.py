"""The chat page: a model is loaded, talked to and stopped, by keyboard and on a phone. The engine repeats."""

import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import Locator, Page, expect

from tests.browser import checks
from tests.browser.conftest import Opener
from tests.browser.fleet import Cookies, Fleet
from tests.browser.screen import Screen
from tests.conftest import eventually

SAID = """# Title

**Bold**, `code` and a [link](https://example.org/page); not a [script](javascript:window.hurt=1).

| a | b |
|---|---|
| 1 | 2 |

```html
<script>window.hurt = 1</script>
```

<img src=x onerror="window.hurt=1"><script>window.hurt=1</script> ![far](https://example.org/far.png)
"""
WIDTHLESS = "long" * 60


@pytest.fixture
def models(settled: Fleet) -> Iterator[Fleet]:
    """Two models that repeat what they are told: `late` loads slowly, `slow-talker` says a word in 50 ms."""
    for name, option in (("late", "load_seconds:4"), ("slow-talker", "delay_ms:50")):
        definition = f"name: {name}\nbackend: echo\nparameters:\n  model: {name}\noptions: ['{option}']\n"
        (settled.cluster.models / f"{name}.yaml").write_text(definition)
    yield settled
    for name in ("late", "slow-talker"):
        settled.post("/api/nodes/models/unload", {"model_name": name})
        (settled.cluster.models / f"{name}.yaml").unlink()


def chat(screen: Screen, model: str) -> Page:
    """The page with this model chosen."""
    page = screen.go(f"/app/chat?model={model}")
    expect(page.get_by_role("combobox", name="Model")).to_contain_text(model)
    expect(page.get_by_test_id("connection")).to_have_text("Live")
    return page


def searched(screen: Screen, model: str) -> Page:
    """The same by the search, which is asked to talk to it."""
    page = screen.go("/app/nodes")
    expect(page.get_by_test_id("connection")).to_have_text("Live")
    page.keyboard.press("Control+k")
    expect(page.get_by_role("combobox", name="Search")).to_be_focused()
    page.keyboard.type(f"talk to {model}")
    expect(page.get_by_role("option", name=f"Chat with {model}")).to_have_attribute("aria-selected", "true")
    page.keyboard.press("Enter")
    expect(page.get_by_role("combobox", name="Model")).to_contain_text(model)
    return page


def say(page: Page, text: str) -> Locator:
    """Asks this; answers the article of what is answered."""
    field = page.get_by_role("textbox", name="Message")
    field.fill(text)
    # Enter does nothing until the conversation has its model, a moment after the page has come.
    expect(page.get_by_role("button", name="Send", exact=True)).not_to_have_attribute("aria-disabled", "true")
    field.press("Enter")
    return page.get_by_role("log", name="Conversation").get_by_role("article").last


@pytest.mark.rule("E68", "UI-10.1", "UI-10.3", "UI-10.4", "UI-10.6", "UI-10.8", "UI-10.11")
def test_a_model_is_loaded_by_the_first_question_and_what_it_says_is_harmless(
    screen: Screen, models: Fleet
) -> None:
    page = chat(screen, "late")
    expect(page.get_by_text("The first message loads this model.")).to_be_visible()
    answer = say(page, SAID)
    expect(answer.get_by_role("progressbar", name="Loading model late")).to_be_visible()
    figures = answer.get_by_role("list", name="Figures of this answer")
    expect(figures).to_contain_text("load included")
    expect(figures).to_contain_text("answer tokens")
    expect(figures.get_by_role("link")).to_have_text(re.compile("^(fine|slow|failing)$"))
    expect(answer.get_by_role("cell", name="2")).to_be_visible()
    expect(answer.get_by_role("link", name="link", exact=True)).to_have_attribute(
        "rel", "noopener noreferrer nofollow"
    )
    expect(answer.get_by_role("link", name="script")).to_have_count(0)
    expect(answer.get_by_text("<script>window.hurt=1</script>")).to_be_visible()
    assert page.evaluate("window.hurt") is None
    expect(page.get_by_text("1 replica loaded", exact=True)).to_be_visible()
    assert checks.violations(page) == []


@pytest.mark.rule("UI-10.5", "UI-10.7", "UI-10.10", "UI-10.12", "UI-10.13")
def test_a_talk_goes_by_keyboard_and_stops_at_once(screen: Screen, models: Fleet) -> None:
    page = searched(screen, "slow-talker")
    words = [f"word-{number}" for number in range(400)]
    answer = say(page, "\n\n".join(f"{one} and" for one in words))
    expect(answer.get_by_text("word-20 and")).to_be_attached()
    expect(page.get_by_role("textbox", name="Message")).to_be_in_viewport()
    page.mouse.wheel(0, -2000)
    jump = page.get_by_role("button", name="Jump to latest")
    expect(jump).to_be_visible()
    jump.press("Enter")
    expect(jump).to_have_count(0)
    page.get_by_role("textbox", name="Message").press("Escape")
    expect(answer.get_by_text("stopped", exact=True)).to_be_visible()
    eventually(lambda: _in_flight(models) == 0, what="nothing is in flight")
    expect(page.get_by_test_id("announcer")).to_contain_text("Stopped.")

    page.get_by_role("button", name="Edit").press("Enter")
    field = page.get_by_role("textbox", name="Message")
    expect(field).to_be_focused()
    expect(field).to_have_value(re.compile("^word-0 and"))
    answer = say(page, "Something shorter")
    expect(answer).to_contain_text("Something shorter")
    expect(answer.get_by_role("button", name="Regenerate")).to_be_visible()
    expect(field).to_be_focused()
    for name in ("Regenerate", "Copy answer"):
        page.keyboard.press("Shift+Tab")
        expect(answer.get_by_role("button", name=name)).to_be_focused()
    page.get_by_role("link", name="Nodes").first.click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Nodes")
    page.go_back()
    expect(answer).to_contain_text("Something shorter")
    page.reload()
    expect(page.get_by_role("textbox", name="Message")).to_be_visible()
    expect(page.get_by_role("log", name="Conversation").get_by_role("article")).to_have_count(0)
    expect(page.get_by_role("combobox", name="Model")).to_contain_text("slow-talker")
    expect(page.get_by_test_id("connection")).to_have_text("Live")
    stops = checks.walk(page)
    assert [stop["name"] for stop in stops if not stop["ring"]] == []
    assert [stop["tag"] for stop in stops[-5:]] == ["button", "summary", "summary", "textarea", "button"]


def _in_flight(fleet: Fleet) -> int:
    return sum(int(node["in_flight_count"]) for node in fleet.get("/api/nodes").json())


@pytest.mark.rule("UI-10.2", "UI-10.9", "UI-10.14")
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_it_fits_a_phone(window: Opener, models: Fleet, session: Cookies, dark: bool) -> None:
    screen = window(models.webs[0].url, session, narrow=True, dark=dark)
    screen.page.set_viewport_size({"width": 360, "height": 740})
    page = chat(screen, "slow-talker")
    page.get_by_text("Settings", exact=True).click()
    page.get_by_label("Temperature").fill("0.5")
    answer = say(page, f"{WIDTHLESS}\n\n```\n{WIDTHLESS}\n```\n\n| {WIDTHLESS} |\n|---|\n| b |")
    expect(answer.get_by_role("button", name="Regenerate")).to_be_visible()
    page.get_by_text("As curl and Python", exact=True).click()
    expect(page.get_by_text(re.compile("temperature=0.5"))).to_be_visible()
    assert checks.sideways(page) == []
    assert checks.violations(page) == []
    for place in (0, 100_000):
        page.mouse.wheel(0, place)
        expect(page.get_by_role("textbox", name="Message")).to_be_in_viewport(ratio=1)
