"""Hosts that a node's addresses may have: those it registered, those the operator lists, no others."""

import asyncio
import errno
import socket
import threading
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import httpx
import pytest
from asgiref.sync import sync_to_async
from pytest_django import Settings

from localai_cluster.kit import addresses, errors
from nodes.backends import worker_logs
from nodes.models import NodeEvent, NodeModel
from nodes.registry import dial_targets, file_port
from tests.support import api

pytestmark = pytest.mark.django_db

NOW = datetime(2026, 11, 22, 12, 0, tzinfo=UTC)


@pytest.fixture
def listed(settings: Settings) -> None:
    """The operator knows gpu-1 under two more names."""
    hosts = {"gpu-1": frozenset({"10.0.0.5", "gpu-1.lan"})}
    settings.CLUSTER = replace(settings.CLUSTER, node_hosts=hosts)


def test_a_reply_may_name_what_was_registered_in_any_spelling() -> None:
    """A stock worker replies with the host that it advertises and the engine's port (nats.md §4.1)."""
    node = api.make_node("gpu-1", address="GPU-1.Example:50051")
    for replied in ("GPU-1.Example:50053", "gpu-1.example.:1", "gpu-1.EXAMPLE:65535"):
        assert dial_targets.accept_replied_address(node.id, replied, now=NOW).address == replied
    assert not NodeEvent.objects.filter(kind="address_refused").exists()


def test_ipv6_has_one_spelling() -> None:
    node = api.make_node("gpu-1", address="[2001:db8::1]:50051")
    assert dial_targets.accept_replied_address(node.id, "[2001:DB8:0::1]:7", now=NOW)


def refused(node_id: Any, replied: str, now: datetime = NOW) -> str:
    with pytest.raises(dial_targets.AddressRefused) as caught:
        dial_targets.accept_replied_address(node_id, replied, now=now)
    return caught.value.message


def test_a_refused_reply_names_both_addresses_and_the_setting() -> None:
    node = api.make_node("gpu-1", address="gpu-1:50051")
    said = refused(node.id, "victim:50053")
    assert "'victim:50053'" in said
    assert "'gpu-1:50051'" in said
    assert "CLUSTER_NODE_HOSTS" in said


def test_a_flood_of_refused_replies_is_one_event_a_minute() -> None:
    """Any address that each of them names."""
    node = api.make_node("gpu-1", address="gpu-1:50051")
    for number in range(50):
        refused(node.id, f"victim-{number}:50053", NOW + timedelta(seconds=number))
    event = NodeEvent.objects.get(kind="address_refused")
    assert (event.count, event.last_at) == (50, NOW + timedelta(seconds=49))
    assert event.detail == {"replied": "victim-0:50053", "registered": "gpu-1:50051"}
    refused(node.id, "victim:50053", NOW + timedelta(seconds=60))
    assert NodeEvent.objects.filter(kind="address_refused").count() == 2


def test_a_long_or_invisible_address_is_kept_short_and_readable() -> None:
    node = api.make_node("gpu-1", address="gpu-1:50051")
    assert len(refused(node.id, "\u202e\x1b" + "x" * 1_000_000)) < 400
    kept = NodeEvent.objects.get(kind="address_refused").detail["replied"]
    assert len(kept) <= 200
    assert set(kept) == {"x"}


def test_a_reply_of_a_removed_node_is_refused() -> None:
    with pytest.raises(errors.NotFound):
        dial_targets.accept_replied_address(uuid4(), "gpu-1:1", now=NOW)


@pytest.mark.usefixtures("listed")
def test_a_listed_host_holds_for_its_node_only() -> None:
    one = api.make_node("gpu-1", address="gpu-1:50051", http_address="10.0.0.5:50050")
    two = api.make_node("gpu-2", address="gpu-2:50051")
    assert dial_targets.accept_replied_address(one.id, "gpu-1.LAN:7", now=NOW)
    assert dial_targets.accept_replied_address(one.id, "10.0.0.5:7", now=NOW)
    refused(one.id, "gpu-2:7")
    refused(two.id, "10.0.0.5:7")


def test_an_http_address_of_another_host_names_the_setting() -> None:
    answer = api.register(api.registration("gpu-1", http_address="10.0.0.5:50050"))
    assert answer.status_code == 400
    assert "CLUSTER_NODE_HOSTS" in api.message(answer)


@pytest.mark.usefixtures("listed")
def test_an_http_address_may_have_a_listed_host() -> None:
    answer = api.register(api.registration("gpu-1", http_address="10.0.0.5:50050"))
    assert answer.status_code == 201


