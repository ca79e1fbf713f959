"""The SQL of the hot path, and all other SQL that web processes run without the ORM.

One invariant keeps the counts exact and the locks free of cycles: a transaction that changes a `replica_uses`
row holds the lock of its `node_models` row, and takes these locks in the order of their ids. So
`node_models.in_flight` is always the sum of the uses, for any number of concurrent web processes.
"""

from collections.abc import Mapping
from typing import Any, Protocol

from localai_cluster.accounts.principals import VALID_KEY_SQL


class StatementRunner(Protocol):
    """A database connection or pool that runs the statements of this module."""

    async def fetch_rows(self, statement: str, parameters: Mapping[str, Any], /) -> list[tuple[Any, ...]]:
        """Run one statement in its own transaction and return its rows."""
        ...


EXTRA_REPLICAS = 64
"""How many replicas of a model are locked beyond the number of requests. Before that, all replicas are
compared without locks. Among the locked replicas the choice is exact, whatever other processes have counted
meanwhile."""

ALLOWED = """(s.nodes IS NULL OR s.nodes ? r.node_id::text) AND (s.labels IS NULL OR NOT EXISTS (
               SELECT FROM jsonb_each(s.labels) AS wanted(key, value) WHERE NOT EXISTS (
                   SELECT FROM node_labels l
                    WHERE l.node_id = r.node_id AND l.key = wanted.key AND to_jsonb(l.value) = wanted.value
               )
           ))"""
"""SQL condition: a pick in scope `s` may use replica `r`, by the pick's nodes and the model's rule."""

OWNERS = f"""owners AS MATERIALIZED (
    SELECT k.key_hash, u.id AS user_id, u.username, u.is_staff OR u.is_superuser AS is_admin
      FROM api_keys k JOIN auth_user u ON u.id = k.user_id
     WHERE k.key_hash = ANY(ARRAY(SELECT jsonb_array_elements_text($3::jsonb -> 'keys')))
       AND {VALID_KEY_SQL}
)"""

ASKED = """asked AS MATERIALIZED (
    SELECT a.ask, a.scope, a.model, a.nodes, a.node, a.index, a.ratio, sum(a.n)::int AS n
      FROM jsonb_to_recordset($3::jsonb -> 'picks') AS a(
               ask int, scope int, model text, key text, n int, nodes jsonb, node uuid, index int,
               ratio float8
           )
     WHERE a.key = '' OR EXISTS (SELECT FROM owners o WHERE o.key_hash = a.key)
     GROUP BY a.ask, a.scope, a.model, a.nodes, a.node, a.index, a.ratio
), scopes AS MATERIALIZED (
    SELECT a.*, c.labels, a.prompts > 0 AND c.route_policy IS DISTINCT FROM 'round_robin' AS by_prefix,
           COALESCE(c.match, ($3::jsonb -> 'thresholds' ->> 'match')::float8) AS match,
           COALESCE(c.abs, ($3::jsonb -> 'thresholds' ->> 'abs')::int) AS abs,
           COALESCE(c.rel, ($3::jsonb -> 'thresholds' ->> 'rel')::float8) AS rel
      FROM (
          SELECT scope, model, nodes, sum(n)::int AS n,
                 (sum(n) FILTER (WHERE ratio IS NOT NULL))::int AS prompts
            FROM asked GROUP BY scope, model, nodes
      ) a LEFT JOIN LATERAL (
          SELECT route_policy, NULLIF(min_prefix_match, 0) AS match, NULLIF(balance_abs_threshold, 0) AS abs,
                 NULLIF(balance_rel_threshold, 0) AS rel,
                 CASE WHEN jsonb_typeof(node_selector) = 'object' THEN NULLIF(node_selector, '{}')
                      ELSE '{"unreadable": []}' END AS labels
            FROM model_scheduling_configs WHERE model_name = a.model OFFSET 0
      ) c ON true
)"""
"""SQL part: the picks with a valid key or none, and their scopes with the rule of their model."""

