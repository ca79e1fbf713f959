"""The line that adds a machine: what it fetches, and the script run for real with a small package."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import tomllib
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from django.conf import settings
from django.contrib.auth import get_user_model
from django.core.management import call_command

from localai_cluster import join_script
from localai_cluster.accounts import actors, principals
from localai_cluster.kit import clock
from nodes.registry import joining
from tests.conftest import eventually
from tests.support import api
from tests.support.environment import API_KEY, REGISTRATION_TOKEN
from tests.support.wheel import closure

pytestmark = pytest.mark.django_db

_WORKER = """
import os, signal, sys, threading
def main():
    told = {name: value for name, value in os.environ.items() if name.startswith("LOCALAI_")}
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    with open("started", "w") as file:
        file.write(repr((VERSION, os.getpid(), told)))
    while not ended.wait(0.1):
        pass
"""


def wheel(folder: Path, version: str = "0.1.0") -> Path:
    """A package like ours, with a worker that only says what it was told."""
    folder.mkdir(exist_ok=True)
    path = folder / f"localai_cluster-{version}-py3-none-any.whl"
    info = f"localai_cluster-{version}.dist-info"
    files = {
        "fake_worker.py": f"VERSION = {version!r}\n{_WORKER}",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: localai-cluster\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": "[console_scripts]\nlocalai-cluster-worker = fake_worker:main\n",
    }
    record = "".join(f"{name},,\n" for name in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in {**files, f"{info}/RECORD": record}.items():
            archive.writestr(zipfile.ZipInfo(name), content)  # no time: equal packages are equal
    return path


@pytest.fixture
def dist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The server's folder with packages."""
    folder = tmp_path / "dist"
    folder.mkdir()
    monkeypatch.setattr(settings, "CLUSTER", replace(settings.CLUSTER, wheel_dir=folder))
    return folder


def made(**wanted: Any) -> str:
    return joining.make(actor=actors.MAKE_RUN, now=clock.now(), **wanted)[1]


# --- the routes


def test_only_who_may_join_gets_the_script_and_the_package(dist: Path) -> None:
    wheel(dist)
    user = get_user_model().objects.create_user("ann", password="x")
    _, key = principals.create_api_key(user, "test")
    ended = made()
    joining.revoke(joining.recognise(ended, "", clock.now()).id, actor=actors.MAKE_RUN, now=clock.now())
    for path in ("/join", "/join/wheel"):
        for credential in (REGISTRATION_TOKEN, API_KEY, made()):
            assert api.bearer(credential).get(path).status_code == 200
        for credential in ("wrong", "join-" + "0" * 64, ended):
            assert api.bearer(credential).get(path).status_code == 401
        assert api.Caller().get(path).status_code == 401
        assert api.bearer(key).get(path).status_code == 403


def test_wrong_tokens_are_counted(minute: None) -> None:
    codes = [api.bearer(f"guess-{number}").get("/join").status_code for number in range(31)]
    assert codes == [401] * 30 + [429]
    assert api.bearer(REGISTRATION_TOKEN).get("/join").status_code == 429


def test_the_script_names_the_package_and_holds_no_secret(dist: Path) -> None:
    path = wheel(dist)
    answer = api.bearer(REGISTRATION_TOKEN).get("/join")
    script = answer.content.decode()
    assert answer["Content-Type"].startswith("text/x-shellscript")
    assert answer["Cache-Control"] == "private, no-store"
    assert f"WHEEL={path.name}\nSHA256={sha256(path.read_bytes()).hexdigest()}\n" in script
    for secret in (REGISTRATION_TOKEN, API_KEY, settings.SECRET_KEY, settings.DATABASES["default"]["NAME"]):
        assert secret not in script
    package = api.bearer(REGISTRATION_TOKEN).get("/join/wheel")
    assert package.content == path.read_bytes()
    assert path.name in package["Content-Disposition"]