@pytest.mark.parametrize(
    ("address", "told", "stays"),
    [
        ("127.0.0.1:7001", "127.0.0.1:7001", True),
        ("LOCALHOST:7001", "localhost.:7001", False),
        ("10.6.6.6:7001", "10.6.6.6:7001", False),
        ("10.6.6.6:7001", "", False),
        ("127.0.0.1:7001", "", True),
    ],
)
def test_a_replica_stays_through_a_registration_on_its_nodes_host_only(
    address: str, told: str, stays: bool
) -> None:
    """One that an earlier version took from a reply unchecked goes with the next registration."""
    node = api.make_node("gpu-1", address="127.0.0.1:50051")
    api.replica(node, "m", address=address)
    running = [{"process_key": "m#0", "address": told}]
    body = api.registration("gpu-1", address="127.0.0.1:50051", running_processes=running)
    assert api.register(body).status_code == 201
    assert NodeModel.objects.exists() is stays


@pytest.mark.parametrize(
    "told", ["127.0.0.1:50051", "localhost:50051", "0.0.0.0:1", "[::1]:7", "127.8.8.8:7"]
)
def test_a_worker_of_another_machine_cannot_register_this_one(told: str) -> None:
    """The server would dial its own ports."""
    for address, http, field in ((told, "", "address"), ("gpu-1:1", told, "http_address")):
        with pytest.raises(errors.InvalidInput, match="LOCALAI_ADVERTISE_ADDR") as caught:
            dial_targets.check_registered("gpu-1", address, http, "192.0.2.7")
        assert caught.value.field == field
    for own in ("127.0.0.1", "::1", "", own_address()):
        dial_targets.check_registered("gpu-1", told, told, own)


def own_address() -> str:
    """One of this machine's addresses."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))
        return str(probe.getsockname()[0])


@pytest.mark.rule("http-1.1")
@pytest.mark.parametrize(
    "host",
    [
        "169.254.169.254",
        "169.254.170.2",
        "[::ffff:169.254.169.254]",
        "[64:ff9b::a9fe:a9fe]",
        "[fd00:ec2::254]",
        "[fd00:ec2::23]",
        "[fd20:ce::254]",
        "[fe80::1]",
        "100.100.100.200",
        "168.63.129.16",
        "Metadata.Google.Internal.",
        "224.0.0.1",
    ],
)
def test_no_node_is_a_clouds_metadata_service(host: str, settings: Settings) -> None:
    """Review X12: such a service gives its secrets to whoever calls from the machine. An operator can list
    it."""
    for fields in ({"address": f"{host}:80"}, {"address": "gpu-1:1", "http_address": f"{host}:80"}):
        answer = api.register(api.registration("gpu-1", **fields))
        assert answer.status_code == 400
        assert "metadata" in api.message(answer)
    node = api.make_node("gpu-1", address="gpu-1:50051")
    type(node).objects.filter(pk=node.pk).update(address=f"{host}:50051")  # registered before
    assert "registered" in refused(node.id, f"{host}:50053")
    plain = host.lower().strip("[].").removeprefix("::ffff:")
    listed = {"gpu-1": frozenset({plain})}
    settings.CLUSTER = replace(settings.CLUSTER, node_hosts=listed)
    assert dial_targets.accept_replied_address(node.id, f"{host}:50053", now=NOW)


SERVER = dial_targets.HttpServer("gpu-1", "healthy", dial_targets.Contact("gpu-1.example:80", "token"))


def lead_to(monkeypatch: pytest.MonkeyPatch, *numbers: str) -> None:
    """Every name resolves to these addresses."""
    families = {number: socket.AF_INET6 if ":" in number else socket.AF_INET for number in numbers}
    found = [(families[number], socket.SOCK_STREAM, 6, "", (number, 80)) for number in numbers]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **options: found)


@pytest.mark.parametrize(
    "numbers",
    [["169.254.169.254"], ["fd00:ec2::254"], ["::ffff:169.254.169.254"], ["192.0.2.1", "169.254.169.254"]],
)
async def test_a_name_that_leads_to_a_metadata_service_is_not_dialled(
    numbers: list[str], monkeypatch: pytest.MonkeyPatch, settings: Settings
) -> None:
    """Registration resolves no name, and a name may lead elsewhere later: each HTTP connection is checked."""
    lead_to(monkeypatch, *numbers)
    monkeypatch.setattr(asyncio.BaseEventLoop, "sock_connect", None)
    assert "metadata service" in await file_port.probe(SERVER)
    with pytest.raises(dial_targets.NotReachable, match="metadata service"):
        await worker_logs.models(SERVER)
    with pytest.raises(dial_targets.AddressRefused, match="metadata service"):
        async for _ in worker_logs.follow(SERVER, "m"):
            pass
    hosts = {"gpu-1": frozenset({"gpu-1.example"})}
    settings.CLUSTER = replace(settings.CLUSTER, node_hosts=hosts)
    assert await dial_targets.resolve(addresses.parse("gpu-1.example:80"), "gpu-1")


@pytest.mark.django_db(transaction=True)
async def test_a_name_that_is_barred_when_it_is_dialled_is_an_event_and_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An administrator sees why the node's files and logs cannot be reached: one event a minute."""
    await sync_to_async(api.make_node)("gpu-1", address="gpu-1.example:50051")
    lead_to(monkeypatch, "169.254.169.254")
    for _ in range(2):
        with pytest.raises(dial_targets.NotReachable):
            await worker_logs.models(SERVER)
    events = [event async for event in NodeEvent.objects.filter(kind="address_refused")]
    assert sum(event.count for event in events) == 2
    assert "169.254.169.254, which is link-local" in events[0].cause
    assert events[0].detail == {"registered": "gpu-1.example:80"}
    assert caplog.text.count("node gpu-1: an address is refused: the host gpu-1.example") == 2


