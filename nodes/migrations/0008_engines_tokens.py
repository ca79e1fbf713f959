from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("nodes", "0007_bus_credentials"),
    ]

    operations = [
        migrations.AddField(
            model_name="backendnode",
            name="engine_token",
            field=models.CharField(blank=True, db_default="", default="", editable=False, max_length=64),
        ),
        migrations.AlterField(
            model_name="nodeevent",
            name="kind",
            field=models.CharField(
                choices=[
                    ("registered", "Registered"),
                    ("approved", "Approved"),
                    ("rejected", "Rejected"),
                    ("drained", "Drained"),
                    ("drain_ended", "Drain Ended"),
                    ("resumed", "Resumed"),
                    ("deactivated", "shut down"),
                    ("fell_silent", "lost contact"),
                    ("heard_again", "back online"),
                    ("marked_unhealthy", "Marked Unhealthy"),
                    ("marked_healthy", "Marked Healthy"),
                    ("deregistered", "Deregistered"),
                    ("override", "Override"),
                    ("labels", "Labels"),
                    ("conflict", "Conflict"),
                    ("conflict_accepted", "Conflict Accepted"),
                    ("conflict_refused", "Conflict Refused"),
                    ("rotation_requested", "Rotation Requested"),
                    ("rotated", "Rotated"),
                    ("revoked", "Revoked"),
                    ("address_refused", "Address Refused"),
                ],
                max_length=24,
            ),
        ),
    ]
