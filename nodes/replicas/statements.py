"""The SQL of the hot path, and of what else web processes run without the ORM.

One invariant keeps the counts exact and the locks free of cycles: a transaction that changes a `replica_uses`
row holds the lock of its `node_models` row, and takes these locks in the order of their ids.
`node_models.in_flight` is then the sum of its uses, however many web processes work at the same time.
"""

from collections.abc import Mapping
from typing import Any, Protocol

from localai_cluster.accounts.credentials import VALID_SQL


class Rows(Protocol):
    """What a statement needs of the database: to be run, its rows."""

    async def rows(self, statement: str, parameters: Mapping[str, Any], /) -> list[tuple[Any, ...]]:
        """Runs one statement in its own transaction."""
        ...


EXCHANGE = f"""
WITH owners AS MATERIALIZED (
    SELECT k.key_hash, u.id AS user_id, u.username, u.is_staff OR u.is_superuser AS is_admin
      FROM api_keys k JOIN auth_user u ON u.id = k.user_id
     WHERE k.key_hash = ANY(ARRAY(SELECT jsonb_array_elements_text($3::jsonb -> 'keys')))
       AND {VALID_SQL}
), asked AS MATERIALIZED (
    SELECT a.model, sum(a.n)::int AS n
      FROM jsonb_to_recordset($3::jsonb -> 'picks') AS a(model text, key text, n int)
     WHERE a.key = '' OR EXISTS (SELECT FROM owners o WHERE o.key_hash = a.key)
     GROUP BY a.model
), released AS MATERIALIZED (
    SELECT g.id, g.n FROM jsonb_to_recordset($3::jsonb -> 'releases') AS g(id uuid, n int)
), locked AS MATERIALIZED (
    SELECT r.id, r.model_name, r.in_flight, r.last_used, n.available_vram, n.weak_identity, n.engine_token,
           r.state = 'loaded' AND n.status = 'healthy' AND n.node_type = 'backend' AS serving
      FROM node_models r JOIN backend_nodes n ON n.id = r.node_id
     WHERE r.id = ANY(ARRAY(SELECT id FROM released))
        OR (r.state = 'loaded' AND r.model_name = ANY(ARRAY(SELECT model FROM asked)))
     ORDER BY r.id
       FOR UPDATE OF r
), counted AS MATERIALIZED (
    SELECT l.*, COALESCE(u.count, 0) AS held, LEAST(COALESCE(u.count, 0), COALESCE(g.n, 0)) AS less
      FROM locked l
      LEFT JOIN replica_uses u ON u.replica_id = l.id AND u.process_id = $1
      LEFT JOIN released g ON g.id = l.id
), places AS (
    SELECT c.id, a.n, row_number() OVER (
               PARTITION BY c.model_name
               ORDER BY c.in_flight - c.less + j, CASE j WHEN 0 THEN c.last_used ELSE $2::timestamptz END,
                        c.available_vram DESC, c.id
           ) AS place
      FROM counted c JOIN asked a ON a.model = c.model_name
     CROSS JOIN LATERAL generate_series(0, a.n - 1) AS j
     WHERE c.serving
), chosen AS MATERIALIZED (
    SELECT id, count(*)::int AS n FROM places WHERE place <= n GROUP BY id
), moves AS MATERIALIZED (
    SELECT c.id, c.held, c.less, COALESCE(h.n, 0) AS more, c.weak_identity, c.engine_token
      FROM counted c LEFT JOIN chosen h ON h.id = c.id
     WHERE c.less > 0 OR h.n > 0
), used AS (
    INSERT INTO replica_uses (process_id, replica_id, count)
    SELECT $1, id, held + more - less FROM moves
        ON CONFLICT (replica_id, process_id) DO UPDATE SET count = EXCLUDED.count
), moved AS (
    UPDATE node_models r
       SET in_flight = GREATEST(r.in_flight + m.more - m.less, 0),
           last_used = CASE WHEN m.more > 0 THEN $2::timestamptz ELSE r.last_used END,
           last_released_at = CASE WHEN m.less > 0 THEN $2::timestamptz ELSE r.last_released_at END,
           updated_at = CASE WHEN m.more > 0 THEN $2::timestamptz ELSE r.updated_at END
      FROM moves m WHERE r.id = m.id
    RETURNING r.id, r.node_id, r.model_name, r.address, m.more, m.weak_identity, m.engine_token
)
SELECT id, node_id, model_name, address, more, weak_identity, engine_token FROM moved WHERE more > 0
 UNION ALL
SELECT NULL, NULL, key_hash, username, user_id, is_admin, NULL FROM owners
"""
"""All picks and releases that wait in a process, in one statement: $1 this process, $2 now, $3 the waiting
ones.

`releases` ({id, n}) are counted out, at most what the process's row still holds (R1.58): a process that was
declared dead cannot subtract a second time. Then each of `picks` ({model, key, n}) is spread over the model's
loaded replicas by R1.78 and counted in. `keys` are API key hashes; `key` is one of them or empty, and only
picks with a valid key or none count. Counting out moves neither `last_used` nor `updated_at` (R1.60), but
`last_released_at`.

Returns one row for each chosen replica (id, node, model, address, how many, its node's `weak_identity` and
`engine_token`) and one for each valid key (null, null, hash, user's name, user's id, whether an admin, null).

`held` needs no lock of its own: only this process and the pass that declares it dead write that row, and
after that pass the insert fails on the missing process."""