def test_without_a_package_the_route_says_what_to_do(dist: Path) -> None:
    (dist / "localai_cluster-0.1.0-py3-none-any.whl.txt").write_text("")
    (dist / "other-0.1.0-py3-none-any.whl").write_text("")
    answer = api.bearer(REGISTRATION_TOKEN).get("/join/wheel")
    assert answer.status_code == 503
    assert "make package" in api.message(answer)


def test_the_package_of_this_version_comes_before_a_newer_file(tmp_path: Path) -> None:
    mine, other = wheel(tmp_path, "0.1.0"), wheel(tmp_path, "0.2.0")
    os.utime(mine, (1, 1))
    found = join_script.find_wheel(tmp_path)
    assert found is not None
    assert found.path == mine
    mine.unlink()
    found = join_script.find_wheel(tmp_path)
    assert found is not None
    assert found.path == other
    assert join_script.find_wheel(tmp_path / "nothing") is None


def test_make_run_names_itself_as_the_maker_of_its_token(
    dist: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`bootstrap` makes it at each start and writes the line for the owner alone."""
    path = tmp_path / "join_command"
    monkeypatch.setenv("CLUSTER_JOIN_COMMAND_FILE", str(path))
    call_command("bootstrap")
    assert not path.exists(), "without a URL for others there is no line"
    monkeypatch.setattr(settings, "CLUSTER", replace(settings.CLUSTER, public_url="http://192.0.2.10:8080"))
    call_command("bootstrap")
    first = path.read_text()
    call_command("bootstrap")
    (newest, _) = api.admin().get("/api/join-tokens").json()
    assert (newest["created_by"], newest["note"], newest["max_uses"]) == ("make run", "make run", 10)
    token = path.read_text().partition(";")[0].removeprefix("T=")
    assert path.read_text() == join_script.join_command("http://192.0.2.10:8080", token) + "\n" != first
    assert str(joining.recognise(token, "", clock.now()).id) == newest["id"]
    assert path.stat().st_mode & 0o077 == 0


# --- the line, for real


@pytest.mark.parametrize("shell", ["sh", "dash", "bash", "busybox"])
def test_the_script_is_posix_shell(shell: str) -> None:
    if not shutil.which(shell):
        pytest.skip(f"{shell} is not installed")
    words = ["busybox", "sh"] if shell == "busybox" else [shell]
    script = join_script.join_script_for(None).encode()
    assert subprocess.run([*words, "-n"], input=script, capture_output=True).stderr == b""


def test_shellcheck_has_nothing_to_say() -> None:
    if not shutil.which("shellcheck"):
        pytest.skip("shellcheck is not installed")
    script = join_script.join_script_for(None)
    said = subprocess.run(["shellcheck", "-s", "sh", "-"], input=script, capture_output=True, text=True)
    assert said.returncode == 0, said.stdout


@pytest.mark.parametrize(
    "url", ["http://h:1", "http://[::1]:8080", "https://h/a'b;c$(d)`e`&f", 'http://h/"x"', "http://h/a\\b*?"]
)
def test_the_line_passes_any_url_unchanged(url: str, tmp_path: Path) -> None:
    """`curl` is replaced: it prints a script that shows what it was called with and what it was told."""
    fake = tmp_path / "curl"
    fake.write_text(
        '#!/bin/sh\nfor last; do :; done\nprintf \'%s\' "$last" >"$OUT.curl"\n'
        "printf '%s\\n' 'printf %s \"$LOCALAI_REGISTER_TO|$LOCALAI_REGISTRATION_TOKEN\" >\"$OUT\"'\n"
    )
    fake.chmod(0o755)
    environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "OUT": str(tmp_path / "out")}
    subprocess.run(["sh", "-c", join_script.join_command(url, "join-1")], env=environ, check=True)
    assert (tmp_path / "out.curl").read_text() == f"{url}/join"
    assert (tmp_path / "out").read_text() == f"{url}|join-1"


class Machine:
    """Another machine: a home folder, and what its shell says."""

    def __init__(self, home: Path) -> None:
        self.home = home
        home.mkdir()
        self.running: list[subprocess.Popen[str]] = []
        self.path = os.environ["PATH"]

    def paste(self, line: str) -> subprocess.Popen[str]:
        """Runs a line in a shell."""
        environ = {"PATH": self.path, "HOME": str(self.home)}
        child = subprocess.Popen(
            ["sh", "-c", line],
            env=environ,
            cwd=self.home,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.running.append(child)
        return child

    def said(self, line: str) -> tuple[int, str]:
        """Runs a line that ends."""
        child = self.paste(line)
        text = child.communicate(timeout=300)[0]
        return child.returncode, text

    def started(self) -> Any:
        """Version, process and settings of the worker that runs; None while there is none."""
        try:
            return eval((self.home / "localai-cluster-worker" / "started").read_text())
        except (OSError, SyntaxError):
            return None


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    """Its programs end with the test."""
    found = Machine(tmp_path / "it's home")
    yield found
    for child in found.running:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
        child.communicate()


@pytest.mark.django_db(transaction=True)
def test_over_http_the_line_runs_only_its_own_script(
    dist: Path, machine: Machine, live_server: Any, tmp_path: Path
) -> None:
    """Review X6: the checksum of the package travels with the script; the line brings that of the script."""
    wheel(dist)
    mine = join_script.find_wheel(dist)
    assert mine
    line = join_script.join_command(live_server.url, made(), mine)
    (dist / mine.path.name).write_bytes(mine.path.read_bytes() + b"changed on the way")
    code, said = machine.said(line)
    assert (code, "not the script that the line was made for" in said) == (1, True), said
    assert list(machine.home.iterdir()) == []
    wheel(dist)
    started = machine.paste(line)
    eventually(lambda: machine.started() or started.poll() is not None, seconds=300)
    assert started.poll() is None, started.communicate()
    assert machine.started()[2]["LOCALAI_REGISTER_TO"] == live_server.url


def test_over_https_the_line_stays_short(dist: Path) -> None:
    wheel(dist)
    line = join_script.join_command("https://h", "join-1", join_script.find_wheel(dist))
    assert line == join_script.join_command("https://h", "join-1")


@pytest.mark.django_db(transaction=True)
def test_what_the_package_needs_is_compared_with_its_hashes(
    dist: Path, machine: Machine, live_server: Any
) -> None:
    """Review X6: the lock comes inside the package. A file of the index with another hash is refused."""
    path = wheel(dist)
    needed = wheel(machine.home, "0.0.9").rename(machine.home / "needed-1.0-py3-none-any.whl")
    url = needed.as_uri()
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("localai_cluster/bundled/worker.txt", f"needed @ {url} --hash=sha256:{'0' * 64}\n")
    code, said = machine.said(join_script.join_command(live_server.url, made(), join_script.find_wheel(dist)))
    assert code == 1
    assert "DO NOT MATCH THE HASHES" in said
    assert machine.started() is None


def test_the_lock_of_the_worker_has_what_it_needs_as_the_server_has_it() -> None:
    """`make lock` makes it from the project's dependencies and the lock of `make run`."""
    folder = Path(join_script.__file__).parents[1] / "requirements"
    pins = {
        name: set(re.findall(r"^(\S+==\S+)", (folder / name).read_text(), re.M))
        for name in ("run.txt", "worker.txt")
    }
    assert pins["worker.txt"] < pins["run.txt"]
    declared = tomllib.loads((folder.parent / "pyproject.toml").read_text())["project"]["dependencies"]
    needed = {re.sub(r"[-_.]+", "-", found.metadata["Name"]).lower() for found in closure(declared, "")}
    assert needed <= {pin.partition("==")[0] for pin in pins["worker.txt"]}


@pytest.mark.django_db(transaction=True)
def test_one_line_installs_starts_and_upgrades_the_worker(
    dist: Path, machine: Machine, live_server: Any
) -> None:
    """From nothing to a worker with its two settings; again: the new package, and the old worker stopped."""
    wheel(dist)
    token = made()
    line = join_script.join_command(live_server.url, token)
    first = machine.paste(line)
    eventually(lambda: machine.started() or first.poll() is not None, seconds=300)
    assert first.poll() is None, first.communicate()
    version, pid, told = machine.started()
    home = machine.home / "localai-cluster-worker"
    assert version == "0.1.0"
    assert told == {
        "LOCALAI_REGISTER_TO": live_server.url,
        "LOCALAI_REGISTRATION_TOKEN": token,
        "LOCALAI_BACKENDS_PATH": f"{home}/backends",
        "LOCALAI_MODELS_PATH": f"{home}/models",
        "LOCALAI_WORKER_DATA_DIR": f"{home}/data",
        "LOCALAI_WORKER_FIND_PORTS": "true",
    }
    assert (home / "data").stat().st_mode & 0o077 == 0
    assert token not in Path(f"/proc/{pid}/cmdline").read_text()

    (dist / "localai_cluster-0.1.0-py3-none-any.whl").unlink()
    (dist / "localai_cluster-0.2.0-py3-none-any.whl").write_bytes(b"no package")
    code, said = machine.said(line)
    assert (code, "the package could not be installed" in said) == (1, True), said
    assert "stopping" not in said
    assert (first.poll(), machine.started()[1]) == (None, pid), "what cannot be installed stops no worker"

    wheel(dist, "0.2.0")
    second = machine.paste(line)
    eventually(lambda: (machine.started() or [""])[0] == "0.2.0" or second.poll() is not None, seconds=300)
    assert second.poll() is None, second.communicate()
    assert first.wait(timeout=60) == 0
    assert machine.started()[1] != pid


@pytest.mark.django_db(transaction=True)
def test_the_line_says_what_is_wrong(dist: Path, machine: Machine, live_server: Any, tmp_path: Path) -> None:
    line = join_script.join_command(live_server.url, made())
    assert machine.said(line)[0] == 1
    assert "run `make package` there" in machine.said(line)[1]

    path = wheel(dist)
    other = join_script.join_script_for(join_script.Wheel(path, "0" * 64))
    run = f"LOCALAI_REGISTER_TO={live_server.url} LOCALAI_REGISTRATION_TOKEN={REGISTRATION_TOKEN} sh"
    code, said = machine.said(f"printf %s {shlex.quote(other)} | {run}")
    assert (code, "not the one that was announced" in said) == (1, True), said
    assert not (machine.home / "localai-cluster-worker" / "venv").exists()

    code, said = machine.said(f"printf %s {shlex.quote(other)} | sh")
    assert (code, "Run the whole line" in said) == (1, True), said

    code, said = machine.said(f"printf %s {shlex.quote(other)} | {run.replace(REGISTRATION_TOKEN, 'wrong')}")
    assert (code, "answered 401" in said) == (1, True), said

    code, said = machine.said(line.replace("join-", "join-0"))
    assert "401" in said


def test_an_old_python_is_named(machine: Machine, tmp_path: Path) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("sh", "cat", "mkdir", "printf"):
        (programs / name).symlink_to(shutil.which(name) or "")
    for name in ("python3", "python3.11", "python3.12"):
        (programs / name).write_text("#!/bin/sh\nexit 1\n")
        (programs / name).chmod(0o755)
    machine.path = str(programs)
    script = join_script.join_script_for(join_script.Wheel(Path("x.whl"), "0" * 64))
    run = "LOCALAI_REGISTER_TO=http://h LOCALAI_REGISTRATION_TOKEN=t sh"
    code, said = machine.said(f"printf %s {shlex.quote(script)} | {run}")
    assert (code, "Python 3.11 or later is needed" in said) == (1, True), said


def test_the_form_of_a_command() -> None:
    line = join_script.join_command("http://192.0.2.10:8080", "join-1")
    assert re.fullmatch(
        r"T=join-1; printf 'header = \"Authorization: Bearer %s\"' \"\$T\" \| "
        r"curl -fgsS -K - http://192\.0\.2\.10:8080/join \| "
        r"LOCALAI_REGISTER_TO=http://192\.0\.2\.10:8080 LOCALAI_REGISTRATION_TOKEN=\$T sh",
        line,
    )
