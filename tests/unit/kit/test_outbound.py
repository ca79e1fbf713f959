"""Requests to sources: which addresses are dialled, who gets a credential, and what an error says."""

import asyncio
import logging
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpcore
import httpx
import pytest

from localai_cluster.kit import addresses, outbound
from localai_cluster.kit.errors import ClusterError, InvalidInput
from localai_cluster.kit.outbound import (
    AddressRefused,
    Outbound,
    SourceBusy,
    SourceError,
    SourceMissing,
    SourceRefused,
    SourceUnreachable,
    body_of,
)
from tests.support.certificates import Authority
from tests.support.sources import Refusal, Source, started

DATA = bytes(range(256)) * 40
TOKEN = "Bearer hf_secret"
PUBLIC = "93.184.216.34"
LOCAL = ("127.0.0.1",)


@pytest.fixture
def source() -> Iterator[Source]:
    with started(files={"/m.gguf": DATA}) as source:
        yield source


@pytest.fixture
def resolve(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Names lead to the given numbers, one list for each lookup; returns the names that were looked up."""
    looked_up: list[str] = []

    def answer(*answers: list[str]) -> list[str]:
        pending = list(answers)

        def lookup(name: str, port: int, **_: Any) -> list[Any]:
            looked_up.append(name)
            numbers = pending.pop(0) if len(pending) > 1 else pending[0]
            return [(socket.AF_INET, 1, 6, "", (number, port)) for number in numbers]

        monkeypatch.setattr(socket, "getaddrinfo", lookup)
        return looked_up

    return answer


@pytest.fixture
def dialled(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The addresses of connections, all of which lead to this machine."""
    opened: list[tuple[str, int]] = []
    plain = httpcore.AnyIOBackend.connect_tcp

    async def connect(network: Any, host: str, port: int, **options: Any) -> httpcore.AsyncNetworkStream:
        opened.append((host, port))
        return await plain(network, "127.0.0.1", port, **options)

    monkeypatch.setattr(httpcore.AnyIOBackend, "connect_tcp", connect)
    return opened


async def read(out: Outbound, url: str, **options: Any) -> bytes:
    return await out.read(url, 1 << 20, **options)


@pytest.mark.parametrize(
    "number",
    [
        "127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0",
        "224.0.0.1", "240.0.0.1", "255.255.255.255", "192.0.2.1", "198.18.0.1", "100.100.100.200",
        "168.63.129.16", "::", "::1", "fe80::1", "fec0::1", "fd00:ec2::254", "ff02::1", "::ffff:127.0.0.1",
        "::ffff:169.254.169.254", "::127.0.0.1", "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "2002:7f00:1::1",
        "2002:5db8:d822::1", "2001:0:7f00:1::1", "2001:db8::1",
    ],
)  # fmt: skip
def test_what_is_no_public_address(number: str) -> None:
    assert not addresses.is_public(number)


@pytest.mark.parametrize(
    "number", [PUBLIC, "1.1.1.1", "2606:4700::1111", f"::ffff:{PUBLIC}", "64:ff9b::101:101"]
)
def test_what_is_one(number: str) -> None:
    assert addresses.is_public(number)


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "localhost", "[::1]", "[::ffff:127.0.0.1]", "127.1", "0x7f.1", "2130706433", "0177.0.0.1",
     "169.254.169.254", "metadata.google.internal", "a_b..c", "xn--a"],
)  # fmt: skip
async def test_no_private_host_is_dialled(source: Source, host: str, dialled: list[Any]) -> None:
    port = source.host.rpartition(":")[2]
    with pytest.raises((AddressRefused, SourceError, InvalidInput)) as refusal:
        await read(Outbound(), f"http://{host}:{port}/m.gguf")
    assert refusal.value.status in (400, 502)
    assert dialled == source.requests == []


async def test_a_name_that_leads_to_a_private_address_is_refused(resolve: Any, dialled: list[Any]) -> None:
    resolve([PUBLIC, "10.0.0.5"])
    with pytest.raises(AddressRefused, match=r"rebind.example is 10\.0\.0\.5, which is not a public address"):
        await read(Outbound(), "http://rebind.example/m.gguf")
    with pytest.raises(AddressRefused, match=r"^10\.0\.0\.5 is not a public address"):
        await read(Outbound(), "http://10.0.0.5/m.gguf")
    assert dialled == []


async def test_the_address_that_was_checked_is_dialled(
    source: Source, resolve: Any, dialled: list[Any]
) -> None:
    """A name server that gives another answer a moment later changes nothing (DNS rebinding)."""
    source.redirects = False
    looked_up = resolve([PUBLIC], ["127.0.0.1"])
    port = int(source.host.rpartition(":")[2])
    assert await read(Outbound(), f"http://public.example:{port}/m.gguf") == DATA
    assert (looked_up, dialled) == (["public.example"], [(PUBLIC, port)])
    assert source.requests[0].host == f"public.example:{port}"


