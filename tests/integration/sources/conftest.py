"""A source that is mirror, registry, gallery and object store of the cluster."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
from pytest_django import Settings

from localai_cluster.kit.env import RegistrySetting
from nodes.backends import catalogue
from nodes.sources import galleries
from tests.support import hub
from tests.support.sources import Source


@pytest.fixture
def source() -> Iterator[Source]:
    """A server that plays all of them."""
    with hub.playing() as source:
        yield source


@pytest.fixture(autouse=True)
def models(source: Source, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The models folder of a cluster that knows this source."""
    models = tmp_path / "models"
    models.mkdir()
    monkeypatch.setattr(galleries, "reader", catalogue.Reader(galleries.read_all))
    settings.CLUSTER = dataclasses.replace(
        settings.CLUSTER,
        models_path=models,
        hugging_face_url=source.url(hub.HUB),
        hugging_face_token="",
        registries=tuple(
            RegistrySetting(host=host, plain_http=True) for host in (source.host, source.storage)
        ),
        model_galleries=[{"name": "local", "url": source.url("/index.yaml")}],
        s3_endpoint=source.url(""),
        share_roots=(models / "share",),
    )
    return models
