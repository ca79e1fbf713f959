"""What an admin can do to a node or about an identity conflict, as data.

Each verb says to which rows it applies and why not to others, what it will do to one, what it asks for, and
which service does it. The same names are routes of the REST API; `confirm.py` makes the pages.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from django import forms
from django.core.exceptions import ValidationError

from localai_cluster.accounts.actors import Actor
from localai_cluster.kit import conf, errors, names
from localai_cluster.kit.nkeys import grouped
from nodes.admin import words
from nodes.backends import node_stop
from nodes.models import BackendNode, NodeConflict
from nodes.registry import services, states
from nodes.registry.states import Event

LONGEST_REASON = 255


class Nothing(forms.Form):
    """A verb that needs only a confirmation."""


class ReasonForm(forms.Form):
    """The reason that the node's page and its timeline show."""

    reason = forms.CharField(
        required=False, max_length=LONGEST_REASON, help_text="Shown on the node's page and in its timeline."
    )

    def clean_reason(self) -> str:
        """Refuses invisible characters."""
        reason = str(self.cleaned_data["reason"])
        try:
            names.check_text(reason, "The reason")
        except errors.InvalidInput as refusal:
            raise ValidationError(refusal.message) from None
        return reason


class NeededReason(ReasonForm):
    """A reason that must be given."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fields["reason"].required = True


class DrainTerms(ReasonForm):
    """The reason, and how long running requests may take."""

    deadline = forms.IntegerField(
        required=False, min_value=0, max_value=int(services.LONGEST_DEADLINE), label="Deadline in seconds"
    )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        default = words.span(conf.cluster().drain_deadline)
        self.fields["deadline"].help_text = (
            f"Replicas are stopped at the deadline, even with running requests. Leave empty for {default};"
            " 0 = immediately."
        )


Asked = Mapping[str, Any]


@dataclass(frozen=True)
class Verb:
    """One thing that an admin can do, to one row or to many."""

    name: str
    title: str
    """On its button."""
    done: str
    """What it has done to a row, for the message afterwards."""
    meaning: str
    refusal: Callable[[Any], str]
    """Why it does not apply to this row, "" if it does."""
    effect: Callable[[Any], str]
    """What it will do to this row."""
    run: Callable[[UUID, Actor, datetime, Asked], str]
    """Does it; answers what else is to be said. Raises ClusterError."""
    form: type[forms.Form] = Nothing
    permission: str = "change"
    grave: bool = False
    """It cannot be undone."""
    many: str = ""
    """What to call it for several rows, if not by its title."""


def _refused(event: Event) -> Callable[[BackendNode], str]:
    def refusal(node: BackendNode) -> str:
        after = states.apply(event, services.facts_of(node))
        return after.reason if isinstance(after, states.Refusal) else ""

    return refusal


def _moves(event: Event, node: BackendNode) -> str:
    """The status before and after, `pending → healthy`."""
    before = services.facts_of(node)
    after = states.apply(event, before)
    told = after if isinstance(after, states.Facts) else before
    was, will = states.status_of(before), states.status_of(told)
    return f"{was} → {will}" if was != will else f"stays {was}"


def _approval(node: BackendNode) -> str:
    shown = grouped(node.fingerprint) or "the shared token only (weak identity)"
    return f"{_moves(Event.APPROVED, node)}. Identity: {shown}"


def _rejection(node: BackendNode) -> str:
    again = " Already rejected." if node.rejected_at else ""
    return f"stays pending, even if it re-registers.{again}"


def remains(node: Any) -> str:
    """What still runs on a node of a `with_counts` queryset."""
    requests = words.count(node.in_flight_count, "request")
    return f"{requests} in flight, {words.count(node.model_count, 'loaded replica')}"


def _drain(node: BackendNode) -> str:
    again = "updates reason and deadline; " if node.drained_at and not node.drain_is_own else ""
    return f"{_moves(Event.DRAINED, node)}; {again}{remains(node)}"


def _revocation(node: BackendNode) -> str:
    secret = f"secret {grouped(node.fingerprint[:16])} …" if node.fingerprint else "weak identity"
    return f"{_moves(Event.REVOKED, node)}; {secret} rejected; {remains(node)} stopped"


def _removal(node: BackendNode) -> str:
    return f"record, labels and conflicts deleted; {remains(node)} stopped"


def _rotation_refused(node: BackendNode) -> str:
    if not node.fingerprint:
        return "has no secret of its own"
    return "rotation already requested" if node.rotation_requested_at else ""


def _approve(node_id: UUID, actor: Actor, now: datetime, asked: Asked) -> str:
    approved = services.approve(node_id, actor=actor, now=now, reason=asked["reason"])
    if not approved.api_token:
        return ""
    return f"API token of the agent {approved.node.name}, shown only once: {approved.api_token}"


def _drain_now(node_id: UUID, actor: Actor, now: datetime, asked: Asked) -> None:
    services.drain(node_id, actor=actor, now=now, reason=asked["reason"], deadline=asked["deadline"])


def _stop(node_id: UUID, actor: Actor, now: datetime, asked: Asked) -> str:
    node = BackendNode.objects.filter(pk=node_id).first()
    if node is None:
        raise errors.NotFound("node not found")
    admission = node_stop.request_stop(node, actor=actor.name, now=now, reason=asked["reason"])
    return f"operation {admission.operation.id} stops the worker of {node.name}"


def _silent(act: Callable[[UUID, Actor, datetime, Asked], object]) -> Callable[..., str]:
    """A service of which nothing more is to be said."""

    def run(pk: UUID, actor: Actor, now: datetime, asked: Asked) -> str:
        act(pk, actor, now, asked)
        return ""

    return run


NODE_VERBS = (
    Verb(
        "approve",
        "Approve",
        "approved",
        "Approved nodes receive work. Approving undoes an earlier rejection. First compare the fingerprint"
        " with the one in the worker's log.",
        _refused(Event.APPROVED),
        _approval,
        _approve,
        ReasonForm,
    ),
    Verb(
        "reject",
        "Reject",
        "rejected",
        "Rejected nodes stay pending and receive no work, even if they re-register. Approve them to undo.",
        _refused(Event.REJECTED),
        _rejection,
        _silent(lambda pk, actor, now, asked: services.reject(pk, actor=actor, now=now, **asked)),
        NeededReason,
    ),
    Verb(
        "drain",
        "Drain",
        "drained",
        "No new requests are sent to the node. Running requests may finish until the deadline; then replicas"
        " are stopped. Restarting the worker does not end the drain; Resume does.",
        _refused(Event.DRAINED),
        _drain,
        _silent(_drain_now),
        DrainTerms,
    ),
    Verb(
        "resume",
        "Resume",
        "resumed",
        "Ends a drain or the status “unhealthy”. An offline node receives work after its next heartbeat.",
        _refused(Event.RESUMED),
        lambda node: _moves(Event.RESUMED, node),
        _silent(lambda pk, actor, now, asked: services.resume(pk, actor=actor, now=now)),
    ),
    Verb(
        "stop",
        "Stop worker",
        "worker told to stop",
        "The worker drains itself, leaves and ends. It comes back only if its machine starts it again.",
        node_stop.refusal,
        lambda node: f"{remains(node)} stopped",
        _stop,
        ReasonForm,
        grave=True,
        many="Stop the workers of",
    ),
    Verb(
        "rotate",
        "Rotate secret",
        "secret rotation requested",
        "The worker replaces its secret at next contact; until then it can only register.",
        _rotation_refused,
        lambda node: f"replaces secret {grouped(node.fingerprint[:16])} …",
        _silent(lambda pk, actor, now, asked: services.request_rotation(pk, actor=actor, now=now)),
        many="Rotate secrets of",
    ),
    Verb(
        "revoke",
        "Revoke secret",
        "revoked",
        "Use if the secret has been compromised. It is permanently rejected, under any name. The node is"
        " pending until a worker registers with a new secret and an administrator approves it.",
        _refused(Event.REVOKED),
        _revocation,
        _silent(lambda pk, actor, now, asked: services.revoke(pk, actor=actor, now=now, **asked)),
        ReasonForm,
        grave=True,
        many="Revoke secrets of",
    ),
    Verb(
        "remove",
        "Remove",
        "removed",
        "Deletes the node's record; its timeline stays for the retention period. A running worker"
        " re-registers as a new, pending node.",
        _refused(Event.DEREGISTERED),
        _removal,
        _silent(lambda pk, actor, now, asked: services.deregister(pk, actor=actor, now=now)),
        permission="delete",
        grave=True,
    ),
)


def _not_acceptable(conflict: NodeConflict) -> str:
    if conflict.state == NodeConflict.State.ACCEPTED:
        return "already accepted"
    return services.NOT_ACCEPTABLE.get(NodeConflict.Mismatch(conflict.kind), "")


def _not_refusable(conflict: NodeConflict) -> str:
    return "" if conflict.state == NodeConflict.State.OPEN else f"already {conflict.state}"


def _acceptance(conflict: NodeConflict) -> str:
    if conflict.kind == NodeConflict.Mismatch.NAME:
        return f"the node is renamed to {conflict.claimed_name}"
    if conflict.kind == NodeConflict.Mismatch.ADDRESS:
        return f"the worker at {conflict.source_address} becomes the node; the current one is refused"
    return f"the worker at {conflict.source_address} becomes the node; the current secret is rejected"


CONFLICT_VERBS = (
    Verb(
        "accept",
        "Accept",
        "accepted",
        "The node takes over the claimant's secret; the previous secret is permanently rejected. The node is"
        " offline until the new worker registers. Accepting a claim to another name only renames the node;"
        " one to another address makes the worker there the node.",
        _not_acceptable,
        _acceptance,
        _silent(lambda pk, actor, now, asked: services.accept_conflict(pk, actor=actor, now=now)),
        permission="decide",
        grave=True,
    ),
    Verb(
        "refuse",
        "Refuse",
        "refused",
        "The node keeps its identity; the claimant stays refused. It can still be accepted later.",
        _not_refusable,
        lambda conflict: f"the worker at {conflict.source_address} stays refused",
        _silent(lambda pk, actor, now, asked: services.refuse_conflict(pk, actor=actor, now=now)),
        permission="decide",
    ),
)
