"""One engine is one row: phases with owner and deadline take the place of `engine_starts` and `loading_by`.

Loads, stops and notes of started engines that are under way become rows of the new table, so no engine is lost.
All server processes must be stopped for it; workers and engines may run.
"""

from typing import Any

import django.db.models.deletion
from django.db import migrations, models

from localai_cluster.kit import clock

CONVERT = """
SET CONSTRAINTS ALL IMMEDIATE;

CREATE TEMPORARY TABLE ended_rows ON COMMIT DROP AS
SELECT r.id FROM node_models r
 WHERE (r.state IN ('staging', 'loading') AND (
           r.loading_by !~ '^[0-9a-f-]{36}:[0-9]+$'
           OR EXISTS (SELECT FROM engine_starts e
                       WHERE e.node_id = r.node_id AND e.model_name = r.model_name
                         AND e.replica_index = r.replica_index AND e.mark <> r.loading_by)))
    OR (r.state IN ('unloading', 'idle', 'loaded') AND r.address = '' AND NOT EXISTS (
           SELECT FROM engine_starts e
            WHERE r.state = 'unloading' AND e.node_id = r.node_id AND e.model_name = r.model_name
              AND e.replica_index = r.replica_index AND e.mark = r.loading_by));
DELETE FROM replica_uses WHERE replica_id IN (SELECT id FROM ended_rows);
DELETE FROM node_models WHERE id IN (SELECT id FROM ended_rows);

UPDATE node_models r
   SET phase = CASE WHEN e.mark IS NOT NULL THEN 'starting' WHEN r.state = 'staging' THEN 'staging' ELSE 'reserved' END,
       owner_kind = 'operation', owner_id = split_part(r.loading_by, ':', 1)::uuid,
       owner_fence = split_part(r.loading_by, ':', 2)::bigint, deadline = %(now)s::timestamptz + interval '30 hours',
       started_at = e.started_at, start_answered = COALESCE(e.answered, false), address = COALESCE(e.address, '')
  FROM node_models s
  LEFT JOIN engine_starts e
    ON e.node_id = s.node_id AND e.model_name = s.model_name AND e.replica_index = s.replica_index
 WHERE s.id = r.id AND r.state IN ('staging', 'loading');

UPDATE node_models r
   SET phase = 'stopping', reason = 'load_failed', owner_kind = 'controllers', deadline = %(now)s::timestamptz + interval '2 minutes',
       started_at = e.started_at, start_answered = e.answered, address = e.address,
       stop_attempts = e.stop_attempts, next_stop_at = e.stop_due_at
  FROM engine_starts e
 WHERE r.state = 'unloading' AND r.address = '' AND e.mark = r.loading_by AND e.node_id = r.node_id
   AND e.model_name = r.model_name AND e.replica_index = r.replica_index;

UPDATE node_models SET phase = 'serving', started_at = COALESCE(loaded_at, created_at), start_answered = true
 WHERE state IN ('loaded', 'idle');

UPDATE node_models r
   SET phase = CASE WHEN r.cleanup_attempts > c.stops_at THEN 'stopping'
                    WHEN c.reason IN ('evicted', 'replaced', 'wrong_model') THEN 'terminating' ELSE 'draining' END,
       reason = c.reason, owner_kind = c.owner_kind, owner_id = c.owner_id,
       deadline = CASE WHEN r.cleanup_attempts > c.stops_at THEN %(now)s::timestamptz + interval '2 minutes'
                       ELSE COALESCE(r.cleanup_next_retry_at, c.drain_until, %(now)s::timestamptz) END,
       next_stop_at = CASE WHEN r.cleanup_attempts > c.stops_at THEN r.cleanup_next_retry_at END,
       stop_attempts = CASE WHEN r.cleanup_attempts > c.stops_at THEN r.cleanup_attempts ELSE 0 END,
       stop_error = CASE WHEN r.cleanup_attempts > c.stops_at THEN r.cleanup_error ELSE '' END,
       started_at = COALESCE(r.loaded_at, r.created_at), start_answered = true
  FROM (
      SELECT s.id, i.drain_until,
             CASE WHEN s.loading_by IN ('eviction', 'replaced', 'another model', 'lost') THEN 1 ELSE 0 END AS stops_at,
             CASE WHEN s.loading_by ~ '^[0-9a-f-]{36}' THEN 'unload'
                  WHEN s.loading_by = 'eviction' THEN 'evicted'
                  WHEN s.loading_by = 'replaced' THEN 'replaced'
                  WHEN s.loading_by = 'another model' THEN 'wrong_model'
                  WHEN s.loading_by = '' AND s.withdrawn_for IS NOT NULL AND s.cleanup_attempts = 0 THEN 'upgrade'
                  ELSE 'lost' END AS reason,
             CASE WHEN s.loading_by ~ '^[0-9a-f-]{36}' THEN 'operation'
                  WHEN s.loading_by = '' AND s.withdrawn_for IS NOT NULL AND s.cleanup_attempts = 0 THEN 'intent'
                  ELSE 'controllers' END AS owner_kind,
             CASE WHEN s.loading_by ~ '^[0-9a-f-]{36}' THEN substr(s.loading_by, 1, 36)::uuid
                  WHEN s.loading_by = '' AND s.cleanup_attempts = 0 THEN s.withdrawn_for END AS owner_id
        FROM node_models s LEFT JOIN pending_backend_ops i ON i.id = s.withdrawn_for
  ) c
 WHERE c.id = r.id AND r.state = 'unloading' AND r.reason = '';

INSERT INTO node_models (
    id, node_id, model_name, replica_index, address, state, in_flight, last_used, loading_by, backend_type,
    model_options, config_revision, effective_options_hash, cleanup_error, cleanup_attempts, created_at, updated_at,
    phase, reason, owner_kind, deadline, started_at, start_answered, stop_attempts, next_stop_at
)
SELECT gen_random_uuid(), e.node_id, e.model_name, e.replica_index, e.address, 'unloading', 0, e.started_at, '', '',
       '{}', '', '', '', 0, e.started_at, %(now)s::timestamptz,
       'departed', 'node_left', 'controllers', %(now)s::timestamptz + interval '7 days', e.started_at, e.answered, e.stop_attempts,
       e.stop_due_at
  FROM engine_starts e JOIN backend_nodes n ON n.id = e.node_id
    ON CONFLICT (node_id, model_name, replica_index) DO NOTHING;

SET CONSTRAINTS ALL DEFERRED;
"""
"""A load that has not sent its start yet gives way to the engine of an earlier one at its slot. What left
`unloading` without a readable owner is tried as a lost replica: it serves again if its engine answers."""


