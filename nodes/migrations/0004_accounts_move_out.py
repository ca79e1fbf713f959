"""Keys and initial passwords belong to the app `accounts`; the tables stay as they are."""

import django.db.models.deletion
from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("nodes", "0003_what_pages_need"),
        ("accounts", "0001_moved_from_nodes"),
    ]

    operations = [
        migrations.SeparateDatabaseAndState(
            state_operations=[
                migrations.AlterField(
                    model_name="backendnode",
                    name="api_key",
                    field=models.ForeignKey(
                        blank=True,
                        null=True,
                        on_delete=django.db.models.deletion.SET_NULL,
                        related_name="+",
                        to="accounts.apikey",
                    ),
                ),
                migrations.DeleteModel(name="ApiKey"),
                migrations.DeleteModel(name="InitialPassword"),
            ]
        ),
    ]
