"""Addresses of a node that may be dialled, and the bearer token for each.

A worker names addresses when it registers and in its replies. Without checks, a worker could direct our
requests to a machine that is not its node. So a reply's address must have the host of `address` or
`http_address`, or a host that the operator lists for the node (CLUSTER_NODE_HOSTS). Any other address causes
an error that names both addresses, an event, and no connection. A host name may resolve to any address: the
IP addresses are checked for each HTTP connection, and when an engine's address is accepted; a barred address
causes an event too. HTTP clients follow no redirects and use no proxy of the environment.

Our worker's engines expect a token that the worker created at its start. Those of a stock worker expect the
registration token, with which anyone can register, so no other node's engines receive it.
"""

import asyncio
import logging
import os
import socket
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from threading import Lock
from typing import Any
from uuid import UUID

import httpcore
import httpx
import psutil
from channels.db import database_sync_to_async
from django.db import DatabaseError, transaction

from localai_cluster.accounts import actors
from localai_cluster.kit import addresses, clock, conf, errors, names
from nodes.models import BackendNode, NodeEvent
from nodes.registry import timeline
from nodes.registry.timeline import Entry

log = logging.getLogger(__name__)

CONNECT_LIMIT = 10.0
"""Seconds until an HTTP connection must be open."""
NEXT_ADDRESS_AFTER = 2.0
"""Seconds after which a connection attempt moves on to the next IP address of a host name."""
_KEEP_SECONDS = 5.0
"""Seconds for which an idle HTTP connection is kept, as by httpx."""
LOOKUP_TIMEOUT = 6.0
"""Seconds for which the check of an engine's address waits for the resolver; it blocks a database thread.

Resolvers usually ask the next name server after five seconds.
"""
_LOOKUP_THREADS = ThreadPoolExecutor(32, "lookup")
"""Separate threads for lookups: a resolver that hangs must not block the threads of the database."""
_lookups: dict[str, "Future[_LookupResult]"] = {}
"""The lookups under way by host. A host has one at most, so that one that hangs takes one thread."""
_lookups_lock = Lock()
_LookupResult = Sequence[tuple[Any, ...]] | OSError
_MAX_STORED_CHARACTERS = 200
"""Maximum characters stored of a refused address, because a worker may send an arbitrarily long one."""


@dataclass(frozen=True)
class Contact:
    """Address and bearer token of an engine or an HTTP server; the token may be empty."""

    address: str
    token: str = field(repr=False)


@dataclass(frozen=True)
class HttpServer:
    """The HTTP server of a node's worker, and the node's status."""

    node: str
    status: str
    contact: Contact


class NotReachable(errors.ClusterError):
    """A worker cannot be called."""

    status = 502
    code = "worker_not_reachable"
    permanent = False


class AddressRefused(errors.ClusterError):
    """The address in a worker's reply does not belong to the worker's node."""

    status = 502
    code = "address_refused"


def check_registered(name: str, address: str, http_address: str, source_address: str) -> None:
    """Raise InvalidInput with the field unless both addresses are `host:port` ("" = none) of one host.

    The HTTP address may also have a host that the operator lists for the node of this name. Loopback is the
    machine that dials: only a worker that registers from this machine may name it. A cloud's metadata service
    and link-local addresses are refused unless the operator lists them for the node.
    """
    main, http = _parse_or_refuse("address", address), _parse_or_refuse("http_address", http_address)
    for field_name, parsed in (("address", main), ("http_address", http)):
        if parsed and _is_barred(parsed.host, name):
            raise errors.InvalidInput(
                f"{field_name} has the host {parsed.host}, which is link-local or a cloud's metadata service:"
                " set LOCALAI_ADVERTISE_ADDR to the worker's own; an operator can allow it for"
                f" {name!r} by CLUSTER_NODE_HOSTS",
                field=field_name,
            )
        if parsed and addresses.is_local(parsed.host) and not _is_own_machine(source_address):
            raise errors.InvalidInput(
                f"{field_name} has the host {parsed.host}, which others cannot reach: set"
                f" LOCALAI_ADVERTISE_ADDR to the worker's own, such as {source_address}:{parsed.port}",
                field=field_name,
            )
    if main and http and http.host != main.host and http.host not in _listed_hosts(name):
        raise errors.InvalidInput(
            f"http_address has the host {http.host}, address has {main.host}: an operator can allow it for"
            f" {name!r} by CLUSTER_NODE_HOSTS",
            field="http_address",
        )


def is_permitted(address: str, *, name: str, registered: tuple[str, ...]) -> bool:
    """Return True if the host of `address` is one of `registered` or is listed for the node `name`."""
    try:
        host = addresses.parse(address).host
    except ValueError:
        return False
    if _is_barred(host, name):
        return False
    if host in _listed_hosts(name):
        return True
    for text in registered:
        with suppress(ValueError):
            if addresses.parse(text).host == host:
                return True
    return False


