"""A container registry with its faults, and images to push: the standard library only.

Tokens, manifest lists, and layers that it redirects to signed addresses of a second server, each good for
one request. `requests` has every request with the header that its credential came in. It answers in the shape
of a real one (`tests/data/registry/replies.json`), also to what pushes an image.
"""

import base64
import hashlib
import io
import json
import secrets
import ssl
import tarfile
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

INDEX = "application/vnd.oci.image.index.v1+json"
MANIFEST = "application/vnd.oci.image.manifest.v1+json"
CONFIG = "application/vnd.oci.image.config.v1+json"
LAYER = "application/vnd.oci.image.layer.v1.tar"
USER, PASSWORD = "reader", "hidden-word"
PIECE = 64 * 1024
DIGEST, VERSION = "Docker-Content-Digest", ("Docker-Distribution-Api-Version", "registry/2.0")
BLOB = {"Accept-Ranges": "bytes", "Content-Type": "application/octet-stream", **dict([VERSION])}


def digest_of(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


@dataclass(frozen=True)
class Request:
    """A request to the registry, its token service (`token`) or its storage, or a change (`push`)."""

    part: str
    path: str
    query: str
    authorization: str
    range: str


@dataclass
class Registry:
    """`with_tokens`: a client needs a token; `private`: and a password for it."""

    with_tokens: bool = False
    private: bool = False
    basic: bool = False
    redirects: bool = True
    drops: list[int] = field(default_factory=list)
    """Bytes after which the next layers' responses end."""
    statuses: list[int] = field(default_factory=list)
    """Statuses of the storage's next responses, in place of a layer."""
    rate: int = 0
    """Bytes per second of a layer; 0 = unlimited."""
    realm: str = ""
    location: str = ""
    """Another address to redirect layers to."""
    requests: list[Request] = field(default_factory=list)
    blobs: dict[str, bytes] = field(default_factory=dict)
    manifests: dict[tuple[str, str], tuple[str, bytes]] = field(default_factory=dict)
    tokens: set[str] = field(default_factory=set)
    sent: dict[str, int] = field(default_factory=dict)
    """Bytes of each layer that were sent."""

    certificate: tuple[Path, Path] | None = None
    """Certificate and key: then it and its storage speak HTTPS."""

    def start(self) -> None:
        self._signatures: set[str] = set()
        self._stopping = threading.Event()
        self._servers = [self._serve("registry"), self._serve("storage")]
        self.host, self.storage = (f"127.0.0.1:{server.server_port}" for server in self._servers)

    def stop(self) -> None:
        self._stopping.set()
        for server in self._servers:
            server.shutdown()
            server.server_close()

    def push(self, name: str, layers: Sequence[bytes], platform: str = "", tag: str = "latest") -> str:
        """Add an image; return its digest. With a platform, `tag` becomes a list of it and other builds."""
        for layer in layers:
            self.blobs[digest_of(layer)] = layer
        config = b"{}"
        self.blobs[digest_of(config)] = config
        listed = [{"mediaType": LAYER, "digest": digest_of(layer), "size": len(layer)} for layer in layers]
        manifest = {
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "config": {"mediaType": CONFIG, "digest": digest_of(config), "size": len(config)},
            "layers": listed,
        }
        digest = self.put(name, MANIFEST, manifest, "" if platform else tag)
        if platform:
            _, known = self.manifests.get((name, tag), ("", b'{"manifests": []}'))
            builds = json.loads(known)["manifests"]
            os, _, architecture = platform.partition("/")
            build = {"mediaType": MANIFEST, "digest": digest, "size": len(self.manifests[name, digest][1])}
            builds.append({**build, "platform": {"os": os, "architecture": architecture}})
            self.put(name, INDEX, {"schemaVersion": 2, "mediaType": INDEX, "manifests": builds}, tag)
        return digest

    def put(self, name: str, media_type: str, manifest: Any, tag: str = "") -> str:
        body = manifest if isinstance(manifest, bytes) else json.dumps(manifest).encode()
        for version in filter(None, (digest_of(body), tag)):
            self.manifests[name, version] = (media_type, body)
        return digest_of(body)

    @property
    def scheme(self) -> str:
        return "https" if self.certificate else "http"

    def seen(self, part: str) -> list[Request]:
        return [request for request in self.requests if request.part == part]

    def _serve(self, role: str) -> ThreadingHTTPServer:
        registry = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                parts = urlsplit(self.path)
                part = "token" if parts.path == "/token" else role
                part = part if self.command == "GET" else "push"
                registry.requests.append(
                    Request(
                        part,
                        parts.path,
                        parts.query,
                        self.headers.get("Authorization", ""),
                        self.headers.get("Range", ""),
                    )
                )
                getattr(registry, f"_{part}")(self, parts.path, parse_qs(parts.query))

            do_POST = do_PUT = do_GET

            def log_message(self, format: str, *args: Any) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        if self.certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*self.certificate)
            server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        return server

    def _token(self, request: BaseHTTPRequestHandler, path: str, query: dict[str, list[str]]) -> None:
        given = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
        if self.private and request.headers.get("Authorization") != f"Basic {given}":
            _answer(request, 401, b"wrong password")
            return
        token = secrets.token_hex(8)
        self.tokens.add(f"Bearer {token}")
        _answer(request, 200, json.dumps({"token": token, "expires_in": 300}).encode())

    def _registry(self, request: BaseHTTPRequestHandler, path: str, query: dict[str, list[str]]) -> None:
        name, _, rest = path.removeprefix("/v2/").rpartition("/")
        name, _, kind = name.rpartition("/")
        if not self._allowed(request):
            realm = self.realm or f"{self.scheme}://{self.host}/token"
            challenge = f'Bearer realm="{realm}",service="test",scope="repository:{name}:pull"'
            challenge = 'Basic realm="test"' if self.basic else challenge
            _refuse(request, 401, "UNAUTHORIZED", {"WWW-Authenticate": challenge})
        elif path == "/v2/":
            _answer(request, 200, b"{}", {"Content-Type": "application/json"})
        elif kind == "manifests" and (name, rest) in self.manifests:
            media_type, body = self.manifests[name, rest]
            _answer(request, 200, body, {"Content-Type": media_type, DIGEST: digest_of(body)})
        elif kind == "blobs" and rest in self.blobs and self.redirects:
            signature = secrets.token_hex(8)
            self._signatures.add(signature)
            target = self.location or f"{self.scheme}://{self.storage}/{rest}?signature={signature}"
            _answer(request, 307, b"", {"Location": target})
        elif kind == "blobs" and rest in self.blobs:
            self._send(request, rest)
        else:
            _refuse(request, 404, f"{kind[:-1].upper()}_UNKNOWN")

    def _push(self, request: BaseHTTPRequestHandler, path: str, query: dict[str, list[str]]) -> None:
        body = request.rfile.read(int(request.headers.get("Content-Length", "0")))
        base, own = path.rpartition("/")[0], f"{self.scheme}://{self.host}"
        if request.command == "POST":
            _answer(request, 202, b"", {"Location": f"{own}{base}/{secrets.token_hex(8)}?state=0"})
            return
        digest = digest_of(body)
        if base.endswith("/manifests"):
            name, tag = base.removeprefix("/v2/").removesuffix("/manifests"), path.rpartition("/")[2]
            self.put(name, request.headers["Content-Type"], body, "" if tag == digest else tag)
        elif query.get("digest") != [digest]:
            _refuse(request, 400, "DIGEST_INVALID")
            return
        else:
            base = base.removesuffix("/uploads")
            self.blobs[digest] = body
        _answer(request, 201, b"", {"Location": f"{own}{base}/{digest}", DIGEST: digest})

    def _allowed(self, request: BaseHTTPRequestHandler) -> bool:
        given = request.headers.get("Authorization", "")
        if self.basic:
            return given == f"Basic {base64.b64encode(f'{USER}:{PASSWORD}'.encode()).decode()}"
        return given in self.tokens or not self.with_tokens

    def _storage(self, request: BaseHTTPRequestHandler, path: str, query: dict[str, list[str]]) -> None:
        signature = query.get("signature", [""])[0]
        if self.statuses:
            _answer(request, self.statuses.pop(0), b"")
        elif signature not in self._signatures:
            _answer(request, 403, b"expired")
        else:
            self._signatures.discard(signature)
            self._send(request, path.removeprefix("/"))

    def _send(self, request: BaseHTTPRequestHandler, digest: str) -> None:
        data = self.blobs[digest]
        start = int(request.headers.get("Range", "bytes=0-")[6:-1] or 0)
        if start >= len(data) > 0:
            headers = {"Content-Range": f"bytes */{len(data)}", "Content-Type": "text/plain; charset=utf-8"}
            _answer(request, 416, b"", {**headers, DIGEST: digest})
            return
        request.send_response(206 if start else 200)
        for name, value in {**BLOB, DIGEST: digest}.items():
            request.send_header(name, value)
        if start:
            request.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        request.send_header("Content-Length", str(len(data) - start))
        request.end_headers()
        end = min(len(data), start + self.drops.pop(0)) if self.drops else len(data)
        if end < len(data):
            request.close_connection = True
        for position in range(start, end, PIECE):
            piece = data[position : min(position + PIECE, end)]
            try:
                request.wfile.write(piece)
            except OSError:
                return
            self.sent[digest] = self.sent.get(digest, 0) + len(piece)
            if self.rate and self._stopping.wait(len(piece) / self.rate):
                return


