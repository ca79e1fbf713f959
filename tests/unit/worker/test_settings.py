"""The worker's settings by flag and variable, its `--help`, and `check` on this machine."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from localai_cluster.worker import check, identity
from localai_cluster.worker.__main__ import main
from localai_cluster.worker.config import SETTINGS, Config, InvalidSettings, build, flag
from tests.support.ports import free_port

ROOT = Path(__file__).resolve().parents[3]
CONTRACT = (ROOT / "docs" / "contract" / "worker.md").read_text(encoding="utf-8")
SECTION = CONTRACT.partition("\n## 2. ")[2].partition("\n## 3. ")[0]
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in SECTION.splitlines()
    if "`LOCALAI" in line
]
SERVER = "http://c:1"


def expanded(cell: str) -> list[str]:
    """The variables of a cell; the row of the object store abbreviates all but the first."""
    names = re.findall(r"`(_?[A-Z][A-Z_]+)`", cell.partition("(")[0])
    return [f"LOCALAI_STORAGE{name}" if name.startswith("_") else name for name in names]


NAMES = sorted({name for cells in ROWS for name in expanded(cells[0])})


def config(variables: dict[str, str] | None = None, /, **flags: str) -> Config:
    return build({"register_to": SERVER, **flags}, variables or {})


@pytest.mark.rule("worker-2")
def test_each_row_of_the_reference_is_a_variable_and_a_flag() -> None:
    """The rows are those of the contract; the flag is the option in kebab case."""
    assert len(NAMES) > 35
    known = {name: flag(entry) for entry in SETTINGS for name in entry.names}
    assert [name for name in NAMES if name not in known] == []
    for variables, flags, *_ in (cells for cells in ROWS if len(cells) > 1):
        for documented in re.findall(r"`(--[a-z-]+[a-z])`", flags):
            assert documented in [known[name] for name in expanded(variables)], documented
    assert flag(SETTINGS[0]).startswith("--")


@pytest.mark.rule("worker-2")
@pytest.mark.parametrize("entry", SETTINGS, ids=[entry.key for entry in SETTINGS])
def test_each_setting_can_be_given_as_a_flag(entry: object) -> None:
    """Also those whose flag a stock worker spells in another way."""
    spellings = {flag(entry): "text"}  # type: ignore[arg-type]
    for part in ("ca", "cert", "key"):
        spellings[f"--nats-tls{part}"] = "text"
    for spelling in spellings:
        with main.make_context("worker", [spelling, "text"], resilient_parsing=True) as context:
            assert "text" in context.params.values()


@pytest.mark.rule("worker-2")
def test_each_default_is_that_of_the_reference() -> None:
    """D-NO-GALLERIES: there is no gallery that nobody has named. Addresses are derived (worker.md §3)."""
    known = {name: entry for entry in SETTINGS for name in entry.names}
    same = {"\N{EN DASH}": "", "**required**": "", "0 (= 65535)": "0", "<cwd>/backends": "./backends"}
    same |= {"<cwd>/models": "./models", "host name, else `node-<pid>": "the host name"}
    derived = {
        "LOCALAI_ADVERTISE_ADDR",
        "LOCALAI_HTTP_ADDR",
        "LOCALAI_ADVERTISE_HTTP_ADDR",
        "LOCALAI_NATS_URL",
    }
    galleries = {"LOCALAI_BACKEND_GALLERIES", "BACKEND_GALLERIES", "LOCALAI_GALLERIES", "GALLERIES"}
    for variables, _, default, *_ in (cells for cells in ROWS if len(cells) > 3):
        for name in set(expanded(variables)) - derived - galleries - {"LOCALAI_NATS_TLS_CA"}:
            expected = same.get(text := default.strip("`"), text)
            assert known[name].shown in (expected, expected or "false"), name
    assert (config().backend_galleries, config().galleries) == ((), ())


@pytest.mark.rule("worker-2")
def test_a_flag_counts_more_than_a_variable_and_the_first_variable_most() -> None:
    environment = {"LOCALAI_BACKENDS_PATH": "/first", "BACKENDS_PATH": "/second", "MODELS_PATH": "/models"}
    found = config(environment)
    assert (found.backends_path, found.models_path) == (Path("/first"), Path("/models"))
    assert config(environment, backends_path="/flag").backends_path == Path("/flag")


@pytest.mark.rule("worker-2")
def test_values_that_stock_workers_tolerate() -> None:
    assert config(heartbeat_interval="0").heartbeat_interval == 10
    assert config(heartbeat_interval="1m30s").heartbeat_interval == 90
    assert config(max_replicas_per_model="0").max_replicas_per_model == 1
    assert config(node_labels=" a = b ,c,d=e=f, =x").node_labels == {"a": "b", "d": "e=f"}
    assert [config(vram_budget=text).vram_budget for text in ("80%", "0.8", "12GB")] == ["80%", "0.8", "12GB"]


@pytest.mark.rule("worker-3")
@pytest.mark.parametrize(
    ("flags", "base", "highest", "address", "http"),
    [
        ({"addr": "h:6000"}, 6000, 65535, "h:6000", "h:5999"),
        ({"addr": "[fd00::1]:6000"}, 6000, 65535, "[fd00::1]:6000", "[fd00::1]:5999"),
        ({"addr": "h:6000", "serve_addr": "0.0.0.0:7000"}, 6000, 65535, "h:6000", "h:5999"),
        ({"addr": "h:6000", "advertise_addr": "nat:16000"}, 6000, 65535, "nat:16000", "nat:5999"),
        ({"addr": "h:6000", "advertise_http_addr": "nat:1"}, 6000, 65535, "h:6000", "nat:1"),
        ({"addr": "h:6000", "http_addr": "127.0.0.1:900"}, 6000, 65535, "h:6000", "h:900"),
        ({"addr": "h:6000", "grpc_max_port": "6005"}, 6000, 6005, "h:6000", "h:5999"),
        ({"addr": "h:6000", "grpc_max_port": "5999"}, 6000, 65535, "h:6000", "h:5999"),
        ({"addr": "h:6000", "grpc_max_port": "65536"}, 6000, 65535, "h:6000", "h:5999"),
        ({"addr": "h:6000", "grpc_max_port": "-1"}, 6000, 65535, "h:6000", "h:5999"),
    ],
)
def test_addresses_and_ports(flags: dict[str, str], base: int, highest: int, address: str, http: str) -> None:
    """D-ADVERTISED: the advertised HTTP address has the port on which that server listens."""
    found = config(**flags)
    assert (found.base_port, found.max_port) == (base, highest)
    assert (found.advertise_addr, found.advertise_http_addr) == (address, http)


@pytest.mark.rule("worker-3")
def test_without_any_address_the_base_port_is_that_of_the_serve_address() -> None:
    found = config(serve_addr="0.0.0.0:7000")
    assert (found.base_port, found.http_bind) == (7000, ("0.0.0.0", 6999))
    assert config().base_port == 50051


@pytest.mark.rule("worker-4")
@pytest.mark.parametrize("switch", ["--registration-require-auth", "--distributed-require-auth"])
def test_without_a_required_token_nothing_begins(
    tmp_path: Path, switch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit code 2, before a folder is made or anything is dialled."""
    monkeypatch.chdir(tmp_path)
    environment = {"LOCALAI_REGISTRATION_TOKEN": None, "LOCALAI_HTTP_ADDR": "192.0.2.1:9"}
    ended = CliRunner(env=environment).invoke(main, ["--register-to", SERVER, switch])
    assert ended.exit_code == 2
    assert ended.stderr.startswith("error: LOCALAI_REGISTRATION_TOKEN (--registration-token): is not set")
    assert list(tmp_path.iterdir()) == []


