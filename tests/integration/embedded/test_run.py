"""`make run` fails: one line with a hint, exit code 1, no traceback, nothing left behind."""

import fcntl
import io
import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import psutil
import pytest

from localai_cluster.embedded import attach, build, lock, preparation, run
from localai_cluster.embedded.layout import Layout, reachable_address
from localai_cluster.embedded.resources import SetupError, runtime_directory
from localai_cluster.embedded.terminal import Log
from localai_cluster.kit import clock, files, nkeys, processes
from localai_cluster.worker import engines, lifecycle
from tests.support.certificates import Authority
from tests.support.ports import free_port

ROOT = Path(run.__file__).resolve().parents[2]


def attempt(data: Path, **settings: str) -> list[str]:
    """The lines of a run that must fail."""
    done = subprocess.run(
        [sys.executable, "-m", "localai_cluster.embedded.run"],
        cwd=ROOT,
        env={
            "PATH": os.environ["PATH"],
            "CLUSTER_DATA_DIR": str(data),
            "PORT": str(free_port()),
            **settings,
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stderr == ""
    lines = [line.removeprefix("run        | ") for line in done.stdout.splitlines()]
    return [line for line in lines if not line.startswith("stopping")]


@contextmanager
def listener() -> Iterator[int]:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield taken.getsockname()[1]


def test_a_port_in_use(tmp_path: Path) -> None:
    with listener() as port:
        (line,) = attempt(tmp_path, PORT=str(port))
    assert line.startswith(
        f"Port {port} on 127.0.0.1 is in use. Stop the program that uses it, or choose another port: PORT="
    )


def test_a_data_directory_in_use_names_its_holder(tmp_path: Path) -> None:
    held = lock.DataLock(tmp_path)
    held.note(port=4711, host="127.0.0.1", mark="m")
    (line,) = attempt(tmp_path)
    assert f"in use by another run (process id {os.getpid()}, port 4711)" in line
    held.release()


def test_a_look_at_a_free_folder_holds_up_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`make manage` looks at the lock in the moment in which `make run` takes it."""
    lock_file = fcntl.flock
    look = (tmp_path / "run.lock").open("w")
    lock_file(look, fcntl.LOCK_SH)

    def flock(descriptor: int, operation: int) -> None:
        try:
            lock_file(descriptor, operation)
        finally:
            look.close()

    monkeypatch.setattr(fcntl, "flock", flock)
    lock.DataLock(tmp_path).release()


def leave_behind(folder: Path, mark: str) -> "subprocess.Popen[bytes]":
    """A killed run: its record in the lock of `folder`, and a process with its mark."""
    process = processes.spawn(
        ["sleep", "1000"], env={"PATH": os.environ["PATH"], processes.MARK_VARIABLE: mark}
    )
    (folder / "run.lock").write_text(json.dumps({"pid": 4194305, "port": 1, "mark": mark}))
    return process


def test_a_stale_lock_is_taken_over_and_its_leftovers_end(tmp_path: Path) -> None:
    """The run before was killed, and so was its process reaper."""
    left = leave_behind(tmp_path, f"{lock.folder_id(tmp_path)}.stale")
    with listener() as port:
        lines = attempt(tmp_path, PORT=str(port))
    assert lines[0] == "cleaning up after a killed run (process id 4194305)"
    assert left.wait(30) < 0


def test_a_copied_lock_ends_no_process_of_the_original(tmp_path: Path) -> None:
    """Review X1: `cp -a` of a live folder brings the record of a run that goes on elsewhere."""
    original, copy = tmp_path / "original", tmp_path / "copy"
    original.mkdir()
    lock.claim(original)
    left = leave_behind(original, f"{lock.folder_id(original)}.live")
    shutil.copytree(original, copy)
    try:
        assert lock.holder_of(copy) == {}
        with listener() as port:
            lines = attempt(copy, PORT=str(port))
        assert lines[0].startswith("this data folder is a copy of another one: ")
        assert not [line for line in lines if "cleaning up" in line]
        assert left.poll() is None
    finally:
        left.kill()
        left.wait()


def test_a_copy_is_told_by_device_and_inode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Review X1: moving a folder makes no copy of it, nor does another device number after a reboot."""
    original, copy = tmp_path / "original", tmp_path / "copy"
    original.mkdir()
    assert not lock.is_copy(original), "of an earlier version"
    lock.claim(original)
    shutil.copytree(original, copy)
    original.rename(tmp_path / "moved")
    assert [lock.is_copy(place) for place in (tmp_path / "moved", copy)] == [False, True]
    lock.claim(copy)
    assert not lock.is_copy(copy)
    claimed = json.loads((copy / lock.FOLDER_ID_FILE).read_text())
    inode = claimed["folder"].split(".")[1]
    (copy / lock.FOLDER_ID_FILE).write_text(json.dumps({**claimed, "folder": f"ffff.{inode}"}))
    assert lock.is_copy(copy), "a snapshot keeps the inode"
    monkeypatch.setattr(files, "boot_id", lambda: "another boot")
    assert not lock.is_copy(copy)


def test_a_folder_that_was_mounted_again_is_no_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """btrfs, NFS, overlay and FUSE get a device number at each mount; a snapshot has another file system."""

    def mount(device: int, file_system: int) -> None:
        folder = SimpleNamespace(st_dev=os.makedev(0, device), st_ino=7)
        monkeypatch.setattr(Path, "stat", lambda _: folder)
        monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_fsid=file_system))

    mount(40, 1)
    lock.claim(tmp_path)
    mount(41, 1)
    assert not lock.is_copy(tmp_path)
    mount(41, 2)
    assert lock.is_copy(tmp_path)
    earlier = {"folder": f"{os.makedev(0, 41):x}.7", "boot": files.boot_id()}
    (tmp_path / lock.FOLDER_ID_FILE).write_text(json.dumps(earlier))
    assert not lock.is_copy(tmp_path), "an earlier version recorded the device number"


