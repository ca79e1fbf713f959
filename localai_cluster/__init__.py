"""The project package.

Settings and entry points above both apps, mechanism (clock, messaging, rpc …) below them.
"""

import sys

# httpx imports its command line if it can, with rich and pygments: 5 MB of every process.
sys.modules.setdefault("httpx._main", None)  # type: ignore[arg-type]

__version__ = "0.1.0"
