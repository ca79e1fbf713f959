"""The last failed load that a rule has counted, by its number: times of two hosts cannot be compared."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("nodes", "0047_reserved_cleared_at"),
    ]

    operations = [
        migrations.AddField(
            model_name="modelschedulingconfig",
            name="failure_seq",
            field=models.BigIntegerField(blank=True, editable=False, null=True),
        ),
    ]
