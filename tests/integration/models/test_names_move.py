"""Older data folders: names that look alike across scripts stay, and new ones are refused."""

from typing import Any

import pytest
from django.db import connection
from django.db.migrations.executor import MigrationExecutor

from localai_cluster.kit import names
from nodes.models import BackendNode
from tests.support import api

LATIN, CYRILLIC, ALPHA, OTHER = "gpu-a", "gpu-\u0430", "gpu-\u0251", "\u0441\u0435\u0440\u0432\u0435\u0440"
BEFORE = [("nodes", "0009_join_tokens")]


def _old_key(name: str) -> str:
    return name.casefold()


@pytest.mark.django_db(transaction=True)
@pytest.mark.rule("R1.22", "R1.29")
def test_rows_that_look_alike_survive_the_new_keys() -> None:
    """The name in ASCII keeps its key, whichever came first; each worker is still known by its own name."""
    try:
        MigrationExecutor(connection).migrate(BEFORE)
        old: Any = MigrationExecutor(connection).loader.project_state(BEFORE).apps
        for name in (CYRILLIC, ALPHA, LATIN, OTHER):
            old.get_model("nodes", "BackendNode").objects.create(
                name=name, name_key=_old_key(name), address="10.0.0.1:1", fingerprint=name.encode().hex()
            )
    finally:
        newest = MigrationExecutor(connection)
        newest.migrate(newest.loader.graph.leaf_nodes())
    keys = {node.name: node.name_key for node in BackendNode.objects.all()}
    ids = {node.name: node.id for node in BackendNode.objects.all()}
    assert keys[LATIN] == "gpu-a"
    assert keys[OTHER] == names.key(OTHER) != _old_key(OTHER)
    assert {keys[CYRILLIC], keys[ALPHA]} == {f"gpu-a#{ids[CYRILLIC]}", f"gpu-a#{ids[ALPHA]}"}
    # It is found by its very name, and its new secret is a conflict for an admin, not another node.
    assert api.register(api.registration(CYRILLIC)).status_code == 409
    assert BackendNode.objects.count() == 4


@pytest.mark.django_db
@pytest.mark.rule("R1.22", "R1.29", "http-1.1")
@pytest.mark.parametrize("name", [CYRILLIC, ALPHA, "gpu\u2013a", "\u0261pu-a"])
def test_a_name_of_another_script_that_looks_like_a_known_one_is_refused(name: str) -> None:
    """D-NAMES: 409 naming the field, in whichever order they come; names in ASCII are never alike."""
    assert api.register(api.registration(LATIN)).status_code == 201
    refused = api.register(api.registration(name))
    assert (refused.status_code, "too similar" in api.message(refused)) == (409, True)
    for other in ("gpu-o", "gpu-0", "gpu-l", "gpu-1", "gpu-i"):
        assert api.register(api.registration(other)).status_code == 201


@pytest.mark.django_db
def test_the_first_one_may_be_of_another_script() -> None:
    """Then the name in ASCII is the one that is too similar."""
    assert api.register(api.registration(CYRILLIC)).status_code == 201
    assert api.register(api.registration(LATIN)).status_code == 409
