"""The time of the reading that cleared a node's reserved memory: only older reservations are not subtracted."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("nodes", "0046_heartbeat_late_after"),
    ]

    operations = [
        migrations.AddField(
            model_name="backendnode",
            name="reserved_cleared_at",
            field=models.DateTimeField(blank=True, editable=False, null=True),
        ),
        migrations.RunSQL(
            "UPDATE backend_nodes SET reserved_cleared_at = vram_read_at", migrations.RunSQL.noop
        ),
    ]
