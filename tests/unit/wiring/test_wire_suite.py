"""`tests/wire` stands alone: a stock worker is held to the same checks as ours."""

import ast
import sys
from pathlib import Path

import pytest

SUITE = Path(__file__).parents[2] / "wire"
PORTS = Path(__file__).parents[2] / "support" / "ports.py"
"""Shared with the other tests."""
ALLOWED = {*sys.stdlib_module_names, "cryptography", "pytest", "pytest_asyncio", "grpc", "nats", "psutil"}


@pytest.mark.parametrize("file", [*sorted(SUITE.glob("*.py")), PORTS], ids=lambda file: file.name)
def test_the_wire_suite_imports_nothing_of_the_product(file: Path) -> None:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0
            names = [node.module or ""]
        for name in names:
            is_own = name.startswith("tests.wire.") or name == "tests.support.ports"
            assert is_own or name.partition(".")[0] in ALLOWED, name
