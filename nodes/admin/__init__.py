"""The registry in Django's admin.

What workers and the cluster itself write is read-only here, nodes and replicas cannot be added by hand, and
what changes a node is a verb that calls the same service as the API. `nodes.py` and `history.py` are the
pages, `verbs.py` says what can be done, `confirm.py` and `carry.py` ask and do it, `editing.py` is what can
be typed in, `seen.py` keeps two admins from overwriting each other. `operations.py` is what
can be done to operations and intents, asked and done by `deeds.py`.
"""

from nodes.admin import history, joining, memory, nodes, operations, replicas

__all__ = ["history", "joining", "memory", "nodes", "operations", "replicas"]
