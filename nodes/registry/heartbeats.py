"""Heartbeats: parse, authenticate, and write many in one statement.

A caller gets its response when its heartbeat is authenticated; the heartbeat is written with the next batch.
The UPDATE authenticates again by node id, fingerprint and process: after a revocation in between it writes
nothing. Figures count only for nodes that are approved and online (R1.34). A silent node returns with its
next heartbeat (R5.5), a node that left by itself does not (R5.7). Reported free VRAM clears the reservation
unless the reservation is newer than the report; the arrival time is stored too, for the reservations of loads
(`nodes/placement/memory.py`). A new total changes the ceiling of a budget in percent; these budgets are read
before, so that a batch is always one UPDATE.

`IdentityCache` authenticates without a SELECT for each heartbeat. One statement reads all identities. They
are valid for at most 5 s from the start of the statement, and a NOTIFY about a node removes its entry at
once. After a missing entry or a mismatch the caller reads the row before it refuses the heartbeat. So after a
lost NOTIFY a revoked secret is accepted for 5 s at most, and still writes nothing.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any
from uuid import UUID

import orjson

from localai_cluster.accounts.actors import WORKER
from localai_cluster.kit import clock, conf, errors
from nodes.models import NodeEvent
from nodes.models.node import MIN_LATE_AFTER
from nodes.registry import identity, resources, states
from nodes.registry.identity import NodeFacts
from nodes.registry.resources import GpuList
from nodes.replicas.checks import ExitReport
from nodes.replicas.statements import StatementRunner
from operations.changes.events import NODES

MAX_FIGURE = 2**63 - 1
_FIGURE_FIELDS = ("available_vram", "total_vram", "available_ram", "total_disk", "available_disk")
_MAX_VENDOR_LENGTH = 32
MAX_ENDED_ENGINES = 64
ENDED_LENGTHS = {"process_key": 300, "address": 512}
"""Maximum characters of the two texts that identify an ended engine."""

HeartbeatKey = tuple[UUID, str, str]
"""Node id, fingerprint and process (`instance`)."""


@dataclass(frozen=True)
class Beat:
    """One heartbeat: the node, its fingerprint, the time of arrival, and the reported figures (bytes).

    `measured_at` is the arrival time of its `available_vram`; in a merged heartbeat it may be earlier than
    `at`.
    """

    id: UUID
    fingerprint: str
    at: datetime
    instance: str = ""
    measured_at: datetime | None = None
    available_vram: int | None = None
    total_vram: int | None = None
    available_ram: int | None = None
    total_disk: int | None = None
    available_disk: int | None = None
    gpu_vendor: str | None = None
    gpus: GpuList | None = None
    """None exactly if `available_vram` is None, except in heartbeats that tests construct."""

    @property
    def key(self) -> HeartbeatKey:
        """The key of the heartbeat in a batch: heartbeats with the same key are merged."""
        return self.id, self.fingerprint, self.instance

    def __post_init__(self) -> None:
        if self.available_vram is not None and self.measured_at is None:
            object.__setattr__(self, "measured_at", self.at)

    def after(self, earlier: "Beat") -> "Beat":
        """Merge this heartbeat with an earlier one: figures that this one lacks come from the earlier one."""
        missing = {name: value for name, value in vars(earlier).items() if getattr(self, name) is None}
        return replace(self, **missing)


class WriteConflict(errors.ClusterError):
    """The node was changed while the batch was being written."""

    message = "The node was changed while the batch was being written."


def parse_heartbeat(body: Mapping[str, Any]) -> dict[str, Any]:
    """Parse the known fields of a heartbeat (`contract/http-api.md` §1.2).

    Raises InvalidInput with the name of the field.
    """
    values: dict[str, Any] = {name: _parse_figure(name, body.get(name)) for name in _FIGURE_FIELDS}
    gpus = body.get("gpus")
    parsed_gpus = None if gpus is None else resources.parse_gpus(gpus)
    if parsed_gpus is not None and values["available_vram"] is None:
        values["available_vram"] = min(sum(gpu["free_vram"] for gpu in parsed_gpus), MAX_FIGURE)
    if parsed_gpus is None and values["available_vram"] is not None:
        parsed_gpus = []
    return values | {"gpu_vendor": _parse_vendor(body.get("gpu_vendor")), "gpus": parsed_gpus}


def parse_ended_engines(body: Mapping[str, Any]) -> list[ExitReport]:
    """Parse the list of ended engines in a heartbeat; raise InvalidInput with the name of the field."""
    entries = body.get("ended_processes")
    if entries is None:
        return []
    if not isinstance(entries, list) or len(entries) > MAX_ENDED_ENGINES:
        raise errors.InvalidInput(
            f"ended_processes must be a list of at most {MAX_ENDED_ENGINES} processes",
            field="ended_processes",
        )
    return [_parse_exit(f"ended_processes.{number}", entry) for number, entry in enumerate(entries)]


def _parse_exit(field: str, entry: Any) -> ExitReport:
    """Parse one ended engine.

    Its texts are only compared, so any characters that a row can store are valid.
    """
    if not isinstance(entry, dict):
        raise errors.InvalidInput(f"{field} must be an object", field=field)
    texts = []
    for name, longest in ENDED_LENGTHS.items():
        text = entry.get(name)
        if not isinstance(text, str) or not 0 < len(text) <= longest:
            raise errors.InvalidInput(
                f"{field}.{name} must be a text of 1 to {longest} characters", field=f"{field}.{name}"
            )
        if "\x00" in text or any("\ud800" <= character <= "\udfff" for character in text):
            raise errors.InvalidInput(
                f"{field}.{name} must be a text without NUL and surrogates", field=f"{field}.{name}"
            )
        texts.append(text)
    return ExitReport(*texts)


def _parse_figure(name: str, value: Any) -> int | None:
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_FIGURE:
        raise errors.InvalidInput(f"{name} must be a whole number of bytes from 0 to 2^63-1", field=name)
    return value


def _parse_vendor(value: Any) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str) or len(value) > _MAX_VENDOR_LENGTH or not value.isprintable():
        raise errors.InvalidInput(
            f"gpu_vendor must be a printable text of at most {_MAX_VENDOR_LENGTH} characters",
            field="gpu_vendor",
        )
    return value


# The rows are locked in the order of their ids: two processes that write the same nodes never deadlock. A row
# that changed after this statement began is left out (its `ctid` differs): to update it, PostgreSQL would
# return to the version that the statement read, where transactions may queue that wait for this one.
# `live` is the state before this statement: of the heartbeat that brings a node back only the time counts.
# A gap is not always the interval: a worker sends extra heartbeats when an engine ends, and a registration
# sets `last_heartbeat` too. A short gap therefore shortens `heartbeat_late_after` by a tenth of the gap only.
# A gap of `stale_after` or more is an outage of the web processes or a mass-disruption hold.
WRITE_SQL = f"""
WITH beat AS (
    SELECT * FROM jsonb_to_recordset(%(beats)s::jsonb) AS beat(
        id uuid, fingerprint text, at timestamptz, instance text, measured_at timestamptz,
        available_vram bigint, total_vram bigint, available_ram bigint, total_disk bigint,
        available_disk bigint, gpu_vendor text, gpus jsonb, budget text, ceiling bigint)
), own AS (
    SELECT node.id, node.ctid, node.offline_at IS NOT NULL AND node.offline_recovers AS silent, beat.instance,
        beat.at, beat.at - node.last_heartbeat AS gap, make_interval(secs => %(stale_after)s) AS stale_after,
        beat.measured_at, beat.available_vram, beat.total_vram, beat.available_ram, beat.total_disk,
        beat.available_disk, beat.gpu_vendor, beat.gpus,
        node.approved_at IS NOT NULL AND node.offline_at IS NULL AS live,
        node.approved_at IS NOT NULL AND node.offline_at IS NULL AND beat.available_vram IS NOT NULL
            AND (node.reserved_at IS NULL OR node.reserved_at <= beat.measured_at) AS clears,
        CASE WHEN beat.budget = node.vram_budget AND beat.budget <> '' THEN beat.ceiling
            ELSE node.vram_budget_bytes END AS ceiling
    FROM backend_nodes AS node JOIN beat ON beat.id = node.id AND beat.fingerprint = node.fingerprint
    WHERE (node.fingerprint <> '' OR node.weak_identity) AND node.rotation_requested_at IS NULL
        AND (beat.instance = '' OR beat.instance = node.instance)
    ORDER BY node.id FOR NO KEY UPDATE OF node
), written AS (
    UPDATE backend_nodes AS node SET
        last_heartbeat = greatest(node.last_heartbeat, own.at),
        heartbeat_late_after = CASE
            WHEN NOT own.silent AND own.gap > interval '0' AND own.gap < own.stale_after
            THEN greatest(interval '{MIN_LATE_AFTER.seconds} s', least(own.stale_after,
                greatest(1.2 * own.gap, node.heartbeat_late_after - 0.1 * own.gap)))
            ELSE node.heartbeat_late_after END,
        updated_at = greatest(node.updated_at, own.at),
        offline_at = CASE WHEN own.silent THEN NULL ELSE node.offline_at END,
        offline_reason = CASE WHEN own.silent THEN '' ELSE node.offline_reason END,
        offline_by = CASE WHEN own.silent THEN '' ELSE node.offline_by END,
        offline_recovers = node.offline_recovers AND NOT own.silent,
        revision = node.revision + own.silent::int,
        reserved_vram = CASE WHEN own.clears THEN 0 ELSE node.reserved_vram END,
        reserved_cleared_at = CASE WHEN own.clears THEN own.measured_at ELSE node.reserved_cleared_at END,
        vram_read_at = CASE WHEN own.live AND own.available_vram IS NOT NULL THEN own.measured_at
            ELSE node.vram_read_at END,
        available_vram = CASE WHEN own.live
            THEN least(coalesce(own.available_vram, node.available_vram), nullif(own.ceiling, 0))
            ELSE node.available_vram END,
        vram_budget_bytes = CASE WHEN own.live THEN own.ceiling ELSE node.vram_budget_bytes END,
        total_vram = CASE WHEN own.live THEN coalesce(own.total_vram, node.total_vram)
            ELSE node.total_vram END,
        available_ram = CASE WHEN own.live THEN coalesce(own.available_ram, node.available_ram)
            ELSE node.available_ram END,
        total_disk = CASE WHEN own.live THEN coalesce(own.total_disk, node.total_disk)
            ELSE node.total_disk END,
        available_disk = CASE WHEN own.live THEN coalesce(own.available_disk, node.available_disk)
            ELSE node.available_disk END,
        gpus = CASE WHEN own.live THEN coalesce(own.gpus, node.gpus) ELSE node.gpus END,
        gpu_vendor = CASE WHEN own.live THEN coalesce(nullif(own.gpu_vendor, ''), node.gpu_vendor)
            ELSE node.gpu_vendor END
    FROM own WHERE own.id = node.id AND own.ctid = node.ctid
    RETURNING node.id, node.fingerprint, own.instance, own.silent, own.at, node.name, node.status
), told AS (
    INSERT INTO node_events (node_id, node_name, kind, at, last_at, count, actor_kind, actor, cause,
        status_before, status_after, detail, request_id)
    SELECT id, name, '{NodeEvent.Kind.HEARD_AGAIN}', at, at, 1, '{WORKER.kind}', '{WORKER}', 'heartbeat',
        '{states.OFFLINE}', status, '{{}}', ''
    FROM written WHERE silent
)
SELECT id, fingerprint, instance, CASE WHEN silent THEN pg_notify('{NODES}', id::text) END
FROM written
"""
"""One UPDATE for a batch of heartbeats. It authenticates each one again, and returns the nodes that it
wrote."""

_BUDGETS_SQL = "SELECT id, vram_budget FROM backend_nodes WHERE id = ANY(%(ids)s) AND vram_budget <> ''"

_REFUSAL_ROWS_SQL = """
SELECT id, fingerprint, weak_identity, instance, rotation_requested_at IS NOT NULL FROM backend_nodes
WHERE id = ANY(%(ids)s) OR (fingerprint <> '' AND fingerprint = ANY(%(fingerprints)s))
"""


async def record(
    database: StatementRunner, beats: Sequence[Beat]
) -> dict[HeartbeatKey, errors.ClusterError | None]:
    """Write heartbeats with different keys in one statement; return for each key the refusal, or None.

    A `WriteConflict` means that another transaction changed the node meanwhile: the caller adds the heartbeat
    to the next batch.
    """
    budgets = await _read_budgets(database, [beat.id for beat in beats if beat.total_vram is not None])
    encoded = [_encode(beat, budgets.get(beat.id, "")) for beat in beats]
    rows = await database.fetch_rows(WRITE_SQL, _write_parameters(encoded))
    written = {(node_id, fingerprint, instance) for node_id, fingerprint, instance, _ in rows}
    refusals = await _find_refusals(database, [beat for beat in beats if beat.key not in written])
    return dict.fromkeys(written) | {key: refusal or WriteConflict() for key, refusal in refusals.items()}


def _write_parameters(encoded: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {"beats": orjson.dumps(encoded).decode(), "stale_after": conf.cluster().node_stale_after}


async def check_identities(
    database: StatementRunner, beats: Sequence[Beat]
) -> dict[HeartbeatKey, errors.ClusterError | None]:
    """Check the identities of heartbeats in one SELECT; return for each key the refusal, or None."""
    return await _find_refusals(database, beats)


async def _read_budgets(database: StatementRunner, ids: Sequence[UUID]) -> dict[UUID, str]:
    """Return the VRAM budgets of the nodes whose heartbeats report a total, by node id.

    Stock workers report no total.
    """
    return dict(await database.fetch_rows(_BUDGETS_SQL, {"ids": ids})) if ids else {}


def _encode(beat: Beat, text: str) -> dict[str, Any]:
    """Encode a heartbeat, with the bytes that the budget `text` means for its total (R1.36, "Port:").

    The UPDATE uses these bytes only while the node still has this budget.
    """
    text = text if beat.total_vram is not None else ""
    return vars(beat) | {
        "budget": text,
        "ceiling": resources.budget_ceiling_or_none(text, beat.total_vram or 0) if text else 0,
    }


async def _find_refusals(
    database: StatementRunner, beats: Sequence[Beat]
) -> dict[HeartbeatKey, errors.ClusterError | None]:
    if not beats:
        return {}
    names = {"ids": [beat.id for beat in beats], "fingerprints": [beat.fingerprint for beat in beats]}
    node_facts = [NodeFacts(*row) for row in await database.fetch_rows(_REFUSAL_ROWS_SQL, names)]
    by_id, by_secret = {row.id: row for row in node_facts}, {row.fingerprint: row for row in node_facts}
    return {
        beat.key: find_refusal(beat, filter(None, (by_id.get(beat.id), by_secret.get(beat.fingerprint))))
        for beat in beats
    }


def find_refusal(beat: Beat, rows: Iterable[NodeFacts]) -> errors.ClusterError | None:
    """Return the error if these rows do not authenticate the heartbeat, otherwise None."""
    try:
        identity.authenticate(beat.id, beat.fingerprint, beat.instance, rows)
    except errors.ClusterError as refusal:
        return refusal
    return None


IDENTITY_MAX_AGE = 5.0
"""Seconds for which the cached rows authenticate heartbeats."""
_REMOVED_RATIO = 8
"""The cache is refreshed early when NOTIFYs have removed more than one in this many identities."""

ALL_IDENTITIES_SQL = """
SELECT id, fingerprint, weak_identity, instance, rotation_requested_at IS NOT NULL FROM backend_nodes
"""


class IdentityCache:
    """The cached identities of one web process; used on one event loop."""

    def __init__(self) -> None:
        self._nodes: dict[UUID, NodeFacts] = {}
        self._removed: set[UUID] = set()
        self._read_at = self._not_before = -math.inf

    def accepts(self, beat: Beat) -> bool:
        """Return True if the cache authenticates the heartbeat; otherwise the caller must read the row."""
        if clock.monotonic() - self._read_at >= IDENTITY_MAX_AGE:
            return False
        node_facts = self._nodes.get(beat.id)
        return node_facts is not None and find_refusal(beat, [node_facts]) is None

    @property
    def needs_refresh(self) -> bool:
        """Return True if the cache is too old or too many of its entries are missing."""
        age = clock.monotonic() - self._read_at
        return age >= IDENTITY_MAX_AGE or len(self._removed) * _REMOVED_RATIO > len(self._nodes)

    async def refresh(self, database: StatementRunner) -> None:
        """Read all identities again; a node that changes during the read is left out."""
        began = clock.monotonic()
        self._removed.clear()
        facts_by_node = {row[0]: NodeFacts(*row) for row in await database.fetch_rows(ALL_IDENTITIES_SQL, {})}
        if began > self._not_before:
            self._nodes = {node: facts for node, facts in facts_by_node.items() if node not in self._removed}
            self._read_at = began

    def forget(self, node: str) -> None:
        """Remove the node from the cache; "" removes all nodes, because a NOTIFY may be lost."""
        if not node:
            self._read_at, self._not_before = -math.inf, clock.monotonic()
            return
        changed = UUID(node)
        self._removed.add(changed)
        self._nodes.pop(changed, None)


_identity_cache = IdentityCache()


def identity_cache() -> IdentityCache:
    """Return the cache of this web process."""
    return _identity_cache
