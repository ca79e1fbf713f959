"""The registry's verbs for tests: registrations, heartbeats, current rows, parallel threads."""

import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

from django.db import connection

from localai_cluster.accounts.actors import Actor, ActorKind
from localai_cluster.accounts.principals import hash_secret
from localai_cluster.kit.errors import ClusterError
from nodes.models import BackendNode, NodeEvent, NodeModel
from nodes.registry import heartbeats, lifecycle, registration
from nodes.registry.heartbeats import Beat
from nodes.registry.registration import Registered, Registration
from tests.support.replicas import columns

NOW = datetime(2026, 8, 22, 10, tzinfo=UTC)
ROOT = Actor(ActorKind.USER, "root")
ANNA = Actor(ActorKind.USER, "anna")
SECRET = "a" * 64
OTHER_SECRET = "b" * 64
THIRD_SECRET = "c" * 64


def later(seconds: float) -> datetime:
    """Return the time `seconds` after NOW."""
    return NOW + timedelta(seconds=seconds)


def register_as(
    told: Registration,
    *,
    secret: str,
    instance: str = "",
    source_address: str,
    now: datetime,
    auto_approve: bool,
) -> Registered:
    """Register a worker with these facts."""
    claim = registration.claim(told, secret=secret, instance=instance, source_address=source_address)
    return registration.register_one(claim, now=now, auto_approve=auto_approve)


def register(
    name: str = "w1",
    *,
    secret: str = SECRET,
    instance: str = "",
    source: str = "10.0.0.1",
    now: datetime = NOW,
    auto_approve: bool = False,
    **fields: Any,
) -> Registered:
    """Register a worker."""
    fields = {"address": "10.0.0.1:50051"} | fields
    return register_as(
        Registration(name=name, **fields),
        secret=secret,
        instance=instance,
        source_address=source,
        now=now,
        auto_approve=auto_approve,
    )


def approved(name: str = "w1", **fields: Any) -> BackendNode:
    """Register a node and approve it."""
    return lifecycle.approve(register(name, **fields).node.id, actor=ROOT, now=NOW).node


def own_secret(name: str) -> str:
    """Return a secret that depends on the name."""
    return hash_secret(name)


def row(node: BackendNode | UUID) -> BackendNode:
    """Return the current row."""
    return BackendNode.objects.get(pk=node if isinstance(node, UUID) else node.pk)


def status(node: BackendNode | UUID) -> str:
    """Return the status in the database."""
    return str(row(node).status)


def replica(node: BackendNode, model: str = "m", index: int = 0, **fields: Any) -> NodeModel:
    """Create a loaded replica."""
    given: dict[str, Any] = {"address": f"10.0.0.1:{50100 + index}", "last_used": NOW}
    values = columns(**given | fields)
    return NodeModel.engines.create(node=node, model_name=model, replica_index=index, **values)


def replicas(node: BackendNode) -> list[str]:
    """Return the process keys of the node's replicas."""
    rows = NodeModel.objects.filter(node=node).order_by("model_name", "replica_index")
    return [str(one) for one in rows]


def told(node: BackendNode | UUID, *kinds: str) -> list[NodeEvent]:
    """Return the node's timeline, oldest first; only events of these kinds, if any are given."""
    rows = NodeEvent.objects.filter(node_id=node if isinstance(node, UUID) else node.pk).order_by("id")
    return list(rows.filter(kind__in=kinds) if kinds else rows)


def kinds(node: BackendNode | UUID) -> list[str]:
    """Return the kinds of the node's events, oldest first."""
    return [event.kind for event in told(node)]


class _Here:
    """Runs statements on Django's own connection and in its transaction."""

    async def fetch_rows(self, statement: str, parameters: Mapping[str, Any], /) -> list[tuple[Any, ...]]:
        with connection.cursor() as cursor:
            cursor.execute(statement, dict(parameters))
            return list(cursor.fetchall())


def beat(*given: Beat) -> dict[heartbeats.HeartbeatKey, Exception | None]:
    """Write these heartbeats as one batch, overtaken ones as the next; return the refusal of each."""
    verdicts: dict[heartbeats.HeartbeatKey, Exception | None] = dict(
        _finished(heartbeats.record(_Here(), given))
    )
    overtaken = [one for one in given if isinstance(verdicts[one.key], heartbeats.WriteConflict)]
    return verdicts | (beat(*overtaken) if overtaken else {})


def beat_of(node: BackendNode, *, secret: str = SECRET, at: datetime = NOW, **fields: Any) -> Beat:
    """Return a heartbeat with this secret."""
    return Beat(id=node.pk, fingerprint=hash_secret(secret) if secret else "", at=at, **fields)


def _finished(work: Coroutine[Any, Any, Any]) -> Any:
    """Return the result of a coroutine that never waits."""
    try:
        work.send(None)
    except StopIteration as done:
        return done.value
    raise AssertionError("it waits for something")


def at_once(*jobs: Callable[[], Any]) -> list[Any]:
    """Run the jobs in threads that start together; return their results or exceptions in the given order."""
    barrier = threading.Barrier(len(jobs))
    results: list[Any] = [None] * len(jobs)

    def run(number: int) -> None:
        barrier.wait()
        try:
            results[number] = jobs[number]()
        except Exception as error:
            results[number] = error
        finally:
            connection.close()

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def unexpected(results: Sequence[Any]) -> list[Any]:
    """Return the results that no caller may see: exceptions that are not the cluster's own."""
    return [one for one in results if isinstance(one, Exception) and not isinstance(one, ClusterError)]
