"""Keys and initial passwords move here from the app `nodes`: in Django's books only, the tables stay as they are."""

from typing import Any

import django.db.models.deletion
from django.conf import settings
from django.db import migrations, models

import localai_cluster.kit.clock

MOVED = ("apikey", "initialpassword")


def move_content_types(
    apps: Any, schema_editor: Any, source: str = "nodes", target: str = "accounts"
) -> None:
    """Permissions and the admin's history follow their models: both name the content type."""
    content_types = apps.get_model("contenttypes", "ContentType").objects.using(
        schema_editor.connection.alias
    )
    content_types.filter(app_label=source, model__in=MOVED).update(app_label=target)


def move_back(apps: Any, schema_editor: Any) -> None:
    """The other way round."""
    move_content_types(apps, schema_editor, "accounts", "nodes")


class Migration(migrations.Migration):
    initial = True
    dependencies = [
        ("nodes", "0003_what_pages_need"),
        ("contenttypes", "0002_remove_content_type_name"),
        migrations.swappable_dependency(settings.AUTH_USER_MODEL),
    ]

    operations = [
        migrations.RunPython(move_content_types, move_back),
        migrations.SeparateDatabaseAndState(
            state_operations=[
                migrations.CreateModel(
                    name="ApiKey",
                    fields=[
                        (
                            "id",
                            models.BigAutoField(
                                auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                            ),
                        ),
                        ("name", models.CharField(max_length=100)),
                        ("prefix", models.CharField(editable=False, max_length=12)),
                        ("key_hash", models.CharField(editable=False, max_length=64, unique=True)),
                        (
                            "created_at",
                            models.DateTimeField(default=localai_cluster.kit.clock.now, editable=False),
                        ),
                        ("revoked_at", models.DateTimeField(blank=True, null=True)),
                        (
                            "user",
                            models.ForeignKey(
                                on_delete=django.db.models.deletion.CASCADE,
                                related_name="api_keys",
                                to=settings.AUTH_USER_MODEL,
                            ),
                        ),
                    ],
                    options={
                        "verbose_name": "API key",
                        "verbose_name_plural": "API keys",
                        "db_table": "api_keys",
                    },
                ),
                migrations.CreateModel(
                    name="InitialPassword",
                    fields=[
                        (
                            "id",
                            models.BigAutoField(
                                auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                            ),
                        ),
                        (
                            "created_at",
                            models.DateTimeField(default=localai_cluster.kit.clock.now, editable=False),
                        ),
                        (
                            "user",
                            models.OneToOneField(
                                on_delete=django.db.models.deletion.CASCADE,
                                related_name="initial_password",
                                to=settings.AUTH_USER_MODEL,
                            ),
                        ),
                    ],
                    options={
                        "verbose_name": "initial password",
                        "verbose_name_plural": "initial passwords",
                        "db_table": "initial_passwords",
                    },
                ),
            ]
        ),
    ]
