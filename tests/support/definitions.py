"""Model definitions in a folder of the test."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

PLAIN: dict[str, Any] = {
    "name": "mini",
    "backend": "numpy",
    "parameters": {"model": "mini.bin"},
    "embeddings": True,
}


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes a file of this name: a text, or any other value as YAML."""

    def _write(name: str, content: Any) -> Path:
        path = tmp_path / name
        path.write_text(content if isinstance(content, str) else yaml.safe_dump(content), encoding="utf-8")
        return path

    return _write