RELEASED = """released AS MATERIALIZED (
    SELECT g.id, g.n FROM jsonb_to_recordset($3::jsonb -> 'releases') AS g(id uuid, n int)
)"""

NEAREST = f"""nearest AS MATERIALIZED (
    SELECT near.id FROM scopes s CROSS JOIN LATERAL (
        SELECT r.id FROM node_models r CROSS JOIN LATERAL (
                   SELECT available_vram, status, node_type FROM backend_nodes WHERE id = r.node_id OFFSET 0
               ) n
         WHERE r.state = 'loaded' AND r.model_name = s.model
           AND n.status = 'healthy' AND n.node_type = 'backend' AND {ALLOWED}
         ORDER BY r.in_flight, r.last_used, n.available_vram DESC, r.id
         LIMIT s.n + {EXTRA_REPLICAS}
    ) near
     UNION ALL
    SELECT r.id FROM asked a CROSS JOIN LATERAL (
        SELECT id FROM node_models
         WHERE node_id = a.node AND model_name = a.model AND replica_index = a.index OFFSET 0
    ) r WHERE a.node IS NOT NULL
)"""
"""SQL part: the least busy replicas of each scope, and the replicas that picks prefer."""

COUNTED = f"""locked AS MATERIALIZED (
    SELECT r.id, r.model_name, r.node_id, r.replica_index, r.in_flight, r.last_used, n.available_vram,
           n.weak_identity, n.engine_token,
           r.state = 'loaded' AND n.status = 'healthy' AND n.node_type = 'backend' AS serving
      FROM node_models r CROSS JOIN LATERAL (
               SELECT available_vram, weak_identity, engine_token, status, node_type
                 FROM backend_nodes WHERE id = r.node_id OFFSET 0
           ) n
     WHERE r.id = ANY(ARRAY(SELECT id FROM released UNION ALL SELECT id FROM nearest))
       AND r.state IS NOT NULL
     ORDER BY r.id
       FOR UPDATE OF r
), counted AS MATERIALIZED (
    SELECT l.*, COALESCE(u.count, 0) AS held, LEAST(COALESCE(u.count, 0), COALESCE(g.n, 0)) AS less
      FROM locked l
      LEFT JOIN replica_uses u ON u.replica_id = l.id AND u.process_id = $1
      LEFT JOIN released g ON g.id = l.id
), choices AS MATERIALIZED (
    SELECT s.scope, r.id, r.node_id, r.replica_index, r.in_flight - r.less AS load, r.last_used,
           r.available_vram
      FROM counted r JOIN scopes s ON s.model = r.model_name
     WHERE r.serving AND {ALLOWED}
)"""
"""SQL part: the replicas to choose from and to release, with the number of requests of this process on each;
`choices` are the replicas of each scope."""

PLACES = """ranked AS (
    SELECT a.ask, a.n, r.*, (r.node_id = a.node AND r.replica_index = a.index) IS TRUE AS preferred,
           row_number() OVER (
               PARTITION BY a.ask
               ORDER BY (r.node_id = a.node AND r.replica_index = a.index) IS NOT TRUE,
                        r.load, r.last_used, r.available_vram DESC, r.id
           )::int AS rank
      FROM choices r JOIN (
               SELECT ask, scope, node, index, n FROM asked WHERE ratio IS NULL
                UNION ALL
               SELECT scope, scope, NULL, NULL, prompts FROM scopes WHERE prompts > 0 AND NOT by_prefix
           ) a USING (scope)
), places AS (
    SELECT r.ask, r.id, r.n, row_number() OVER (
               PARTITION BY r.ask
               ORDER BY NOT r.preferred, r.load + j,
                        CASE j WHEN 0 THEN r.last_used ELSE $2::timestamptz END, r.available_vram DESC, r.id
           ) AS place
      FROM ranked r CROSS JOIN LATERAL generate_series(0, r.n - r.rank) AS j
)"""
"""SQL part: the replicas for the picks of each `ask`, distributed by R1.78."""

