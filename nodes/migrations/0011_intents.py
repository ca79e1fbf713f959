"""Intents get what the unit of work on a node needs: the table is made again with UUIDs; nothing wrote it before."""

import uuid

import django.db.models.deletion
from django.db import migrations, models

import localai_cluster.kit.clock


class Migration(migrations.Migration):
    dependencies = [("nodes", "0010_names_that_look_alike")]

    operations = [
        migrations.DeleteModel("PendingBackendOp"),
        migrations.CreateModel(
            name="PendingBackendOp",
            fields=[
                (
                    "id",
                    models.UUIDField(default=uuid.uuid4, editable=False, primary_key=True, serialize=False),
                ),
                ("backend", models.CharField(max_length=255)),
                (
                    "op",
                    models.CharField(
                        choices=[("install", "Install"), ("upgrade", "Upgrade"), ("delete", "Delete")],
                        max_length=16,
                    ),
                ),
                ("gallery", models.CharField(blank=True, default="", max_length=255)),
                ("galleries", models.TextField(blank=True, default="")),
                ("uri", models.CharField(blank=True, default="", max_length=1024)),
                ("name", models.CharField(blank=True, default="", max_length=255)),
                ("alias", models.CharField(blank=True, default="", max_length=255)),
                ("force", models.BooleanField(default=False)),
                ("operation_id", models.UUIDField()),
                ("attempts", models.IntegerField(default=0)),
                ("lost_leases", models.IntegerField(default=0)),
                ("last_error", models.TextField(blank=True, default="")),
                ("next_retry_at", models.DateTimeField(default=localai_cluster.kit.clock.now)),
                ("unanswered_since", models.DateTimeField(blank=True, null=True)),
                ("cancelled_at", models.DateTimeField(blank=True, null=True)),
                ("lease_owner", models.CharField(blank=True, default="", max_length=64)),
                ("lease_until", models.DateTimeField(blank=True, null=True)),
                ("fence", models.BigIntegerField(default=0)),
                ("created_at", models.DateTimeField(default=localai_cluster.kit.clock.now, editable=False)),
                (
                    "node",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="pending_ops",
                        to="nodes.backendnode",
                    ),
                ),
            ],
            options={
                "verbose_name": "pending backend operation",
                "verbose_name_plural": "pending backend operations",
                "db_table": "pending_backend_ops",
                "indexes": [
                    models.Index(
                        condition=models.Q(("lease_until__isnull", True)),
                        fields=["next_retry_at"],
                        name="intent_due",
                    ),
                    models.Index(
                        condition=models.Q(("lease_until__isnull", False)),
                        fields=["lease_until"],
                        name="intent_leased",
                    ),
                ],
                "constraints": [
                    models.UniqueConstraint(fields=("node", "backend"), name="intent_once"),
                    models.CheckConstraint(
                        condition=models.Q(("backend", ""), _negated=True), name="intent_names_backend"
                    ),
                    models.CheckConstraint(
                        condition=models.Q(("op__in", ["install", "upgrade", "delete"])),
                        name="intent_op_known",
                    ),
                    models.CheckConstraint(
                        condition=models.Q(("attempts__gte", 0)), name="intent_attempts_not_negative"
                    ),
                    models.CheckConstraint(
                        condition=models.Q(
                            models.Q(("lease_owner", ""), ("lease_until__isnull", True)),
                            models.Q(("lease_owner", ""), _negated=True),
                            _connector="OR",
                        ),
                        name="intent_lease_has_owner",
                    ),
                ],
            },
        ),
    ]
