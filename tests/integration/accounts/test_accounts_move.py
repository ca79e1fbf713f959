"""Older data folders: keys and initial passwords move from the app `nodes` to `accounts`, rows and all."""

import pytest
from django.contrib.auth.models import Permission, User
from django.contrib.contenttypes.models import ContentType
from django.db import connection
from django.db.migrations.executor import MigrationExecutor

from localai_cluster.accounts import principals
from localai_cluster.accounts.models import ApiKey, InitialPassword

BEFORE = [("nodes", "0003_what_pages_need")]


@pytest.mark.django_db(transaction=True)
def test_keys_passwords_and_permissions_survive_the_move() -> None:
    try:
        MigrationExecutor(connection).migrate([("accounts", None), *BEFORE])
        old = MigrationExecutor(connection).loader.project_state(BEFORE).apps
        user = User.objects.create(username="ann")
        plain = principals.KEY_PREFIX + "0" * 48
        old.get_model("nodes", "ApiKey").objects.create(
            user_id=user.pk, name="laptop", prefix=plain[:12], key_hash=principals.hash_secret(plain)
        )
        old.get_model("nodes", "InitialPassword").objects.create(user_id=user.pk)
        ContentType.objects.filter(app_label="accounts").delete()
        kind, _ = ContentType.objects.get_or_create(app_label="nodes", model="apikey")
        may, _ = Permission.objects.get_or_create(
            content_type=kind, codename="view_apikey", defaults={"name": "Can view API key"}
        )
        user.user_permissions.add(may)
    finally:
        newest = MigrationExecutor(connection)
        newest.migrate(newest.loader.graph.leaf_nodes())
    ContentType.objects.clear_cache()

    caller = principals.owner_of(principals.classify_credential(plain))
    assert caller.name == "ann"
    assert ApiKey.objects.get().name == "laptop"
    assert InitialPassword.objects.get().user == user
    assert User.objects.get(pk=user.pk).has_perm("accounts.view_apikey")
