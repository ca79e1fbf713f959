"""A cluster with the real llama.cpp whose hub and gallery of models are played by the test.

`make story ARGS=models` plays docs/models-walkthrough.md on it.
"""

import json
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from playwright.sync_api import expect

from localai_cluster.kit import clock
from tests.browser.fleet import Fleet, running_fleet
from tests.browser.story_teller import Teller
from tests.support import hub
from tests.support.cluster import ROOT
from tests.support.sources import Source, sha256_of

REPO = "HuggingFaceTB/SmolLM2-135M-Instruct-GGUF"
"""What a person pastes."""
IMPORTED = "SmolLM2-135M-Instruct"
ENTRY = "smollm2-assistant"
"""The model of the gallery."""
_WEIGHTS = ROOT / "build" / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
_LARGER = 40_000_000
RATE = 15_000_000
"""Bytes a second that the source sends, so that a person sees the progress."""


@contextmanager
def source_of_models(rate: int = RATE) -> Iterator[Source]:
    """A hub with one repository of two variants, and a gallery with one entry."""
    weights = _WEIGHTS.read_bytes()
    files = {
        "smollm2-135m-instruct-q4_1.gguf": weights,
        "smollm2-135m-instruct-q8_0.gguf": weights + bytes(_LARGER),
    }
    with hub.playing(rate=rate) as source:
        hub.add_repository(source, REPO, files)
        source.files["/files/assistant.gguf"] = weights
        entry = {
            "name": ENTRY,
            "description": "A language model that chats on one core of a processor.",
            "license": "apache-2.0",
            "tags": ["llm", "chat"],
            "size": f"{len(weights) // 10**6}MB",
            "overrides": {
                "backend": "llama-cpp",
                "context_size": 2048,
                "parameters": {"model": "gallery/assistant.gguf", "temperature": 0, "max_tokens": 64},
                "template": {"use_tokenizer_template": True},
            },
            "files": [
                {
                    "filename": "gallery/assistant.gguf",
                    "uri": source.url("/files/assistant.gguf"),
                    "sha256": sha256_of(weights),
                }
            ],
        }
        source.files["/index.yaml"] = json.dumps([entry]).encode()
        yield source


@contextmanager
def cluster_with_models(rate: int = RATE) -> Iterator[Fleet]:
    """A cluster with one worker that uses this source."""
    with source_of_models(rate) as source:
        more = {
            "HF_ENDPOINT": source.url(hub.HUB),
            "LOCALAI_GALLERIES": json.dumps([{"name": "models", "url": source.url("/index.yaml")}]),
            "LOCALAI_REGISTRIES": json.dumps(
                [{"host": host, "plain_http": True} for host in (source.host, source.storage)]
            ),
        }
        with running_fleet(webs=1, workers=("fine",), tasks=True, **more) as fleet:
            fleet.publish("llama-cpp", "1.0.0", fleet.cluster.gallery / "llama-cpp")
            yield fleet


QUESTION = "What is the capital of France?"


def add(one: Teller, text: str, picture: str) -> None:
    """Adds what this text names, and chats with it as soon as it can be talked to."""
    page = one.page
    page.get_by_label("Name, address or definition").fill(text)
    button = page.get_by_role("button", name=re.compile("^Download .* and load$"))
    expect(button).to_be_visible()
    one.picture(f"{picture}-variants")
    begun = clock.monotonic()
    button.click()
    expect(page.get_by_role("progressbar").first).to_be_visible()
    time.sleep(3)
    one.picture(f"{picture}-progress")
    panel = page.get_by_role("region", name="Your model")
    panel.get_by_role("link", name="Chat", exact=True).click()
    one.say(f"downloaded and defined after {clock.monotonic() - begun:.1f} s")
    page.get_by_role("textbox", name="Message").fill(QUESTION)
    page.get_by_role("button", name="Send").click()
    answer = page.get_by_role("log", name="Conversation").get_by_role("article").last
    figures = answer.get_by_role("list", name="Figures of this answer")
    expect(figures).to_contain_text("answer tokens", timeout=60_000)
    one.say(f"answered after {clock.monotonic() - begun:.1f} s:", answer.inner_text())
    one.picture(f"{picture}-chat")


def from_gallery(one: Teller) -> None:
    """A model of the catalogue is chosen, imported, and answers."""
    page = one.show("/app/models/add")
    page.get_by_role("button", name=f"Choose {ENTRY}").click()
    add(one, f"models@{ENTRY}", "gallery")


def from_hub(one: Teller) -> None:
    """The name of a repository is pasted; the recommended variant is imported and answers."""
    one.show("/app/models/add")
    add(one, REPO, "hub")


def edited(one: Teller) -> None:
    """The context is halved; the page names the replica that the edit replaces."""
    page = one.show(f"/app/models/{IMPORTED}/definition")
    page.get_by_role("button", name="Edit").click()
    page.get_by_label("Context, tokens").fill("4096")
    expect(page.get_by_role("group", name="Difference")).to_contain_text("+context_size: 4096")
    page.get_by_label("Reason").fill("half the context is enough")
    save = page.get_by_role("button", name="Save")
    expect(save).not_to_have_attribute("aria-disabled", "true")
    one.picture("edit")
    save.click()
    expect(page.get_by_label(f"Definition of {IMPORTED}")).to_have_value(re.compile("4096"))


def restored(one: Teller) -> None:
    """The first revision is restored; its history says who changed what, and why."""
    page = one.show(f"/app/models/{IMPORTED}/revisions")
    expect(page.get_by_text("half the context is enough")).to_be_visible()
    one.picture("revisions")
    page.get_by_role("button", name="Restore revision 1").click()
    question = page.get_by_role("alertdialog")
    one.picture("restore")
    question.get_by_role("button", name="Restore").click()
    expect(page.get_by_text("Revision 3", exact=True)).to_be_visible()
    one.say(page.get_by_role("main").inner_text())


def deleted(one: Teller) -> None:
    """The model is deleted with its files."""
    page = one.show(f"/app/models/{IMPORTED}")
    page.get_by_role("button", name="More", exact=True).click()
    page.get_by_role("menuitem", name="Delete…").click()
    question = page.get_by_role("alertdialog")
    files = question.get_by_role("checkbox")
    if files.count():
        files.first.check()
    time.sleep(0.5)
    one.picture("delete")
    begun = clock.monotonic()
    question.get_by_role("button", name="Delete").click()
    expect(page).to_have_url(re.compile("/app/models$"), timeout=60_000)
    one.say(f"gone after {clock.monotonic() - begun:.1f} s; left of its files:")
    one.say([path.name for path in (one.fleet.cluster.models / "hf").rglob("*.gguf")])
    one.show("/app/models")
    one.picture("models")


SCENES = (from_gallery, from_hub, edited, restored, deleted)


def play(one: Teller, names: Sequence[str]) -> None:
    """Plays the scenes of these names, all if there are none."""
    for scene in SCENES:
        if names and scene.__name__ not in names:
            continue
        one.say(f"== {scene.__name__}: {scene.__doc__}")
        try:
            scene(one)
        except Exception as error:
            one.say(f"THE SCENE BROKE OFF: {error!r}")
