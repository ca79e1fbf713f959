"""The project package.

Settings and entry points above both apps, mechanism (clock, messaging, rpc …) below them.
"""

__version__ = "0.1.0"
