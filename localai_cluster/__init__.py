"""The project package: settings and entry points, and the mechanisms that both apps use.

The entry points are above the apps `nodes` and `operations`; the mechanisms (clock, messaging, rpc …) are
below the apps.
"""

import sys

# httpx imports its command line if it can, with rich and pygments: 5 MB of every process.
sys.modules.setdefault("httpx._main", None)  # type: ignore[arg-type]

__version__ = "0.1.0"