def bearer_token(engine_token: str, weak_identity: bool) -> str:
    """Return the bearer token for calls to a node's engines; "" if they need none."""
    return engine_token or (conf.cluster().registration_token if weak_identity else "")


def accept_replied_address(node_id: UUID, replied: str, *, now: datetime) -> Contact:
    """Check the address of an engine that a worker has replied, and return the engine's contact.

    Raises NotFound, and AddressRefused for an address that must not be dialled. The refusal is also recorded
    as an event of the node.
    """
    node = BackendNode.objects.filter(pk=node_id).first()
    if node is None:
        raise errors.NotFound(f"node {node_id} is no longer registered")
    if is_permitted(replied, name=node.name, registered=(node.address, node.http_address)):
        try:
            _check_lookup(addresses.parse(replied), node.name)
        except AddressRefused as refusal:
            _record_refusal(node, refusal.message, {"replied": replied}, now)
            raise
        return Contact(replied, bearer_token(node.engine_token, node.weak_identity))
    shortened = names.to_single_line(replied[:_MAX_STORED_CHARACTERS])
    detail = {"replied": shortened, "registered": node.address}
    _record_refusal(node, "a reply names another host", detail, now)
    raise AddressRefused(
        f"node {node.name} replied with the address {shortened!r}, but it registered {node.address!r}"
        " (see CLUSTER_NODE_HOSTS)"
    )


def _record_refusal(node: BackendNode, cause: str, detail: Mapping[str, str], now: datetime) -> None:
    log.warning("node %s: an address is refused: %s", node.name, cause)
    kind, status = NodeEvent.Kind.ADDRESS_REFUSED, node.status
    entry = Entry(node.id, node.name, kind, actors.WORKER, cause, status, status, detail)
    # Counted, one row a minute: a worker must not be able to fill the timeline.
    with transaction.atomic():
        timeline.record(entry, at=now)


def http_server(node_id: UUID) -> HttpServer:
    """Return the HTTP server of a node's worker: its contact and the node's status.

    Raises NotFound, NotReachable for a node without an HTTP address (an agent), Conflict for a node that is
    not approved, and AddressRefused: anybody who knows the registration token can register an address.
    """
    node = BackendNode.objects.filter(pk=node_id).first()
    if node is None:
        raise errors.NotFound("node not found")
    if node.approved_at is None:
        raise errors.Conflict(
            f"node {node.name} is not approved; its worker is contacted only after approval"
        )
    if not node.http_address:
        raise NotReachable("node has no HTTP address")
    if not is_permitted(node.http_address, name=node.name, registered=(node.address,)):
        shortened = names.to_single_line(node.http_address[:_MAX_STORED_CHARACTERS])
        raise AddressRefused(
            f"node {node.name} has registered the HTTP address {shortened!r},"
            f" whose host is not that of {node.address!r} (see CLUSTER_NODE_HOSTS)"
        )
    contact = Contact(
        str(addresses.parse(node.http_address)), bearer_token(node.engine_token, node.weak_identity)
    )
    return HttpServer(node.name, node.status, contact)


def client_of(server: HttpServer) -> httpx.AsyncClient:
    """Return an HTTP client for the server, which limits only the time to connect.

    The caller sets all other limits.
    """
    authorization = {"Authorization": f"Bearer {server.contact.token}"} if server.contact.token else {}
    # Plain HTTP, so nothing is verified; reading all certificates would block the event loop for 20 ms.
    transport = httpx.AsyncHTTPTransport(verify=False, trust_env=False)
    # httpx has no parameter for it yet.
    network = _CheckedNetwork(server.node)
    transport._pool = httpcore.AsyncConnectionPool(network_backend=network, keepalive_expiry=_KEEP_SECONDS)
    return httpx.AsyncClient(
        base_url=f"http://{server.contact.address}",
        headers=authorization | {"Accept-Encoding": "identity"},
        timeout=httpx.Timeout(None, connect=CONNECT_LIMIT),
        trust_env=False,
        follow_redirects=False,
        transport=transport,
    )


class _CheckedNetwork(httpcore.AsyncNetworkBackend):
    """A network backend that tries the IP addresses of a server's name in turn, except barred ones."""

    def __init__(self, node: str) -> None:
        self._node = node

    async def connect_tcp(
        self, host: str, port: int, timeout: float | None = None, *options: Any, **named_options: Any
    ) -> httpcore.AsyncNetworkStream:
        network, soon = httpcore.AnyIOBackend(), min(timeout or NEXT_ADDRESS_AFTER, NEXT_ADDRESS_AFTER)
        try:
            async with asyncio.timeout(timeout):
                numbers = await resolve(addresses.Address(addresses.host(host), port), self._node)
        except TimeoutError as error:
            raise httpcore.ConnectTimeout from error
        except (OSError, AddressRefused) as error:
            raise httpcore.ConnectError(str(error)) from error
        for number in numbers[:-1]:
            try:
                return await network.connect_tcp(number, port, soon, *options, **named_options)
            except (httpcore.ConnectError, httpcore.ConnectTimeout):
                pass
        return await network.connect_tcp(numbers[-1], port, timeout, *options, **named_options)