def _answer(
    request: BaseHTTPRequestHandler, status: int, body: bytes, headers: dict[str, str] | None = None
) -> None:
    request.send_response(status)
    for name, value in (*(headers or {}).items(), VERSION):
        request.send_header(name, value)
    request.send_header("Content-Length", str(len(body)))
    request.end_headers()
    request.wfile.write(body)


def _refuse(
    request: BaseHTTPRequestHandler, status: int, code: str, headers: dict[str, str] | None = None
) -> None:
    body = {"errors": [{"code": code, "message": "refused"}]}
    _answer(
        request, status, json.dumps(body).encode(), {"Content-Type": "application/json", **(headers or {})}
    )


def entry(name: str, content: bytes = b"", **more: Any) -> tuple[tarfile.TarInfo, bytes]:
    """An entry of a layer; `more` are attributes of its header."""
    info = tarfile.TarInfo(name)
    info.size, info.mode = len(content), 0o755
    for key, value in more.items():
        setattr(info, key, value)
    return info, content


def layer(*entries: tuple[tarfile.TarInfo, bytes]) -> bytes:
    """A plain layer with these entries."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:") as file:
        for info, content in entries:
            file.addfile(info, io.BytesIO(content))
    return out.getvalue()


def layer_of(folder: Path, names: Iterable[str] | None = None) -> bytes:
    """A plain layer with the files of a folder, all of them or those named."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:") as file:
        for name in sorted(names if names is not None else (path.name for path in folder.iterdir())):
            file.add(folder / name, name)
    return out.getvalue()
