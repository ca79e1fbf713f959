"""How hard the tests look: `make sweep` sets TEST_EFFORT, and a race or a property is tried that often."""

import os

import pytest

EFFORT = int(os.environ.get("TEST_EFFORT", "1"))
"""1 for every run; by this races have more rounds and properties more examples."""

swept = pytest.mark.skipif("TEST_EFFORT" not in os.environ, reason="`make sweep` plays it")
"""For a test that is too long for every run, beside another of its kind that every run plays."""