def test_the_help_shows_each_setting_once_in_its_group() -> None:
    shown = CliRunner().invoke(main, ["--help"], terminal_width=200).stdout
    groups = list(dict.fromkeys(entry.group for entry in SETTINGS))
    places = [shown.index(f"\n{group}:\n") for group in groups]
    assert places == sorted(places)
    for entry in SETTINGS:
        assert len(re.findall(rf"\n  {flag(entry)} ", shown)) == 1
        assert all(name in shown for name in entry.names)


def test_the_page_for_slurm_names_settings_that_exist() -> None:
    """All that its scripts export are variables of the worker."""
    page = (ROOT / "docs" / "operating" / "slurm.md").read_text(encoding="utf-8")
    known = {name for entry in SETTINGS for name in entry.names}
    exported = {name.removesuffix("_FILE") for name in re.findall(r"(LOCALAI_[A-Z_]+)=", page)}
    assert len(exported) > 8
    assert exported <= known


def test_settings_without_effect_are_named() -> None:
    assert config().without_effect == []
    found = config({"LOCALAI_STORAGE_SECRET_KEY": "hush"}, storage_url="http://s")
    assert found.without_effect == ["LOCALAI_STORAGE_URL", "LOCALAI_STORAGE_SECRET_KEY"]
    assert "hush" not in repr(found)