ANNOUNCE = """
INSERT INTO web_processes (id, host, pid, started_at, seen_at, hearing_since, version)
VALUES (%(process)s, %(host)s, %(pid)s, %(started)s, %(now)s, %(now)s, %(version)s)
    ON CONFLICT (id) DO UPDATE SET seen_at = EXCLUDED.seen_at
"""

RENEW = """
UPDATE web_processes
   SET seen_at = %(now)s,
       hearing_since = CASE WHEN seen_at < %(gap)s::timestamptz THEN %(now)s ELSE hearing_since END
 WHERE id = %(process)s
"""
"""Says that this process lives. After a gap longer than it may be silent, `hearing_since` starts again."""

LOCK_USED = """
SELECT r.id FROM node_models r
 WHERE r.id = ANY(%(ids)s::uuid[])
    OR r.id IN (SELECT u.replica_id FROM replica_uses u WHERE u.process_id = %(process)s)
 ORDER BY r.id FOR UPDATE OF r
"""
"""Locks everything that `SETTLE` or `RELEASE_ALL` may touch. It must be a statement of its own before them,
so that they see what others committed while this one waited."""

SETTLE = """
WITH mine AS MATERIALIZED (
    SELECT r.id, COALESCE(u.count, 0) AS before, COALESCE(h.n, 0) AS after
      FROM node_models r
      LEFT JOIN replica_uses u ON u.replica_id = r.id AND u.process_id = %(process)s::uuid
      LEFT JOIN unnest(%(ids)s::uuid[], %(counts)s::int[]) AS h(id, n) ON h.id = r.id
     WHERE COALESCE(u.count, 0) <> COALESCE(h.n, 0)
), uses AS (
    INSERT INTO replica_uses (process_id, replica_id, count)
    SELECT %(process)s::uuid, id, after FROM mine
        ON CONFLICT (replica_id, process_id) DO UPDATE SET count = EXCLUDED.count
)
UPDATE node_models r
   SET in_flight = GREATEST(r.in_flight + m.after - m.before, 0),
       last_released_at = CASE WHEN m.after < m.before THEN %(now)s ELSE r.last_released_at END
  FROM mine m WHERE r.id = m.id
"""
"""Makes this process's counts what it holds in memory; repeating it changes nothing."""

RELEASE_ALL = """
WITH gone AS (
    DELETE FROM replica_uses WHERE process_id = %(process)s RETURNING replica_id, count
)
UPDATE node_models r SET in_flight = GREATEST(r.in_flight - g.count, 0), last_released_at = %(now)s
  FROM gone g WHERE r.id = g.replica_id AND g.count > 0
"""

DELETE_PROCESS = "DELETE FROM web_processes WHERE id = %(process)s"

LOSE = """
WITH lost AS (
    UPDATE node_models
       SET state = 'unloading', loading_by = %(owner)s, cleanup_attempts = 1, cleanup_error = '',
           cleanup_next_retry_at = %(until)s, updated_at = %(now)s
     WHERE id = %(replica)s AND address = %(address)s AND state = 'loaded'
    RETURNING node_id
)
SELECT node_id, pg_notify(%(channel)s, node_id::text) FROM lost
"""
"""Takes one replica out of the picks for good (`leaving.go`), if it is the one that was picked. Requests that
run there are still counted out."""

DROP_DEAD_PROCESSES = """
WITH dead AS (
    DELETE FROM web_processes AS process WHERE id = ANY(%(ids)s) AND seen_at < %(since)s
        AND NOT EXISTS (SELECT FROM replica_uses AS use
                        WHERE use.process_id = process.id AND use.replica_id <> ALL(%(locked)s::uuid[]))
    RETURNING id
), taken AS (
    SELECT use.replica_id, sum(use.count) AS count
    FROM replica_uses AS use JOIN dead ON dead.id = use.process_id
    GROUP BY use.replica_id
), gone AS (
    DELETE FROM replica_uses WHERE process_id IN (SELECT id FROM dead)
), settled AS (
    UPDATE node_models AS replica
    SET in_flight = greatest(replica.in_flight - taken.count, 0), updated_at = %(now)s,
        last_released_at = CASE WHEN taken.count > 0 THEN %(now)s ELSE replica.last_released_at END
    FROM taken WHERE replica.id = taken.replica_id
)
SELECT count(*) FROM dead
"""
"""A process that uses a replica which is not `locked` has just picked it: it lives, and locking that replica
now would be out of order."""

LOCK_MISCOUNTED = """
SELECT r.id FROM node_models r
  LEFT JOIN (SELECT replica_id, sum(count) AS held FROM replica_uses GROUP BY replica_id) u
         ON u.replica_id = r.id
 WHERE r.in_flight <> COALESCE(u.held, 0)
 ORDER BY r.id FOR UPDATE OF r SKIP LOCKED
"""
"""Who holds a row is changing its count; it is looked at again with the next pass."""

RECOUNT = """
UPDATE node_models r SET in_flight = s.held
  FROM (SELECT m.id, (SELECT COALESCE(sum(u.count), 0) FROM replica_uses u WHERE u.replica_id = m.id) AS held
          FROM node_models m WHERE m.id = ANY(%(ids)s)) s
 WHERE r.id = s.id AND r.in_flight <> s.held
"""
"""It must be a statement of its own after `LOCK_MISCOUNTED`, so that it sees what others committed before
the rows were locked."""
