"""Small parts of the worker, without process or network: settings, identity, progress, figures."""

import asyncio
import socket
import stat
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localai_cluster import __version__
from localai_cluster.kit.addresses import split_host_port
from localai_cluster.kit.quantities import human_bytes
from localai_cluster.messaging.messages import ProgressEvent
from localai_cluster.messaging.nats import NatsBus
from localai_cluster.worker import hardware, identity, lifecycle
from localai_cluster.worker.config import Config, InvalidSettings, build
from localai_cluster.worker.control_plane import CallFailed, Registered
from localai_cluster.worker.engines import EngineSupervisor
from localai_cluster.worker.hardware import GpuTotals, system_facts
from localai_cluster.worker.install_commands import InstallCommands
from localai_cluster.worker.progress import ProgressStream, Tick, build_event
from localai_cluster.worker.registration import GaveUp, body, register, retry_pauses, running_processes


def config(**given: str) -> Config:
    return build({"register_to": "http://c:1//", "nats_url": "nats://n:4222", **given}, {})


@pytest.mark.rule("C18")
def test_addresses_follow_the_rules() -> None:
    """worker.md §3, W2."""
    plain = config(addr="h:6000")
    assert (plain.base_port, plain.advertise_addr, plain.advertise_http_addr) == (6000, "h:6000", "h:5999")
    assert plain.http_bind == ("0.0.0.0", 5999)
    assert plain.max_port == 65535
    assert plain.register_to == "http://c:1"
    assert config().base_port == 50051
    assert config(serve_addr="0.0.0.0:7000").advertise_addr.endswith(":7000")
    assert config(addr="h:6000", grpc_max_port="5000").max_port == 65535
    assert config(addr="h:6000", grpc_max_port="6005").max_port == 6005
    six = config(addr="[::1]:6000", advertise_addr="[fe80::1]:7")
    assert (six.base_port, six.advertise_host) == (6000, "[fe80::1]")
    assert config(heartbeat_interval="0").heartbeat_interval == 10
    assert config(max_replicas_per_model="-3").max_replicas_per_model == 1
    assert config(backends_path="/b").source_roots == (Path("/b"),)
    assert config(backends_path="/a/b").data_dir == Path("/a")


