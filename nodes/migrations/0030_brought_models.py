"""How much of a model's files each node has."""

import django.db.models.deletion
from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("nodes", "0029_prefix_pressure"),
    ]

    operations = [
        migrations.CreateModel(
            name="BroughtModel",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                ("model_name", models.CharField(max_length=255)),
                ("size", models.PositiveBigIntegerField(help_text="bytes")),
                ("seen_at", models.DateTimeField()),
                (
                    "node",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="brought_models",
                        to="nodes.backendnode",
                    ),
                ),
            ],
            options={
                "verbose_name": "model on a node's disk",
                "verbose_name_plural": "models on nodes' disks",
                "db_table": "brought_models",
                "constraints": [
                    models.UniqueConstraint(fields=("model_name", "node"), name="brought_once_a_node")
                ],
            },
        ),
    ]