def test_a_copied_cluster_gets_its_own_bus_keys_and_keeps_the_operators(tmp_path: Path) -> None:
    """Review X1: keys in settings are the operator's to change; only generated ones are replaced."""
    given = nkeys.generate("account").seed
    layout = Layout.of({"CLUSTER_DATA_DIR": str(tmp_path), "LOCALAI_NATS_ACCOUNT_SEED": given})
    accounts = tmp_path / "nats" / "accounts"
    accounts.mkdir(parents=True)
    before = {path.name: path.read_text() for path in layout.secrets.directory.iterdir()}
    layout.forget_original()
    after = {path.name: path.read_text() for path in layout.secrets.directory.iterdir()}
    changed = {name for name in before if before[name] != after.get(name)}
    assert changed == {"nats_operator", "nats_system"}
    assert layout.secrets.value("nats_account") == given
    assert not accounts.exists()


@pytest.mark.parametrize(
    ("setting", "url"),
    [
        ("DATABASE_URL", "postgresql://me:hidden-word@127.0.0.1:{port}/x"),
        ("REDIS_URL", "redis://:hidden-word@127.0.0.1:{port}/0"),
        ("LOCALAI_NATS_URL", "nats://me:hidden-word@127.0.0.1:{port}"),
    ],
)
def test_an_external_service_that_is_away(tmp_path: Path, setting: str, url: str) -> None:
    seed = {"LOCALAI_NATS_ACCOUNT_SEED": nkeys.generate("account").seed}
    (line,) = attempt(tmp_path, **{setting: url.format(port=free_port())}, **seed)
    assert line.startswith(f"{setting}: ")
    assert f"or unset {setting} to use the bundled " in line
    assert "hidden-word" not in line


def test_an_external_nats_without_a_key(tmp_path: Path) -> None:
    """No worker is ever let onto a bus without credentials: the cluster must be able to mint them."""
    (line,) = attempt(tmp_path, LOCALAI_NATS_URL=f"nats://127.0.0.1:{free_port()}")
    assert "LOCALAI_NATS_ACCOUNT_SEED" in line