PROMPTS = """prompts AS MATERIALIZED (
    SELECT a.ask, a.scope, a.n, r.id AS hot, r.load,
           (sum(a.n) OVER (PARTITION BY a.scope, r.id ORDER BY a.ask))::int - a.n AS earlier
      FROM asked a JOIN scopes s USING (scope) LEFT JOIN choices r
           ON r.scope = a.scope AND r.node_id = a.node AND r.replica_index = a.index AND a.ratio >= s.match
     WHERE s.by_prefix AND a.ratio IS NOT NULL
), warm AS MATERIALIZED (
    SELECT p.*, LEAST(p.n, GREATEST(g.most - p.load + 1 - p.earlier, 0)) AS own
      FROM prompts p JOIN (
               SELECT scope, floor(LEAST(least + abs, least * rel + 1))::int AS most
                 FROM (
                     SELECT s.scope, s.abs, s.rel, min(r.load + COALESCE(d.n, 0)) AS least
                       FROM scopes s JOIN choices r USING (scope) LEFT JOIN (
                                SELECT scope, hot AS id, sum(n) AS n FROM prompts GROUP BY scope, hot
                            ) d USING (scope, id)
                      WHERE s.by_prefix GROUP BY s.scope, s.abs, s.rel
                 ) filled
           ) g USING (scope)
)"""
"""The picks with a prompt: `hot` is the replica that last received the beginning of their prompts, `own` the
number of picks that this replica takes.

The least busy of these replicas comes first, so a pick meets a replica that is the least busy one, or the
fewest requests of a replica are what it has after all picks of its own. Hence `most`.
"""

WALK = """walk AS (
    SELECT t.asks, t.hots, t.counts, s.abs, s.rel, l.ids, l.loads, 1 AS turn, 0 AS given,
           NULL::int AS ask, NULL::int AS k, NULL::int AS n, NULL::bool AS is_cached
      FROM scopes s CROSS JOIN LATERAL (
               SELECT array_agg(id ORDER BY weight, node_id, replica_index) AS ids,
                      array_agg(load ORDER BY weight, node_id, replica_index) AS loads
                 FROM (
                     SELECT r.id, r.node_id, r.replica_index, r.load + COALESCE(
                                (SELECT sum(own)::int FROM warm WHERE hot = r.id AND scope = s.scope), 0
                            ) AS load, COALESCE(
                                ($3::jsonb #>> ARRAY['weights', s.model, r.node_id || '/' || r.replica_index]
                            )::float8, 0) AS weight
                       FROM choices r WHERE r.scope = s.scope
                 ) r
           ) l CROSS JOIN LATERAL (
               SELECT array_agg(ask ORDER BY ask) AS asks, array_agg(n - own ORDER BY ask) AS counts,
                      array_agg(array_position(l.ids, hot) ORDER BY ask) AS hots
                 FROM warm WHERE scope = s.scope AND n > own
           ) t
     WHERE t.asks IS NOT NULL
     UNION ALL
    SELECT asks, hots, counts, abs, rel, ids, loads[:k - 1] || (loads[k] + n) || loads[k + 1:],
           turn + (given + n = counts[turn])::int,
           CASE WHEN given + n = counts[turn] THEN 0 ELSE given + n END,
           asks[turn], k, n, hots[turn] IS NOT NULL
      FROM (
          SELECT c.*, CASE WHEN is_own OR loads[k] > least OR cardinality(array_positions(loads, least)) > 1
                           THEN LEAST(counts[turn] - given, GREATEST(most - loads[k] + 1, 1)) ELSE 1 END AS n
            FROM (
                SELECT w.asks, w.hots, w.counts, w.abs, w.rel, w.ids, w.loads, w.turn, w.given, m.least,
                       m.most, w.loads[w.hots[w.turn]] <= m.most AS is_own,
                       CASE WHEN w.loads[w.hots[w.turn]] <= m.most THEN w.hots[w.turn]
                            ELSE COALESCE((SELECT min(o.k)::int
                                             FROM unnest(w.loads) WITH ORDINALITY AS o(load, k)
                                            WHERE o.load <= m.most), 1) END AS k
                  FROM walk w CROSS JOIN LATERAL (
                           SELECT min(load) AS least,
                                  floor(LEAST(min(load) + w.abs, min(load) * w.rel + 1))::int AS most
                             FROM unnest(w.loads) AS load
                       ) m
                 WHERE w.turn <= cardinality(w.asks) OFFSET 0
            ) c OFFSET 0
      ) step
)"""
"""The other picks with a prompt, `n` picks of one ask in each step. `loads` are the numbers of requests of
the replicas, in the order of their weights; `hots` has for each ask the position of its own replica in this
order, `k` is the position that the step chooses. A step assigns several picks to one position as long as they
change no other choice: the replica is not overloaded, and the smallest number of requests stays equal.
"""

