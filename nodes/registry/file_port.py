"""Reachability of a node's HTTP server, through which the node gets the files of models.

A load that cannot reach the server records a failure and tries another node. From then on placement excludes
the node from loads that send files. One `FilePorts` lives in every controller and checks the port when the
node has been approved, every `CHECK_INTERVAL` seconds, and after a failure at growing intervals, until the
port answers. The result is stored in the row (`file_port_*`), so every controller sees it. A controller
claims a node before the check, so no lock is held during the request. A changed result wakes the loads that
wait for the node, by a NOTIFY.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

import httpx
from django.db import Error as DatabaseError
from django.db import transaction
from django.db.models import F, Q

from localai_cluster.kit import backoff, clock, errors, names
from localai_cluster.kit.leases import claim_rows, seconds_until_due
from localai_cluster.kit.periodic_task import WorkPool
from localai_cluster.metrics import passes
from nodes.models import BackendNode
from nodes.models.node import BackendNodeQuerySet
from nodes.registry import dial_targets
from nodes.registry.dial_targets import CONNECT_LIMIT, client_of, reason_of
from operations.changes import events
from operations.executor.work import in_thread

CHECK_INTERVAL = 300.0
"""Seconds between two checks of a port that answers."""
FIRST_PAUSE, MAX_PAUSE = 5.0, 300.0
"""Seconds until the second check of a port that did not answer, and the maximum. Each failure doubles the
pause."""
CLAIM_SECONDS = 30.0
"""Duration of a claim in seconds; meanwhile no other controller checks the node."""
UNCHECKED_COLUMNS: Mapping[str, Any] = {
    "file_port_error": "",
    "file_port_failed_at": None,
    "file_port_failures": 0,
    "file_port_next_check_at": None,
}
"""The columns of a node whose port has not been checked: a check is due at once."""
_PROBE_TIMEOUT = 5.0
_MAX_ERROR_LENGTH = 255
_PROBE_PATH = "/healthz"


def claim_due(limit: int, *, now: datetime) -> list[BackendNode]:
    """Claim at most `limit` due nodes for this caller; the longest overdue first. Read only id and name."""
    due = Q(file_port_next_check_at__isnull=True) | Q(file_port_next_check_at__lte=now)
    checkable = _checkable_nodes().filter(due).order_by(F("file_port_next_check_at").asc(nulls_first=True))
    until = now + timedelta(seconds=CLAIM_SECONDS)
    return claim_rows(checkable.only("id", "name"), limit=limit, file_port_next_check_at=until)


def next_due(*, now: datetime, at_most: float) -> float:
    """Return the seconds until the next check of a node is due, at most `at_most`."""
    return seconds_until_due(_checkable_nodes(), "file_port_next_check_at", now=now, at_most=at_most)


def _checkable_nodes() -> BackendNodeQuerySet:
    """Return the approved backend nodes that are not offline and have an HTTP address to check."""
    statuses = ("healthy", "draining", "unhealthy")
    return BackendNode.objects.filter(node_type="backend", status__in=statuses).exclude(http_address="")


def record_failure(node_id: UUID, reason: str, *, now: datetime) -> None:
    """Record that the port could not be reached, and schedule the next check.

    Several loads may fail at once: while a check is pending, only the first failure counts.
    """
    with transaction.atomic():
        node = BackendNode.objects.select_for_update(no_key=True, of=("self",)).filter(pk=node_id).first()
        if node is None:
            return
        pending = node.file_port_next_check_at is not None and node.file_port_next_check_at > now
        if node.file_port_error and pending:
            return
        _write_failure(node, reason, now)


def record_check(node_id: UUID, error: str, *, now: datetime) -> None:
    """Record the result of a check: `error` is empty if the port answered."""
    with transaction.atomic():
        node = BackendNode.objects.select_for_update(no_key=True, of=("self",)).filter(pk=node_id).first()
        if node is None:
            return
        if error:
            _write_failure(node, error, now)
            return
        next_check_at = now + timedelta(seconds=CHECK_INTERVAL)
        BackendNode.objects.filter(pk=node_id).update(
            **{**UNCHECKED_COLUMNS, "file_port_next_check_at": next_check_at}
        )
        if node.file_port_error:
            events.notify(events.NODES, str(node_id))


def _write_failure(node: BackendNode, reason: str, now: datetime) -> None:
    pause = backoff.delay(node.file_port_failures + 1, first=FIRST_PAUSE, longest=MAX_PAUSE)
    BackendNode.objects.filter(pk=node.pk).update(
        file_port_error=names.to_single_line(reason)[:_MAX_ERROR_LENGTH],
        file_port_failed_at=node.file_port_failed_at or now,
        file_port_failures=node.file_port_failures + 1,
        file_port_next_check_at=now + timedelta(seconds=pause),
    )
    events.notify(events.NODES, str(node.pk))


async def probe(server: dial_targets.HttpServer) -> str:
    """Return why the port does not answer; "" if it answers.

    A worker that reads a large file may be slow to answer, so an open connection is sufficient. The request
    has no token.
    """
    anonymous = replace(server, contact=dial_targets.Contact(server.contact.address, ""))
    async with client_of(anonymous) as client:
        try:
            await client.head(_PROBE_PATH, timeout=httpx.Timeout(_PROBE_TIMEOUT, connect=CONNECT_LIMIT))
        except httpx.ReadTimeout:
            return ""
        except httpx.TransportError as error:
            return failure_text(server.contact.address, reason_of(error))
    return ""


def failure_text(address: str, reason: str) -> str:
    """Return the message for operators that the file port at this address does not answer."""
    return f"its file port {address} does not answer: {reason}"


log = logging.getLogger(__name__)

MAX_PARALLEL_CHECKS = 16
POLL_SECONDS = 30.0
"""Seconds between two passes when no wake-up arrives and nothing is due."""
_GATHER_SECONDS = 0.2
"""Seconds for which wake-ups are collected into one pass."""


class FilePorts(WorkPool[BackendNode]):
    """Periodic task of a controller that checks the file ports of nodes when a check is due."""

    def __init__(self) -> None:
        super().__init__(
            "file ports",
            parallel=MAX_PARALLEL_CHECKS,
            interval=POLL_SECONDS,
            gather=_GATHER_SECONDS,
            retry_on=(DatabaseError,),
        )

    async def claim_due(self, limit: int) -> Sequence[BackendNode]:
        """Claim nodes whose check is due."""
        with passes.count_pass("file ports"):
            return await in_thread(claim_due, limit, now=clock.now())

    async def next_due(self) -> float:
        """Return the seconds until a check is due."""
        return await in_thread(next_due, now=clock.now(), at_most=POLL_SECONDS)

    async def run_item(self, item: BackendNode) -> None:
        """Check one node's port and record the result."""
        try:
            try:
                server = await in_thread(dial_targets.http_server, item.id)
            except errors.ClusterError:
                return  # requests to it are not allowed; its claim expires
            error = await probe(server)
            await in_thread(record_check, item.id, error, now=clock.now())
            if error:
                log.warning("node %s: %s", item.name, error)
        except DatabaseError as error:
            log.warning(
                "the check of the file port of %s was not recorded, it is repeated: %s", item.name, error
            )
        except Exception:
            # One node's server must not end the checks of all others; the claim expires.
            log.exception("the check of the file port of %s failed, it is repeated", item.name)
