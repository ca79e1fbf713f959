from django.db import migrations, models
from django.db.models import Q


class Migration(migrations.Migration):
    dependencies = [
        ("operations", "0013_next_check_at"),
    ]

    operations = [
        migrations.AddIndex(
            model_name="operation",
            index=models.Index(
                condition=Q(("dismissed_at__isnull", True), ("status", "failed")),
                fields=["kind"],
                name="operation_failure",
            ),
        ),
    ]
