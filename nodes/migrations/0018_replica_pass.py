"""What the replica pass needs: when a replica's last request ended, and what the pass made of each rule."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("nodes", "0017_reservations"),
    ]

    operations = [
        migrations.AddField(
            model_name="nodemodel",
            name="last_released_at",
            field=models.DateTimeField(blank=True, editable=False, null=True),
        ),
        migrations.AddField(
            model_name="modelschedulingconfig",
            name="wanted_replicas",
            field=models.IntegerField(db_default=0, default=0, editable=False),
        ),
        migrations.AddField(
            model_name="modelschedulingconfig",
            name="current_replicas",
            field=models.IntegerField(db_default=0, default=0, editable=False),
        ),
        migrations.AddField(
            model_name="modelschedulingconfig",
            name="loading_replicas",
            field=models.IntegerField(db_default=0, default=0, editable=False),
        ),
        migrations.AddField(
            model_name="modelschedulingconfig",
            name="reason",
            field=models.TextField(blank=True, db_default="", default="", editable=False),
        ),
        migrations.AddField(
            model_name="modelschedulingconfig",
            name="looked_at",
            field=models.DateTimeField(blank=True, editable=False, null=True),
        ),
    ]