async def open_socket(server: HttpServer) -> socket.socket:
    """Return a socket that is connected to the server. Raise OSError, or AddressRefused."""
    target, loop = addresses.parse(server.contact.address), asyncio.get_running_loop()
    failure = OSError("no address")
    for number in await resolve(target, server.node):
        opened = socket.socket(socket.AF_INET6 if ":" in number else socket.AF_INET)
        opened.setblocking(False)
        try:
            await loop.sock_connect(opened, (number, target.port))
        except OSError as error:
            opened.close()
            failure = error
        except BaseException:
            opened.close()
            raise
        else:
            return opened
    raise failure


async def resolve(target: addresses.Address, name: str) -> list[str]:
    """Return the IP addresses of `target` of the node `name`.

    Raises OSError, or AddressRefused after it has recorded an event.
    """
    if addresses.is_ip_address(target.host):
        return [target.host]
    # Shielded: the lookup goes on for the others that wait for it.
    results = await asyncio.shield(asyncio.wrap_future(_start_lookup(target.host)))
    if isinstance(results, OSError):
        raise results
    try:
        return _permitted_addresses(target.host, results, name)
    except AddressRefused as refusal:
        with suppress(DatabaseError):
            await database_sync_to_async(_record_barred)(name, str(target), refusal.message)
        raise


def _record_barred(name: str, address: str, cause: str) -> None:
    node = BackendNode.objects.filter(name=name).first()
    if node is not None:
        _record_refusal(node, cause, {"registered": address}, clock.now())


def _check_lookup(target: addresses.Address, name: str) -> None:
    """Raise AddressRefused if the name resolves to a barred address, or if the lookup does not end in time.

    A name that cannot be resolved is accepted; the connection fails later.
    """
    if addresses.is_ip_address(target.host):
        return
    try:
        results = _start_lookup(target.host).result(LOOKUP_TIMEOUT)
    except TimeoutError:
        raise AddressRefused(
            f"the host {target.host} of node {name} was not resolved within {LOOKUP_TIMEOUT:.0f} s"
        ) from None
    if not isinstance(results, OSError):
        _permitted_addresses(target.host, results, name)


def _start_lookup(host: str) -> "Future[_LookupResult]":
    """Start a lookup of the host, or join the one that is under way."""
    with _lookups_lock:
        lookup = _lookups.get(host)
        if lookup is None:
            lookup = _lookups[host] = _LOOKUP_THREADS.submit(_look_up, host)
            lookup.add_done_callback(lambda _: _lookups.pop(host, None))
    return lookup


def _look_up(host: str) -> _LookupResult:
    try:
        return socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        return error


def _permitted_addresses(host: str, results: Sequence[tuple[Any, ...]], name: str) -> list[str]:
    numbers = list(dict.fromkeys(addresses.host(entry[4][0].partition("%")[0]) for entry in results))
    barred = next((number for number in numbers if _is_barred(number, name)), None)
    if barred is not None and host not in _listed_hosts(name):
        raise AddressRefused(
            f"the host {host} of node {name} is {barred}, which is link-local or a cloud's metadata service"
            " (see CLUSTER_NODE_HOSTS)"
        )
    return numbers


def reason_of(error: Exception) -> str:
    """Return why a connection failed: the operating system's message, or else the error's text."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno:
            # An error of the name resolution has a number of its own, below zero.
            return os.strerror(cause.errno).lower() if cause.errno > 0 else str(cause.strerror)
        cause = cause.__cause__ or cause.__context__
    if isinstance(error, httpx.ConnectTimeout):
        return f"no connection within {CONNECT_LIMIT:.0f} s"
    return (str(error) or type(error).__name__)[:200]


def _is_barred(host: str, name: str) -> bool:
    return addresses.is_special(host) and host not in _listed_hosts(name)


def _is_own_machine(source_address: str) -> bool:
    """Return True if a call from this address came from the machine of this process."""
    if not source_address or addresses.is_local(source_address):
        return True
    interfaces = psutil.net_if_addrs().values()
    own_addresses = (entry.address for entries in interfaces for entry in entries)
    return source_address in {address.partition("%")[0] for address in own_addresses}


def _parse_or_refuse(field: str, text: str) -> addresses.Address | None:
    if not text:
        return None
    try:
        return addresses.parse(text)
    except ValueError as error:
        raise errors.InvalidInput(f"{field} {error}", field=field) from None


def _listed_hosts(name: str) -> frozenset[str]:
    return conf.cluster().node_hosts.get(name, frozenset())
