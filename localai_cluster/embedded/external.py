"""Looks at the operator's own PostgreSQL, NATS or Redis before anything starts: one clear line if it is away.

No message holds a URL, since URLs hold credentials.
"""

import json
import socket
from collections.abc import Callable
from urllib.parse import unquote, urlsplit

import psycopg
import redis

from localai_cluster.embedded.places import Trouble

SECONDS = 5


def check_database(url: str) -> None:
    """`Trouble` unless a connection can be made."""
    try:
        psycopg.connect(url, connect_timeout=SECONDS).close()
    except psycopg.Error as error:
        raise Trouble(
            f"DATABASE_URL: PostgreSQL does not let us in: {_one_line(error)}.",
            "Start it or mend the URL; without DATABASE_URL an embedded one is used.",
        ) from None


def check_redis(url: str) -> None:
    """`Trouble` unless it answers PING."""
    try:
        with redis.Redis.from_url(url, socket_connect_timeout=SECONDS, socket_timeout=SECONDS) as client:
            client.ping()
    except (redis.RedisError, ValueError, OSError) as error:
        raise Trouble(
            f"REDIS_URL: Redis does not let us in: {_one_line(error)}.",
            "Start it or mend the URL; without REDIS_URL an embedded one is used.",
        ) from None


def check_nats(url: str) -> None:
    """`Trouble` unless one of the servers named answers and takes the credential."""
    complaint = "no server named"
    for part in url.split(","):
        try:
            complaint = _knock(part.strip())
        except (OSError, ValueError) as error:
            complaint = _one_line(error)
        if not complaint:
            return
    raise Trouble(
        f"LOCALAI_NATS_URL: NATS does not let us in: {complaint}.",
        "Start it or mend the URL; without LOCALAI_NATS_URL an embedded one is used.",
    )


def _knock(url: str) -> str:
    """Says hello in NATS's protocol; returns what is wrong, or nothing."""
    parts = urlsplit(url)
    if parts.scheme not in ("nats", "tls") or not parts.hostname:
        return "it must read nats://user:password@host:4222"
    with socket.create_connection((parts.hostname, parts.port or 4222), timeout=SECONDS) as link:
        stream = link.makefile("rwb")
        greeting = stream.readline()
        if not greeting.startswith(b"INFO "):
            return "what answers there is not NATS"
        if parts.scheme == "tls" or json.loads(greeting[5:]).get("tls_required"):
            return ""  # the handshake is the clients' business; a server is there
        user, password = unquote(parts.username or ""), parts.password
        login = {"auth_token": user} if password is None else {"user": user, "pass": unquote(password)}
        hello = json.dumps({"verbose": False, "pedantic": False, **login})
        stream.write(f"CONNECT {hello}\r\nPING\r\n".encode())
        stream.flush()
        answer = stream.readline().decode(errors="replace").strip()
        return "" if answer.startswith("PONG") else answer.removeprefix("-ERR ").strip("'") or "it hung up"


CHECKS: dict[str, Callable[[str], None]] = {
    "DATABASE_URL": check_database,
    "REDIS_URL": check_redis,
    "LOCALAI_NATS_URL": check_nats,
}


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text.rstrip(".")[:300]
