from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("operations", "0001_initial")]

    operations = [
        migrations.AddField(
            model_name="operation",
            name="dismissed_by",
            field=models.CharField(blank=True, default="", max_length=150),
        ),
        migrations.CreateModel(
            name="ControllerBeat",
            fields=[
                ("owner", models.CharField(max_length=64, primary_key=True, serialize=False)),
                ("seen_at", models.DateTimeField()),
                ("bus_connected", models.BooleanField(default=False)),
            ],
            options={
                "verbose_name": "controller",
                "verbose_name_plural": "controllers",
                "db_table": "controller_beats",
            },
        ),
    ]
