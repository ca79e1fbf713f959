"""The statement of `statements.EXCHANGE` for picks that know where the beginning of their prompt was last.

Choosing and counting are one statement here too, so the guard against overload (R3.13) holds across all web
processes. It runs only when such a pick waits, in the place of the other one.
"""

from nodes.replicas.statements import (
    ADMITTED,
    ALLOWED,
    CHOSEN_COLUMNS,
    COUNTED,
    LABELS,
    MOVED,
    OWNER_COLUMNS,
    OWNERS,
    PLACES,
    RELEASED,
    SPARE,
)

EXCHANGE_BY_PREFIX = f"""
WITH RECURSIVE {OWNERS}, wanted AS (
    SELECT a.ask, a.plainly, a.model, a.nodes, a.node, a.index, a.share, sum(a.n)::int AS n
      FROM jsonb_to_recordset($3::jsonb -> 'picks') AS a(
               ask int, plainly int, model text, key text, n int, nodes jsonb, node uuid, index int,
               share float8
           )
     WHERE {ADMITTED}
     GROUP BY a.ask, a.plainly, a.model, a.nodes, a.node, a.index, a.share
), ruled AS MATERIALIZED (
    SELECT w.model, w.nodes, w.n, c.labels, p.by_prefix,
           CASE WHEN p.by_prefix OR w.share IS NULL THEN w.ask ELSE w.plainly END AS ask,
           CASE WHEN p.by_prefix OR w.share IS NULL THEN w.node END AS node,
           CASE WHEN p.by_prefix OR w.share IS NULL THEN w.index END AS index,
           w.share >= COALESCE(NULLIF(c.min_prefix_match, 0), d.match) AS near,
           COALESCE(NULLIF(c.balance_abs_threshold, 0), d.abs) AS abs,
           COALESCE(NULLIF(c.balance_rel_threshold, 0), d.rel) AS rel
      FROM wanted w
     CROSS JOIN jsonb_to_record($3::jsonb -> 'thresholds') AS d(match float8, abs int, rel float8)
      LEFT JOIN LATERAL (
               SELECT {LABELS} AS labels, c.route_policy, c.min_prefix_match,
                      c.balance_abs_threshold, c.balance_rel_threshold
                 FROM model_scheduling_configs c WHERE c.model_name = w.model OFFSET 0
           ) c ON true
     CROSS JOIN LATERAL (
               SELECT w.share IS NOT NULL AND c.route_policy IS DISTINCT FROM 'round_robin' AS by_prefix
           ) p
), asked AS MATERIALIZED (
    SELECT ask, model, nodes, node, index, labels, sum(n)::int AS n
      FROM ruled WHERE NOT by_prefix
     GROUP BY ask, model, nodes, node, index, labels
), guided AS MATERIALIZED (
    SELECT * FROM ruled WHERE by_prefix
), {RELEASED}, nearest AS MATERIALIZED (
    SELECT near.id FROM (
        SELECT model, nodes, labels, sum(n)::int AS n FROM ruled GROUP BY model, nodes, labels
    ) a CROSS JOIN LATERAL (
        SELECT r.id FROM node_models r CROSS JOIN LATERAL (
                   SELECT available_vram, status, node_type FROM backend_nodes WHERE id = r.node_id OFFSET 0
               ) n
         WHERE r.state = 'loaded' AND r.model_name = a.model
           AND n.status = 'healthy' AND n.node_type = 'backend' AND {ALLOWED}
         ORDER BY r.in_flight, r.last_used, n.available_vram DESC, r.id
         LIMIT a.n + {SPARE}
    ) near
     UNION ALL
    SELECT r.id FROM ruled a CROSS JOIN LATERAL (
        SELECT id FROM node_models
         WHERE node_id = a.node AND model_name = a.model AND replica_index = a.index OFFSET 0
    ) r
), {COUNTED}, {PLACES}, numbered AS MATERIALIZED (
    SELECT r.*, r.in_flight - r.less AS load, COALESCE(w.weight, 0) AS weight,
           row_number() OVER (PARTITION BY r.model_name ORDER BY r.id)::int AS k
      FROM counted r
      LEFT JOIN jsonb_to_recordset($3::jsonb -> 'weights')
                AS w(model text, node uuid, index int, weight float8)
             ON w.model = r.model_name AND w.node = r.node_id AND w.index = r.replica_index
     WHERE r.serving AND r.model_name IN (SELECT model FROM guided)
), lined AS MATERIALIZED (
    SELECT a.ask, a.model, a.n, a.abs, a.rel,
           array_agg(r.k ORDER BY r.weight, r.node_id, r.replica_index) AS cold,
           min(r.k) FILTER (WHERE a.near AND r.node_id = a.node AND r.replica_index = a.index) AS hot
      FROM guided a JOIN numbered r ON r.model_name = a.model
     WHERE {ALLOWED}
     GROUP BY a.ask, a.model, a.n, a.abs, a.rel
), turns AS MATERIALIZED (
    SELECT l.*, row_number() OVER (PARTITION BY l.model ORDER BY l.ask, j) AS turn
      FROM lined l CROSS JOIN LATERAL generate_series(1, l.n) AS j
), walk AS (
    SELECT model_name::text AS model, 0::bigint AS turn, array_agg(load ORDER BY k) AS loads,
           NULL::int AS ask, NULL::int AS k
      FROM numbered GROUP BY model_name
     UNION ALL
    SELECT w.model, t.turn, w.loads[:c.k - 1] || (w.loads[c.k] + 1) || w.loads[c.k + 1:], t.ask, c.k
      FROM walk w
     CROSS JOIN LATERAL (SELECT * FROM turns WHERE turn = w.turn + 1 AND model = w.model OFFSET 0) t
     CROSS JOIN LATERAL (
               SELECT l.k FROM (
                   SELECT o.k, o.place, w.loads[o.k] AS load, min(w.loads[o.k]) OVER () AS least
                     FROM unnest(t.cold) WITH ORDINALITY AS o(k, place)
               ) l
               CROSS JOIN LATERAL (
                   SELECT l.load <= l.least + t.abs AND l.load <= l.least * t.rel + 1 AS eligible
               ) g
               ORDER BY (l.k = t.hot AND g.eligible) IS NOT TRUE, NOT g.eligible, l.place
               LIMIT 1
           ) c
), chosen AS MATERIALIZED (
    SELECT ask, id, count(*)::int AS n FROM places WHERE place <= n GROUP BY ask, id
     UNION ALL
    SELECT w.ask, r.id, count(*)::int FROM walk w JOIN numbered r ON r.model_name = w.model AND r.k = w.k
     GROUP BY w.ask, r.id
), {MOVED}
SELECT {CHOSEN_COLUMNS}, (SELECT l.hot IS NOT NULL FROM lined l WHERE l.ask = c.ask)
  FROM moved m JOIN chosen c ON c.id = m.id
 UNION ALL
SELECT {OWNER_COLUMNS}, NULL FROM owners
"""
"""The parameters of `EXCHANGE`; $3 has more: of each pick `share` and `plainly`, and `thresholds` ({match,
abs, rel}, the cluster's) and `weights` ({model, node, index, weight}, of replicas that are the home of
anything).

A pick with a `share`, unless its model's rule is for `round_robin`, goes by the prefix: `index` on `node` had
that share of its prompt last. R3.14, with a rule's own thresholds in the place of the cluster's: that replica
if it is among those to choose from, the share is enough and it is not too busy; else the first that is not in
the order of weights. Such picks of one model follow each other, and each sees what the ones before it have
taken.

Of a model for `round_robin`, picks with the same `plainly` are one ask of that number: they are spread
together, whatever their prompts. Picks without a share are those of `EXCHANGE`.

The rows of picks that went by the prefix say last whether such a replica was there with share enough (R3.18),
all others null. All weights are compared among the replicas that were locked: the least busy ones, as many as
there are requests and `SPARE` more, and those asked for. `OFFSET 0` keeps each step of the walk from sorting
all turns again."""
