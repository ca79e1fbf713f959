"""The environment of the test run: temporary data, sockets, fixed secrets; set before Django reads it.

Loaded as a plugin (`-p`), so it runs before pytest-django reads the settings. It starts no server: PostgreSQL
and Valkey start with the first test that needs them (`tests/conftest.py`).
"""

import atexit
import os
import shutil
import tempfile
from pathlib import Path

GIVEN = dict(os.environ)
"""The environment of whoever started the program, for a program that is no part of the test run."""
HOME = Path(tempfile.mkdtemp(prefix="lac-test-"))
RUN = Path(os.environ.setdefault("CLUSTER_TESTS_OF_RUN", str(HOME)))
"""Folder of the whole run, which belongs to the first process of the run."""
REGISTRATION_TOKEN = "test-registration-token"
API_KEY = "test-static-admin-key"
VALKEY_PASSWORD = "test-valkey-password"


def _prepare() -> None:
    from localai_cluster.embedded.bundled_servers import EmbeddedPostgres, EmbeddedValkey
    from localai_cluster.kit import nkeys

    models = HOME / "models"
    models.mkdir()
    os.environ.update(
        DATABASE_URL=EmbeddedPostgres(HOME / "pg").url,
        REDIS_URL=EmbeddedValkey(HOME / "vk", password=VALKEY_PASSWORD).url,
        LOCALAI_NATS_URL="nats://127.0.0.1:1",
        LOCALAI_NATS_ACCOUNT_SEED=nkeys.generate("account").seed,
        CLUSTER_NATS_OPERATOR_SEED=nkeys.generate("operator").seed,
        CLUSTER_NATS_SYSTEM_SEED=nkeys.generate("account").seed,
        LOCALAI_REGISTRATION_TOKEN=REGISTRATION_TOKEN,
        LOCALAI_API_KEY=API_KEY,
        LOCALAI_MODELS_PATH=str(models),
        SECRET_KEY="test-secret-key-of-no-value-whatsoever",
        CLUSTER_DATA_DIR=str(HOME),
        DJANGO_SETTINGS_MODULE="localai_cluster.settings",
    )
    for name in ("LOCALAI_AUTO_APPROVE_NODES", "LOCALAI_ALLOW_SHARED_TOKEN_NODES", "DEBUG", "HOST", "PORT"):
        os.environ.pop(name, None)


_owner = os.getpid()


def _remove() -> None:
    if os.getpid() == _owner:
        shutil.rmtree(HOME, ignore_errors=True)


_prepare()
atexit.register(_remove)
