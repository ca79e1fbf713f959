"""TLS between all parties: a private CA, mutual TLS, and no way around either (nats.md §9.1)."""

import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from localai_cluster.embedded.nats import BusKeys, EmbeddedNats
from localai_cluster.kit import clock, nkeys
from localai_cluster.kit.conf import load
from localai_cluster.kit.tls import TlsFiles
from localai_cluster.messaging import messages
from localai_cluster.messaging import messages as m
from localai_cluster.messaging.messages import Gallery, encode_galleries
from localai_cluster.messaging.nats import NatsBus, connection_problem
from localai_cluster.messaging.servers import Servers, mint_service, mint_worker, parse_url
from localai_cluster.worker.config import InvalidSettings, build
from tests.conformance.worker_support import NatsServer, StubControlPlane, Worker, ask
from tests.conftest import until
from tests.support.certificates import Authority
from tests.support.ports import free_port


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "ca")


def server_of(folder: Path, tls: dict[str, object] | None) -> EmbeddedNats:
    return EmbeddedNats(folder, port=free_port(), keys=BusKeys.generate(), tls=tls)


@pytest.fixture
def mutual(tmp_path: Path, authority: Authority) -> Iterator[EmbeddedNats]:
    """A NATS server that wants a certificate of its clients, too."""
    certificate, key = authority.issue("nats")
    tls = {
        "cert_file": str(certificate),
        "key_file": str(key),
        "ca_file": str(authority.file),
        "verify": True,
    }
    with server_of(tmp_path / "nats", tls) as server:
        yield server


def dialled(server: EmbeddedNats, files: TlsFiles, scheme: str = "nats") -> Servers:
    credentials = mint_service(server.keys.account, "test", now=clock.now().timestamp())
    url = f"{scheme}://127.0.0.1:{server.port}"
    tls = files.client(clock.now()) if files else None
    return replace(parse_url(url), credentials=credentials, tls=tls)


def files_of(authority: Authority, name: str = "", *, ca: bool = True) -> TlsFiles:
    certificate, key = authority.issue(name) if name else ("", "")
    return TlsFiles(str(authority.file) if ca else "", str(certificate), str(key))


@pytest.mark.rule("nats-9.1")
async def test_mutual_tls_lets_in_who_shows_a_certificate_of_the_ca(
    mutual: EmbeddedNats, authority: Authority, tmp_path: Path
) -> None:
    stranger = Authority(tmp_path / "other", "another CA")
    assert await connection_problem(dialled(mutual, files_of(authority, "controller"))) == ""
    refused = {
        "no certificate of its own": files_of(authority),
        "a certificate of another CA": TlsFiles(
            str(authority.file), *(str(file) for file in stranger.issue("stranger"))
        ),
        "another CA for the server": files_of(stranger, "stranger"),
    }
    for case, files in refused.items():
        assert await connection_problem(dialled(mutual, files)), case
    assert await connection_problem(dialled(mutual, TlsFiles(), "tls")), (
        "the system's CAs do not know this server"
    )


@pytest.mark.rule("nats-9.1")
@pytest.mark.parametrize("scheme", ["nats", "tls"])
async def test_a_server_that_offers_no_tls_gets_nothing(
    tmp_path: Path, authority: Authority, scheme: str
) -> None:
    """Setting any TLS file forces TLS, and so does `tls://`: it cannot be switched off in between."""
    with server_of(tmp_path / "nats", None) as server:
        assert await connection_problem(dialled(server, TlsFiles())) == ""
        files = files_of(authority) if scheme == "nats" else TlsFiles()
        assert await connection_problem(dialled(server, files, scheme))


@pytest.fixture
def nats(tmp_path: Path) -> NatsServer:
    """The worker fixture wants one; this suite has its own server."""
    return NatsServer(tmp_path)


async def serve_over_tls(worker: Worker, control_plane: StubControlPlane, authority: Authority) -> None:
    """The control plane starts again with a certificate of this authority, and the worker dials it so."""
    await control_plane.stop()
    control_plane.tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    control_plane.tls.load_cert_chain(*authority.issue("web"))
    await control_plane.start()
    worker.environment["LOCALAI_REGISTER_TO"] = f"https://127.0.0.1:{control_plane.port}"


