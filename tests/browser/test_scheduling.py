"""The pages of scheduling rules and of models: a rule that is made in the browser brings a replica, live."""

import re
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tests.browser import checks
from tests.browser.fleet import Fleet
from tests.browser.screen import Screen
from tests.support import gguf_files
from tests.support.gguf_models import MODELS

MODEL = "ruled"


@pytest.mark.rule("UW8", "UW10", "UW11", "UW1", "E41", "E42", "UI-6.2", "UI-7.3")
def test_a_rule_is_made_and_its_replica_appears(screen: Screen, settled: Fleet) -> None:
    definition = f"name: {MODEL}\nbackend: echo\nparameters:\n  model: {MODEL}\n"
    (settled.cluster.models / f"{MODEL}.yaml").write_text(definition)
    page = screen.go("/app/scheduling")
    expect(page.get_by_text("No scheduling rules")).to_be_visible()

    page.get_by_role("button", name="Add rule…").click()
    dialog = page.get_by_role("dialog", name="Add rule")
    dialog.get_by_label("Model", exact=True).fill(MODEL)
    dialog.get_by_label("Label", exact=True).fill("node.name")
    matches = dialog.get_by_role("group", name="Node selector").get_by_role("status")
    dialog.get_by_label("Value", exact=True).fill("nowhere")
    expect(matches).to_contain_text("No node matches")
    dialog.get_by_label("Value", exact=True).fill("fine")
    expect(matches).to_contain_text("nodes: fine")
    dialog.get_by_label("Maximum replicas").fill("1")
    dialog.get_by_role("button", name="Save rule").click()
    # While the dialog is open, nothing behind it has a role.
    expect(dialog).to_have_count(0)
    row = page.get_by_role("table", name="Scheduling rules").get_by_role("row").filter(has_text=MODEL)
    expect(row).to_contain_text("exactly 1")
    expect(row).to_contain_text("node.name=fine")
    expect(row.get_by_role("group", name="Nodes with replicas")).to_contain_text("fine")
    expect(row).to_contain_text("satisfied")

    row.get_by_role("link", name=MODEL).click()
    model = page.get_by_role("table", name=f"Replicas of {MODEL}")
    replica = model.get_by_role("row").filter(has=page.get_by_role("rowheader", name="fine"))
    expect(replica).to_contain_text("loaded")
    page.goto(f"{screen.url}/app/capacity?of=ram&model={MODEL}")
    expect(page.get_by_role("link", name=re.compile("^fine .* free of "))).to_be_visible()
    expect(
        page.get_by_role("link", name=re.compile("^slow .*not matching the rule's selector$"))
    ).to_be_visible()
    page.goto(f"{screen.url}/app/models/{MODEL}")
    page.get_by_role("link", name="Rule: exactly 1").click()
    row.get_by_role("button", name=f"Delete rule of {MODEL}").click()
    question = page.get_by_role("alertdialog", name=f"Delete the rule of {MODEL}")
    question.get_by_role("button", name="Delete", exact=True).click()
    expect(question).to_have_count(0)
    expect(page.get_by_text("No scheduling rules")).to_be_visible()
    _unload(page, screen.url)


def _unload(page: Page, url: str) -> None:
    """Unloads the model from the list."""
    page.goto(f"{url}/app/models?q={MODEL}")
    page.get_by_role("button", name=f"Actions for {MODEL}").click()
    page.get_by_role("menuitem", name="Unload all…").click()
    question = page.get_by_role("alertdialog", name=f"Unload {MODEL} from 1 node")
    question.get_by_role("button", name="Unload", exact=True).click()
    expect(question).to_have_count(0)
    models = page.get_by_role("grid", name="Models")
    expect(models.get_by_role("row").filter(has_text=MODEL)).to_contain_text("not running")


@pytest.mark.rule("UW9", "UW12", "UI-9.7")
def test_where_a_model_fits_is_shown_before_any_load(screen: Screen, settled: Fleet, tmp_path: Path) -> None:
    """On its page on demand, and in a plan for a file that no server has."""
    definition = "name: large\nbackend: echo\nvram_needed: 9GiB\nparameters:\n  model: large\n"
    file = settled.cluster.models / "large.yaml"
    file.write_text(definition)
    page = screen.go("/app/models/large")
    model = page.get_by_role("region", name="Replicas")
    model.get_by_role("button", name="Where it fits: large").click()
    table = model.get_by_role("table", name="Memory for large")
    expect(table.get_by_role("row").filter(has_text="fine")).to_contain_text("9 GiB")
    expect(model.get_by_text("Needs: 9 GiB.")).to_be_visible()
    assert checks.violations(page) == []

    page.goto(f"{screen.url}/app/capacity/what-if")
    page.get_by_label("Or a GGUF file on this computer").set_input_files(
        gguf_files.write(tmp_path / "m.gguf", MODELS[0])
    )
    page.get_by_label("Context, tokens").fill("4096")
    page.get_by_label("New nodes").fill("1")
    page.get_by_label("VRAM of each, GiB").fill("24")
    page.get_by_role("button", name="Plan").click()
    row = (
        page.get_by_role("table", name="Memory for the replica").get_by_role("row").filter(has_text="(new 1)")
    )
    expect(row).to_contain_text("fits")
    expect(page.get_by_text("with 4k of context")).to_be_visible()
    assert checks.violations(page) == []
    assert checks.sideways(page) == []
    file.unlink()
