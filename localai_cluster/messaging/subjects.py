"""Subject names of the bus, built in one place.

Every variable part passes through `token`, the rule that the permission lists of workers use too. The
mapping is not reversible, so payloads repeat the real ids and nothing ever reads an id back out of a
subject.
"""

PREFIX_NEWS = "prefixcache.*"
PREFIX_OBSERVED = "prefixcache.observe"
"""Published by a web process: a replica was given a prompt."""
PREFIX_INVALIDATED = "prefixcache.invalidate"
"""Published by who removed a replica's row: what it was given counts no more."""

_UNSAFE = str.maketrans(dict.fromkeys(".*> \t\n", "-"))


def token(value: str) -> str:
    """One subject token: `.`, `*`, `>`, space, tab and newline become `-`, nothing else changes."""
    return value.translate(_UNSAFE)


def node_prefix(node_id: str) -> str:
    """Everything of one node lies below this prefix."""
    return f"nodes.{token(node_id)}"


def inbox(node_id: str) -> str:
    """Replies of one node lie below this prefix: its credentials allow no other inbox (§9.2, *Build*)."""
    return f"_INBOX.{token(node_id)}"


def backend_install(node_id: str) -> str:
    """Request: have the backend's files there and, unless only those are asked for, a process running."""
    return f"{node_prefix(node_id)}.backend.install"


def backend_upgrade(node_id: str) -> str:
    """Request: stop the backend's processes and install it again."""
    return f"{node_prefix(node_id)}.backend.upgrade"


def backend_cancel(node_id: str) -> str:
    """Request, an extension of ours: end the install or upgrade of one operation."""
    return f"{node_prefix(node_id)}.backend.cancel"


def install_progress(node_id: str, op_id: str) -> str:
    """Published by the worker while an install or upgrade with this operation id runs."""
    return f"{backend_install(node_id)}.{token(op_id)}.progress"


def install_progress_everywhere(op_id: str) -> str:
    """The progress of one operation on every node."""
    return f"nodes.*.backend.install.{token(op_id)}.progress"


def install_progress_of_all(node_id: str) -> str:
    """The progress of every operation on one node."""
    return f"{backend_install(node_id)}.*.progress"


def backend_stop(node_id: str) -> str:
    """Published: stop processes by backend, model or process key; empty means all of them."""
    return f"{node_prefix(node_id)}.backend.stop"


def backend_delete(node_id: str) -> str:
    """Request: stop the backend's processes and remove its files."""
    return f"{node_prefix(node_id)}.backend.delete"


def backend_list(node_id: str) -> str:
    """Request: which backends are installed."""
    return f"{node_prefix(node_id)}.backend.list"


def models_running(node_id: str) -> str:
    """Request: which processes are alive."""
    return f"{node_prefix(node_id)}.models.running"


def model_unload(node_id: str) -> str:
    """Request: free a model's memory; its process lives on."""
    return f"{node_prefix(node_id)}.model.unload"


def model_stop(node_id: str) -> str:
    """Request: stop exactly one process and confirm that it is gone."""
    return f"{node_prefix(node_id)}.model.stop"


def model_delete(node_id: str) -> str:
    """Request: remove a model's staged files."""
    return f"{node_prefix(node_id)}.model.delete"


def stop(node_id: str) -> str:
    """Published: the worker shuts down."""
    return f"{node_prefix(node_id)}.stop"