def test_a_wrong_setting(tmp_path: Path) -> None:
    (line,) = attempt(tmp_path, PORT="many")
    assert line.startswith("PORT: 'many' is ")
    assert line.endswith("Use a port between 1 and 65535.")


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"LOCALAI_MODEL_SCHEDULING": "[{]"}, "LOCALAI_MODEL_SCHEDULING: is not valid JSON"),
        ({"CLUSTER_WORKER_NATS_URL": "http://x"}, "CLUSTER_WORKER_NATS_URL must start with one of: nats://"),
    ],
)
def test_a_setting_that_only_the_product_reads_is_refused_before_the_servers_start(
    tmp_path: Path, settings: dict[str, str], told: str
) -> None:
    """Review R16: it was found when PostgreSQL had made its files."""
    (line,) = attempt(tmp_path, **settings)
    assert told in line
    assert not (tmp_path / "postgres").exists()


def test_https_is_served_under_a_name_of_the_certificate(tmp_path: Path) -> None:
    """Review X6: the local worker and the printed lines verify the name; `make run`'s own probes need not."""
    certificate, key = Authority(tmp_path / "ca").issue("web")
    tls = {"CLUSTER_TLS_CERT": str(certificate), "CLUSTER_TLS_KEY": str(key), "PORT": "8123"}
    here = Layout.of({"CLUSTER_DATA_DIR": str(tmp_path / "d"), **tls})
    assert (here.base_url, here.public_url) == ("https://127.0.0.1:8123", "")
    others = Layout.of({"CLUSTER_DATA_DIR": str(tmp_path / "d"), "HOST": "192.0.2.10", **tls})
    assert (others.base_url, others.probe_url) == ("https://localhost:8123", "https://192.0.2.10:8123")
    assert "LOCALAI_WORKER_TLS_CA" not in here.worker_environment("w", tmp_path / "w")
    with pytest.raises(SetupError, match="daphne does not serve HTTPS"):
        Layout.of({"CLUSTER_DATA_DIR": str(tmp_path / "d"), "CLUSTER_SERVER": "daphne", **tls})


def test_a_web_process_for_each_core_at_most_four(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Issue 22; the operator's own number stays, and daphne serves with one."""
    for cores, env, expected in (
        (2, {}, "2"),
        (64, {}, "4"),
        (64, {"CLUSTER_WEB_PROCESSES": "16"}, "16"),
        (64, {"CLUSTER_SERVER": "daphne"}, "1"),
    ):
        monkeypatch.setattr("os.sched_getaffinity", lambda pid, cores=cores: set(range(cores)))
        layout = Layout.of({"CLUSTER_DATA_DIR": str(tmp_path), **env})
        assert layout.product_environment({})["CLUSTER_WEB_PROCESSES"] == expected


def test_weak_secrets_do_not_open_the_product(tmp_path: Path) -> None:
    (line,) = attempt(tmp_path, HOST="0.0.0.0", LOCALAI_API_KEY="changeme")
    assert "HOST=0.0.0.0 exposes the cluster" in line
    assert "LOCALAI_API_KEY" in line
    assert "changeme" not in line


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "free_bytes", lambda place: 3 * 2**20)
    cluster = run.Cluster({"CLUSTER_DATA_DIR": str(tmp_path), "PORT": str(free_port())}, Log())
    with pytest.raises(SetupError, match="has 3 MB free; 512 MB are needed"):
        cluster.start()
    cluster.stop()


@contextmanager
def serving(*bodies: object) -> Iterator[int]:
    """The port of a server that gives these answers one after the other, the last one for ever."""
    answers = [*bodies]

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(answers.pop(0) if len(answers) > 1 else answers[0]).encode())

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()


@pytest.mark.rule("worker-19")
def test_the_worker_has_the_time_that_its_orderly_stop_takes(tmp_path: Path) -> None:
    cluster = run.Cluster({"CLUSTER_DATA_DIR": str(tmp_path), "PORT": str(free_port())}, Log())
    limits = {program.name: program.seconds for program in cluster._programs({})}
    assert limits["worker"] > lifecycle.DEREGISTER_TIMEOUT + engines.STOP_TIMEOUT + engines.FREE_TIMEOUT
    cluster.stop()


