"""What loads reserve of the memory of nodes, and when a node's memory was read."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("nodes", "0016_scheduling_rules"),
    ]

    operations = [
        migrations.AddField(
            model_name="backendnode",
            name="vram_read_at",
            field=models.DateTimeField(blank=True, editable=False, null=True),
        ),
        migrations.AddField(
            model_name="nodemodel",
            name="loaded_at",
            field=models.DateTimeField(blank=True, null=True),
        ),
        migrations.AddField(
            model_name="nodemodel",
            name="vram_needed",
            field=models.BigIntegerField(db_default=0, default=0),
        ),
        migrations.AddField(
            model_name="nodemodel",
            name="vram_on_node",
            field=models.BooleanField(db_default=False, default=False),
        ),
        migrations.AddField(
            model_name="nodemodel",
            name="vram_seen",
            field=models.BigIntegerField(db_default=0, default=0),
        ),
        migrations.AddField(
            model_name="nodemodel",
            name="vram_seen_at",
            field=models.DateTimeField(blank=True, null=True),
        ),
        migrations.AddConstraint(
            model_name="nodemodel",
            constraint=models.CheckConstraint(
                condition=models.Q(("vram_needed__gte", 0), ("vram_seen__gte", 0)),
                name="replica_vram_not_negative",
            ),
        ),
    ]
