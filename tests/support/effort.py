"""How hard the tests look: `make sweep` sets TEST_EFFORT, and a race or a property is tried that often."""

import os

EFFORT = int(os.environ.get("TEST_EFFORT", "1"))
"""1 for every run; by this races have more rounds and properties more examples."""
