"""`docs/configuration.md` and the tables of settings agree: every variable, and its real default."""

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from localai_cluster.kit import conf, env
from localai_cluster.worker import config

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
SERVER: dict[str, env.Setting] = {
    entry.name: entry.metadata["setting"] for entry in fields(conf.ClusterSettings)
}
IN_WORDS = {"model_load_timeout", "decision_space"}
"""Defaults that the document states in words or in another unit."""
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in DOCUMENT.partition("\n## Worker")[0].splitlines()
    if line.startswith("| `")
]


def documented_default(name: str) -> str:
    """Return the default in the row of a variable; a row of several has one default or one for each."""
    for cells in ROWS:
        names = re.findall(r"`([A-Z][A-Z0-9_]+)`", cells[0])
        if name in names:
            defaults = re.findall(r"`([^`]+)`", cells[1]) or [cells[1]]
            position = names.index(name) if len(defaults) == len(names) else 0
            return str(defaults[position])
    raise AssertionError(f"{name} has no row in docs/configuration.md")


def value_of(text: str, default: Any) -> Any:
    if isinstance(default, bool):
        return env.parse_bool(text)
    if isinstance(default, str):
        return text
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return env.parse_duration(text)


@pytest.mark.parametrize("name", [name for setting in SERVER.values() for name in setting.names])
def test_each_variable_of_the_servers_is_explained(name: str) -> None:
    assert f"`{name}`" in DOCUMENT


@pytest.mark.parametrize(
    "name",
    [
        name
        for name, setting in SERVER.items()
        if setting.default != ""
        and isinstance(setting.default, bool | int | float | str)
        and name not in IN_WORDS
    ],
)
def test_its_default_is_the_real_one(name: str) -> None:
    setting = SERVER[name]
    for variable in setting.names:
        assert value_of(documented_default(variable), setting.default) == setting.default, variable


def test_each_variable_of_the_worker_has_help() -> None:
    """`--help` is the worker's table; the document explains those beyond the reference's."""
    contract = (ROOT / "docs" / "contract" / "worker.md").read_text(encoding="utf-8")
    for option in config.SETTINGS:
        assert option.help
        assert any(f"`{name}`" in DOCUMENT or name in contract for name in option.environment), option.key
