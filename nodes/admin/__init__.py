"""The registry in Django's admin: approval and overrides of nodes, join tokens, read-only lists.

Everything else that changes a node, an operation or a rule is done on the pages, over REST or at the command
line.
"""

from nodes.admin import nodes, tables

__all__ = ["nodes", "tables"]
