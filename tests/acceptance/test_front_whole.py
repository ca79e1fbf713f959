"""`make run`'s process as a whole: up, everything killed and up again, killed itself, taken over, stopped."""

import json
import os
import signal
import ssl
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from localai_cluster.embedded.run import find_node
from localai_cluster.kit import processes
from tests.conftest import eventually
from tests.support.certificates import Authority
from tests.support.effort import swept
from tests.support.ports import free_port
from tests.support.postgres import copy_migrated_data
from tests.support.run import CHILDREN, Run


@pytest.fixture
def data(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / ("deep" * 15) / ("data" * 10)
    folder.mkdir(parents=True)
    yield folder
    lock = folder / "run.lock"
    if lock.exists() and (text := lock.read_text()):
        processes.sweep(json.loads(text)["mark"])


@swept
def test_a_cluster_survives_its_processes_and_leaves_nothing_behind(data: Path) -> None:
    """Issue 3: restart with backoff, `kill -9` of `make run`, takeover, ordered stop with exit 0."""
    port = free_port()
    first = Run(data, port)
    try:
        first.wait_ready()
        eventually(lambda: set(first.leaders()) == set(CHILDREN), seconds=20, what=first.output)
        before = first.leaders()
        for pid in before.values():
            os.kill(pid, signal.SIGKILL)
        eventually(lambda: set(first.leaders().values()).isdisjoint(before.values()), seconds=60)
        eventually(
            lambda: set(first.leaders()) == set(CHILDREN) and first.works(), seconds=60, what=first.output
        )
        for name in CHILDREN:
            assert f"{name} ended (signal SIGKILL), restarting in 1 s" in first.output
        mark = first.mark
    finally:
        first.process.kill()
        first.process.wait()
    eventually(
        lambda: not list(processes.marked_processes(mark)), seconds=60, what="the reaper to end what is left"
    )

    second = Run(data, port)
    try:
        second.wait_ready()
        assert "cleaning up after a killed run" in second.output
        assert second.works()
        mark = second.mark
    finally:
        second.process.terminate()
        code = second.process.wait(360)
    assert code == 0
    assert not list(processes.marked_processes(mark))
    assert processes.reaper_of(mark) is None
    assert second.output.rstrip().endswith("stopped")
    assert "LOG:  database system is shut down" in second.output
    assert "Traceback" not in second.output
    assert "killed: " not in second.output
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://127.0.0.1:{port}/healthz", trust_env=False)
    for secret in (data / "secrets").iterdir():
        value = secret.read_text().strip()
        assert value not in first.output + second.output, secret.name
        assert secret.stat().st_mode & 0o077 == 0


@pytest.mark.skipif(os.environ.get("CLUSTER_SERVER") == "daphne", reason="daphne serves no HTTPS here")
def test_make_run_serves_https(data: Path, tmp_path: Path) -> None:
    """Review X6: with a certificate of a private CA; its own worker registers over HTTPS."""
    authority = Authority(tmp_path / "ca")
    certificate, key = authority.issue("web")
    tls = {"CLUSTER_TLS_CERT": certificate, "CLUSTER_TLS_KEY": key, "LOCALAI_WORKER_TLS_CA": authority.file}
    copy_migrated_data(data / "postgres")
    run = Run(data, free_port(), **{name: str(path) for name, path in tls.items()})
    try:
        run.wait_ready()
        url, trust = f"https://127.0.0.1:{run.port}", ssl.create_default_context(cafile=str(authority.file))
        assert f"open {url} in a browser" in run.output
        assert find_node(url, run.key, "local", trust)["status"] == "healthy"
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"http://127.0.0.1:{run.port}/healthz", trust_env=False)
    finally:
        run.process.terminate()
        assert run.process.wait(360) == 0


@swept
def test_a_cluster_whose_own_worker_is_drained_stays_up(data: Path) -> None:
    """An admin's drain outlives a restart. That is no reason to end a cluster that serves others."""
    settings = {"LOCALAI_HEARTBEAT_INTERVAL": "1s"}
    first = Run(data, free_port(), **settings)
    try:
        first.wait_ready()
        target = first.target
        node = find_node(target.url, target.key, "local")
        drained = httpx.post(
            f"{target.url}/api/nodes/{node['id']}/drain", headers=target.headers, json={}, trust_env=False
        )
        assert drained.status_code == 200, drained.text
    finally:
        first.process.terminate()
        assert first.process.wait(60) == 0

    second = Run(data, free_port(), **settings)
    try:
        second.wait_ready()
        assert "the local worker is draining and receives no requests" in second.output
        assert "has not registered" not in second.output
        assert find_node(second.target.url, second.target.key, "local")["status"] == "draining"
    finally:
        second.process.terminate()
        assert second.process.wait(60) == 0
