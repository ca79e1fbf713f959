"""The address of the bus and the login for it, parsed from a URL or built from a registration."""

import ssl
from dataclasses import dataclass, field
from urllib.parse import unquote, urlsplit

from localai_cluster.kit.addresses import is_local
from localai_cluster.kit.errors import InvalidInput
from localai_cluster.messaging.credentials import Credentials

DEFAULT_PORT = 4222
LONGEST_URL = 2048


@dataclass(frozen=True)
class Servers:
    """Servers of one bus, and the login: a JWT if there is one, else user and password, else a token.

    With a TLS context the connection is always encrypted, or it fails.
    """

    urls: tuple[str, ...]
    user: str = ""
    password: str = field(default="", repr=False)
    token: str = field(default="", repr=False)
    credentials: Credentials | None = None
    tls: ssl.SSLContext | None = None

    @property
    def proves_itself(self) -> bool:
        """True if there is a login: credentials, a user or a token."""
        return bool(self.credentials or self.user or self.token)


def parse_url(text: str) -> Servers:
    """Parse `nats://user:password@host:port[,…]`; the login is taken from the first URL.

    Raise InvalidInput, which quotes nothing.
    """
    wrong = InvalidInput("not a NATS URL such as nats://host:4222", field="url")
    if len(text) > LONGEST_URL:
        raise wrong
    try:
        parts = [
            urlsplit(part.strip() if "://" in part else f"nats://{part.strip()}")
            for part in text.split(",")
            if part.strip()
        ]
        ports = [part.port for part in parts]
    except ValueError:
        raise wrong from None
    if not parts or 0 in ports:
        raise wrong
    urls = []
    for part in parts:
        if part.scheme not in ("nats", "tls") or not part.hostname or part.path.strip("/") or part.query:
            raise wrong
        urls.append(f"{part.scheme}://{part.netloc.rpartition('@')[2]}")
    user, password = unquote(parts[0].username or ""), parts[0].password
    if user and password is None:
        return Servers(tuple(urls), token=user)
    return Servers(tuple(urls), user=user, password=unquote(password or ""))


def url_for_worker(configured: str, own_host: str) -> str:
    """Return the URL that a worker dials: `configured` without credentials.

    A host that means only this machine is replaced by `own_host`, the name under which the worker has just
    reached this server. An empty or loopback `own_host` replaces nothing.
    """
    urls = []
    for url in parse_url(configured).urls:
        scheme, _, authority = url.partition("://")
        parts = urlsplit(url)
        if own_host and not is_local(own_host) and is_local(parts.hostname or ""):
            bracketed = f"[{own_host}]" if ":" in own_host else own_host
            authority = f"{bracketed}:{parts.port or DEFAULT_PORT}"
        urls.append(f"{scheme}://{authority}")
    return ",".join(urls)
