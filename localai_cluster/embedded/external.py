"""Checks the operator's own PostgreSQL, NATS or Redis before anything starts: one clear line if one is down.

Messages never contain URLs, since URLs contain credentials.
"""

import asyncio
import ssl
from collections.abc import Callable
from dataclasses import replace

import psycopg
import redis

from localai_cluster.embedded.resources import SetupError
from localai_cluster.kit import clock, nkeys
from localai_cluster.kit.errors import InvalidInput
from localai_cluster.messaging import nats
from localai_cluster.messaging.credentials import mint_service
from localai_cluster.messaging.servers import parse_url

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


def check_nats(url: str, account_seed: str, tls: ssl.SSLContext | None) -> None:
    """Raises `SetupError` unless one of the servers takes a user of the account."""
    problem = "LOCALAI_NATS_URL"
    try:
        credentials = mint_service(
            nkeys.from_seed(account_seed, "account"), "check", now=clock.now().timestamp()
        )
        complaint = asyncio.run(nats.complaint(replace(parse_url(url), credentials=credentials, tls=tls)))
    except InvalidInput as error:
        complaint = error.message
    except ValueError as error:
        problem, complaint = "LOCALAI_NATS_ACCOUNT_SEED", str(error)
    if complaint:
        raise SetupError(
            f"{problem}: cannot connect to NATS: {complaint}.",
            "Start it, fix the URL and set LOCALAI_NATS_ACCOUNT_SEED to a key of its account, or unset "
            "LOCALAI_NATS_URL to use the bundled NATS.",
        )


CHECKS: dict[str, Callable[[str], None]] = {
    "DATABASE_URL": check_database,
    "REDIS_URL": check_redis,
}


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text.rstrip(".")[:300]
