"""The time limit for work that waits for an offline or unhealthy node, and the reasons that its targets show.

A worker that sends heartbeats but does not listen on the bus stays unhealthy for as long as that lasts. The
time of the mark counts then, because its last heartbeat is always recent.
"""

from datetime import datetime, timedelta

from localai_cluster.kit import conf
from nodes.models import BackendNode, NodeStatus

_ABSENT = (NodeStatus.OFFLINE, NodeStatus.UNHEALTHY)
_DEAF = "it sends heartbeats, but does not answer on the bus"


def gives_up_at(node: BackendNode) -> datetime | None:
    """Return when work that waits for this absent node is given up; None, for at once, if it was never heard.

    R1.118: the time counts from the last heartbeat, or from an earlier mark that the node still has.
    """
    if node.last_heartbeat is None:
        return None
    since: datetime = node.last_heartbeat
    for marked_at in (node.offline_at, node.unhealthy_at):
        since = since if marked_at is None else min(since, marked_at)
    return since + timedelta(seconds=conf.cluster().install_wait)


def sends_heartbeats(node: BackendNode) -> bool:
    """Return True if an unhealthy node has been heard since it was marked."""
    if node.status != NodeStatus.UNHEALTHY or node.unhealthy_at is None:
        return False
    return node.last_heartbeat is not None and node.last_heartbeat > node.unhealthy_at


def reason_to_wait(node: BackendNode, *, now: datetime) -> str:
    """Return why a part waits for its node, and until when."""
    text = f"node {node.name} is {node.status}"
    if sends_heartbeats(node):
        text += f": {_DEAF}"
    until = gives_up_at(node)
    if node.status not in _ABSENT or until is None:
        return text
    if until <= now:
        return f"{text}; CLUSTER_INSTALL_WAIT is over"
    return f"{text}; it waits until {until:%Y-%m-%d %H:%M:%S} UTC"


def reason_to_give_up(node: BackendNode) -> str:
    """Return why work for the node was given up, when its time is over."""
    text = f"node {node.name} is {node.status}"
    if sends_heartbeats(node):
        text += f" since {node.unhealthy_at:%Y-%m-%d %H:%M:%S} UTC: {_DEAF}"
    elif node.last_heartbeat is not None:
        text += f"; its last heartbeat was at {node.last_heartbeat:%Y-%m-%d %H:%M:%S} UTC"
    return f"given up: {text} (CLUSTER_INSTALL_WAIT)"
