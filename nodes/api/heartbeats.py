"""`POST /api/node/:id/heartbeat`: a raw ASGI application in front of Django.

The node gets its response when its heartbeat is authenticated, by the identity cache or by its row.
Authenticated heartbeats wait for the next batch: one statement each second writes all of them. The first
heartbeat after a second without any is written at once. If a batch is lost, each of its nodes loses one
heartbeat. A body that cannot be parsed gets a 400, but the heartbeat counts, without figures, because the
node is alive. Engines that the worker reports as ended are stored before the response, so the worker need not
report them again. After a refusal, the failure is counted or the conflict recorded for this request alone,
outside the event loop.
"""

import asyncio
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from channels.db import database_sync_to_async
from django.db import DatabaseError

from localai_cluster.accounts import principals
from localai_cluster.kit import clock, errors
from localai_cluster.kit.batching import Batcher, CallBatcher
from localai_cluster.kit.database_pool import UNREACHABLE_ERRORS
from localai_cluster.metrics import web as metrics
from localai_cluster.web import throttle, wire
from localai_cluster.web.envelopes import envelope_of, flat_refusal, translate_error
from localai_cluster.web.openapi import Operation, json_body
from localai_cluster.web.shapes import reference
from nodes.api import worker_routes
from nodes.api.worker_routes import NO_CREDENTIAL_MESSAGE, parse_node_id
from nodes.registry import claims, heartbeats, identity, resources
from nodes.registry.heartbeats import Beat, IdentityCache
from nodes.replicas import checks
from nodes.replicas.statements import StatementRunner

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 64 * 1024
BATCH_INTERVAL = 1.0
_PATH_PATTERN = re.compile(r"/api/node/(?P<node_id>[^/]+)/heartbeat/?\Z")

Verdict = errors.ClusterError | None
"""Result of a heartbeat's authentication: the refusal, or None if it is accepted."""


class HeartbeatAuthenticator:
    """Authenticates heartbeats by the identity cache, and by rows if the cache cannot decide.

    Concurrent heartbeats that need rows share a query.
    """

    def __init__(self, database: Callable[[], StatementRunner], identities: IdentityCache) -> None:
        self._database = database
        self._identities = identities
        self._calls: CallBatcher[Beat, Verdict] = CallBatcher(self._prove_all)

    async def prove(self, beat: Beat) -> Verdict:
        """Return the refusal of the heartbeat, or None; during a database outage Unavailable."""
        return None if self._identities.accepts(beat) else await self._calls.put(beat)

    async def _prove_all(self, beats: Sequence[Beat]) -> Sequence[Verdict]:
        verdicts: dict[heartbeats.HeartbeatKey, Verdict] = {}
        failure: errors.ClusterError = errors.Unavailable("the database is unavailable")
        try:
            verdicts = await self._check_beats({beat.key: beat for beat in beats})
        except errors.ClusterError as error:
            failure = error
        except UNREACHABLE_ERRORS as error:
            log.warning("%d heartbeats not proved: %s", len(beats), type(error).__name__)
        except Exception:
            # Every caller gets an answer, also if the look fails.
            log.exception("%d heartbeats not proved", len(beats))
        return [verdicts.get(beat.key, failure) for beat in beats]

    async def _check_beats(
        self, beats: Mapping[heartbeats.HeartbeatKey, Beat]
    ) -> dict[heartbeats.HeartbeatKey, Verdict]:
        database = self._database()
        if self._identities.needs_refresh:
            await self._identities.refresh(database)
        undecided = [beat for beat in beats.values() if not self._identities.accepts(beat)]
        return dict.fromkeys(beats) | await heartbeats.check_identities(database, undecided)