MOVED = """moves AS MATERIALIZED (
    SELECT c.id, c.held, c.less, COALESCE(h.n, 0) AS more, c.weak_identity, c.engine_token
      FROM counted c LEFT JOIN (SELECT id, sum(n)::int AS n FROM chosen GROUP BY id) h ON h.id = c.id
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
      FROM moves m WHERE r.id = m.id AND r.id = ANY(ARRAY(SELECT id FROM moves))
    RETURNING r.id, r.node_id, r.model_name, r.replica_index, r.address, m.weak_identity, m.engine_token
)"""

EXCHANGE = f"""
WITH RECURSIVE {OWNERS}, {ASKED}, {RELEASED}, {NEAREST}, {COUNTED}, {PLACES}, {PROMPTS}, {WALK},
chosen AS MATERIALIZED (
    SELECT ask, id, count(*)::int AS n, NULL::bool AS is_cached FROM places WHERE place <= n GROUP BY ask, id
     UNION ALL
    SELECT ask, hot, own, true FROM warm WHERE own > 0
     UNION ALL
    SELECT ask, ids[k], n, is_cached FROM walk WHERE k IS NOT NULL
), {MOVED}
SELECT m.id, m.node_id, m.model_name, m.address, c.n, m.weak_identity, m.engine_token, c.ask,
       m.replica_index, c.is_cached
  FROM moved m JOIN chosen c ON c.id = m.id
 UNION ALL
SELECT NULL, NULL, key_hash, username, user_id, is_admin, NULL, NULL, NULL, NULL FROM owners
"""
"""All waiting picks and releases of a process, in one statement: $1 is the process, $2 now, $3 the picks and
releases.

`releases` ({id, n}) are subtracted from the counts, at most the number that the row of the process still has
(R1.58): a process that was declared dead cannot subtract a second time. A release changes `last_released_at`,
but neither `last_used` nor `updated_at` (R1.60). `keys` are API key hashes; the `key` of a pick is one of
these hashes or empty, and only picks with a valid or an empty key count.

`picks` are {ask, scope, model, key, n, nodes, node, index, ratio}. Equal picks have the same number `ask`;
picks of one model and the same `nodes` have the same number `scope`, which differs from every `ask`. The
statement chooses among the model's loaded replicas on nodes that the selector of its rule allows (R2.10) and
that are in `nodes`, unless `nodes` is null, and counts the picks on the chosen replicas:

- A pick without a `ratio` is distributed by R1.78. The replica `index` on `node` is chosen whenever it is
  allowed, at any load (R1.80); null prefers no replica. Different asks of one scope do not see the choices of
  each other in the same statement.
- A pick with a `ratio` has a prompt; the replica `index` on `node` last received this fraction of the prompt.
  The pick gets this replica if the ratio is sufficient and the replica is not overloaded, otherwise the
  replica with the least weight that is not overloaded (R3.14). The picks of a scope are processed in
  sequence: first the picks that get their own replicas, the least busy replica first, then the other picks in
  the order of their asks. Each pick sees the choices before it, so the guard (R3.13) holds across all web
  processes. `thresholds` ({match, abs, rel}) are the cluster's, for rules without their own; `weights` map
  model and "node/index" to the weight of each replica that has one.
- If the model's rule is `round_robin`, the picks with a ratio are distributed by R1.78 as one ask, whose
  number is their scope.

The statement returns a row for each replica chosen for an ask (id, node, model, address, number of picks, the
node's `weak_identity` and `engine_token`, ask, index, and true if a replica with a sufficient ratio was
available (R3.18), null without a ratio) and a row for each valid key (null, null, hash, user's name, user's
id, true for an administrator, and nulls).

`held` needs no lock of its own: only this process, the pass that declares it dead, and a departure of the
replica write that row. After that pass the insert fails because the process is missing, and a departed
replica is left out, because the state is read again after the wait for the lock. An abandoned statement may
still run during a settlement and then write an outdated count; the sum is wrong until the state pass
recounts.

The cost does not grow with the tables. The statement is planned once, without its parameters, so `OFFSET 0`
and `= ANY(ARRAY(...))` leave the key as the only way to find a row. A replica of rank k has k - 1 replicas
before it, so it gets at most n - k + 1 of n requests, and no further positions are compared. Picks with a
ratio that get their own replicas are counted together; the walk has a step for some of the other picks.
"""

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
"""Statement that renews the presence of this process. After a gap longer than the allowed one,
`hearing_since` restarts."""

