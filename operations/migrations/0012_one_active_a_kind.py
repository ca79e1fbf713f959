"""Operations of different kinds on one backend of one node may be active side by side."""

from django.db import migrations, models
from django.db.models import Q

_ACTIVE = ("status__in", ["pending", "processing", "waiting_for_nodes"])


class Migration(migrations.Migration):
    dependencies = [
        ("operations", "0011_last_progress_and_time_limit"),
    ]

    operations = [
        migrations.RemoveConstraint(model_name="operation", name="operation_one_active_a_key"),
        migrations.AddConstraint(
            model_name="operation",
            constraint=models.UniqueConstraint(
                name="operation_one_active_a_key",
                fields=("key",),
                condition=Q(("by_parts", False), _ACTIVE),
            ),
        ),
        migrations.AddConstraint(
            model_name="operation",
            constraint=models.UniqueConstraint(
                name="operation_one_active_a_key_and_kind",
                fields=("key", "kind"),
                condition=Q(("by_parts", True), _ACTIVE),
            ),
        ),
    ]