def test_an_engine_at_a_name_that_leads_to_a_metadata_service_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    node = api.make_node("gpu-1", address="gpu-1.example:50051")
    lead_to(monkeypatch, "169.254.169.254")
    reason = refused(node.id, "gpu-1.example:50053")
    assert "metadata service" in reason
    event = NodeEvent.objects.get(kind="address_refused")
    assert (event.cause, event.detail) == (reason, {"replied": "gpu-1.example:50053"})
    lead_to(monkeypatch, "10.0.0.7")
    assert dial_targets.accept_replied_address(node.id, "gpu-1.example:50053", now=NOW)


class HangingResolver:
    """A resolver that answers for `slow.example` only when it is released."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[str] = []
        self.released = threading.Event()
        monkeypatch.setattr(socket, "getaddrinfo", self._look_up)

    def _look_up(self, host: str, *_: Any, **__: Any) -> list[tuple[Any, ...]]:
        self.asked.append(host)
        if host == "slow.example":
            self.released.wait()
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.0.0.7", 0))]


def test_an_engine_at_a_name_whose_lookup_does_not_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name server could otherwise answer too late for the check, and in time for the connection."""
    node = api.make_node("gpu-1", address="slow.example:50051")
    monkeypatch.setattr(dial_targets, "LOOKUP_TIMEOUT", 0.01)
    resolver = HangingResolver(monkeypatch)
    try:
        reason = refused(node.id, "slow.example:50053")
    finally:
        resolver.released.set()
    assert "was not resolved within" in reason
    assert NodeEvent.objects.get(kind="address_refused").cause == reason


async def test_lookups_that_hang_do_not_delay_those_of_other_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that wait for one name share one lookup, also after one of them has given up."""
    resolver, slow = HangingResolver(monkeypatch), addresses.parse("slow.example:80")
    waiting = [asyncio.create_task(dial_targets.resolve(slow, "gpu-2")) for _ in range(8)]
    try:
        async with asyncio.timeout(10):
            found = await dial_targets.resolve(addresses.parse("gpu-1.example:80"), "gpu-1")
        waiting.pop().cancel()
    finally:
        resolver.released.set()
    assert found == ["10.0.0.7"]
    assert await asyncio.gather(*waiting) == [["10.0.0.7"]] * 7
    assert sorted(resolver.asked) == ["gpu-1.example", "slow.example"]


async def test_the_addresses_of_a_name_are_tried_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """As IPv6 without a route, then IPv4: the last one's failure is what is said."""
    served = await asyncio.start_server(_answer, "127.0.0.1", 0)
    port = served.sockets[0].getsockname()[1]
    server = replace(SERVER, contact=dial_targets.Contact(f"gpu-1.example:{port}", ""))
    async with served:
        lead_to(monkeypatch, "127.9.9.9", "127.0.0.1")
        async with dial_targets.client_of(server) as client:
            answer = await client.get("/healthz")
        assert (answer.status_code, answer.text) == (200, f"gpu-1.example:{port}")
        (await dial_targets.open_socket(server)).close()
        lead_to(monkeypatch, "127.0.0.1", "127.9.9.9")
        assert await file_port.probe(server) == ""
        lead_to(monkeypatch, "127.9.9.9")
        assert (await file_port.probe(server)).endswith("connection refused")


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Replies with the Host header of the request."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    host = next((line[6:] for line in head.splitlines() if line.lower().startswith("host: ")), "")
    writer.write(
        f"HTTP/1.1 200 OK\r\nContent-Length: {len(host)}\r\nConnection: close\r\n\r\n{host}".encode()
    )
    await writer.drain()
    writer.close()


@pytest.mark.parametrize(
    ("cause", "error", "reason"),
    [
        (OSError(errno.ECONNREFUSED, "x"), httpx.ConnectError("All attempts failed"), "connection refused"),
        (socket.gaierror(-2, "Name not known"), httpx.ConnectError("[Errno -2] x"), "Name not known"),
        (None, httpx.ConnectTimeout(""), "no connection within"),
        (None, httpx.ReadTimeout(""), "ReadTimeout"),
        (None, httpx.ReadError("broken"), "broken"),
    ],
)
def test_the_reason_of_a_failed_connection_is_the_systems_own(
    cause: OSError | None, error: Exception, reason: str
) -> None:
    """Staging, logs and checks of ports all show it, so each must name the cause without a number."""
    error.__cause__ = cause
    assert dial_targets.reason_of(error).startswith(reason)
