from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("nodes", "0023_placement_log"),
    ]

    operations = [
        migrations.AddField(
            model_name="backendnode",
            name="returned_beside",
            field=models.DateTimeField(blank=True, editable=False, null=True),
        ),
        migrations.AddField(
            model_name="backendnode",
            name="returned_vram",
            field=models.BigIntegerField(db_default=0, default=0, editable=False),
        ),
        migrations.AddField(
            model_name="enginestart",
            name="answered",
            field=models.BooleanField(db_default=False, default=False),
        ),
    ]
