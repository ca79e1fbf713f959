"""Which addresses of a node may be dialled, and with which bearer.

A worker names addresses when it registers and in its replies. If any host were dialled, a worker could have
text sent to a machine that is not its node. So a reply's address has the host of `address` or `http_address`,
or one that the operator lists for that node (CLUSTER_NODE_HOSTS). Another one is an error that names both, an
event, and no connection.

Our worker's engines expect a token that the worker made at its start. Those of a stock worker expect the
registration token, with which anyone can register, so no other node's engines are sent it.
"""

from dataclasses import dataclass, field
from datetime import datetime
from uuid import UUID

import psutil
from django.db import transaction

from localai_cluster import addresses, conf, errors, names
from localai_cluster.accounts import actors
from nodes.models import BackendNode, NodeEvent
from nodes.registry import timeline
from nodes.registry.timeline import Entry

_SHOWN = 200
"""Characters of a refused address that are kept: it may be a megabyte of anything."""


@dataclass(frozen=True)
class Contact:
    """Where an engine is called, and the bearer for it ("" = none)."""

    address: str
    token: str = field(repr=False)


@dataclass(frozen=True)
class HttpServer:
    """The HTTP server of a node's worker, and how the node fares."""

    node: str
    status: str
    contact: Contact


class NotReachable(errors.ClusterError):
    """A worker cannot be called."""

    status = 502
    code = "worker_not_reachable"
    permanent = False


class AddressRefused(errors.ClusterError):
    """A worker's reply names an address that is not its node's."""

    status = 502
    code = "address_refused"


def check_registered(name: str, address: str, http_address: str, source_address: str) -> None:
    """Raises InvalidInput naming the field unless both are `host:port` ("" = not told) of one host.

    The HTTP address may also have a host that the operator lists for the node of this name. Loopback is the
    machine that dials: only a worker that came from this machine may name it. Nobody may name a cloud's
    metadata service or a link-local address, unless the operator lists it for the node.
    """
    own, other = _checked("address", address), _checked("http_address", http_address)
    for field_name, given in (("address", own), ("http_address", other)):
        if given and _is_barred(given.host, name):
            raise errors.InvalidInput(
                f"{field_name} has the host {given.host}, which is link-local or a cloud's metadata service:"
                " set LOCALAI_ADVERTISE_ADDR to the worker's own; an operator can allow it for"
                f" {name!r} by CLUSTER_NODE_HOSTS",
                field=field_name,
            )
        if given and addresses.is_local(given.host) and not _own_machine(source_address):
            raise errors.InvalidInput(
                f"{field_name} has the host {given.host}, which others cannot reach: set"
                f" LOCALAI_ADVERTISE_ADDR to the worker's own, such as {source_address}:{given.port}",
                field=field_name,
            )
    if own and other and other.host != own.host and other.host not in _listed(name):
        raise errors.InvalidInput(
            f"http_address has the host {other.host}, address has {own.host}: an operator can allow it for"
            f" {name!r} by CLUSTER_NODE_HOSTS",
            field="http_address",
        )


def permitted(address: str, *, name: str, registered: tuple[str, ...]) -> bool:
    """Whether `address` is `host:port` with a host of `registered`, or one listed for the node `name`."""
    try:
        host = addresses.parse(address).host
    except ValueError:
        return False
    if _is_barred(host, name):
        return False
    return host in _listed(name) or host in {found.host for one in registered if (found := _parsed(one))}


def bearer(engine_token: str, weak_identity: bool) -> str:
    """What a call to an engine of such a node carries; "" = nothing."""
    return engine_token or (conf.cluster().registration_token if weak_identity else "")


def accept(node_id: UUID, replied: str, *, now: datetime) -> Contact:
    """How to call the engine at the address of a reply.

    Raises AddressRefused, after an event, for one that must not be dialled, and NotFound.
    """
    node = BackendNode.objects.filter(pk=node_id).first()
    if node is None:
        raise errors.NotFound(f"node {node_id} is no longer registered")
    if permitted(replied, name=node.name, registered=(node.address, node.http_address)):
        return Contact(replied, bearer(node.engine_token, node.weak_identity))
    shown = names.plain(replied[:_SHOWN])
    entry = Entry(
        node.id,
        node.name,
        NodeEvent.Kind.ADDRESS_REFUSED,
        actors.WORKER,
        "a reply names another host",
        node.status,
        node.status,
        {"replied": shown, "registered": node.address},
    )
    # Counted, one row a minute: a worker must not be able to fill the timeline.
    with transaction.atomic():
        timeline.record_repeated(entry, at=now)
    raise AddressRefused(
        f"node {node.name} replied with the address {shown!r}, but it registered {node.address!r}"
        " (see CLUSTER_NODE_HOSTS)"
    )


def http_server(node_id: UUID) -> HttpServer:
    """How to call the HTTP server of a node's worker.

    Raises NotFound, NotReachable for a node without such an address (an agent), Conflict for one that is not
    approved, and AddressRefused: anybody who knows the registration token can register an address.
    """
    node = BackendNode.objects.filter(pk=node_id).first()
    if node is None:
        raise errors.NotFound("node not found")
    if node.approved_at is None:
        raise errors.Conflict(f"node {node.name} is not approved; its worker is not asked before it is")
    if not node.http_address:
        raise NotReachable("node has no HTTP address")
    if not permitted(node.http_address, name=node.name, registered=(node.address,)):
        raise AddressRefused(
            f"node {node.name} has registered the HTTP address {names.plain(node.http_address[:_SHOWN])!r},"
            f" whose host is not that of {node.address!r} (see CLUSTER_NODE_HOSTS)"
        )
    contact = Contact(str(addresses.parse(node.http_address)), bearer(node.engine_token, node.weak_identity))
    return HttpServer(node.name, node.status, contact)


def _is_barred(host: str, name: str) -> bool:
    return addresses.is_special(host) and host not in _listed(name)


def _own_machine(source_address: str) -> bool:
    """Whether a call from this address came from the machine of this process."""
    if not source_address or addresses.is_local(source_address):
        return True
    mine = (one.address for found in psutil.net_if_addrs().values() for one in found)
    return source_address in {address.partition("%")[0] for address in mine}


def _checked(field: str, text: str) -> addresses.Address | None:
    if not text:
        return None
    try:
        return addresses.parse(text)
    except ValueError as error:
        raise errors.InvalidInput(f"{field} {error}", field=field) from None


def _parsed(text: str) -> addresses.Address | None:
    try:
        return addresses.parse(text)
    except ValueError:
        return None


def _listed(name: str) -> frozenset[str]:
    return conf.cluster().node_hosts.get(name, frozenset())
