from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("nodes", "0021_placement_records"),
    ]

    operations = [
        migrations.AddField(
            model_name="nodebackend",
            name="alias",
            field=models.CharField(
                blank=True, default="", help_text="another name that starts it", max_length=255
            ),
        ),
    ]
