"""The units, the container file and the compose file in `examples/`: every command and every setting in them.

The programs come from the wheel in a virtual environment of its own, as on an operator's machine.
"""

import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from localai_cluster.embedded.nats import BusKeys
from localai_cluster.kit import processes
from localai_cluster.worker import config
from tests.conftest import eventually
from tests.support import forking, wheel
from tests.support.cluster import ROOT, Cluster, Process, is_ready, running_cluster, runs_tasks
from tests.support.ports import free_port
from tests.support.wheel import Installed

SYSTEMD, CONTAINERS = ROOT / "examples" / "systemd", ROOT / "examples" / "containers"
PROGRAMS = "/opt/localai-cluster/bin/"
START = {
    "web": ["localai-cluster-manage", "serve"],
    "controller": ["localai-cluster-manage", "controller"],
    "tasks": ["localai-cluster-manage", "qcluster"],
    "worker": ["localai-cluster-worker"],
}
"""What starts each part, and is started below."""
BEFORE = [["localai-cluster-manage", "migrate", "--no-input"], ["localai-cluster-manage", "bootstrap"]]
NOT_OURS = {"MALLOC_ARENA_MAX", "PYTHONUNBUFFERED", "PIP_NO_CACHE_DIR", "PIP_ROOT_USER_ACTION"}
KEYS = BusKeys.generate()
GIVEN = {
    **wheel.NO_SERVERS,
    "LOCALAI_NATS_ACCOUNT_SEED": KEYS.account.seed,
    "CLUSTER_NATS_OPERATOR_SEED": KEYS.operator.seed,
    "CLUSTER_NATS_SYSTEM_SEED": KEYS.system.seed,
}
"""What the secret files hold; any other one holds a long random word."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    folder = tmp_path_factory.mktemp("deployed")
    return wheel.install(wheel.build(folder / "dist"), folder / "venv", "server")


def unit(part: str) -> dict[str, list[str]]:
    """The settings of a unit."""
    found: dict[str, list[str]] = {}
    for line in (SYSTEMD / f"localai-cluster-{part}.service").read_text().splitlines():
        name, sign, value = line.partition("=")
        if sign:
            found.setdefault(name, []).append(value)
    return found


def env_file(name: str) -> dict[str, str]:
    """The settings of an environment file, as systemd reads it."""
    lines = [line for line in (SYSTEMD / name).read_text().splitlines() if line and line[0] != "#"]
    return dict(shlex.split(line)[0].split("=", 1) for line in lines)


def compose() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((CONTAINERS / "compose.yaml").read_text())
    return found


def stages() -> dict[str, str]:
    """The stages of the container file by their names."""
    text = (CONTAINERS / "Containerfile").read_text()
    return dict(re.findall(r"^FROM \S+ AS (\w+)\n(.*?)(?=^FROM |\Z)", text, re.M | re.S))


def settings_of(*names: str) -> dict[str, str]:
    """What the ENV lines of these stages set."""
    text = "".join(stages()[name] for name in names).replace("\\\n", " ")
    return dict(re.findall(r"(\w+)=(\S+)", " ".join(re.findall(r"^ENV (.*)$", text, re.M))))


def unit_command(line: str) -> list[str]:
    """The words of an Exec line, the program by its name."""
    first, *words = shlex.split(line)
    assert first.startswith(PROGRAMS), line
    return [first.removeprefix(PROGRAMS), *words]


def ours(environment: Mapping[str, Any]) -> dict[str, str]:
    return {name: str(value) for name, value in environment.items() if name not in NOT_OURS}


def environments() -> list[Any]:
    """Everything that is set for a part, by the file and the part."""
    services = compose()["services"]
    found = {"systemd worker": env_file("worker.env"), "systemd tasks": env_file("server.env")}
    for part in ("web", "controller"):
        found[f"systemd {part}"] = env_file("server.env") | env_file(f"{part}.env")
    for part in ("web", "controller", "tasks"):
        found[f"compose {part}"] = {**settings_of("server", part), **services[part]["environment"]}
    for part in ("migrate", "bootstrap"):
        found[f"compose {part}"] = {**settings_of("server"), **services[part]["environment"]}
    found["compose worker"] = {**settings_of("worker"), **services["worker"]["environment"]}
    return [pytest.param(where, ours(values), id=where) for where, values in found.items()]


def with_files(environment: Mapping[str, str], folder: Path) -> dict[str, str]:
    """The same with secret files that exist here."""
    changed = dict(environment)
    for name in environment:
        if name.endswith("_FILE"):
            (folder / name).write_text(GIVEN.get(name.removesuffix("_FILE"), "a-long-random-word-1234567890"))
            changed[name] = str(folder / name)
    return changed


def first(settings: Mapping[str, str], names: Sequence[str]) -> str | None:
    """The setting under the first of these names that is there."""
    return next((settings[name] for name in names if name in settings), None)


def test_only_the_controller_is_given_the_seeds_that_rule_the_bus() -> None:
    """Web and tasks shared its file: who broke into either could make itself any node of the bus."""
    seeds = {"CLUSTER_NATS_OPERATOR_SEED_FILE", "CLUSTER_NATS_SYSTEM_SEED_FILE"}
    for part in ("web", "controller", "tasks"):
        files = [Path(file).name for file in unit(part)["EnvironmentFile"]]
        given = {name: value for file in files for name, value in env_file(file).items()}
        assert seeds & given.keys() == (seeds if part == "controller" else set())
        loaded = [one.partition(":")[0] for one in unit(part).get("LoadCredential", ())]
        assert {Path(given[seed]).name for seed in seeds & given.keys()} == set(loaded)


def test_all_of_them_start_the_same_commands() -> None:
    """Units, images and services agree, and what they start is what the tests below start."""
    for part, command in START.items():
        assert [unit_command(line) for line in unit(part)["ExecStart"]] == [command]
        assert json.loads(re.findall(r"^CMD (.*)$", stages()[part], re.M)[0]) == command
        assert compose()["services"][part]["command"] == command
    assert [unit_command(line) for line in unit("web")["ExecStartPre"]] == BEFORE
    assert [compose()["services"][name]["command"] for name in ("migrate", "bootstrap")] == BEFORE
    others = set(compose()["services"]) - {*START, "migrate", "bootstrap"}
    assert others == {"postgres", "valkey", "nats"}
    assert {path.stem for path in SYSTEMD.glob("*.service")} == {f"localai-cluster-{part}" for part in START}


@pytest.mark.parametrize(("where", "environment"), environments())
def test_every_setting_is_documented_and_read(
    tmp_path: Path, where: str, environment: dict[str, str]
) -> None:
    """By docs/configuration.md or the worker's own table; with these values the programs accept them all.

    The check is a fork: the wheel's own programs start below.
    """
    known = set(re.findall(r"`([A-Z][A-Z0-9_]+)`", (ROOT / "docs" / "configuration.md").read_text()))
    worker = {name for setting in config.SETTINGS for name in setting.names}
    for name in environment:
        assert name.removesuffix("_FILE") in (worker if where.endswith("worker") else known), name
    settings = with_files(environment, tmp_path)
    if where.endswith("worker"):
        given = {one.key: first(settings, one.names) for one in config.SETTINGS}
        assert config.build(given, settings).registration_token.startswith("a-long")
    else:
        checked = forking.run_command("check", env=settings, cwd=ROOT, folder=tmp_path)
        assert "no issues" in checked.stdout, checked.stderr


def test_only_the_controller_gets_the_keys_that_rule_the_bus() -> None:
    """Who has them can replace the cluster's account; it revokes, the others have no use for them."""
    rulers = {"nats_operator_seed", "nats_system_seed"}
    services = compose()["services"]
    given = {name: rulers & set(service.get("secrets", ())) for name, service in services.items()}
    assert {name: secrets for name, secrets in given.items() if secrets} == {"controller": rulers}


