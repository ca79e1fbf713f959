"""Carrying out what a confirmation page said, row by row, and what to report.

Each row has its own transaction, in which the node's row is locked at the revision that the page showed: a
node that has changed since is left alone, and what is wrong with one row does not stop the others.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from uuid import UUID

from django.core.exceptions import BadRequest
from django.db import transaction

from localai_cluster.accounts.actors import Actor
from localai_cluster.kit import clock, errors
from nodes.admin import seen
from nodes.admin.verbs import Verb
from nodes.models import BackendNode
from nodes.registry import services

MOST_AT_ONCE = 500


class Ticket(NamedTuple):
    """A row as the page showed it: its id, its node's revision and newest event."""

    pk: UUID
    revision: int
    event: int

    def __str__(self) -> str:
        return f"{self.pk}:{self.revision}:{self.event}"


def read_tickets(text: str) -> list[Ticket]:
    """The rows that a page carried, each once; raises BadRequest if no page of ours wrote that."""
    try:
        parts = [one.split(":") for one in text.split()]
        tickets = [Ticket(UUID(pk), int(revision), int(event)) for pk, revision, event in parts]
    except ValueError:
        raise BadRequest("items: not what the page carried") from None
    if len(tickets) > MOST_AT_ONCE:
        raise BadRequest(f"items: at most {MOST_AT_ONCE}")
    return list({ticket.pk: ticket for ticket in tickets}.values())


@dataclass
class Report:
    """The outcome: names of nodes, sentences, and further notices."""

    done: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)


@dataclass
class Carrier:
    """One verb, one actor, what was asked for, and how the node of a row is found."""

    verb: Verb
    actor: Actor
    asked: Mapping[str, Any]
    node_of: Callable[[Any], BackendNode]
    _own: dict[UUID, int] = field(default_factory=dict)
    """Revisions that nodes have got from this page itself: it may decide on two conflicts of one node."""

    def carry_out(self, tickets: Iterable[Ticket], rows: Mapping[UUID, Any]) -> Report:
        """All of them, one after the other."""
        report = Report()
        for ticket in tickets:
            row = rows.get(ticket.pk)
            if row is None:
                report.refused.append(f"{ticket.pk} no longer exists")
            else:
                self._one(ticket, row, report)
        return report

    def _one(self, ticket: Ticket, row: Any, report: Report) -> None:
        node = self.node_of(row)
        try:
            notice = self._do(ticket, node)
        except errors.ClusterError as refusal:
            report.refused.append(f"Node {node.name}: {self._told(refusal, ticket, node)}")
            return
        report.done.append(node.name)
        if notice:
            report.notices.append(notice)

    def _do(self, ticket: Ticket, node: BackendNode) -> str:
        with transaction.atomic():
            services.locked(node.pk, self._own.get(node.pk, ticket.revision))
            notice = self.verb.run(ticket.pk, self.actor, clock.now(), self.asked)
            if not self.verb.grave:
                self._own |= dict(BackendNode.objects.filter(pk=node.pk).values_list("pk", "revision"))
        return notice

    def _told(self, refusal: errors.ClusterError, ticket: Ticket, node: BackendNode) -> str:
        if refusal.field != "revision":
            return f"{refusal.message}. Nothing was changed"
        return f"{seen.since(node.pk, ticket.event)}. Nothing was changed; review the node again"
