"""Every change of a replica's phase or deadline, recorded by a trigger of PostgreSQL.

So a test misses no change between two reads, however short a phase is.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

import orjson
from django.db import connection

from nodes.models import Phase
from nodes.replicas.states import TRANSITIONS

# In a schema of its own, so that what empties the product's tables does not see it.
_CREATE = """
CREATE SCHEMA observed;
CREATE UNLOGGED TABLE observed.replica_log (n bigserial, before jsonb, after jsonb);
CREATE FUNCTION observed.log_replica() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP <> 'UPDATE' OR OLD.phase <> NEW.phase OR OLD.deadline IS DISTINCT FROM NEW.deadline THEN
        INSERT INTO observed.replica_log (before, after) VALUES (to_jsonb(OLD), to_jsonb(NEW));
    END IF;
    RETURN NULL;
END $$;
CREATE TRIGGER log_replica AFTER INSERT OR DELETE OR UPDATE OF phase, deadline ON node_models
    FOR EACH ROW EXECUTE FUNCTION observed.log_replica();
"""
_DROP = "DROP SCHEMA IF EXISTS observed CASCADE"
_STATE = """
SELECT (SELECT max(n) FROM observed.replica_log), (SELECT json_agg(r ORDER BY id)::text FROM node_models r),
    (SELECT json_agg(r ORDER BY id)::text FROM backend_nodes r)
"""
_TAKE = """
WITH taken AS (DELETE FROM observed.replica_log RETURNING n, before, after)
SELECT before, after FROM taken ORDER BY n
"""

ALLOWED = {pair for transition in TRANSITIONS.values() for pair in transition.follows.items()}
"""Pairs of phases that may follow each other according to the table."""


@dataclass(frozen=True)
class Row:
    """A row before or after a change."""

    id: UUID
    node_id: UUID
    name: str
    phase: Phase
    reason: str
    deadline: datetime | None
    in_flight: int
    owner: tuple[UUID, int | None] | None
    """Operation or intent, with the fence of a load's attempt."""

    def __str__(self) -> str:
        return f"{self.name} ({self.phase} {self.reason})"


def _row(values: dict[str, Any] | None) -> Row | None:
    if values is None:
        return None
    deadline, owner = values["deadline"], values["owner_id"]
    return Row(
        UUID(values["id"]),
        UUID(values["node_id"]),
        f"{values['model_name']}#{values['replica_index']} {values['id'][:4]}",
        Phase(values["phase"]),
        values["reason"],
        datetime.fromisoformat(deadline) if deadline else None,
        values["in_flight"],
        (UUID(owner), values["owner_fence"]) if owner else None,
    )


@contextmanager
def replica_log() -> Iterator[None]:
    """Record the changes."""
    with connection.cursor() as cursor:
        cursor.execute(f"{_DROP};{_CREATE}")
    try:
        yield
    finally:
        with connection.cursor() as cursor:
            cursor.execute(_DROP)


def read_state() -> tuple[str, ...]:
    """Return the rows of nodes and replicas as text, and the last change that was not taken."""
    with connection.cursor() as cursor:
        cursor.execute(_STATE)
        return tuple(map(str, cursor.fetchone()))


def take_changes() -> list[tuple[Row | None, Row | None]]:
    """Return the changes since the last call: the row before and after each."""
    with connection.cursor() as cursor:
        cursor.execute(_TAKE)
        # Django's connection hands JSON over as text.
        return [(_row(_decoded(before)), _row(_decoded(after))) for before, after in cursor.fetchall()]


def _decoded(value: Any) -> Any:
    return orjson.loads(value) if isinstance(value, str) else value