def convert(apps: Any, editor: Any) -> None:
    """Turn what is under way into rows of the new table."""
    with editor.connection.cursor() as cursor:
        cursor.execute(CONVERT, {"now": clock.now()})


class Migration(migrations.Migration):
    dependencies = [
        ("nodes", "0033_intents_by_op"),
    ]

    operations = [
        migrations.RemoveConstraint(
            model_name="nodemodel",
            name="replica_state_known",
        ),
        migrations.RemoveConstraint(
            model_name="nodemodel",
            name="replica_loaded_has_address",
        ),
        migrations.RemoveIndex(
            model_name="nodemodel",
            name="replica_withdrawn",
        ),
        migrations.AddField(
            model_name="nodemodel",
            name="claimed_until",
            field=models.DateTimeField(blank=True, null=True),
        ),
        migrations.AddField(
            model_name="nodemodel",
            name="deadline",
            field=models.DateTimeField(blank=True, null=True),
        ),
        migrations.AddField(
            model_name="nodemodel",
            name="next_stop_at",
            field=models.DateTimeField(blank=True, null=True),
        ),
        migrations.AddField(
            model_name="nodemodel",
            name="owner_fence",
            field=models.BigIntegerField(blank=True, null=True),
        ),
        migrations.AddField(
            model_name="nodemodel",
            name="owner_id",
            field=models.UUIDField(blank=True, null=True),
        ),
        migrations.AddField(
            model_name="nodemodel",
            name="owner_kind",
            field=models.CharField(
                blank=True,
                choices=[("operation", "Operation"), ("intent", "Intent"), ("controllers", "Controllers")],
                db_default="",
                default="",
                max_length=16,
            ),
        ),
        migrations.AddField(
            model_name="nodemodel",
            name="phase",
            field=models.CharField(
                choices=[
                    ("reserved", "Reserved"),
                    ("staging", "Staging"),
                    ("starting", "Starting"),
                    ("serving", "Serving"),
                    ("draining", "Draining"),
                    ("terminating", "Terminating"),
                    ("stopping", "Stopping"),
                    ("departed", "Departed"),
                ],
                default="reserved",
                max_length=16,
            ),
        ),
        migrations.AddField(
            model_name="nodemodel",
            name="reason",
            field=models.CharField(
                blank=True,
                choices=[
                    ("unload", "Unload"),
                    ("upgrade", "Upgrade"),
                    ("evicted", "Evicted"),
                    ("replaced", "Replaced"),
                    ("lost", "Lost"),
                    ("wrong_model", "Wrong Model"),
                    ("load_failed", "Load Failed"),
                    ("node_left", "Node Left"),
                ],
                db_default="",
                default="",
                max_length=16,
            ),
        ),
        migrations.AddField(
            model_name="nodemodel",
            name="start_answered",
            field=models.BooleanField(db_default=False, default=False),
        ),
        migrations.AddField(
            model_name="nodemodel",
            name="started_at",
            field=models.DateTimeField(blank=True, null=True),
        ),
        migrations.AddField(
            model_name="nodemodel",
            name="stop_attempts",
            field=models.IntegerField(db_default=0, default=0),
        ),
        migrations.AddField(
            model_name="nodemodel",
            name="stop_error",
            field=models.CharField(blank=True, db_default="", default="", max_length=240),
        ),
        migrations.AlterField(
            model_name="nodemodel",
            name="node",
            field=models.ForeignKey(
                on_delete=django.db.models.deletion.PROTECT, related_name="replicas", to="nodes.backendnode"
            ),
        ),
        migrations.RunPython(convert, migrations.RunPython.noop),
        migrations.RemoveIndex(
            model_name="nodemodel",
            name="replica_model",
        ),
        migrations.RemoveField(
            model_name="nodemodel",
            name="cleanup_attempts",
        ),
        migrations.RemoveField(
            model_name="nodemodel",
            name="cleanup_error",
        ),
        migrations.RemoveField(
            model_name="nodemodel",
            name="cleanup_next_retry_at",
        ),
        migrations.RemoveField(
            model_name="nodemodel",
            name="loading_by",
        ),
        migrations.RemoveField(
            model_name="nodemodel",
            name="withdrawn_for",
        ),
        migrations.RemoveField(
            model_name="nodemodel",
            name="state",
        ),
        migrations.AddField(
            model_name="nodemodel",
            name="state",
            field=models.GeneratedField(
                db_persist=True,
                expression=models.Case(
                    models.When(phase="reserved", then=models.Value("loading")),
                    models.When(phase="staging", then=models.Value("staging")),
                    models.When(phase="starting", then=models.Value("loading")),
                    models.When(phase="serving", then=models.Value("loaded")),
                    models.When(phase="draining", then=models.Value("unloading")),
                    models.When(phase="terminating", then=models.Value("unloading")),
                    models.When(phase="stopping", then=models.Value("unloading")),
                    output_field=models.CharField(max_length=16),
                ),
                output_field=models.CharField(max_length=16, null=True),
            ),
        ),
        migrations.DeleteModel(
            name="EngineStart",
        ),
        migrations.AddIndex(
            model_name="nodemodel",
            index=models.Index(
                condition=models.Q(("state", "loaded")), fields=["model_name"], name="replica_model"
            ),
        ),
        migrations.AddIndex(
            model_name="nodemodel",
            index=models.Index(
                condition=models.Q(("phase", "serving"), _negated=True),
                fields=["phase"],
                name="replica_not_serving",
            ),
        ),
        migrations.AddConstraint(
            model_name="nodemodel",
            constraint=models.CheckConstraint(
                condition=models.Q(
                    (
                        "phase__in",
                        [
                            "reserved",
                            "staging",
                            "starting",
                            "serving",
                            "draining",
                            "terminating",
                            "stopping",
                            "departed",
                        ],
                    )
                ),
                name="replica_phase_known",
            ),
        ),
        migrations.AddConstraint(
            model_name="nodemodel",
            constraint=models.CheckConstraint(
                condition=models.Q(
                    models.Q(("phase", "serving"), ("owner_id__isnull", True), ("owner_kind", "")),
                    models.Q(
                        ("phase", "draining"),
                        models.Q(
                            models.Q(("owner_id__isnull", False), ("owner_kind", "operation")),
                            models.Q(("owner_id__isnull", False), ("owner_kind", "intent")),
                            models.Q(("owner_id__isnull", True), ("owner_kind", "controllers")),
                            _connector="OR",
                        ),
                    ),
                    models.Q(
                        ("phase", "terminating"),
                        models.Q(
                            models.Q(("owner_id__isnull", False), ("owner_kind", "operation")),
                            models.Q(("owner_id__isnull", True), ("owner_kind", "controllers")),
                            _connector="OR",
                        ),
                    ),
                    models.Q(
                        ("phase", "stopping"),
                        models.Q(
                            models.Q(("owner_id__isnull", False), ("owner_kind", "operation")),
                            models.Q(("owner_id__isnull", True), ("owner_kind", "controllers")),
                            _connector="OR",
                        ),
                    ),
                    models.Q(
                        ("phase", "departed"), ("owner_id__isnull", True), ("owner_kind", "controllers")
                    ),
                    models.Q(
                        ("phase__in", ("reserved", "staging", "starting")),
                        ("owner_id__isnull", False),
                        ("owner_kind", "operation"),
                    ),
                    _connector="OR",
                ),
                name="replica_life_owner",
            ),
        ),
        migrations.AddConstraint(
            model_name="nodemodel",
            constraint=models.CheckConstraint(
                condition=models.Q(
                    models.Q(
                        ("phase__in", ("reserved", "staging", "starting")), ("owner_fence__isnull", False)
                    ),
                    models.Q(
                        models.Q(("phase__in", ("reserved", "staging", "starting")), _negated=True),
                        ("owner_fence__isnull", True),
                    ),
                    _connector="OR",
                ),
                name="replica_life_fence",
            ),
        ),
        migrations.AddConstraint(
            model_name="nodemodel",
            constraint=models.CheckConstraint(
                condition=models.Q(
                    models.Q(("phase", "serving"), ("deadline__isnull", True)),
                    models.Q(models.Q(("phase", "serving"), _negated=True), ("deadline__isnull", False)),
                    _connector="OR",
                ),
                name="replica_life_deadline",
            ),
        ),
        migrations.AddConstraint(
            model_name="nodemodel",
            constraint=models.CheckConstraint(
                condition=models.Q(
                    models.Q(
                        models.Q(
                            ("phase__in", ("reserved", "staging", "starting")),
                            ("phase", "serving"),
                            _connector="OR",
                        ),
                        ("reason", ""),
                    ),
                    models.Q(
                        models.Q(
                            ("phase__in", ("reserved", "staging", "starting")),
                            ("phase", "serving"),
                            _connector="OR",
                            _negated=True,
                        ),
                        (
                            "reason__in",
                            [
                                "unload",
                                "upgrade",
                                "evicted",
                                "replaced",
                                "lost",
                                "wrong_model",
                                "load_failed",
                                "node_left",
                            ],
                        ),
                    ),
                    _connector="OR",
                ),
                name="replica_life_reason",
            ),
        ),
        migrations.AddConstraint(
            model_name="nodemodel",
            constraint=models.CheckConstraint(
                condition=models.Q(
                    ("phase__in", ("stopping", "departed")),
                    models.Q(("next_stop_at__isnull", True), ("stop_attempts", 0), ("stop_error", "")),
                    _connector="OR",
                ),
                name="replica_life_stops",
            ),
        ),
        migrations.AddConstraint(
            model_name="nodemodel",
            constraint=models.CheckConstraint(
                condition=models.Q(
                    ("claimed_until__isnull", True),
                    models.Q(
                        ("phase__in", ("reserved", "staging", "starting")),
                        ("phase", "serving"),
                        _connector="OR",
                        _negated=True,
                    ),
                    _connector="OR",
                ),
                name="replica_life_claim",
            ),
        ),
        migrations.AddConstraint(
            model_name="nodemodel",
            constraint=models.CheckConstraint(
                condition=models.Q(
                    models.Q(("phase__in", ("reserved", "staging")), _negated=True),
                    models.Q(("address", ""), ("started_at__isnull", True)),
                    _connector="OR",
                ),
                name="replica_life_engine",
            ),
        ),
        migrations.AddConstraint(
            model_name="nodemodel",
            constraint=models.CheckConstraint(
                condition=models.Q(
                    models.Q(("phase", "starting"), _negated=True),
                    ("started_at__isnull", False),
                    _connector="OR",
                ),
                name="replica_life_start",
            ),
        ),
        migrations.AddConstraint(
            model_name="nodemodel",
            constraint=models.CheckConstraint(
                condition=models.Q(
                    models.Q(("phase__in", ("serving", "draining", "terminating")), _negated=True),
                    models.Q(("address", ""), _negated=True),
                    _connector="OR",
                ),
                name="replica_life_address",
            ),
        ),
        migrations.AddConstraint(
            model_name="nodemodel",
            constraint=models.CheckConstraint(
                condition=models.Q(
                    models.Q(("phase", "departed"), _negated=True), ("in_flight", 0), _connector="OR"
                ),
                name="replica_life_requests",
            ),
        ),
    ]