def test_systemd_accepts_the_units(whole: Installed, tmp_path: Path) -> None:
    """`systemd-analyze verify`, which also looks for the programs."""
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd-analyze is not installed")
    units = []
    for path in SYSTEMD.glob("*.service"):
        units.append(tmp_path / path.name)
        units[-1].write_text(path.read_text().replace(PROGRAMS, f"{whole.folder}/bin/"))
    command = [analyze, "verify", "--man=no", *map(str, units)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    told = [line for line in done.stderr.splitlines() if "localai-cluster" in line]
    assert (done.returncode, told) == (0, []), done.stderr


def test_volumes_and_secrets_of_the_compose_file_are_declared() -> None:
    """What a service mounts is declared, and folders of the repository are where it says."""
    found = compose()
    for name, service in found["services"].items():
        assert set(service.get("secrets", ())) <= set(found["secrets"]), name
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            if source.startswith("."):
                assert (CONTAINERS / source).resolve().is_relative_to(ROOT), volume
            else:
                assert source in found["volumes"], volume
        for value in service.get("environment", {}).values():
            if str(value).startswith("/run/secrets/"):
                assert str(value).rpartition("/")[2] in service["secrets"], (name, value)
        target = service.get("build", {}).get("target")
        assert target is None or target in stages(), name
    assert set(re.findall(r"--from=(\w+)", "".join(stages().values()))) <= set(stages())


def test_the_keys_of_the_bus_are_made_where_the_compose_file_expects_them(
    whole: Installed, tmp_path: Path
) -> None:
    """The command of docs/operating/install.md makes what NATS and the secrets mount."""
    (line,) = re.findall(
        r"localai-cluster-manage (nats_config .*)", (ROOT / "docs/operating/install.md").read_text()
    )
    command = [word.replace("examples/containers", str(tmp_path)) for word in shlex.split(line)]
    done = whole.run("localai-cluster-manage", *command)
    assert done.returncode == 0, done.stderr
    found = compose()
    mounts = [volume.split(":")[0] for volume in found["services"]["nats"]["volumes"]]
    seeds = [secret["file"] for name, secret in found["secrets"].items() if name.startswith("nats_")]
    assert len(seeds) == 3
    for path in (*mounts, *seeds):
        assert (tmp_path / path).exists(), path
    assert "/etc/nats/accounts" in (tmp_path / "nats" / "nats.conf").read_text()


def environment_of(cluster: Cluster, part: str) -> dict[str, str]:
    """The cluster's, without the sources and without the keys that only a controller gets."""
    left_out = {"PYTHONPATH"}
    if part != "controller":
        left_out |= {"CLUSTER_NATS_OPERATOR_SEED", "CLUSTER_NATS_SYSTEM_SEED"}
    return {name: value for name, value in cluster.environment.items() if name not in left_out}


def start(cluster: Cluster, whole: Installed, part: str, port: int = 0, **env: str) -> Process:
    """Starts a part by its command, from the wheel and not from here."""
    program, *words = START[part]
    given = {**environment_of(cluster, part), **env}
    place = cluster.home / f"cwd-{part}"
    place.mkdir()
    log = cluster.home / f"{part}.log"
    with log.open("wb") as file:
        command = [str(whole.program(program)), *words]
        child = processes.spawn(command, env=given, cwd=place, stdout=file, stderr=subprocess.STDOUT)
    process = Process(part, child, log, port)
    cluster.processes.append(process)
    return process


def test_the_parts_start_and_serve_by_these_commands(whole: Installed) -> None:
    """The installed wheel alone: all parts run, the worker installs from the server's gallery."""
    with running_cluster() as cluster:
        environment = environment_of(cluster, "") | {"CLUSTER_ADMIN_PASSWORD": "for-the-first-sign-in"}
        for program, *words in BEFORE:
            done = whole.run(program, *words, **environment)
            assert done.returncode == 0, done.stderr
        port = free_port()
        web = start(cluster, whole, "web", port, PORT=str(port))
        eventually(lambda: is_ready(web), seconds=60, what=f"web is ready: {web.log}")
        controller, tasks = start(cluster, whole, "controller"), start(cluster, whole, "tasks")
        start(
            cluster,
            whole,
            "worker",
            LOCALAI_NODE_NAME="wheel",
            LOCALAI_REGISTER_TO=web.url,
            LOCALAI_ADDR=f"127.0.0.1:{free_port()}",
            LOCALAI_HTTP_ADDR=f"127.0.0.1:{free_port()}",
        )
        eventually(lambda: "is ready" in controller.output(), seconds=60, what="the controller is ready")
        eventually(lambda: runs_tasks(tasks), seconds=60, what="the tasks run")
        eventually(lambda: cluster.node(web, "wheel"), seconds=60, what="the worker registers")
        assert cluster.embed(web).status_code == 200
        page = cluster.get(web, "/login")
        assert (page.status_code, "/static/ui/" in page.text) == (200, True)
