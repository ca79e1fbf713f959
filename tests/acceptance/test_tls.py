"""A cluster whose web process serves HTTPS and whose bus wants certificates of all clients."""

from pathlib import Path

import httpx
import pytest

from localai_cluster.embedded.nats import EmbeddedNats
from localai_cluster.kit import clock
from localai_cluster.kit.tls import TlsFiles
from tests.conftest import eventually
from tests.support.certificates import Authority
from tests.support.cluster import ADMIN, Cluster
from tests.support.effort import swept
from tests.support.ports import free_port


@swept
@pytest.mark.rule("nats-9.1")
def test_a_request_is_served_when_everything_is_encrypted(empty: Cluster, tmp_path: Path) -> None:
    authority = Authority(tmp_path / "ca")
    files = {name: [str(file) for file in authority.issue(name)] for name in ("nats", "server", "web")}
    empty.nats.stop()
    certificate, key = files["nats"]
    tls = {"cert_file": certificate, "key_file": key, "ca_file": str(authority.file), "verify": True}
    empty.nats = EmbeddedNats(empty.home / "tls-nats", port=free_port(), keys=empty.nats.keys, tls=tls)
    empty.nats.start(empty.reaper)
    bus = {
        "LOCALAI_NATS_TLS_CA": str(authority.file),
        "LOCALAI_NATS_TLS_CERT": files["server"][0],
        "LOCALAI_NATS_TLS_KEY": files["server"][1],
    }
    empty.controller(**bus)
    port = free_port()
    https = {"CLUSTER_TLS_CERT": files["web"][0], "CLUSTER_TLS_KEY": files["web"][1]}
    web = empty.spawn("web", "manage.py", "serve", port=port, env={"PORT": str(port), **bus, **https})
    url, context = f"https://127.0.0.1:{port}", TlsFiles(str(authority.file)).client(clock.now())
    with httpx.Client(base_url=url, verify=context, headers=ADMIN, timeout=120) as client:

        def ready() -> bool:
            try:
                return client.get("/readyz").status_code == 200
            except httpx.TransportError:
                return False

        eventually(ready, seconds=30, what=f"web is ready: {web.log}")
        verified = {"LOCALAI_REGISTER_TO": url, "LOCALAI_WORKER_TLS_CA": str(authority.file)}
        empty.worker("w1", web, wait=False, **bus, **verified)
        eventually(lambda: client.get("/api/nodes").json(), seconds=30, what="the worker registers")
        answer = client.post("/v1/embeddings", json={"model": "echo", "input": "hello"})
        assert answer.status_code == 200, answer.text
        signed_in = client.get("/login")
        assert all(cookie.secure for cookie in signed_in.cookies.jar)
    with pytest.raises(httpx.TransportError):
        httpx.get(f"http://127.0.0.1:{port}/healthz", timeout=30)