def on_machine(folder: Path, **flags: str) -> Config:
    """A worker's settings with folders of the test and any free port."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    given = {
        "backends_path": str(folder / "backends"),
        "http_addr": f"127.0.0.1:{port}",
        "addr": "127.0.0.1:23051",
    }
    return build(
        {"register_to": "http://localhost:1", "models_path": str(folder / "models"), **given, **flags}, {}
    )


def problems(lines: list[str]) -> list[str]:
    return [line for line in lines if isinstance(line, check.Problem)]


async def test_the_check_of_a_machine_that_is_ready_finds_nothing(tmp_path: Path) -> None:
    lines = await check.report_machine(on_machine(tmp_path, test_gpus="2x24GiB", capability="nvidia-cuda-12"))
    assert problems(lines) == []
    assert "hardware: 2 GPUs with 48 GiB, capability nvidia-cuda-12" in lines
    assert not (tmp_path / "models").exists()


async def test_the_check_names_ports_that_are_taken(tmp_path: Path) -> None:
    with socket.create_server(("0.0.0.0", 0)) as taken:
        port = taken.getsockname()[1]
        busy = await check.report_machine(on_machine(tmp_path, http_addr=f"127.0.0.1:{port}"))
        engines = await check.report_machine(on_machine(tmp_path, addr=f"127.0.0.1:{port}"))
    assert "LOCALAI_HTTP_ADDR (--http-addr): cannot listen" in problems(busy)[0]
    assert f"port {port}, the first one for engines" in problems(engines)[0]


async def test_the_check_looks_at_no_ports_while_the_worker_runs(tmp_path: Path) -> None:
    given = on_machine(tmp_path, http_addr="192.0.2.1:1")
    with identity.lock_data_folder(given.data_dir):
        lines = await check.report_machine(given)
    assert problems(lines) == []
    assert any("a worker runs with" in line for line in lines)


async def test_the_check_names_an_address_that_the_control_plane_cannot_reach(tmp_path: Path) -> None:
    lines = await check.report_machine(on_machine(tmp_path, register_to="http://192.0.2.7:8080"))
    (problem,) = problems(lines)
    assert "the control plane at 192.0.2.7 cannot reach 127.0.0.1:23051; set LOCALAI_ADDR" in problem


async def test_the_check_names_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    lines = await check.report_machine(on_machine(tmp_path, models_path=str(tmp_path / "file" / "models")))
    (problem,) = problems(lines)
    assert "set LOCALAI_MODELS_PATH" in problem


def test_the_command_tells_all_problems_and_fails(tmp_path: Path) -> None:
    """Exit code 1 for what it finds, 2 for wrong settings; found facts go to stdout, problems to stderr."""
    flags = ["--register-to", "http://127.0.0.1:1", "--http-addr", "192.0.2.1:9", "--data-dir", str(tmp_path)]
    flags += ["--addr", f"127.0.0.1:{free_port()}"]
    command = [sys.executable, "-m", "localai_cluster.worker", "check", *flags]
    alone = {"PATH": os.environ["PATH"]}
    ended = subprocess.run(command, cwd=ROOT, env=alone, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert "hardware: " in ended.stdout
    assert [line.partition(":")[0] for line in ended.stderr.splitlines()] == ["error", "error"]
    assert CliRunner().invoke(main, ["check", "--addr", "nonsense"]).exit_code == 2


def test_wrong_settings_are_found_before_anything_is_checked() -> None:
    with pytest.raises(InvalidSettings, match="--log-lines"):
        config(log_lines="0")
