"""Rows of former releases after the migration: keys and passwords, names that look alike, and engines.

One database goes back to the oldest of these releases and forward again, and gets the rows of each release
on its way, because every migration of the schema costs seconds.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
from django.contrib.auth.models import Permission, User
from django.contrib.contenttypes.models import ContentType
from django.db import connection
from django.db.migrations.executor import MigrationExecutor
from psycopg.conninfo import conninfo_to_dict
from pytest_django.plugin import DjangoDbBlocker

from localai_cluster.accounts import principals
from localai_cluster.accounts.models import ApiKey, InitialPassword
from localai_cluster.kit import clock, names
from nodes.models import BackendNode, NodeModel
from nodes.replicas import slots, stops
from operations.changes.events import conninfo
from operations.models import Operation
from tests.support import api
from tests.support.cluster import ROOT
from tests.support.postgres import empty_tables

BEFORE_ACCOUNTS, BEFORE_NAMES, BEFORE_PHASES = (
    [("nodes", name)] for name in ("0003_what_pages_need", "0009_join_tokens", "0033_intents_by_op")
)
KEY = principals.KEY_PREFIX + "0" * 48
LATIN, CYRILLIC, ALPHA, OTHER = "gpu-a", "gpu-\u0430", "gpu-\u0251", "\u0441\u0435\u0440\u0432\u0435\u0440"
OPERATION, ENDED, INTENT = UUID(int=1), UUID(int=2), UUID(int=3)
RUNS = f"{OPERATION}:4"
ANY: Any = object()

Row = dict[str, Any]

ROWS: dict[str, Row] = {
    "reserved": {"state": "loading", "loading_by": RUNS},
    "staging": {"state": "staging", "loading_by": RUNS},
    "unreadable": {"state": "loading", "loading_by": "x"},
    "starting": {"state": "loading", "loading_by": RUNS},
    "overtaken": {"state": "loading", "loading_by": RUNS},
    "failed": {"state": "unloading", "loading_by": f"{ENDED}:1"},
    "failed and gone": {"state": "unloading", "loading_by": f"{ENDED}:1"},
    "serving": {"state": "loaded", "address": "a:1", "in_flight": 2},
    "unload": {"state": "unloading", "address": "a:1", "loading_by": str(OPERATION), "in_flight": 1},
    "stopped by an unload": {
        **{"state": "unloading", "address": "a:1", "loading_by": str(ENDED)},
        **{"cleanup_attempts": 3, "cleanup_error": "stuck"},
    },
    "upgrade": {"state": "unloading", "address": "a:1", "withdrawn_for": INTENT},
    "upgrade and unload": {
        **{"state": "unloading", "address": "a:1"},
        **{"withdrawn_for": INTENT, "loading_by": str(OPERATION)},
    },
    "evicted": {"state": "unloading", "address": "a:1", "loading_by": "eviction", "cleanup_attempts": 1},
    "replaced": {"state": "unloading", "address": "a:1", "loading_by": "replaced", "cleanup_attempts": 4},
    "lost": {"state": "unloading", "address": "a:1", "loading_by": "lost", "cleanup_attempts": 1},
    "strange": {"state": "unloading", "address": "a:1", "loading_by": "another model", "cleanup_attempts": 1},
    "nobody's": {"state": "unloading", "address": "a:1"},
}
NOTES: dict[str, Row] = {
    "starting": {"mark": RUNS, "address": "a:2", "answered": True},
    "overtaken": {"mark": f"{ENDED}:1", "address": "a:3", "answered": True},
    "failed": {"mark": f"{ENDED}:1", "stop_attempts": 2},
    "drained away": {"mark": f"{ENDED}:1", "address": "a:4", "answered": True},
}
PHASES: dict[str, tuple[Any, ...]] = {
    "reserved": ("reserved", "", "operation", OPERATION, 4, ""),
    "staging": ("staging", "", "operation", OPERATION, 4, ""),
    "starting": ("starting", "", "operation", OPERATION, 4, "a:2"),
    "overtaken": ("departed", "node_left", "controllers", None, None, "a:3"),
    "failed": ("stopping", "load_failed", "controllers", None, None, ""),
    "serving": ("serving", "", "", None, None, "a:1"),
    "unload": ("draining", "unload", "operation", OPERATION, None, "a:1"),
    "stopped by an unload": ("stopping", "unload", "operation", ENDED, None, "a:1"),
    "upgrade": ("draining", "upgrade", "intent", INTENT, None, "a:1"),
    "upgrade and unload": ("draining", "unload", "operation", OPERATION, None, "a:1"),
    "evicted": ("terminating", "evicted", "controllers", None, None, "a:1"),
    "replaced": ("stopping", "replaced", "controllers", None, None, "a:1"),
    "lost": ("draining", "lost", "controllers", None, None, "a:1"),
    "strange": ("terminating", "wrong_model", "controllers", None, None, "a:1"),
    "nobody's": ("draining", "lost", "controllers", None, None, "a:1"),
    "drained away": ("departed", "node_left", "controllers", None, None, "a:4"),
}


@pytest.fixture(scope="module")
def moved(django_db_setup: None, django_db_blocker: DjangoDbBlocker) -> Iterator[None]:
    """The rows of the former releases, migrated; each test of them leaves them as they are."""
    with django_db_blocker.unblock():
        Operation.objects.create(
            id=OPERATION,
            kind="k",
            key="k",
            element="m",
            status="processing",
            fence=4,
            lease_until=clock.now(),
        )
        try:
            MigrationExecutor(connection).migrate([("accounts", None), *BEFORE_ACCOUNTS])
            _plant_accounts(_apps_at(BEFORE_ACCOUNTS))
            MigrationExecutor(connection).migrate(BEFORE_NAMES)
            _plant_names(_apps_at(BEFORE_NAMES))
            MigrationExecutor(connection).migrate(BEFORE_PHASES)
            _plant_engines(_apps_at(BEFORE_PHASES))
        finally:
            newest = MigrationExecutor(connection)
            newest.migrate(newest.loader.graph.leaf_nodes())
        ContentType.objects.clear_cache()
    yield
    with django_db_blocker.unblock():
        empty_tables()


def _apps_at(state: list[tuple[str, str]]) -> Any:
    return MigrationExecutor(connection).loader.project_state(state).apps


def _plant_accounts(old: Any) -> None:
    user = User.objects.create(username="ann")
    old.get_model("nodes", "ApiKey").objects.create(
        user_id=user.pk, name="laptop", prefix=KEY[:12], key_hash=principals.hash_secret(KEY)
    )
    old.get_model("nodes", "InitialPassword").objects.create(user_id=user.pk)
    ContentType.objects.filter(app_label="accounts").delete()
    kind, _ = ContentType.objects.get_or_create(app_label="nodes", model="apikey")
    may, _ = Permission.objects.get_or_create(
        content_type=kind, codename="view_apikey", defaults={"name": "Can view API key"}
    )
    user.user_permissions.add(may)


def _old_key(name: str) -> str:
    return name.casefold()


def _plant_names(old: Any) -> None:
    for name in (CYRILLIC, ALPHA, LATIN, OTHER):
        old.get_model("nodes", "BackendNode").objects.create(
            name=name, name_key=_old_key(name), address="10.0.0.1:1", fingerprint=name.encode().hex()
        )


def _plant_engines(old: Any) -> None:
    now = clock.now()
    names = ("BackendNode", "NodeModel", "EngineStart")
    nodes, replicas, notes = (old.get_model("nodes", name).objects for name in names)
    node = nodes.create(name="one", name_key="one", address="a:1", approved_at=now, last_heartbeat=now)
    old.get_model("nodes", "PendingBackendOp").objects.create(
        id=INTENT, node=node, backend="echo", op="upgrade", operation_id=uuid4()
    )
    for model, row in ROWS.items():
        replicas.create(node=node, model_name=model, **row)
    for model, note in NOTES.items():
        notes.create(node_id=node.pk, model_name=model, **note)
    notes.create(node_id=uuid4(), model_name="of a removed node", mark="x")


@pytest.mark.django_db
@pytest.mark.usefixtures("moved")
def test_keys_passwords_and_permissions_survive_the_move() -> None:
    """They move from the app `nodes` to `accounts`."""
    caller = principals.owner_of(principals.classify_credential(KEY))
    assert caller.name == "ann"
    assert ApiKey.objects.get().name == "laptop"
    user = User.objects.get(username="ann")
    assert InitialPassword.objects.get().user == user
    assert user.has_perm("accounts.view_apikey")


@pytest.mark.django_db
@pytest.mark.usefixtures("moved")
@pytest.mark.rule("R1.22", "R1.29")
def test_rows_that_look_alike_survive_the_new_keys() -> None:
    """The name in ASCII keeps its key, whichever came first; each worker is still known by its own name."""
    keys = {node.name: node.name_key for node in BackendNode.objects.all()}
    ids = {node.name: node.id for node in BackendNode.objects.all()}
    assert keys[LATIN] == "gpu-a"
    assert keys[OTHER] == names.key(OTHER) != _old_key(OTHER)
    assert {keys[CYRILLIC], keys[ALPHA]} == {f"gpu-a#{ids[CYRILLIC]}", f"gpu-a#{ids[ALPHA]}"}
    # It is found by its very name, and its new secret is a conflict for an admin, not another node.
    assert api.register(api.registration(CYRILLIC)).status_code == 409
    assert {node.name: node.id for node in BackendNode.objects.all()} == ids
    assert ids.keys() == {LATIN, CYRILLIC, ALPHA, OTHER, "one"}


@pytest.mark.django_db
@pytest.mark.usefixtures("moved")
def test_every_engine_has_a_row_in_the_phase_that_follows() -> None:
    found = {
        row.model_name: (row.phase, row.reason, row.owner_kind, row.owner_id, row.owner_fence, row.address)
        for row in NodeModel.engines.all()
    }
    assert found == PHASES
    states = {
        name: row["state"] for name, row in ROWS.items() if name in found and found[name][0] != "departed"
    }
    assert dict(NodeModel.objects.values_list("model_name", "state")) == states
    assert NodeModel.objects.get(model_name="serving").in_flight == 2
    stopped = NodeModel.objects.get(model_name="stopped by an unload")
    assert (stopped.stop_attempts, stopped.stop_error) == (3, "stuck")


@pytest.mark.django_db
@pytest.mark.usefixtures("moved")
def test_controllers_go_on_with_what_was_under_way() -> None:
    """What a running load owns stays; every other engine that was to go is stopped."""
    now = clock.now() + timedelta(seconds=301)
    assert slots.end_abandoned_loads(now=now) == []
    due = {engine.model_name for engine in stops.claim_due(99, now=now)}
    stays = {"reserved", "staging", "starting", "serving", "unload", "upgrade", "upgrade and unload"}
    assert due == set(PHASES) - stays


@pytest.fixture
def restored() -> Iterator[str]:
    """The URL of a database that `pg_dump --inserts` has written at `BEFORE_PHASES`, with these engines."""
    here = conninfo_to_dict(conninfo())
    with psycopg.connect(conninfo(), autocommit=True) as link:
        link.execute("CREATE DATABASE former_release")
        url = f"postgresql://{here['user']}@/former_release?host={here['host']}"
        with psycopg.connect(url, autocommit=True) as former:
            former.execute((ROOT / "tests" / "data" / "before-phases.sql").read_bytes())
        yield url
        link.execute("DROP DATABASE former_release WITH (FORCE)")


@pytest.mark.django_db(transaction=True)
def test_a_dump_of_the_former_release_is_migrated_without_losing_an_engine(restored: str) -> None:
    """As an operator does it: restore, `manage.py migrate`; nothing is under way that has no owner."""
    environment = {**os.environ, "DATABASE_URL": restored}
    migrate = [sys.executable, "manage.py", "migrate", "--verbosity", "0"]
    subprocess.run(migrate, cwd=ROOT, env=environment, check=True, timeout=300)
    columns = "model_name, phase, reason, owner_kind, owner_id, owner_fence, address"
    with psycopg.connect(restored) as link:
        found = {name: rest for name, *rest in link.execute(f"SELECT {columns} FROM node_models").fetchall()}
        nodes = link.execute(
            "SELECT name, in_flight FROM backend_nodes n JOIN node_models r ON r.node_id = n.id"
        )
        assert sorted(nodes.fetchall())[-1] == ("one", 2)
    assert {name: tuple(rest) for name, rest in found.items()} == PHASES
