"""Checks the operator's own PostgreSQL, NATS or Redis before anything starts: one clear line if one is down.

Messages never contain URLs, since URLs contain credentials.
"""

import json
import socket
from collections.abc import Callable
from urllib.parse import unquote, urlsplit

import psycopg
import redis

from localai_cluster.embedded.resources import SetupError

SECONDS = 5


def check_database(url: str) -> None:
    """Raises `SetupError` unless a connection succeeds."""
    try:
        psycopg.connect(url, connect_timeout=SECONDS).close()
    except psycopg.Error as error:
        raise SetupError(
            f"DATABASE_URL: cannot connect to PostgreSQL: {_one_line(error)}.",
            "Start it or fix the URL, or unset DATABASE_URL to use the bundled PostgreSQL.",
        ) from None


def check_redis(url: str) -> None:
    """Raises `SetupError` unless it answers PING."""
    try:
        with redis.Redis.from_url(url, socket_connect_timeout=SECONDS, socket_timeout=SECONDS) as client:
            client.ping()
    except (redis.RedisError, ValueError, OSError) as error:
        raise SetupError(
            f"REDIS_URL: cannot connect to Redis: {_one_line(error)}.",
            "Start it or fix the URL, or unset REDIS_URL to use the bundled Valkey.",
        ) from None


def check_nats(url: str) -> None:
    """Raises `SetupError` unless one of the servers answers and accepts the credentials."""
    complaint = "the URL names no server"
    for part in url.split(","):
        try:
            complaint = _connect(part.strip())
        except (OSError, ValueError) as error:
            complaint = _one_line(error)
        if not complaint:
            return
    raise SetupError(
        f"LOCALAI_NATS_URL: cannot connect to NATS: {complaint}.",
        "Start it or fix the URL, or unset LOCALAI_NATS_URL to use the bundled NATS.",
    )


def _connect(url: str) -> str:
    """Opens a NATS connection; returns what is wrong, or an empty text."""
    parts = urlsplit(url)
    if parts.scheme not in ("nats", "tls") or not parts.hostname:
        return "the URL must have the form nats://user:password@host:4222"
    with socket.create_connection((parts.hostname, parts.port or 4222), timeout=SECONDS) as link:
        stream = link.makefile("rwb")
        greeting = stream.readline()
        if not greeting.startswith(b"INFO "):
            return "the server there is not NATS"
        if parts.scheme == "tls" or json.loads(greeting[5:]).get("tls_required"):
            return ""  # a server is there; clients do the TLS handshake
        user, password = unquote(parts.username or ""), parts.password
        login = {"auth_token": user} if password is None else {"user": user, "pass": unquote(password)}
        hello = json.dumps({"verbose": False, "pedantic": False, **login})
        stream.write(f"CONNECT {hello}\r\nPING\r\n".encode())
        stream.flush()
        answer = stream.readline().decode(errors="replace").strip()
        return (
            ""
            if answer.startswith("PONG")
            else answer.removeprefix("-ERR ").strip("'") or "it closed the connection"
        )


CHECKS: dict[str, Callable[[str], None]] = {
    "DATABASE_URL": check_database,
    "REDIS_URL": check_redis,
    "LOCALAI_NATS_URL": check_nats,
}


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text.rstrip(".")[:300]
