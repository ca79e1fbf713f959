"""The tables of settings: each field has a text and a valid default, and the document shows them."""

import pytest

from localai_cluster.kit import env, settings_table
from localai_cluster.worker import config
from tests.checks import settings

ALL = [(table, entry) for table in settings.TABLES.values() for entry in env.declared_settings(table)]
TEXTS = {table: env.read_field_docstrings(table) for table in settings.TABLES.values()}
NAMES = [entry.names[0] for _, entry in ALL]


def test_the_tables_of_the_document_are_those_of_the_programs() -> None:
    """`python -m tests.checks.settings --write` generates them."""
    assert not list(settings.problems())


@pytest.mark.parametrize(("table", "entry"), ALL, ids=NAMES)
def test_each_setting_has_a_text(table: type[env.Table], entry: env.Setting) -> None:
    """The docstring of the field, for `--help` and the document; one sentence or two."""
    text = TEXTS[table][entry.key]
    assert text.endswith(".")
    assert "|" not in text


@pytest.mark.parametrize("entry", [entry for _, entry in ALL if isinstance(entry.default, str)])
def test_each_default_is_a_valid_value(entry: env.Setting) -> None:
    """The text that the document shows as the default has the effect of leaving the variable out."""
    if isinstance(entry.default, str) and entry.default:
        entry.parse(entry.default)


def test_no_two_settings_of_a_program_share_a_variable() -> None:
    server = [
        *env.declared_settings(settings_table.ClusterSettings),
        *env.declared_settings(settings_table.Bootstrap),
    ]
    for entries in (server, config.SETTINGS):
        names = [name for entry in entries for name in entry.names]
        assert len(set(names)) == len(names)
