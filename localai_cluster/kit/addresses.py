"""Addresses from clients: only `host:port` is accepted, and hosts are normalized for comparison.

A worker reports the addresses on which it and its engines listen, and the product dials these addresses.
`parse` refuses everything but `host:port`: a socket's path (`unix:…`), another scheme (`dns:…`), a path, a
list. Spellings of one host are equal: case, a trailing dot, the forms of an IPv6 address. Only
`local_address` resolves a name.
"""

import contextlib
import ipaddress
import re
import socket
from dataclasses import dataclass
from urllib.parse import urlsplit

MAX_HOST_LENGTH = 253
"""Maximum characters of a host name; DNS resolves no longer one."""
MAX_URL_LENGTH = 512
EXPECTED_ADDRESS_FORM = (
    "host:port: a host name or IP address (an IPv6 address in brackets), and a port from 1 to 65535"
)
_HOST_LABEL_PATTERN = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?\Z", re.ASCII)
_PORT_PATTERN = re.compile(r"[1-9][0-9]{0,4}\Z", re.ASCII)


@dataclass(frozen=True)
class Address:
    """A listening address. Equal spellings give equal addresses."""

    host: str
    """Host as `host` normalizes it: without the brackets of an IPv6 address."""
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def target(self) -> str:
        """The address as a gRPC target with an explicit scheme, so that no client's text can set it."""
        if ":" in self.host:
            return f"ipv6:{self}"
        return f"ipv4:{self}" if is_ip_address(self.host) else f"dns:///{self}"


def parse(text: str) -> Address:
    """Parse `host:port`. Raise ValueError, whose message completes a sentence about the text."""
    name, colon, number = text.rpartition(":")
    if not colon or not _PORT_PATTERN.match(number) or int(number) > 65535:
        raise ValueError(f"is not {EXPECTED_ADDRESS_FORM}")
    if ":" in name and not (name.startswith("[") and name.endswith("]")):
        raise ValueError(f"is not {EXPECTED_ADDRESS_FORM}")
    try:
        return Address(host(name), int(number))
    except ValueError:
        raise ValueError(f"is not {EXPECTED_ADDRESS_FORM}") from None


def host(text: str) -> str:
    """Normalize a host name or IP address; an IPv6 address may have brackets. Raise ValueError."""
    if text.startswith("[") or ":" in text:
        number = text[1:-1] if text.startswith("[") and text.endswith("]") else text
        if "%" in number:
            raise ValueError("is an address of one link only")
        address = ipaddress.IPv6Address(number)
        return str(address.ipv4_mapped or address)
    name = text.lower().removesuffix(".")
    labels = name.split(".")
    if (
        not text.isascii()
        or len(name) > MAX_HOST_LENGTH
        or not all(_HOST_LABEL_PATTERN.match(label) for label in labels)
    ):
        raise ValueError("is neither a host name nor an IP address")
    # Name resolution accepts several notations of numbers (`127.1`, `0x7f.1`): we accept only the plain one.
    if labels[-1].isdigit() or labels[-1].startswith("0x"):
        return str(ipaddress.IPv4Address(name))
    return name


def is_loopback(host: str) -> bool:
    """Return True if `host`, a name or an IP address, is reachable only from this machine."""
    try:
        number = ipaddress.ip_address(host)
    except ValueError:
        name = host.lower().removesuffix(".")
        return name == "localhost" or name.endswith(".localhost")
    return (getattr(number, "ipv4_mapped", None) or number).is_loopback


def is_local(host: str) -> bool:
    """Return True if this host means the dialling machine itself: loopback or the unspecified address."""
    with contextlib.suppress(ValueError):
        if ipaddress.ip_address(host).is_unspecified:
            return True
    return is_loopback(host)


