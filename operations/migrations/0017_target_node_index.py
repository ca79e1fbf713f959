from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("operations", "0016_active_work_indexes"),
    ]

    operations = [
        migrations.AddIndex(
            model_name="operationtarget",
            index=models.Index(fields=["node_id", "operation"], name="target_of_node"),
        ),
    ]
