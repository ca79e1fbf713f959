"""Whether a node's HTTP server, which takes the files of models, can be reached."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("nodes", "0031_address_conflict"),
    ]

    operations = [
        migrations.AddField(
            model_name="backendnode",
            name="file_port_error",
            field=models.CharField(blank=True, db_default="", default="", editable=False, max_length=255),
        ),
        migrations.AddField(
            model_name="backendnode",
            name="file_port_failed_at",
            field=models.DateTimeField(blank=True, editable=False, null=True),
        ),
        migrations.AddField(
            model_name="backendnode",
            name="file_port_failures",
            field=models.IntegerField(db_default=0, default=0, editable=False),
        ),
        migrations.AddField(
            model_name="backendnode",
            name="file_port_next_check_at",
            field=models.DateTimeField(blank=True, editable=False, null=True),
        ),
    ]
