"""The sources of models that nodes could not reach lately."""

import django.db.models.deletion
from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("nodes", "0043_backend_sizes"),
    ]

    operations = [
        migrations.CreateModel(
            name="UnreachedSource",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                ("host", models.CharField(help_text="with its port", max_length=255)),
                ("seen_at", models.DateTimeField()),
                (
                    "node",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="unreached_sources",
                        to="nodes.backendnode",
                    ),
                ),
            ],
            options={
                "verbose_name": "unreached source",
                "verbose_name_plural": "unreached sources",
                "db_table": "unreached_sources",
                "constraints": [
                    models.UniqueConstraint(fields=("node", "host"), name="unreached_once_a_node")
                ],
            },
        ),
    ]
