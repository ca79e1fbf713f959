from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("nodes", "0042_definitions"),
    ]

    operations = [
        migrations.AddField(
            model_name="nodebackend",
            name="size",
            field=models.BigIntegerField(
                db_default=0, default=0, help_text="bytes of its files; 0 = unknown"
            ),
        ),
    ]