_METADATA_HOST_NAMES = frozenset(
    {"metadata", "metadata.goog", "metadata.google.internal", "instance-data", "instance-data.ec2.internal"}
)
_METADATA_IP_ADDRESSES = frozenset(
    map(
        ipaddress.ip_address,
        (
            *("100.100.100.200", "168.63.129.16", "192.0.0.192"),
            *("fd00:ec2::254", "fd00:ec2::23", "fd20:ce::254", "fd00:c1::a9fe:a9fe"),
        ),
    )
)
_NAT64_NETWORK = ipaddress.IPv6Network("64:ff9b::/96")


def is_special(host: str) -> bool:
    """Return True if this host cannot be a node: a cloud's metadata service, link-local or multicast.

    A metadata service gives its secrets to any caller on the machine, such as this server.
    """
    try:
        number = ipaddress.ip_address(host)
    except ValueError:
        return host in _METADATA_HOST_NAMES
    if number in _NAT64_NETWORK:
        number = ipaddress.IPv4Address(int(number) & 0xFFFFFFFF)
    return number.is_link_local or number.is_multicast or number in _METADATA_IP_ADDRESSES


def is_public(number: str) -> bool:
    """Return True if this IP address is on the Internet: not private, loopback, shared or reserved.

    An address that embeds another one is public if the embedded one is (IPv4-mapped, NAT64), or never (6to4,
    Teredo).
    """
    address = ipaddress.ip_address(number)
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return is_public(str(address.ipv4_mapped))
        if address in _NAT64_NETWORK:
            return is_public(str(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)))
        if address.sixtofour is not None or address.teredo is not None or address.is_site_local:
            return False
    return address.is_global and not (address.is_multicast or address.is_reserved or is_special(number))


def host_of(text: str) -> str:
    """Return the host of a `host:port`; return any other text unchanged."""
    try:
        return parse(text).host
    except ValueError:
        return text


def same_host(host_a: str, host_b: str) -> bool:
    """Return True if both texts name the same host. All forms of loopback are the same host."""
    try:
        host_a, host_b = host(host_a), host(host_b)
    except ValueError:
        return host_a == host_b
    return host_a == host_b or (is_local(host_a) and is_local(host_b))


def is_same_address(address_a: str, address_b: str) -> bool:
    """Return True if both texts are the same address. Texts that are no addresses are compared literally."""
    try:
        return parse(address_a) == parse(address_b)
    except ValueError:
        return address_a == address_b


def is_ip_address(host: str) -> bool:
    """Return True if this normalized host is an IP address, False if it is a name."""
    return ":" in host or host.rpartition(".")[2].isdigit()


def split_host_port(text: str) -> tuple[str, int]:
    """Split `host:port`; an IPv6 host has brackets. Raise ValueError."""
    host, separator, port = text.rpartition(":")
    if not separator or not port.isascii() or not port.isdigit() or not 1 <= int(port) <= 65535:
        raise ValueError("not host:port")
    if ":" in host and not (host.startswith("[") and host.endswith("]")):
        raise ValueError("not host:port (write an IPv6 address in brackets)")
    return host, int(port)


def parse_base_url(text: str) -> str:
    """Return the base URL of a web server without a trailing slash. Raise ValueError."""
    plain = text.isascii() and text.isprintable() and " " not in text and len(text) <= MAX_URL_LENGTH
    try:
        parts = urlsplit(text if plain else "")
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        usable = False
    if not usable or parts.username is not None or parts.query or parts.fragment:
        raise ValueError("not a base URL such as http://192.0.2.10:8080")
    return text.rstrip("/")


def local_address(url: str) -> str:
    """Return this machine's address on the route to the server of `url`; an IPv6 address has brackets.

    Nothing is sent: connecting a UDP socket only selects the route. Without a route or a name server the
    result is the host name.
    """
    with contextlib.suppress(OSError, ValueError):
        parts = urlsplit(url)
        target = (parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80))
        for family, _, _, _, address in socket.getaddrinfo(*target, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(address)
                own_address = str(probe.getsockname()[0]).partition("%")[0]
                return f"[{own_address}]" if ":" in own_address else own_address
    return socket.gethostname() or "localhost"
