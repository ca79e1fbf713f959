"""The silence after which a heartbeat is late follows the interval of the worker."""

import datetime

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("nodes", "0045_disk_quota"),
    ]

    operations = [
        migrations.AddField(
            model_name="backendnode",
            name="heartbeat_late_after",
            field=models.DurationField(
                db_default=datetime.timedelta(seconds=12),
                default=datetime.timedelta(seconds=12),
                editable=False,
            ),
        ),
    ]