LOCK_USED = """
SELECT r.id FROM node_models r
 WHERE (r.id = ANY(%(ids)s::uuid[])
    OR r.id IN (SELECT u.replica_id FROM replica_uses u WHERE u.process_id = %(process)s))
   AND r.state IS NOT NULL
 ORDER BY r.id FOR UPDATE OF r
"""
"""Statement that locks all rows which `SETTLE` or `RELEASE_ALL` may change. It must run before these, as a
statement of its own, so that they see what other transactions committed while it waited."""

SETTLE = """
WITH mine AS MATERIALIZED (
    SELECT r.id, COALESCE(u.count, 0) AS before, COALESCE(h.n, 0) AS after
      FROM node_models r
      LEFT JOIN replica_uses u ON u.replica_id = r.id AND u.process_id = %(process)s::uuid
      LEFT JOIN unnest(%(ids)s::uuid[], %(counts)s::int[]) AS h(id, n) ON h.id = r.id
     WHERE COALESCE(u.count, 0) <> COALESCE(h.n, 0) AND r.state IS NOT NULL
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
"""Statement that sets the counts of this process in the database to those in its memory; idempotent. Departed
replicas, which have no state, are not counted."""

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
       SET phase = %(phase)s, reason = %(reason)s, owner_kind = 'controllers', deadline = %(deadline)s,
           updated_at = %(now)s
     WHERE id = %(replica)s AND address = %(address)s AND phase = 'serving'
    RETURNING node_id
)
SELECT node_id, pg_notify(%(channel)s, node_id::text) FROM lost
"""
"""Statement that drains one replica (`terminations.lose`), if its row is still the row that was picked.
Requests that run on it are still counted out."""

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
"""Statement that deletes dead processes and subtracts their requests. A process that uses a replica which is
not `locked` has just picked this replica: the process is alive, and a lock on the replica now would violate
the order of locks."""

LOCK_MISCOUNTED = """
SELECT r.id FROM node_models r
  LEFT JOIN (SELECT replica_id, sum(count) AS held FROM replica_uses GROUP BY replica_id) u
         ON u.replica_id = r.id
 WHERE r.in_flight <> COALESCE(u.held, 0) AND r.state IS NOT NULL
 ORDER BY r.id FOR UPDATE OF r SKIP LOCKED
"""
"""Statement that locks replicas with a wrong count. It skips a locked row: the holder of the lock is changing
the count, and the next pass checks the row. Departed replicas are not counted."""

RECOUNT = """
UPDATE node_models r SET in_flight = s.held
  FROM (SELECT m.id, (SELECT COALESCE(sum(u.count), 0) FROM replica_uses u WHERE u.replica_id = m.id) AS held
          FROM node_models m WHERE m.id = ANY(%(ids)s)) s
 WHERE r.id = s.id AND r.in_flight <> s.held
"""
"""Statement that corrects the counts of locked replicas. It runs after `LOCK_MISCOUNTED`, so that it sees
what other transactions committed before the rows were locked."""