async def test_the_next_address_of_a_name_is_tried(
    source: Source, resolve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    source.redirects = False
    resolve(["203.0.114.1", PUBLIC])
    plain, tried = httpcore.AnyIOBackend.connect_tcp, []

    async def connect(network: Any, host: str, port: int, **options: Any) -> httpcore.AsyncNetworkStream:
        tried.append(host)
        if host != PUBLIC:
            raise httpcore.ConnectError("refused")
        return await plain(network, "127.0.0.1", port, **options)

    monkeypatch.setattr(httpcore.AnyIOBackend, "connect_tcp", connect)
    port = source.host.rpartition(":")[2]
    assert await read(Outbound(), f"http://public.example:{port}/m.gguf") == DATA
    assert tried == ["203.0.114.1", PUBLIC]


@pytest.mark.parametrize(("name", "is_right"), [("localhost", True), ("other.example", False)])
async def test_tls_verifies_the_name_and_not_the_address(
    tmp_path: Path, resolve: Any, dialled: list[Any], name: str, is_right: bool
) -> None:
    authority = Authority(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*authority.issue("server"))
    trusting = ssl.create_default_context(cafile=str(authority.file))
    resolve([PUBLIC])
    with started(files={"/m.gguf": DATA}, redirects=False, context=context) as source:
        port = source.host.rpartition(":")[2]
        out = Outbound(verify=trusting)
        if is_right:
            assert await read(out, f"https://{name}:{port}/m.gguf") == DATA
        else:
            with pytest.raises(SourceError, match="certificate"):
                await read(out, f"https://{name}:{port}/m.gguf")
    assert dialled == [(PUBLIC, int(port))]


@pytest.mark.parametrize("allowed", ["127.0.0.1", "LOCALHOST", "port"])
async def test_a_configured_host_may_be_private(source: Source, allowed: str) -> None:
    source.redirects = False
    host = {"LOCALHOST": source.host.replace("127.0.0.1", "localhost")}.get(allowed, source.host)
    out = Outbound([source.host if allowed == "port" else allowed])
    assert await read(out, f"http://{host}/m.gguf") == DATA


async def test_a_configured_port_opens_no_other_one(source: Source) -> None:
    """Here the redirect leads to another port of this machine."""
    with pytest.raises(AddressRefused, match="not a public address"):
        await read(Outbound([source.host]), source.url("/m.gguf"))
    assert source.seen("storage") == []


async def test_each_redirect_is_checked(source: Source) -> None:
    source.location = "http://169.254.169.254/latest/meta-data"
    with pytest.raises(AddressRefused, match=r"169\.254\.169\.254 is not a public address"):
        await read(Outbound(LOCAL), source.url("/m.gguf"))


@pytest.mark.parametrize(
    ("location", "error"),
    [
        ("file:///etc/passwd", "only http"),
        ("http://user:word@127.0.0.1/", "user name or password"),
        ("http://[::1", "malformed address|Invalid URL in location header"),
        ("http://xn--a/", "malformed address"),
        ("", "more than 5 redirects"),
    ],
)
async def test_redirects_to_nowhere(source: Source, location: str, error: str) -> None:
    source.location = location or source.url("/m.gguf")
    with pytest.raises(SourceError, match=error):
        await read(Outbound(LOCAL), source.url("/m.gguf"))


async def test_a_credential_never_crosses_a_redirect(source: Source) -> None:
    source.tokens = {"/": TOKEN}
    out = Outbound(LOCAL, {source.url("/"): TOKEN, f"http://{source.storage}": "Bearer other"})
    headers = {"X-Own": "1", "Cookie": "c", "Range": "bytes=0-"}
    assert await read(out, source.url("/m.gguf"), headers=headers) == DATA
    assert [(request.part, request.authorization) for request in source.requests] == [
        ("files", TOKEN),
        ("storage", ""),
    ]
    assert source.requests[1].range == "bytes=0-"


async def test_a_credential_stays_with_its_own_host(source: Source, resolve: Any, dialled: list[Any]) -> None:
    source.redirects = False
    resolve([PUBLIC])
    port = source.host.rpartition(":")[2]
    urls = ("https://hub.example", "http://127.0.0.1:1", f"https://tls.example:{port}")
    out = Outbound((*LOCAL, "hub.example"), dict.fromkeys(urls, TOKEN))
    for host in ("evil-hub.example", "hub.example.evil", "127.0.0.1", "hub.example", "tls.example"):
        await read(out, f"http://{host}:{port}/m.gguf")
    # The fourth has the right host and another port, the last one only another scheme.
    assert [request.authorization for request in source.requests] == [""] * 5


@pytest.mark.parametrize(
    ("refusal", "error", "words"),
    [
        (Refusal(401), SourceRefused, r"m\.gguf refuses access \(HTTP status 401\): it needs a token"),
        (Refusal(403, (("X-Error-Message", "Accept\tit"),)), SourceRefused, r"403\): Accept it"),
        (Refusal(403, (), b'{"error": "gated"}'), SourceRefused, "gated"),
        (Refusal(404, (), b'{"error": {"message": "gone"}}'), SourceMissing, "HTTP status 404: gone"),
        (Refusal(429, (("Retry-After", "7"),)), SourceBusy, "HTTP status 429"),
        (Refusal(503, (), b"[" * 9000), SourceBusy, "HTTP status 503$"),
        (Refusal(418, (), b'{"error": 7}'), SourceError, "HTTP status 418$"),
        (Refusal(200, (("Content-Encoding", "gzip"),)), SourceError, "compresses"),
    ],
)  # fmt: skip
async def test_a_refusal_has_the_words_of_the_source(
    source: Source, refusal: Refusal, error: type[ClusterError], words: str
) -> None:
    source.refusals = [refusal]
    with pytest.raises(error, match=words) as raised:
        await read(Outbound(LOCAL), source.url("/m.gguf"))
    assert type(raised.value) is error
    assert raised.value.permanent is not isinstance(raised.value, SourceBusy)
    assert getattr(raised.value, "retry_after", 7.0) in (7.0, 0.0)


async def test_a_credential_is_in_no_message_and_no_log(
    source: Source, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    source.refusals = [Refusal(403, (), b'{"error": "bad token hf_secret in Bearer hf_secret"}')]
    out = Outbound(LOCAL, {source.url("/"): TOKEN})
    with pytest.raises(SourceRefused) as refusal:
        await read(out, source.url("/m.gguf?token=inquery"))
    await read(out, source.url("/m.gguf"))
    text = refusal.value.message + caplog.text
    assert "bad token … in" in text
    assert "hf_secret" not in text
    assert "inquery" not in text
    assert "signature=" not in text


async def test_an_expired_signed_address_is_worth_a_retry(source: Source) -> None:
    source.lifetime = -1
    source.storage_refusals = [Refusal(403, (), b"<Error/>")]
    with pytest.raises(SourceError, match="403") as error:
        await read(Outbound(LOCAL), source.url("/m.gguf"))
    assert (type(error.value), error.value.permanent) == (SourceError, False)


async def test_documents_are_bounded(source: Source) -> None:
    with pytest.raises(SourceError, match="longer than 100 bytes"):
        await Outbound(LOCAL).read(source.url("/m.gguf"), 100)


async def test_a_lost_connection_is_worth_a_retry(source: Source) -> None:
    source.drops = [100]
    with pytest.raises(SourceError, match="connection lost") as error:
        await read(Outbound(LOCAL), source.url("/m.gguf"))
    assert not error.value.permanent
    assert type(error.value) is SourceError
    source.stop()
    with pytest.raises(SourceUnreachable) as error:
        await read(Outbound(LOCAL), source.url("/m.gguf"))
    assert not error.value.permanent


async def test_ranges(source: Source) -> None:
    out, url = Outbound(LOCAL), source.url("/m.gguf")
    async with out.open_range(url, 100, 50) as body:
        assert b"".join([piece async for piece in body.pieces]) == DATA[100:150]
        assert (body.offset, body.total) == (100, len(DATA))
        validator = body.validator
    assert validator.startswith('"')
    source.ranges = False
    async with out.open_range(url, 100) as body:
        assert (body.offset, body.total, body.validator) == (0, len(DATA), validator)
    source.ranges, source.files["/empty"] = True, b""
    async with out.open_range(source.url("/empty"), 0, 10) as body:
        assert [piece async for piece in body.pieces] == []
    with pytest.raises(SourceError, match="ends before byte 20000"):
        async with out.open_range(url, 20_000):
            pass


@pytest.mark.parametrize(
    ("status", "headers"),
    [
        (206, {}),
        (206, {"content-range": "bytes 5-9/10"}),
        (206, {"content-range": "bytes */10"}),
        (206, {"content-range": "bytes 0-9/" + "9" * 30}),
        (204, {}),
    ],
)
def test_a_wrong_range_is_an_error(status: int, headers: dict[str, str]) -> None:
    request = httpx.Request("GET", "http://a.example/f")
    with pytest.raises(SourceError, match="another range"):
        body_of(httpx.Response(status, headers=headers, request=request), 0)


async def test_a_resolver_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    hang = asyncio.Event()
    monkeypatch.setattr(outbound, "CONNECT_TIMEOUT", 0.05)
    loop = asyncio.get_running_loop()

    def lookup(*_: Any, **__: Any) -> list[Any]:
        asyncio.run_coroutine_threadsafe(hang.wait(), loop).result(30)
        return []

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    with pytest.raises(SourceError, match="name server does not answer"):
        await read(Outbound(), "http://slow.example/")
    hang.set()


async def test_the_body_of_a_slow_source_ends() -> None:
    async def body() -> AsyncIterator[bytes]:
        yield b"some"
        await asyncio.Event().wait()

    pieces = outbound.read_pieces(body(), 1024, 0.05)
    assert await anext(pieces) == b"some"
    with pytest.raises(TimeoutError):
        await anext(pieces)
