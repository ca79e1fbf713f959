"""Picks of a test, and a connection that sees rows before they are committed."""

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from nodes.gateway.picks import Picker
from nodes.gateway.request import InferenceRequest, Replica
from tests.support import hot


async def acquire(picker: Picker, model: str = "echo") -> Replica:
    """Pick a replica; fail if there is none."""
    replica = await picker.acquire(InferenceRequest(model=model))
    assert replica is not None
    return replica


@pytest.fixture
def raw() -> Iterator[psycopg.Connection[Any]]:
    """Yield a plain connection to the test database."""
    with psycopg.connect(hot.database_url()) as connection:
        yield connection
