"""Columns get the field's usual names: when the next attempt is due, and until when somebody needs the outcome."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("operations", "0002_dismissals_and_controllers")]

    operations = [
        migrations.RemoveIndex("operation", "operation_due"),
        migrations.RenameField("operation", "next_look_at", "next_attempt_at"),
        migrations.RenameField("operation", "wanted_until", "needed_until"),
        migrations.AddIndex(
            "operation",
            models.Index(
                fields=["next_attempt_at"],
                name="operation_due",
                condition=models.Q(("status__in", ["pending", "waiting_for_nodes"])),
            ),
        ),
    ]
