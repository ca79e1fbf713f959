"""Subject names of the bus, built in one place.

Every variable part passes through `token`, the rule that the permission lists of workers use too. The mapping
is not reversible, so payloads repeat the real ids and no code reads an id from a subject.
"""

PREFIX_NEWS = "prefixcache.*"
PREFIX_OBSERVED = "prefixcache.observe"
"""Published by a web process: a prompt was routed to a replica."""
PREFIX_INVALIDATED = "prefixcache.invalidate"
"""Published by the process that removed a replica's row: the prompts routed to it no longer count."""

_UNSAFE = str.maketrans(dict.fromkeys(".*> \t\n", "-"))


def token(value: str) -> str:
    """Convert `value` to one subject token: `.`, `*`, `>`, space, tab and newline become `-`."""
    return value.translate(_UNSAFE)


def node_prefix(node_id: str) -> str:
    """Return the prefix of all subjects of one node."""
    return f"nodes.{token(node_id)}"


def inbox(node_id: str) -> str:
    """Return the prefix of one node's replies; its credentials allow no other inbox (§9.2, *Build*)."""
    return f"_INBOX.{token(node_id)}"


def backend_install(node_id: str) -> str:
    """Request: install the backend's files and, unless `install_only` is set, start a process."""
    return f"{node_prefix(node_id)}.backend.install"


def backend_upgrade(node_id: str) -> str:
    """Request: stop the backend's processes and install it again."""
    return f"{node_prefix(node_id)}.backend.upgrade"


def backend_cancel(node_id: str) -> str:
    """Request, an extension of ours: cancel the install or upgrade of one operation."""
    return f"{node_prefix(node_id)}.backend.cancel"


def install_progress(node_id: str, op_id: str) -> str:
    """Published by the worker during an install or upgrade with this operation id."""
    return f"{backend_install(node_id)}.{token(op_id)}.progress"


def install_progress_everywhere(op_id: str) -> str:
    """Wildcard: the progress of one operation on every node."""
    return f"nodes.*.backend.install.{token(op_id)}.progress"


def install_progress_of_all(node_id: str) -> str:
    """Wildcard: the progress of every operation on one node."""
    return f"{backend_install(node_id)}.*.progress"


def backend_stop(node_id: str) -> str:
    """Published: stop processes by backend, model or process key; empty means all of them."""
    return f"{node_prefix(node_id)}.backend.stop"


def backend_delete(node_id: str) -> str:
    """Request: stop the backend's processes and remove its files."""
    return f"{node_prefix(node_id)}.backend.delete"


def backend_list(node_id: str) -> str:
    """Request: list the installed backends."""
    return f"{node_prefix(node_id)}.backend.list"


def models_running(node_id: str) -> str:
    """Request: list the live processes."""
    return f"{node_prefix(node_id)}.models.running"


def model_unload(node_id: str) -> str:
    """Request: free a model's memory; its process keeps running."""
    return f"{node_prefix(node_id)}.model.unload"


def model_stop(node_id: str) -> str:
    """Request: stop exactly one process and confirm that it has ended."""
    return f"{node_prefix(node_id)}.model.stop"


def model_delete(node_id: str) -> str:
    """Request: remove a model's staged files."""
    return f"{node_prefix(node_id)}.model.delete"


def stop(node_id: str) -> str:
    """Published: the worker shuts down."""
    return f"{node_prefix(node_id)}.stop"
