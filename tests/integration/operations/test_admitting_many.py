"""A list of requests is admitted as its requests are one after the other, at the cost of one."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest
from django.db import connection, transaction
from django.test.utils import CaptureQueriesContext
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from localai_cluster.accounts.actors import Actor, ActorKind
from localai_cluster.accounts.audit import attribute_to
from localai_cluster.accounts.models import AuditEntry
from localai_cluster.kit import errors
from operations.ledger import admission
from operations.ledger.admission import Admission, OperationRequest, Outcome, Requester
from operations.models import ACTIVE, Operation, OperationTarget, Status, owner_of
from tests.support.effort import EFFORT
from tests.support.fleet import at_once

NOW = datetime(2026, 8, 22, 10, tzinfo=UTC)
KEYS = ("import:m", "node:m", "model:m#", "model:m#0", "model:m#1", "model:m", "model:m#x#0", "model:n#0")
KINDS = ("model_load", "model_unload")
NODES = tuple(UUID(int=number) for number in (1, 2))
TIMES = (None, NOW + timedelta(hours=1), NOW + timedelta(hours=2))


@dataclass(frozen=True)
class Present:
    """An operation that exists before the requests, with the status of its target on each node."""

    key: str
    kind: str
    status: str
    targets: tuple[str, ...] = ()
    dismissed: bool = False
    needed_until: datetime | None = None


@dataclass(frozen=True)
class Asked:
    """A request; `repeats` is the position of a present operation."""

    key: str
    kind: str
    joins: bool = True
    nodes: tuple[UUID, ...] = ()
    needed_until: datetime | None = None
    repeats: int | None = None


def element_of(key: str) -> str:
    return "n" if key.startswith("model:n") else "m#x" if key.startswith("model:m#x") else "m"


STATUSES = st.sampled_from([Status.PENDING, Status.FAILED, Status.FAILED, Status.CANCELLED])
PRESENT = st.builds(
    Present,
    st.sampled_from(KEYS),
    st.sampled_from(KINDS),
    STATUSES,
    st.lists(st.sampled_from(["error", "success"]), max_size=2).map(tuple),
    st.booleans(),
    st.sampled_from(TIMES),
)
ASKED = st.builds(
    Asked,
    st.sampled_from(KEYS),
    st.sampled_from(KINDS),
    st.booleans(),
    st.lists(st.sampled_from(NODES), unique=True).map(tuple),
    st.sampled_from(TIMES),
    st.none() | st.integers(0, 3),
)


def set_up(present: Sequence[Present]) -> list[Operation]:
    """Write the operations; of several active ones with one key the first."""
    rows, targets, active = [], [], set[str]()
    for number, it in enumerate(present):
        status = Status.CANCELLED if it.status in ACTIVE and it.key in active else it.status
        active |= {it.key} if status in ACTIVE else set()
        row = Operation(
            id=UUID(int=100 + number),
            kind=it.kind,
            key=it.key,
            element=element_of(it.key),
            status=status,
            needed_until=it.needed_until,
            created_at=NOW - timedelta(minutes=number),
            finished_at=None if status in ACTIVE else NOW,
            dismissed_at=NOW if it.dismissed and status == Status.FAILED else None,
        )
        for node_id, part in zip(NODES, it.targets, strict=False):
            targets.append(OperationTarget(operation=row, node_id=node_id, node_name="w", status=part))
        rows.append(row)
    Operation.objects.bulk_create(rows)
    OperationTarget.objects.bulk_create(targets)
    return rows


def requests_of(asked: Sequence[Asked], rows: Sequence[Operation]) -> list[OperationRequest]:
    return [
        OperationRequest(
            it.kind,
            key=it.key,
            element=element_of(it.key),
            by=Requester(f"user {number}"),
            payload={"number": number},
            targets=[(node_id, "w") for node_id in it.nodes],
            needed_until=it.needed_until,
            joins=it.joins or not owner_of(it.key),
            repeats=rows[it.repeats] if it.repeats is not None and it.repeats < len(rows) else None,
        )
        for number, it in enumerate(asked)
    ]


def one_by_one(requests: Sequence[OperationRequest]) -> list[Outcome]:
    outcomes = list[Outcome]()
    for request in requests:
        try:
            outcomes.append(admission.admit(request, now=NOW))
        except errors.ClusterError as refusal:
            outcomes.append(refusal)
    return outcomes


def together(requests: Sequence[OperationRequest]) -> list[Outcome]:
    return admission.admit_many(requests, now=NOW)


def played(
    admit: Callable[[Sequence[OperationRequest]], list[Outcome]],
    present: Sequence[Present],
    asked: Sequence[Asked],
) -> dict[str, Any]:
    """What the requests leave behind, with a number for each new operation; nothing stays."""
    with transaction.atomic(), attribute_to(Actor(ActorKind.COMMAND, "ann")):
        outcomes = admit(requests_of(asked, set_up(present)))
        new = [it.operation.id for it in outcomes if isinstance(it, Admission) and it.created]

        def name(text: object) -> str:
            text = str(text)
            for number, id in enumerate(new):
                text = text.replace(str(id), f"new {number}")
            return text

        columns = ("key", "kind", "element", "status", "payload", "actor", "needed_until", "dismissed_at")
        left = {
            "outcomes": [
                (name(it.operation.id), it.created) if isinstance(it, Admission) else (type(it), name(it))
                for it in outcomes
            ],
            "operations": {
                name(row.id): (
                    *(getattr(row, column) for column in columns),
                    row.dismissed_by,
                    name(row.dismissed_comment),
                    row.seq > 0,
                )
                for row in Operation.objects.all()
            },
            "targets": sorted(
                (name(it.operation_id), it.node_id, it.node_name, it.status, it.dismissed_at is None)
                for it in OperationTarget.objects.all()
            ),
            "audit": [
                (it.kind, it.subject, name(it.subject_id), name(it.detail))
                for it in AuditEntry.objects.order_by("pk")
            ],
        }
        transaction.set_rollback(True)
    return left


FAILED = Present("node:m", "model_unload", "failed", ("error", "error"))


@pytest.mark.django_db
@pytest.mark.rule("O34", "O52")
@given(st.lists(PRESENT, max_size=4), st.lists(ASKED, min_size=1, max_size=5))
@example([], [Asked("model:m#0", "model_load"), Asked("model:m#0", "model_load", needed_until=TIMES[1])])
@example([], [Asked("model:m#", "model_load", joins=False)] * 3 + [Asked("model:m#", "model_unload")])
@example([FAILED], [Asked("import:m", "model_load", True, NODES, None, 0), Asked(FAILED.key, FAILED.kind)])
@example([FAILED], [Asked("import:m", "model_load", True, (node,), None, 0) for node in NODES])
@settings(
    max_examples=150 * EFFORT, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_a_list_is_admitted_as_one_after_the_other(present: list[Present], asked: list[Asked]) -> None:
    """Outcomes, operations, their targets, dismissals and the audit, for whatever is there before."""
    assert played(together, present, asked) == played(one_by_one, present, asked)


def failures(size: int) -> list[Operation]:
    rows = []
    for number in range(size):
        row = Operation(kind="model_load", key=f"model:{number}#0", element=f"{number}", status="failed")
        row.finished_at = NOW
        row.save()
        OperationTarget.objects.create(operation=row, node_id=NODES[0], node_name="w", status="error")
        rows.append(row)
    return rows


@pytest.mark.django_db
def test_a_hundred_requests_cost_as_many_statements_as_one() -> None:
    """Requests that create, that join with a time of their own, that repeat and that are refused."""
    costs = []
    for size in (1, 100):
        Operation.objects.all().delete()
        load = OperationRequest("model_load", key="", element="", by=Requester("ann"))
        joined, repeated = (
            [
                replace(load, key=f"{row.key}{suffix}", element=row.element, targets=[(NODES[0], "w")])
                for row in failures(size)
            ]
            for suffix in ("joined", "")
        )
        admission.admit_many(joined, now=NOW)
        requests = [
            replace(it, needed_until=NOW + timedelta(seconds=number)) for number, it in enumerate(joined)
        ]
        requests += [replace(it, repeats=row) for it, row in zip(repeated, failures(size), strict=True)]
        requests += [replace(it, joins=False) for it in joined]
        requests += [replace(it, kind="model_unload") for it in joined]
        with attribute_to(Actor(ActorKind.COMMAND, "ann")), CaptureQueriesContext(connection) as made:
            outcomes = admission.admit_many(requests, now=NOW)
        created = [isinstance(it, Admission) and it.created for it in outcomes]
        assert created == [False] * size + [True] * 2 * size + [False] * size
        assert not Operation.objects.filter(status="failed", dismissed_at=None).exists()
        costs.append(len(made))
    assert costs[0] == costs[1] <= 20


@pytest.mark.django_db(transaction=True)
@pytest.mark.rule("O34")
def test_lists_in_any_order_admit_each_key_once() -> None:
    """Keys with and without an owner; no two transactions wait for each other in a circle."""
    keys = [f"import:{number}" for number in range(6)] + [f"model:{number}#0" for number in range(6)]
    requests = [OperationRequest("model_load", key=key, element="m", by=Requester("ann")) for key in keys]
    orders = (requests, requests[::-1], requests[6:] + requests[:6], requests[::-2])
    results = at_once(*(lambda order=order: together(order) for order in orders))
    admitted = [it for outcomes in results for it in outcomes]
    assert all(isinstance(it, Admission) for it in admitted), results
    assert sum(it.created for it in admitted) == len(keys) == Operation.objects.active().count()
    assert {it.operation.id for it in admitted} == set(Operation.objects.values_list("pk", flat=True))