@pytest.mark.parametrize(
    ("stamps", "told"),
    [
        (["old", "old", "old", "new"], "the local worker is draining and receives no requests; see "),
        (["old"], "the local worker has not registered; see its output above (worker |). "),
    ],
)
def test_a_worker_without_work_or_without_registration_ends_no_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stamps: list[str], told: str
) -> None:
    monkeypatch.setattr(run, "READY_TIMEOUT", 5 if "new" in stamps else 0.1)
    said = io.StringIO()
    heard = [[{"name": "local", "status": "draining", "last_heartbeat": stamp}] for stamp in stamps]
    with serving(*heard) as port:
        cluster = run.Cluster({"CLUSTER_DATA_DIR": str(tmp_path), "PORT": str(port)}, Log(said))
        cluster._wait_registered(cluster._last_heartbeat())
    assert f"run        | {told}" in said.getvalue()
    cluster.stop()


def test_a_directory_of_somebody_else(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (line,) = attempt(tmp_path / "file" / "data")
    assert "Not a directory" in line


def test_another_worker_needs_a_running_cluster_and_a_name(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="No cluster is running on"):
        attach.worker_environment({"CLUSTER_DATA_DIR": str(tmp_path)}, "two")
    for name, words in (
        ("", "NAME is required"),
        ("local", "belongs to"),
        *((name, "not a valid name") for name in ("a/b", ".", "..")),  # its folder is data/workers/NAME
    ):
        with pytest.raises(SetupError, match=words):
            attach.worker_environment({"CLUSTER_DATA_DIR": str(tmp_path)}, name)


def test_a_management_command_needs_a_running_cluster(tmp_path: Path) -> None:
    """`make manage`: says how to start one."""
    with pytest.raises(SetupError, match="make run"):
        attach.management_environment({"CLUSTER_DATA_DIR": str(tmp_path)})


def test_another_worker_gets_its_own_folders_and_no_admin_secret(tmp_path: Path) -> None:
    file = tmp_path / "s3-secret"
    file.write_text("s3")
    secrets = {
        "LOCALAI_API_KEY": "k" * 32,
        "SECRET_KEY": "s" * 50,
        "LOCALAI_NATS_URL": "nats://me:word@127.0.0.1:4222",
        "LOCALAI_NATS_ACCOUNT_SEED": nkeys.generate("account").seed,
        "CLUSTER_S3_ACCESS_KEY": "s3",
        "CLUSTER_S3_SECRET_KEY_FILE": str(file),
        "CLUSTER_ENROL_SECRET": "e" * 64,
    }
    settings = {"CLUSTER_DATA_DIR": str(tmp_path), "HF_TOKEN": "hf", **secrets}
    held = lock.DataLock(tmp_path)
    held.note(port=4711, host="127.0.0.1", mark="m")
    env = attach.worker_environment(settings, "two")
    held.release()
    assert env["LOCALAI_REGISTER_TO"] == "http://127.0.0.1:4711"
    assert env["LOCALAI_NODE_NAME"] == "two"
    assert env["LOCALAI_WORKER_FIND_PORTS"] == "true"
    assert env["LOCALAI_WORKER_DATA_DIR"] == str(tmp_path / "workers" / "two")
    assert env["HF_TOKEN"] == "hf"
    assert not secrets.keys() & env.keys()


def test_the_runtime_directory_is_refused_when_somebody_else_made_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    deep = tmp_path / ("d" * 100)
    elsewhere = runtime_directory(deep)
    assert elsewhere.parent == tmp_path or str(elsewhere).startswith("/tmp/")
    elsewhere.rmdir()
    elsewhere.symlink_to(tmp_path)
    with pytest.raises(SetupError, match="belongs to another user"):
        runtime_directory(deep)
    elsewhere.unlink()


def test_a_checks_finding_is_told_in_one_line() -> None:
    said = (
        "SystemCheckError: System check identified some issues:\n\nERRORS:\n"
        "?: (cluster.E003) REDIS_URL must start with one of: redis://.\n\tHINT: See docs.\n\nmore"
    )
    assert (
        preparation.error_line(said)
        == "?: (cluster.E003) REDIS_URL must start with one of: redis://. HINT: See docs."
    )


def test_a_refused_row_is_not_printed() -> None:
    """Review X5: the last line of PostgreSQL's message is the row, with what is in it."""
    said = (
        'null value in column "later" of relation "operations" violates not-null constraint\n'
        "DETAIL:  Failing row contains (7, secret, null).\n"
    )
    assert preparation.error_line(said) == said.splitlines()[0]


@pytest.mark.parametrize(
    ("environ", "generated", "told"),
    [
        ({}, "true", "/secrets/admin_password (you choose a new one when you sign in)"),
        ({"CLUSTER_ADMIN_PASSWORD": "x" * 30}, "false", "the initial password is in CLUSTER_ADMIN_PASSWORD"),
        ({"CLUSTER_ADMIN_PASSWORD_FILE": "/some/file"}, "false", "the initial password is in /some/file"),
    ],
)
def test_a_password_that_no_one_chose_is_only_the_first(
    tmp_path: Path, environ: dict[str, str], generated: str, told: str
) -> None:
    """The announcement leads to the page and never prints the operator's own; `bootstrap` learns of it."""
    said = io.StringIO()
    cluster = run.Cluster({"CLUSTER_DATA_DIR": str(tmp_path / "d"), "PORT": "8123", **environ}, Log(said))
    assert cluster.layout.bootstrap_environment()["CLUSTER_ADMIN_PASSWORD_GENERATED"] == generated
    run.print_instructions(cluster, 1.25)
    first, second, *_ = said.getvalue().splitlines()
    assert first.endswith("| ready in 1.2 s: open http://127.0.0.1:8123 in a browser")
    assert "| sign in as admin; the initial password is " in second
    assert second.endswith(told)
    cluster.stop()


def test_a_password_that_was_changed_is_not_announced(tmp_path: Path) -> None:
    """Review R16: the dead initial password was announced at every later start."""
    said = io.StringIO()
    cluster = run.Cluster({"CLUSTER_DATA_DIR": str(tmp_path), "PORT": "8123"}, Log(said))
    cluster.password_changed = True
    run.print_instructions(cluster, 1)
    cluster.stop()
    assert "sign in as admin; its password was changed since the first start" in said.getvalue()
    assert "admin_password" not in said.getvalue()


@pytest.mark.parametrize(
    ("line", "package", "told"),
    [
        ("T=join-1; curl …", True, "run there within 1 h: the line in {path}"),
        ("T=join-1; curl …", False, "the server has no worker package: run `make package` there"),
        (None, True, "press Add a node on the Nodes page"),
    ],
    ids=["a line", "no package", "no line"],
)
def test_the_line_that_adds_a_machine_is_in_a_file_and_never_in_a_log(
    tmp_path: Path, line: str | None, package: bool, told: str
) -> None:
    """`bootstrap` writes the file at each start; what an earlier start wrote has expired.

    Review R16: a line that cannot work, for want of a package, is not shown.
    """
    said, wheels = io.StringIO(), tmp_path / "wheels"
    wheels.mkdir()
    if package:
        (wheels / "localai_cluster-0.1.0-py3-none-any.whl").write_bytes(b"")
    settings = {"CLUSTER_DATA_DIR": str(tmp_path), "HOST": "0.0.0.0", "PORT": "8123"}
    cluster = run.Cluster({**settings, "CLUSTER_WHEEL_DIR": str(wheels)}, Log(said))
    path = cluster.layout.join_command
    path.write_text("of an earlier start")
    given = cluster.layout.bootstrap_environment()["CLUSTER_JOIN_COMMAND_FILE"]
    assert (Path(given), path.exists()) == (path, False)
    if line:
        path.write_text(line + "\n")
    run.print_instructions(cluster, 1)
    cluster.stop()
    assert told.format(path=path) in said.getvalue()
    assert ("the line in" in said.getvalue()) is (line is not None and package)
    assert "join-1" not in said.getvalue()


def test_a_cluster_of_this_machine_only_needs_no_line(tmp_path: Path) -> None:
    layout = Layout.of({"CLUSTER_DATA_DIR": str(tmp_path)})
    assert "CLUSTER_JOIN_COMMAND_FILE" not in layout.bootstrap_environment()


@pytest.mark.parametrize(
    ("settings", "url"),
    [
        ({}, ""),
        ({"HOST": "192.0.2.10"}, "http://192.0.2.10:8123"),
        ({"HOST": "2001:db8::1"}, "http://[2001:db8::1]:8123"),
        ({"HOST": "192.0.2.10", "CLUSTER_PUBLIC_URL": "https://ai.example"}, "https://ai.example"),
    ],
)
def test_the_servers_know_their_url_for_others(tmp_path: Path, settings: dict[str, str], url: str) -> None:
    layout = Layout.of({"CLUSTER_DATA_DIR": str(tmp_path), "PORT": "8123", **settings})
    assert layout.product_environment({})["CLUSTER_PUBLIC_URL"] == url


def test_without_a_way_out_the_address_of_a_device_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: Any) -> Any:
        raise OSError("Network is unreachable")

    def address(text: str, family: int = socket.AF_INET) -> Any:
        return SimpleNamespace(address=text, family=family)

    devices = {
        "lo": [address("127.0.0.1")],
        "wlan": [address("169.254.3.4"), address("fe80::1", socket.AF_INET6)],
        "lan": [address("10.9.8.7")],
    }
    monkeypatch.setattr(socket, "socket", unreachable)
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: devices)
    assert reachable_address("0.0.0.0") == "10.9.8.7"
    del devices["lan"]
    assert reachable_address("0.0.0.0") == socket.gethostname()


