"""The rows of one backend on the nodes of a request, and the request's place among them. Pure.

A node has at most one row for each op of a backend. They run one at a time, in the order of their requests.
An equal request joins the existing row. If a different request follows that row, joining it would let the
older request win: then the row moves to the end, or the request is refused if the row has begun.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from uuid import UUID

from localai_cluster.kit import errors
from nodes.backends.backend_requests import KINDS, Wish
from nodes.models import PendingBackendOp

_NEXT = timedelta(microseconds=1)


@dataclass(frozen=True)
class RequestOrder:
    """The rows of a backend by node: `same` of the requested op, `others` in the order in which they run."""

    same: Mapping[UUID, PendingBackendOp]
    others: Mapping[UUID, list[PendingBackendOp]]

    @classmethod
    def of(cls, request: Wish, rows: Iterable[PendingBackendOp]) -> "RequestOrder":
        """Sort the rows of the requested backend."""
        same: dict[UUID, PendingBackendOp] = {}
        others: dict[UUID, list[PendingBackendOp]] = {}
        for row in sorted(rows, key=lambda row: row.turn):
            if row.op == KINDS[request.kind]:
                same[row.node_id] = row
            else:
                others.setdefault(row.node_id, []).append(row)
        return cls(same, others)

    def followed(self) -> list[PendingBackendOp]:
        """Return the rows of the requested op that a different request follows."""
        return [row for row in self.same.values() if self._followers(row)]

    def before(self, row: PendingBackendOp) -> PendingBackendOp | None:
        """Return the row of another op that runs before this one on the same node."""
        rows = self.others.get(row.node_id, ())
        return next((candidate for candidate in rows if candidate.turn < row.turn), None)

    def end(self, now: datetime) -> datetime:
        """Return a time of request after those of all rows, even if clocks differ."""
        rows = [*self.same.values(), *(row for rows in self.others.values() for row in rows)]
        return max([now, *(row.requested_at + _NEXT for row in rows)])

    def can_join(self, open_nodes: Collection[UUID]) -> bool:
        """Return True if an active equal operation with open parts on these nodes does what is requested."""
        return not self.followed() and all(id in self.same or id in open_nodes for id in self.others)

    def refuse(self, request: Wish, names: Mapping[UUID, str], *, is_load: bool) -> None:
        """Raise Conflict, which names the operation, if the request cannot join the queue.

        A load never waits for another request on its node, and never reverses one.
        """
        for row in self.same.values():
            node, followers = names[row.node_id], self._followers(row)
            if row.cancelled_at is not None:
                raise errors.Conflict(
                    f"{row} on {node} is being cancelled; ask again in a few seconds",
                    operation=row.operation_id,
                )
            if not request.is_that_of(row):
                state = "in progress" if row.has_begun else "waiting, and asks for something else"
                raise _conflict(row, node, state)
            if followers and row.has_begun:
                raise _conflict(followers[-1], node, f"to follow {row}, which is in progress")
        if is_load and self.others:
            first = next(iter(self.others.values()))[0]
            raise _conflict(first, names[first.node_id], "in progress" if first.has_begun else "waiting")

    def _followers(self, row: PendingBackendOp) -> list[PendingBackendOp]:
        return [follower for follower in self.others.get(row.node_id, ()) if follower.turn > row.turn]


def _conflict(row: PendingBackendOp, node: str, state: str) -> errors.Conflict:
    return errors.Conflict(
        f"{row} on {node} is {state} (operation {row.operation_id})",
        operation=row.operation_id,
        kind=f"backend_{row.op}",
        state="processing" if row.has_begun else "pending",
    )
