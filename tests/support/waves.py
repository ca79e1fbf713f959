"""Upgrades in waves on real rows: requested, executed by hand, and inspected."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from localai_cluster.kit import clock
from nodes.backends import admission, intents
from nodes.backends.backend_requests import UPGRADE, BackendRequest, RequestScope
from nodes.backends.intents import Ended, Intent
from nodes.backends.waves import Options
from nodes.models import BackendNode
from operations.ledger.admission import Requester
from operations.models import Operation, OperationTarget
from tests.support import hot

ECHO = BackendRequest(UPGRADE, "echo")


def fleet(*names: str) -> list[BackendNode]:
    """Create approved nodes with these names."""
    return [hot.node(name) for name in names]


def asked(nodes: Sequence[BackendNode], **options: Any) -> Operation:
    """Request an upgrade of echo in waves."""
    wanted = RequestScope(nodes, by=Requester("ann"), waves=Options(**options))
    return admission.admit(ECHO, wanted, now=clock.now()).operation


def claimed(owner: str = "controller", *, now: datetime | None = None) -> dict[str, Intent]:
    """Return the intents that a controller claims now, by node."""
    found = intents.claim(owner, now=now or clock.now(), lease=60, limit=100)
    return {intent.node.name: intent for intent in found}


def settled(*found: Intent, outcome: Any = None) -> None:
    """End these attempts, all with this outcome (by default done)."""
    written = intents.record_outcomes(
        {(one.id, one.fence): (outcome or Ended(), ()) for one in found}, now=clock.now()
    )
    assert not written


def story(operation: Operation) -> dict[str, tuple[int | None, str, str]]:
    """Return wave, state and reason of each target, by node."""
    rows = OperationTarget.objects.filter(operation=operation)
    return {part.node_name: (part.wave, part.status, part.reason) for part in rows}


def states(operation: Operation) -> dict[str, str]:
    """Return the state of each target, by node."""
    return {name: status for name, (_, status, _) in story(operation).items()}


def again(operation: Operation) -> Operation:
    """Return the operation from its current row."""
    return Operation.objects.get(pk=operation.pk)


def failed_canary() -> Operation:
    """Return an upgrade of three nodes whose first wave has failed."""
    operation = asked(fleet("a", "b", "c"))
    settled(*claimed().values(), outcome=Ended(error="no such image"))
    return again(operation)