@pytest.mark.rule("nats-9.1")
async def test_a_worker_joins_over_https_and_mutual_tls(
    worker: Worker, mutual: EmbeddedNats, authority: Authority, control_plane: StubControlPlane
) -> None:
    """With the wrong CA it sends no token; with the right one it comes onto the bus."""
    await serve_over_tls(worker, control_plane, authority)

    def minted() -> dict[str, str]:
        now = clock.now().timestamp()
        made = mint_worker(
            mutual.keys.account, nkeys.generate("user"), "backend", "n1", now=now, lifetime=600
        )
        return {"nats_jwt": made.jwt, "nats_user_seed": made.seed, "nats_url": mutual.url}

    control_plane.credentials = minted
    del worker.environment["LOCALAI_NATS_URL"]
    worker.launch()
    await until(lambda: "CERTIFICATE_VERIFY_FAILED" in worker.log.read_text(), 30, "it says what is wrong")
    assert control_plane.calls == []
    worker.kill()
    certificate, key = authority.issue("worker")
    worker.launch(
        LOCALAI_WORKER_TLS_CA=str(authority.file),
        LOCALAI_NATS_TLS_CA=str(authority.file),
        LOCALAI_NATS_TLS_CERT=str(certificate),
        LOCALAI_NATS_TLS_KEY=str(key),
    )
    await until(lambda: "connected to the message bus" in worker.log.read_text(), 30, "it is on the bus")


@contextmanager
def gallery(authority: Authority) -> Iterator[Gallery]:
    """An empty gallery over HTTPS, with a certificate of this authority."""

    class Empty(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"[]")

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Empty)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*authority.issue("gallery"))
    server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield Gallery(f"https://127.0.0.1:{server.server_port}/index.yaml", authority.folder.name)
    server.shutdown()
    thread.join()
    server.server_close()


async def test_galleries_are_verified_by_the_system_and_not_by_the_ca_of_the_control_plane(
    worker: Worker, nats: NatsServer, authority: Authority, control_plane: StubControlPlane, tmp_path: Path
) -> None:
    """LOCALAI_WORKER_TLS_CA is for the control plane alone: its CA vouches for no gallery, and hides none."""
    await nats.start()
    await serve_over_tls(worker, control_plane, authority)
    public = Authority(tmp_path / "public", "a CA of the system")
    worker.launch(LOCALAI_WORKER_TLS_CA=str(authority.file), SSL_CERT_FILE=str(public.file))
    bus = NatsBus(parse_url(nats.url), name="test")
    bus.start()
    subject = messages.subject("backend.install", control_plane.node_id)

    async def listens() -> bool:
        return subject.rpartition(".")[0] in " ".join(await nats.subscriptions())

    with gallery(public) as theirs, gallery(authority) as private:
        await until(listens, 30, "the worker listens")
        request = m.InstallRequest("m", backend_galleries=encode_galleries([theirs, private]))
        reply = await ask(bus, subject, request, m.InstallReply, 60)
    await bus.close()
    nats.stop()
    assert "gallery ca cannot be read" in reply.error
    assert "CERTIFICATE_VERIFY_FAILED" in reply.error
    assert "gallery public" not in reply.error


def wrong_files(authority: Authority, folder: Path) -> dict[str, tuple[dict[str, str], str]]:
    """Settings by part, and the sentence that they deserve."""
    certificate, key = (str(file) for file in authority.issue("one"))
    other = str(authority.issue("two")[1])
    expired = authority.issue("old", days=-3)
    text = folder / "text.pem"
    text.write_text("hello")
    return {
        "missing": ({"CA": str(folder / "none.pem")}, f"CA: cannot read {folder / 'none.pem'}: No such file"),
        "a folder": ({"CA": str(folder)}, f"CA: cannot read {folder}: Is a directory"),
        "no PEM": ({"CA": str(text)}, f"CA: {text} holds no CA certificate"),
        "half": ({"CERT": certificate}, "KEY: is not set; set both or neither"),
        "other half": ({"KEY": key}, "CERT: is not set; set both or neither"),
        "mismatch": ({"CERT": certificate, "KEY": other}, f"KEY: {other} is not the key of the certificate"),
        "no key": ({"CERT": certificate, "KEY": str(text)}, f"KEY: {text} holds no usable private key"),
        "no certificate": ({"CERT": str(text), "KEY": key}, f"CERT: {text} holds no certificate"),
        "expired": (
            {"CERT": str(expired[0]), "KEY": str(expired[1])},
            f"CERT: the certificate in {expired[0]} expired on ",
        ),
    }


def test_wrong_files_are_named_at_the_start_of_servers_and_workers(
    tmp_path: Path, authority: Authority
) -> None:
    for case, (given, said) in wrong_files(authority, tmp_path).items():
        settings = {f"LOCALAI_NATS_TLS_{part}": value for part, value in given.items()}
        (problem,) = load(settings)[1].problems
        assert f"{problem.setting}: {problem.message}".startswith(f"LOCALAI_NATS_TLS_{said}"), case
        by_key = {f"nats_tls_{part.lower()}": value for part, value in given.items()}
        with pytest.raises(InvalidSettings) as refused:
            build({"register_to": "http://c", **by_key}, {})
        assert said.partition(": ")[2] in refused.value.message, case
    (problem,) = load({"CLUSTER_TLS_KEY": str(authority.issue("x")[1])})[1].problems
    assert problem.setting == "CLUSTER_TLS_CERT"
