"""`GET /api/models`: what is defined, for the pages."""

import dataclasses
from pathlib import Path

import pytest
from pytest_django import Settings

from tests.support import api

pytestmark = pytest.mark.django_db


@pytest.mark.rule("E65")
def test_every_definition_is_listed_by_name(settings: Settings, tmp_path: Path) -> None:
    """A file that is no definition is left out."""
    settings.CLUSTER = dataclasses.replace(settings.CLUSTER, models_path=tmp_path)
    for name in ("zeta", "org/alpha"):
        text = f"name: {name}\nbackend: echo\nparameters:\n  model: {name}.gguf\n"
        (tmp_path / f"{name.replace('/', '-')}.yaml").write_text(text)
    (tmp_path / "broken.yaml").write_text("name: broken\n")
    assert api.admin().get("/api/models").json() == [
        {"name": "org/alpha", "backend": "echo", "model": "org/alpha.gguf", "source": "org-alpha.yaml"},
        {"name": "zeta", "backend": "echo", "model": "zeta.gguf", "source": "zeta.yaml"},
    ]