@pytest.mark.parametrize(
    ("settings", "builds"),
    [({"HOST": "0.0.0.0"}, 1), ({}, 0), ({"HOST": "0.0.0.0", "CLUSTER_WHEEL_DIR": "/srv/wheels"}, 0)],
    ids=["open", "this machine only", "the operator's folder"],
)
def test_the_worker_package_is_built_for_other_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, str], builds: int
) -> None:
    """A package that cannot be built is one line, and the cluster starts without it."""
    calls: list[int] = []

    def build_wheel() -> bool:
        calls.append(1)
        if len(calls) == 2:
            raise SetupError("The worker package cannot be built: no space.", "Run `make install ui`.")
        return True

    monkeypatch.setattr(build, "build_wheel", build_wheel)
    said = io.StringIO()
    cluster = run.Cluster({"CLUSTER_DATA_DIR": str(tmp_path), **settings}, Log(said))
    cluster._offer_package()
    assert len(calls) == builds
    assert said.getvalue().count("built the worker package") == builds
    if builds:
        cluster._offer_package()
        assert "other machines cannot install the worker: The worker package cannot be built: no space" in (
            said.getvalue()
        )
    cluster.stop()


@pytest.mark.parametrize(("began", "least", "most"), [("", 0, 0), ("x", 0, 0), (-100, 100, 160), (60, 0, 0)])
def test_ready_in_counts_from_make_run(began: str | int, least: float, most: float) -> None:
    """What was installed before is part of the wait; without make, or with a clock set back, it is not."""
    stamp = f"{clock.now().timestamp() + began:.0f}" if isinstance(began, int) else began
    assert least - 1 <= run.seconds_spent_by_make({"CLUSTER_MAKE_BEGAN": stamp}) <= most + 1