class BeatWriter:
    """Collects authenticated heartbeats and writes them, at most once every `interval` seconds."""

    def __init__(self, database: Callable[[], StatementRunner], interval: float = BATCH_INTERVAL) -> None:
        self._database = database
        self._batches: Batcher[heartbeats.HeartbeatKey, Beat] = Batcher(
            self._write, merge=lambda earlier, later: later.after(earlier), interval=(interval, interval)
        )

    def add(self, beat: Beat) -> None:
        """Add the heartbeat to the next batch. A batch that cannot be written is lost."""
        self._batches.add(beat.key, beat)

    async def _write(
        self, batch: Mapping[heartbeats.HeartbeatKey, Beat]
    ) -> Mapping[heartbeats.HeartbeatKey, Beat]:
        """Write the heartbeats. Return those whose node has changed meanwhile, for the next batch."""
        try:
            verdicts = await heartbeats.record(self._database(), list(batch.values()))
        except (errors.ClusterError, *UNREACHABLE_ERRORS) as error:
            metrics.HEARTBEATS_LOST.inc(len(batch))
            log.warning("%d heartbeats not written: %s", len(batch), type(error).__name__)
        except Exception:
            metrics.HEARTBEATS_LOST.inc(len(batch))
            log.exception("%d heartbeats not written", len(batch))
        else:
            return {
                key: beat
                for key, beat in batch.items()
                if isinstance(verdicts.get(key), heartbeats.WriteConflict)
            }
        return {}


@dataclass(frozen=True)
class _HeartbeatRequest:
    """A parsed request: its heartbeat, the ended engines in it, and the error of an invalid body."""

    beat: Beat
    ended: Sequence[checks.ExitReport] = ()
    problem: errors.ClusterError | None = None


class HeartbeatApplication:
    """ASGI application that receives heartbeats; `database` returns the process's pool once it is open."""

    def __init__(self, database: Callable[[], StatementRunner], identities: IdentityCache) -> None:
        self._database = database
        self._gate = HeartbeatAuthenticator(database, identities)
        self._writer = BeatWriter(database)

    async def __call__(self, scope: worker_routes.Scope, receive: Any, send: Any) -> None:
        try:
            status, body, headers = await self._respond(scope, receive)
        except wire.Disconnected:
            return
        except Exception as raised:
            error = translate_error(raised)
            if error is None:
                raise
            status, body, headers = error.status, _refusal(error), wire.refusal_headers(error)
        metrics.HEARTBEATS.labels(status).inc()
        await worker_routes.send_json(send, status, body, headers)

    async def _respond(
        self, scope: worker_routes.Scope, receive: Any
    ) -> tuple[int, dict[str, Any], dict[str, str]]:
        worker_routes.require_method(scope, "POST")
        try:
            call = await _read_request(scope, receive)
            refusal = await self._gate.prove(call.beat)
        except errors.NotAuthenticated as error:
            raise await worker_routes.refusal_for_caller(error, scope) from error
        if refusal is not None:
            if isinstance(refusal, identity.OtherProcess):
                await _record_conflict(call.beat, worker_routes.client_of(scope))
            if not call.beat.fingerprint:
                # Over the limit a right guess at the shared token must not look different from a wrong one.
                address = worker_routes.client_of(scope)
                await asyncio.to_thread(throttle.token_failures().check, address, clock.now())
            raise await worker_routes.refusal_for_caller(refusal, scope)
        self._writer.add(call.beat)
        if call.problem is not None:
            raise call.problem
        if call.ended:
            await self._record_exits(call)
        return 200, {"message": "heartbeat recorded"}, {}

    async def _record_exits(self, call: _HeartbeatRequest) -> None:
        try:
            await checks.report_exits(self._database(), call.beat.id, call.ended)
        except UNREACHABLE_ERRORS as error:
            raise errors.Unavailable("the database is unavailable") from error


