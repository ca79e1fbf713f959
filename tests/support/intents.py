"""One intent from the request to its result; the test plays the bus."""

from dataclasses import replace
from typing import Any

import pytest
from django.conf import settings

from localai_cluster.kit import clock
from localai_cluster.messaging import messages
from localai_cluster.messaging import messages as m
from nodes.backends import admission, backend_requests, intent_queue, intents
from nodes.backends.backend_requests import BackendRequest, RequestScope
from nodes.backends.intent_queue import IntentQueue
from nodes.backends.intents import Intent
from nodes.commands import commands
from nodes.loading.load_request import load_on_other_node
from nodes.models import BackendNode, PendingBackendOp
from operations.ledger.admission import Requester
from operations.models import Operation, OperationTarget
from tests.support import hot
from tests.support.bus import PlayedBus

INSTALL, UPGRADE, DELETE = backend_requests.INSTALL, backend_requests.UPGRADE, backend_requests.DELETE
KINDS = [INSTALL, UPGRADE, DELETE]
_COMMANDS = {
    INSTALL: "backend.install",
    UPGRADE: "backend.upgrade",
    DELETE: "backend.delete",
}


def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the pauses between requests to a worker."""
    for pause in ("PING_EVERY", "_RETRY_PAUSE_SECONDS", "BUS_WAIT"):
        monkeypatch.setattr(commands, pause, 0.0)
    monkeypatch.setattr(intent_queue, "PROOF_POLL_SECONDS", 0.0)


def limits(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Set the time limit of installs and upgrades."""
    short = replace(settings.CLUSTER, install_timeout=seconds, upgrade_timeout=seconds)
    monkeypatch.setattr(settings, "CLUSTER", short)


def ask(kind: str, *nodes: BackendNode, backend: str = "echo", **wish: Any) -> Operation:
    """Admit this request; return its operation."""
    asked = RequestScope(nodes, by=Requester("test"))
    return admission.admit(BackendRequest(kind, backend, **wish), asked, now=clock.now()).operation


def claim(limit: int = 1) -> list[Intent]:
    """Return the intents that a controller claims now."""
    return intents.claim("controller", now=clock.now(), lease=60, limit=limit)


def part(operation: Operation, node: BackendNode | None = None) -> OperationTarget:
    """Return the operation's target on a node, or its only target."""
    found = OperationTarget.objects.filter(operation=operation)
    return found.get(node_id=node.id) if node else found.get()


def due_now() -> None:
    """End the pause before the next attempt."""
    PendingBackendOp.objects.update(next_retry_at=clock.now())


class Stage:
    """A node with a worker that lists no backends, and the queue of one controller."""

    def __init__(self) -> None:
        self.bus, self.node = PlayedBus(), hot.node()
        self.queue = IntentQueue(self.bus, load_on_other_node)
        self.kind = INSTALL
        self.lists()

    def lists(self, *backends: m.InstalledBackend, instance: str = "") -> None:
        """Set the worker's answer to `backend.list`."""
        listed = m.ListReply(backends, instance=instance)
        self.bus.replies[messages.subject("backend.list", str(self.node.id))] = listed

    def begins(self, kind: str, **wish: Any) -> Intent:
        """Return the first attempt of an operation on echo."""
        self.kind = kind
        ask(kind, self.node, **wish)
        return self.claimed()

    def claimed(self) -> Intent:
        """Return the next attempt, which must be due."""
        (intent,) = claim()
        return intent

    @property
    def subject(self) -> str:
        """Return the subject of the command."""
        return messages.subject(_COMMANDS[self.kind], str(self.node.id))

    @property
    def sent(self) -> list[bytes]:
        """Return the commands that were sent so far."""
        return self.bus.asked[self.subject]

    def answers(self, *replies: Any) -> None:
        """Set the worker's replies to the command, in order."""
        self.bus.replies[self.subject] = list(replies)

    async def carries_out(self, intent: Intent) -> OperationTarget:
        """Execute one attempt; return the target afterwards."""
        await self.queue.execute(intent)
        return await self.part(intent)

    async def part(self, intent: Intent) -> OperationTarget:
        """Return the target of the operation that requested first."""
        of_it = OperationTarget.objects.select_related("operation").filter(intent_id=intent.id)
        return await hot.in_thread(of_it.get)

    async def again(self) -> OperationTarget:
        """Execute the next attempt as soon as its pause is over; return the target."""

        def next_one() -> Intent:
            due_now()
            return self.claimed()

        return await self.carries_out(await hot.in_thread(next_one))

    async def row(self, intent: Intent) -> PendingBackendOp | None:
        """Return the intent; None if it has been deleted."""
        return await hot.in_thread(PendingBackendOp.objects.filter(pk=intent.id).first)
