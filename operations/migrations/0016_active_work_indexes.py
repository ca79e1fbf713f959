from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("operations", "0015_dismissed_targets"),
    ]

    operations = [
        migrations.RemoveIndex(
            model_name="operationtarget",
            name="target_of_intent",
        ),
        migrations.AddIndex(
            model_name="operation",
            index=models.Index(
                condition=models.Q(("status__in", ["pending", "processing", "waiting_for_nodes"])),
                fields=["kind", "element"],
                name="operation_active",
            ),
        ),
        migrations.AddIndex(
            model_name="operationtarget",
            index=models.Index(
                condition=models.Q(
                    ("intent_id__isnull", False),
                    ("status__in", ["queued", "downloading", "running_on_worker", "cancelled"]),
                ),
                fields=["intent_id"],
                name="target_of_intent",
            ),
        ),
    ]
