"""The wheel: what is in it, and that it works where nothing else of the project is."""

import re
import tomllib
import zipfile
from pathlib import Path

import pytest

from localai_cluster.embedded.nats import BusKeys
from localai_cluster.rpc.generated import backend_pb2_grpc
from tests.support import wheel as package
from tests.support.effort import swept
from tests.support.wheel import ROOT, Installed

WORKER_MODULES = """
import importlib, pkgutil, sys
import localai_cluster.messaging, localai_cluster.rpc, localai_cluster.worker
for package in (localai_cluster.worker, localai_cluster.messaging, localai_cluster.rpc):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if module.name not in ("localai_cluster.worker.__main__", "localai_cluster.rpc.build"):
            importlib.import_module(module.name)
print(sorted(name for name in ("django", "channels", "psycopg") if name in sys.modules))
"""
PAGES = """
from pathlib import Path
from django.conf import settings
from django.contrib.staticfiles import finders
from django.template.loader import get_template
from django.test import Client
for path in (settings.FILES / "templates").rglob("*.html"):
    get_template(str(path.relative_to(settings.FILES / "templates")))
page = Client().get("/login")
script = page.content.decode().split('src="/static/')[1].split('"')[0]
print(page.status_code, Path(finders.find(script)).is_file(), Path(finders.find("favicon.svg")).is_file())
"""
UNWANTED = re.compile(r"(^|/)(tests?|data|__pycache__|node_modules|secrets?)/|\.(pyc|stamp|key|pem|env)$")
KEYS = BusKeys.generate()
SETTINGS = {
    **package.NO_SERVERS,
    "LOCALAI_NATS_ACCOUNT_SEED": KEYS.account.seed,
    "CLUSTER_NATS_OPERATOR_SEED": KEYS.operator.seed,
    "CLUSTER_NATS_SYSTEM_SEED": KEYS.system.seed,
    "LOCALAI_REGISTRATION_TOKEN": "token-of-the-package-test",
    "SECRET_KEY": "secret-key-of-the-package-test-only",
}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return package.build(tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def worker_only(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return package.install(wheel, tmp_path_factory.mktemp("worker") / "venv")


@pytest.fixture(scope="module")
def whole(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return package.install(wheel, tmp_path_factory.mktemp("server") / "venv", "server")


def test_what_is_in_it(wheel: Path) -> None:
    """The packages, the stubs, templates and pages; no tests, no data, nothing for development."""
    with zipfile.ZipFile(wheel) as file:
        names = file.namelist()
        size = sum(info.file_size for info in file.infolist())
    tops = {name.partition("/")[0] for name in names}
    assert tops == {"localai_cluster", "nodes", "operations", "localai_cluster-0.1.0.dist-info"}
    for needed in (
        "localai_cluster/rpc/generated/backend_pb2_grpc.py",
        "localai_cluster/rpc/backend.proto",
        "localai_cluster/bundled/static/dist/manifest.json",
        "localai_cluster/bundled/static/site/favicon.svg",
        "nodes/migrations/0001_initial.py",
    ):
        assert needed in names
    templates = {
        f"localai_cluster/bundled/{path.relative_to(ROOT)}" for path in ROOT.glob("templates/**/*.html")
    }
    assert templates <= set(names)
    unwanted = re.compile(
        r"(^|/)(tests?|data|__pycache__|node_modules|\.stamp|secrets?)/|\.(pyc|sqlite3|key|pem|env)$"
    )
    assert [name for name in names if unwanted.search(name)] == []
    assert size < 20_000_000


def test_the_worker_runs_where_no_django_is(worker_only: Installed) -> None:
    """It is declared completely: every module of the worker imports with what the wheel asks for."""
    missing = worker_only.run("python", "-c", "import django")
    assert "No module named 'django'" in missing.stderr
    helped = worker_only.run("localai-cluster-worker", "--help")
    assert (helped.returncode, "--register-to" in helped.stdout) == (0, True), helped.stderr
    wrong = worker_only.run("localai-cluster-worker")
    assert wrong.returncode == 2
    assert "LOCALAI_REGISTER_TO" in wrong.stderr
    imported = worker_only.run("python", "-c", WORKER_MODULES)
    assert (imported.stdout, imported.returncode) == ("[]\n", 0), imported.stderr


def test_without_the_extra_the_server_says_what_to_install(worker_only: Installed) -> None:
    said = worker_only.run("localai-cluster-manage", "check")
    assert (said.returncode, said.stderr.count("\n")) == (1, 1)
    assert "localai-cluster[server]" in said.stderr


@swept
def test_with_the_extra_everything_is_there(whole: Installed) -> None:
    """`localai-cluster-manage` in an empty folder: settings, templates and pages come from the wheel."""
    checked = whole.run("localai-cluster-manage", "check", **SETTINGS)
    assert "no issues" in checked.stdout, checked.stderr
    for command in ("serve", "controller", "qcluster", "migrate", "bootstrap", "nodes"):
        helped = whole.run("localai-cluster-manage", command, "--help", **SETTINGS)
        assert helped.returncode == 0, helped.stderr
    pages = whole.run("localai-cluster-manage", "shell", "-v", "0", "-c", PAGES, **SETTINGS)
    assert pages.stdout == "200 True True\n", pages.stdout + pages.stderr
    modules = whole.run("python", "-c", "import localai_cluster.manage as m; print(m.__file__)")
    assert str(whole.folder) in modules.stdout
    served = whole.run(
        "localai-cluster-manage", "shell", "-v", "0", "-c", "import localai_cluster.asgi", **SETTINGS
    )
    assert served.returncode == 0, served.stderr


def test_the_stubs_run_with_the_oldest_versions_that_are_declared() -> None:
    """Generated code refuses an older runtime than the one that made it."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    floors = dict(text.split(">=") for text in declared)
    messages = (ROOT / "localai_cluster/rpc/generated/backend_pb2.py").read_text()
    found = re.search(r"Domain\.PUBLIC,\s*(\d+),\s*(\d+),\s*(\d+)", messages)
    assert found is not None
    assert floors["protobuf"] == ".".join(found.groups())
    assert floors["grpcio"] == backend_pb2_grpc.GRPC_GENERATED_VERSION
