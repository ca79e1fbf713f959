"""When a running attempt was last heard of, and when it is given up (review R5)."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("operations", "0010_cancellable_is_computed"),
    ]

    operations = [
        migrations.AddField(model, column, models.DateTimeField(blank=True, null=True))
        for model in ("operation", "operationtarget")
        for column in ("last_progress_at", "time_limit_at")
    ]
