from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("nodes", "0024_life_of_replicas"),
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
