from django.db import migrations


class Migration(migrations.Migration):
    """Columns of the upgrade check and of scheduling rules, in the words of the field."""

    dependencies = [("nodes", "0037_stored_responses")]

    operations = [
        migrations.RenameField("upgradecheck", "asked", "requested"),
        migrations.RenameField("upgradecheck", "answered", "completed"),
        migrations.RenameField("upgradecheck", "followed", "processed"),
        migrations.RenameField("modelschedulingconfig", "looked_at", "checked_at"),
    ]
