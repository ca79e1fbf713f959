"""The registry in Django's admin: approval and overrides of nodes, join tokens, read-only lists.

All other changes of nodes, operations and rules are made on the pages, over REST or at the command line.
"""

from nodes.admin import nodes, tables

__all__ = ["nodes", "tables"]