@pytest.mark.parametrize(
    ("url", "advertised"),
    [
        ("http://127.0.0.1:8080", "127.0.0.1:50051"),
        ("http://localhost:8080", "127.0.0.1:50051"),
        ("https://[::1]", "[::1]:50051"),
        ("http://no-such-host.invalid:8080", f"{socket.gethostname()}:50051"),
    ],
)
def test_without_an_address_the_one_on_the_way_to_the_control_plane_is_advertised(
    url: str, advertised: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other machines often cannot resolve the host name; it is the last resort."""
    real = socket.getaddrinfo

    def looked_up(host: str, *rest: Any, **more: Any) -> Any:
        if host.endswith(".invalid"):
            raise socket.gaierror("no such host")
        return real("127.0.0.1" if host == "localhost" else host, *rest, **more)

    monkeypatch.setattr(socket, "getaddrinfo", looked_up)
    assert config(register_to=url).advertise_addr == advertised


def test_an_address_that_was_given_is_never_replaced() -> None:
    assert config(register_to="http://127.0.0.1:1", addr="h:6000").advertise_addr == "h:6000"
    assert config(register_to="http://127.0.0.1:1", advertise_addr="n:7").advertise_addr == "n:7"


@pytest.mark.parametrize("text", ["", "h", "h:", "h:0", "h:65536", "h:x", "::1:5", "h:²"])
def test_what_is_not_host_and_port(text: str) -> None:
    with pytest.raises(ValueError, match="not host:port"):
        split_host_port(text)


def test_secrets_from_files_and_never_in_repr(tmp_path: Path) -> None:
    secret = tmp_path / "token"
    secret.write_text("hush\n")
    url = tmp_path / "url"
    url.write_text("nats://u:hush2@h:1\n")
    environment = {"LOCALAI_REGISTRATION_TOKEN_FILE": str(secret), "LOCALAI_NATS_URL_FILE": str(url)}
    made = build({"register_to": "http://c"}, environment)
    assert made.nats is not None
    assert (made.registration_token, made.nats.password) == ("hush", "hush2")
    assert "hush" not in repr(made)


def test_all_wrong_settings_are_reported_together_without_secrets() -> None:
    """One line each, with variable, flag and hint."""
    wrong = {"addr": "nonsense", "download_rate": "much", "advertise_addr": "h:0"}
    with pytest.raises(InvalidSettings) as refused:
        config(**wrong, nats_url="nats://me:hush@[::1", register_to="")
    lines = refused.value.message.splitlines()
    flags = ("--nats-url", "--addr", "--advertise-addr", "--download-rate", "--register-to")
    assert [line.partition("(")[2].partition(")")[0] for line in lines] == list(flags)
    assert lines[1] == (
        "LOCALAI_ADDR (--addr): 'nonsense' is not host:port. Use host:port, such as gpu-1.example:50051."
    )
    assert "hush" not in refused.value.message


def test_a_secret_file_that_is_not_text_is_a_wrong_setting(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_bytes(b"\xff\xfe")
    given = {"register_to": "http://c", "nats_url": "nats://n:4222"}
    with pytest.raises(
        InvalidSettings, match=r"LOCALAI_REGISTRATION_TOKEN_FILE: cannot read .*: it is not text"
    ):
        build(given, {"LOCALAI_REGISTRATION_TOKEN_FILE": str(token)})


def test_required_authentication_demands_a_token() -> None:
    with pytest.raises(InvalidSettings, match="LOCALAI_REGISTRATION_TOKEN"):
        config(distributed_require_auth="true")


def test_the_secret_is_made_once_with_mode_0600(tmp_path: Path) -> None:
    secrets: list[str] = []
    threads = [
        threading.Thread(target=lambda: secrets.append(identity.NodeIdentity(tmp_path).secret))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(secrets)) == 1
    assert len(secrets[0]) == 64
    assert sorted(path.name for path in tmp_path.iterdir()) == ["node-secret", "node-servers"]
    path = tmp_path / "node-secret"
    path.chmod(0o644)
    assert identity.NodeIdentity(tmp_path).secret == secrets[0]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.write_text("short")
    with pytest.raises(identity.IdentityError, match="approve the node again"):
        identity.NodeIdentity(tmp_path)


@pytest.mark.rule("worker-19")
async def test_the_worker_ends_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Installs and engines, the HTTP server, the bus: commands are heard until the end."""
    steps: list[str] = []

    def noting(step: str) -> Any:
        async def note(*_: Any) -> None:
            steps.append(step)

        return note

    @asynccontextmanager
    async def serving(*_: Any) -> AsyncIterator[None]:
        yield
        steps.append("http")

    monkeypatch.setattr(lifecycle, "serving", serving)
    for owner, name in (
        (lifecycle.Worker, "_run_until_stopped"),
        (InstallCommands, "close"),
        (EngineSupervisor, "close"),
        (NatsBus, "close"),
    ):
        monkeypatch.setattr(owner, name, noting(owner.__name__))
    folders = {"backends_path": str(tmp_path / "backends"), "models_path": str(tmp_path / "models")}
    await lifecycle.run(config(find_ports="true", **folders), identity.NodeIdentity(tmp_path))
    assert steps == ["Worker", "InstallCommands", "EngineSupervisor", "http", "NatsBus"]


def test_registration_body() -> None:
    """worker.md §5.1: what is always sent, what only when known."""
    made = config(node_labels="a=b, c = d ,odd", max_replicas_per_model="2", node_name="n", addr="h:2")
    told = body(
        made, "nvidia", GpuTotals(8, 4, "nvidia", "8.9"), {"total_ram": 10, "available_ram": 5}, "5" * 64
    )
    assert told == {
        "name": "n",
        "address": "h:2",
        "http_address": "h:1",
        "total_vram": 8,
        "available_vram": 8,
        "gpu_vendor": "nvidia",
        "gpu_compute_capability": "8.9",
        "capability": "nvidia",
        "engine_token": "5" * 64,
        "max_replicas_per_model": 2,
        "labels": {"a": "b", "c": "d", "node.replica-slots": "2"},
        "version": __version__,
        "system": system_facts(),
        "total_ram": 10,
        "available_ram": 5,
    }
    assert 0 < system_facts().get("cpu_cores", 1) <= system_facts()["cpu_count"]
    full_disk = body(config(vram_budget="80%"), "default", GpuTotals(), {"available_disk": 0}, "")
    assert full_disk["available_disk"] == 0


@pytest.mark.rule("worker-5.1")
def test_what_runs_is_listed_at_the_addresses_that_installs_answer() -> None:
    class Running:
        key, port = "org/m:1@q#0", 6001

    engines: Any = [Running()]
    assert running_processes(engines, "gpu-1") == [{"process_key": "org/m:1@q#0", "address": "gpu-1:6001"}]
    assert running_processes([], "gpu-1") == []


async def test_registration_gives_up_after_a_hundred_attempts() -> None:
    """worker.md §5.2, W3: 2, 4, 8 … at most 30 s, then the worker exits."""
    slept: list[float] = []

    class Refusing:
        async def register(self, told: dict[str, Any]) -> Registered:
            raise CallFailed("no", 401)

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    async def told() -> dict[str, Any]:
        return {}

    with pytest.raises(GaveUp, match="failed 100 times"):
        await register(Refusing(), told, sleep)  # type: ignore[arg-type]
    assert slept[:6] == [2, 4, 8, 16, 30, 30]
    assert slept == list(retry_pauses())
    assert len(slept) == 99


class Windows:
    """Sleeps that end when the test says so."""

    def __init__(self) -> None:
        self.waiting: list[asyncio.Future[None]] = []

    async def sleep(self, seconds: float) -> None:
        assert seconds == 0.25
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.waiting.append(future)
        await future

    async def end(self) -> None:
        self.waiting.pop().set_result(None)
        await settle()


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


@pytest.mark.rule("A56", "O68", "W24", "R6.10", "C45", "T-UNL-33", "T-UNL-34", "nats-4.3")
async def test_progress_leaves_first_at_once_then_once_a_window_and_last_before_the_end() -> None:
    """nats.md §4.3, W24: leading edge, one slot, flush."""
    sent: list[ProgressEvent] = []

    async def send(progress: ProgressEvent) -> None:
        sent.append(progress)

    windows = Windows()
    progress = ProgressStream(send, "op", "node", "b", windows.sleep)

    def sizes() -> list[int]:
        return [progress.current_bytes for progress in sent]

    progress.report(Tick("downloading", 1, 10))
    await settle()
    assert sizes() == [1]
    for size in (2, 3, 4):
        progress.report(Tick("downloading", size, 10))
    await settle()
    assert sizes() == [1]
    await windows.end()
    assert sizes() == [1, 4]
    await windows.end()
    await settle()
    assert sizes() == [1, 4], "a quiet window sends nothing"
    progress.report(Tick("downloading", 9, 10))
    await settle()
    progress.report(Tick("downloading", 10, 10))
    await progress.finish()
    assert sizes() == [1, 4, 9, 10]
    assert [one.seq for one in sent] == [1, 2, 3, 4]
    await progress.finish()
    assert len(sent) == 4


@pytest.mark.rule("W24", "O68")
async def test_the_last_tick_is_sent_even_if_the_end_meets_it_on_its_way() -> None:
    """A bus that holds up a publish must not cost the operation its last figure."""
    begun: list[int] = []
    sent: list[int] = []

    async def send(progress: ProgressEvent) -> None:
        begun.append(progress.current_bytes)
        if len(begun) == 1:
            await asyncio.Event().wait()
        sent.append(progress.current_bytes)

    progress = ProgressStream(send, "op", "node", "b")
    progress.report(Tick("downloading", 10, 10))
    await settle()
    assert (begun, sent) == ([10], [])
    await progress.finish()
    assert sent == [10]


@given(st.integers(0, 10**15), st.integers(1, 10**15))
def test_events_tell_real_figures(current: int, total: int) -> None:
    current = min(current, total)
    told = build_event(Tick("downloading", current, total, "f"), 1, "o", "n", "b")
    assert 0 <= told.percentage <= 100
    assert (told.current_bytes, told.total_bytes) == (current, total)


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (512, "512 B"), (1024, "1.0 KiB"), (412 * 2**20, "412.0 MiB"), (2**60, "1024.0 PiB")],
)
def test_human_sizes(size: int, text: str) -> None:
    """nats.md §4.3."""
    assert human_bytes(size) == text


def test_gpus_are_summed_and_nonsense_left_out() -> None:
    text = "24564, 20000, 8.9\n24564, 24000, 8.9\n[N/A], x\n"
    found = hardware.parse_gpus(text)
    assert (found.total, found.free) == (2 * 24564 * 2**20, 44000 * 2**20)
    assert (found.vendor, found.compute_capability) == ("nvidia", "8.9")
    assert hardware.parse_gpus("no devices") == GpuTotals()


def test_capability(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """worker.md §18.4: forced, run file, small or no GPU, vendor."""
    noted = tmp_path / "capability"
    big = GpuTotals(24 * 2**30, 0, "nvidia", "8.9")
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    assert hardware.detect_capability("forced", big, noted) == "forced"
    assert hardware.detect_capability("", GpuTotals(), noted) == "default"
    assert hardware.detect_capability("", GpuTotals(4 * 2**30, 0, "nvidia"), noted) == "default"
    assert hardware.detect_capability("", big, noted).startswith("nvidia")
    noted.write_text(" metal\n")
    assert hardware.detect_capability("", big, noted) == "metal"