@pytest.mark.parametrize(("place", "path"), [(0, "/v1/chat/completions"), (1, "/v1/embeddings")])
def test_the_printed_requests_work_from_any_folder(tmp_path: Path, place: int, path: str) -> None:
    """What is pasted into another terminal finds its key there too, no matter what the folders are called."""
    data = tmp_path / "my data"
    layout = Layout.of({"CLUSTER_DATA_DIR": str(data), "PORT": str(free_port())})
    request = run.example_requests(layout, {"smollm2", "minilm"})[place].line
    key = subprocess.run(
        ["sh", "-c", request.partition('Bearer $(')[2].partition(')"')[0]],
        cwd="/", capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert key.stdout.strip() == layout.secrets.value("admin_api_key")
    assert str(data) in request
    assert path in request
    body = json.loads(shlex.split(request.partition(" -d ")[2])[0])
    assert body.get("stream", False) is (place == 0)


def test_a_request_is_printed_for_a_model_that_is_there(tmp_path: Path) -> None:
    """A models folder of an earlier version lacks some, one of your own all."""
    with serving({"data": [{"id": "minilm"}, {"id": "mine"}]}, {"error": {}}) as port:
        layout = Layout.of({"CLUSTER_DATA_DIR": str(tmp_path), "PORT": str(port)})
        (request,) = run.example_requests(layout, run.served_models(layout))
        assert (request.what, '"model":"minilm"' in request.line) == ("three vectors", True)
        assert run.example_requests(layout, run.served_models(layout)) == []
    assert run.served_models(layout) == frozenset(), "nothing listens"


def test_of_several_admin_keys_make_run_uses_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`LOCALAI_API_KEY=a,b` is two keys; with both as one, the start waited four minutes for the worker."""
    first = "k" * 32

    def answer(request: httpx.Request) -> httpx.Response:
        if request.headers["Authorization"] != f"Bearer {first}":
            return httpx.Response(401, json={"error": {}})
        return httpx.Response(
            200, json=[{"name": "local"}] if "nodes" in request.url.path else {"data": [{"id": "m"}]}
        )

    monkeypatch.setattr(
        run, "_probe_client", lambda trust: httpx.Client(transport=httpx.MockTransport(answer))
    )
    keys = {"LOCALAI_API_KEY": f" {first}, {'l' * 32}"}
    cluster = run.Cluster({"CLUSTER_DATA_DIR": str(tmp_path), "PORT": str(free_port()), **keys}, Log())
    assert cluster._find_local_node() == {"name": "local"}
    assert run.served_models(cluster.layout) == {"m"}
    cluster.stop()


def test_ctrl_c_interrupts_a_migration_that_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process may hold its locks for hours; each Ctrl-C was without effect until it was through."""
    spawn = processes.spawn

    def spawn_waiting(argv: list[str], **options: Any) -> "subprocess.Popen[bytes]":
        return spawn(["sleep", "1000"], **options)

    said = io.StringIO()

    def start(cluster: run.Cluster) -> None:
        monkeypatch.setattr(processes, "spawn", spawn_waiting)
        cluster._preparation = preparation.Preparation({"PATH": os.environ["PATH"]})
        threading.Timer(0.1, cluster.ask_to_stop).start()
        cluster._preparation.migrate()

    monkeypatch.setattr(run.Cluster, "start", start)
    run.run({"CLUSTER_DATA_DIR": str(tmp_path), "PORT": str(free_port())}, Log(said), lambda cluster: None)
    assert said.getvalue().splitlines() == ["run        | stopped"]


def test_a_new_models_folder_has_the_examples_and_their_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file is a link, or a copy where that cannot be; a folder that exists is left alone."""
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "m.gguf").write_text("weights")
    monkeypatch.setattr("localai_cluster.embedded.layout.MODEL_FILES_FOLDER", tmp_path / "files")
    for name in ("linked", "copied"):
        made = Layout.of({"CLUSTER_DATA_DIR": str(tmp_path / name)})
        made.data_dir.mkdir(exist_ok=True)
        made.seed_models()
        found = made.data_dir / "models"
        assert {path.name for path in (ROOT / "examples" / "models").iterdir()} < set(os.listdir(found))
        assert (found / "m.gguf").read_text() == "weights"
        monkeypatch.setattr(Path, "hardlink_to", refuse)
    shutil.rmtree(tmp_path / "files")
    (found / "m.gguf").unlink()
    made.seed_models()
    assert not (found / "m.gguf").exists()


def refuse(*_: object) -> None:
    """Says that a file system has no links."""
    raise OSError