async def _read_request(scope: worker_routes.Scope, receive: Any) -> _HeartbeatRequest:
    """Read and parse the request; raise NotAuthenticated for a text that cannot be a node's credential."""
    headers = worker_routes.headers_of(scope)
    secret = principals.bearer(headers.get(b"authorization", ""))
    if not secret:
        raise errors.NotAuthenticated(NO_CREDENTIAL_MESSAGE)
    if (fingerprint := identity.node_fingerprint(secret)) == identity.UNKNOWN_FINGERPRINT:
        raise identity.WrongCredential("invalid node credential")
    node_id, at, instance = _parse_node_id(scope["path"]), clock.now(), _parse_instance(headers)
    try:
        body = await wire.read_json_object(receive, headers.get(b"content-type", ""), MAX_BODY_BYTES)
        figures, ended = heartbeats.parse_heartbeat(body), heartbeats.parse_ended_engines(body)
    except errors.ClusterError as problem:
        return _HeartbeatRequest(Beat(node_id, fingerprint, at, instance), problem=problem)
    return _HeartbeatRequest(Beat(node_id, fingerprint, at, instance, **figures), ended)


def _parse_instance(headers: Mapping[bytes, str]) -> str:
    """Return the worker's process id. Replace an invalid one by a text that matches no node."""
    try:
        return identity.check_instance(headers.get(b"x-localai-node-instance", ""))
    except errors.InvalidInput:
        return identity.UNKNOWN_FINGERPRINT


async def _record_conflict(beat: Beat, source: str) -> None:
    """Record the conflict of two processes for an admin. A database error is only logged."""
    try:
        await database_sync_to_async(claims.record_other_process)(
            beat.id, beat.instance, source_address=source, now=beat.at
        )
    except DatabaseError as error:
        log.warning("a second process of a node was not noted: %s", type(error).__name__)


def _parse_node_id(path: str) -> UUID:
    """Return the node id in the URL. Replace an invalid one by an id that no node has."""
    match = _PATH_PATTERN.match(path)
    return (parse_node_id(match["node_id"]) if match else None) or UUID(int=0)


def _refusal(error: errors.ClusterError) -> dict[str, Any]:
    if error.status == 401:
        return flat_refusal(error)
    return envelope_of(error, "node_error")


def _figure_schema(meaning: str) -> Operation:
    return {"type": "integer", "format": "int64", "minimum": 0, "nullable": True, "description": meaning}


_GONE_OPERATION: Operation = {
    "type": "object",
    "required": list(heartbeats.ENDED_LENGTHS),
    "properties": {
        name: {"type": "string", "minLength": 1, "maxLength": longest}
        for name, longest in heartbeats.ENDED_LENGTHS.items()
    },
}

HEARTBEAT: Operation = {
    **worker_routes.describe_node_route(
        "node_heartbeat",
        "Send a heartbeat",
        "A body that cannot be read is answered with 400 naming the field, and still counts as a sign of"
        " life. Figures count for approved nodes that are not offline.",
        "node_id",
    ),
    "requestBody": {
        "content": json_body(
            {
                "type": "object",
                "properties": {
                    "available_vram": _figure_schema("Free bytes over all GPUs; ends the soft reservation."),
                    "total_vram": _figure_schema("Bytes over all GPUs; a budget in percent follows it."),
                    "available_ram": _figure_schema("Free bytes of memory."),
                    "total_disk": _figure_schema("Size of the filesystem of the models folder."),
                    "available_disk": _figure_schema("Free bytes there; 0 means full."),
                    "gpu_vendor": {"type": "string", "maxLength": 32, "nullable": True},
                    "gpus": resources.GPUS_SCHEMA,
                    "ended_processes": {
                        "type": "array",
                        "nullable": True,
                        "maxItems": heartbeats.MAX_ENDED_ENGINES,
                        "description": "Engines that have ended by themselves. Their replicas are removed as"
                        " soon as the worker confirms that it does not run them.",
                        "items": _GONE_OPERATION,
                    },
                },
            },
            {"available_disk": 81634525184, "available_ram": 24667537408, "total_disk": 270553174016},
        )
    },
    "responses": {
        "200": {
            "description": "Recorded.",
            "content": json_body(reference("Message"), {"message": "heartbeat recorded"}),
        },
        **worker_routes.WRONG_SECRET_RESPONSE,
        **worker_routes.describe_refusals(400, 403, 404, 409, 413, 429),
    },
}
