"""`cancellable` is computed from kind and status: the column said no for every load (review R3)."""

from django.db import migrations


class Migration(migrations.Migration):
    dependencies = [
        ("operations", "0009_files_sent"),
    ]

    operations = [migrations.RemoveField(model_name="operation", name="cancellable")]
