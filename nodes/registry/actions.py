"""The actions of an administrator on a node or an identity conflict: names, texts and conditions. Pure.

REST, the command line, Django's admin, operations over many nodes and, through `make types`, the pages use
this table. The row of `states.TRANSITIONS` for `event` states in which statuses an action is possible;
`bulk.py` runs the action.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from nodes.registry import states
from nodes.registry.states import Event

if TYPE_CHECKING:
    from nodes.models import BackendNode

MAX_REASON_LENGTH = 255


@dataclass(frozen=True)
class Action:
    """One action: its conditions, and the texts that every interface shows."""

    name: str
    """Name in URLs and on the command line."""
    title: str
    """Text on the button of the action."""
    done: str
    """Past participle for a row on which the action has succeeded, such as "approved"."""
    message: str
    """Message in the response of REST and in the output of the command line."""
    summary: str
    """Summary in the API document."""
    help: str
    """Help text on the command line."""
    consequence: str
    """Text that is shown before the user confirms."""
    event: Event | None = None
    """The event that the action causes; None if it changes no fact about a node."""
    reason: Literal["none", "optional", "required"] = "none"
    """Whether the action needs a reason, accepts one, or has none."""


APPROVE = Action(
    "approve",
    "Approve",
    "approved",
    "node approved",
    "Approve a node",
    "Approve pending nodes.",
    "Approved nodes receive work. Approving undoes an earlier rejection. First compare the fingerprint with"
    " the one in the worker's log.",
    event=Event.APPROVED,
    reason="optional",
)
REJECT = Action(
    "reject",
    "Reject",
    "rejected",
    "node rejected",
    "Reject a node",
    "Reject a pending node.",
    "Rejected nodes stay pending and receive no work, even if they re-register. Approve them to undo.",
    event=Event.REJECTED,
    reason="required",
)
DRAIN = Action(
    "drain",
    "Drain",
    "drained",
    "node set to draining",
    "Drain a node",
    "Send no new requests to a node.",
    "No new requests are sent to the node. Running requests may finish until the deadline; then replicas are"
    " stopped. Restarting the worker does not end the drain; Resume does.",
    event=Event.DRAINED,
    reason="optional",
)
RESUME = Action(
    "resume",
    "Resume",
    "resumed",
    "node resumed",
    "Resume a node",
    "Return a node to service.",
    "Ends a drain or the status “unhealthy”. An offline node receives work after its next heartbeat.",
    event=Event.RESUMED,
    reason="optional",
)
STOP = Action(
    "stop",
    "Stop worker",
    "worker told to stop",
    "the worker is being stopped",
    "Stop the worker of a node",
    "Stop the worker of a node.",
    "The worker drains itself, leaves and ends. It comes back only if its machine starts it again.",
    reason="optional",
)
ROTATE = Action(
    "rotate",
    "Rotate secret",
    "secret rotation requested",
    "rotation requested",
    "Request a secret rotation",
    "Have the worker replace its secret at its next call.",
    "The worker replaces its secret at next contact; until then it can only register.",
)
REVOKE = Action(
    "revoke",
    "Revoke secret",
    "revoked",
    "identity revoked",
    "Revoke a node's secret",
    "Reject the worker's secret permanently.",
    "Use if the secret has been compromised. It is permanently rejected, under any name. The node is pending"
    " until a worker registers with a new secret and an administrator approves it.",
    event=Event.REVOKED,
    reason="optional",
)
REMOVE = Action(
    "remove",
    "Remove",
    "removed",
    "node deregistered",
    "Remove a node",
    "Remove a node; its timeline stays.",
    "Deletes the node's record; its timeline stays for the retention period. A running worker re-registers as"
    " a new, pending node.",
    event=Event.DEREGISTERED,
)
NODE_ACTIONS: Mapping[str, Action] = {
    action.name: action for action in (APPROVE, REJECT, DRAIN, RESUME, STOP, ROTATE, REVOKE, REMOVE)
}
"""The actions on a node by name."""

_TAKE_OVER_CONSEQUENCE = (
    "The node takes over the claimant's secret; the previous secret is permanently rejected. The node is"
    " offline until the new worker registers."
)
ACCEPT_CONSEQUENCES: Mapping[str, str] = {
    "secret": _TAKE_OVER_CONSEQUENCE,
    "weak": _TAKE_OVER_CONSEQUENCE,
    "name": "The node takes the new name.",
    "address": "The worker at the claimed address becomes the node, and the one at the current address is"
    " refused. The node is offline until it registers.",
}
"""The consequence of accepting a conflict, by kind; conflicts of other kinds cannot be accepted."""
ACCEPT = Action(
    "accept",
    "Accept",
    "accepted",
    "conflict accepted",
    "Accept an identity conflict",
    "Accept a conflict: the claimant becomes the node.",
    f"{_TAKE_OVER_CONSEQUENCE} Accepting a claim to another name only renames the"
    " node; one to another address makes the worker there the node.",
)
REFUSE = Action(
    "refuse",
    "Refuse",
    "refused",
    "conflict refused",
    "Refuse an identity conflict",
    "Refuse a conflict: the node stays as it is, and the claimant stays refused.",
    "The node keeps its identity; the claimant stays refused. It can still be accepted later.",
)


def refusal(action: Action, node: "BackendNode") -> str:
    """Return why the action is not possible on the node now; "" if it is possible."""
    if action is STOP:
        return _stop_refusal(node)
    if action is ROTATE and not node.fingerprint:
        return "has no secret of its own"
    if action is ROTATE and node.rotation_requested_at:
        return "rotation already requested"
    after = states.apply(action.event, states.facts_of(node)) if action.event else None
    return after.reason if isinstance(after, states.Refusal) else ""


def _stop_refusal(node: "BackendNode") -> str:
    if node.node_type != "backend":
        return "an agent does not listen for it; stop its process on its machine"
    if node.status == states.PENDING:
        return "pending approval: it is not on the bus"
    return "already offline" if node.status == states.OFFLINE else ""
