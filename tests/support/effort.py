"""The effort of the tests: `make sweep` sets TEST_EFFORT, which multiplies rounds and examples."""

import os

import pytest

EFFORT = int(os.environ.get("TEST_EFFORT", "1"))
"""Multiplier of races' rounds and properties' examples; 1 in an ordinary run."""

swept = pytest.mark.skipif("TEST_EFFORT" not in os.environ, reason="`make sweep` plays it")
"""Marks a test that is too long for an ordinary run; a shorter test of the same kind runs always."""
