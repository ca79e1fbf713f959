"""A conflict about the address of a node known by the shared token."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("nodes", "0030_brought_models"),
    ]

    operations = [
        migrations.AlterField(
            model_name="nodeconflict",
            name="kind",
            field=models.CharField(
                choices=[
                    ("secret", "another secret"),
                    ("weak", "a secret for a node known by the shared token"),
                    ("token", "the shared token for a node with a secret"),
                    ("instance", "two processes with one secret"),
                    ("name", "the node's secret under another name"),
                    ("address", "another address for a node known by the shared token"),
                ],
                max_length=16,
            ),
        ),
    ]
