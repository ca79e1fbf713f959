"""System checks of the settings (`manage.py check`). Each wrong setting has an id and a hint."""

from typing import Any
from urllib.parse import urlsplit

from django.conf import settings
from django.core.checks import CheckMessage, Error, Tags, Warning, register

from localai_cluster.kit import addresses, conf
from localai_cluster.kit.env import is_weak_secret
from localai_cluster.messaging.servers import Credentials


@register(Tags.security)
def check_environment(app_configs: Any, **kwargs: Any) -> list[CheckMessage]:
    """Report cluster.E001: a variable has an invalid value."""
    return [
        Error(f"{problem.setting}: {problem.message}", hint=problem.hint, id="cluster.E001")
        for problem in settings.CLUSTER_PROBLEMS
    ]


@register(Tags.security)
def check_required(app_configs: Any, **kwargs: Any) -> list[CheckMessage]:
    """Report cluster.E002: a required setting is missing."""
    cluster = conf.cluster()
    required = {
        "DATABASE_URL": cluster.database_url,
        "REDIS_URL": cluster.redis_url,
        "LOCALAI_NATS_URL": cluster.nats_url,
        "LOCALAI_NATS_ACCOUNT_SEED": cluster.nats_account_seed,
        "LOCALAI_REGISTRATION_TOKEN": cluster.registration_token,
        "SECRET_KEY": settings.SECRET_KEY if not settings.SECRET_KEY_IS_STAND_IN else "",
    }
    return [
        Error(
            f"{name} is not set.",
            hint=f"Set {name} (or {name}_FILE); `make run` generates one.",
            id="cluster.E002",
        )
        for name, value in required.items()
        if not value
    ]


@register(Tags.security)
def check_urls(app_configs: Any, **kwargs: Any) -> list[CheckMessage]:
    """Report cluster.E003: a URL has an unsupported scheme, or no valid host or port."""
    cluster = conf.cluster()
    urls = {
        "DATABASE_URL": (cluster.database_url, ("postgresql", "postgres")),
        "REDIS_URL": (cluster.redis_url, ("redis", "rediss", "unix")),
        "LOCALAI_NATS_URL": (cluster.nats_url, ("nats", "tls")),
        "CLUSTER_WORKER_NATS_URL": (cluster.worker_nats_url, ("nats", "tls")),
    }
    wrong = {name: _url_problem(url, schemes) for name, (url, schemes) in urls.items() if url}
    return [
        Error(f"{name} {reason}.", hint=f"See docs/configuration.md, {name}.", id="cluster.E003")
        for name, reason in wrong.items()
        if reason
    ]


def _url_problem(url: str, schemes: tuple[str, ...]) -> str:
    # The URL is not repeated, since it may contain a password.
    parts = urlsplit(url.split(",")[0])
    if parts.scheme not in schemes:
        return f"must start with one of: {', '.join(scheme + '://' for scheme in schemes)}"
    try:
        port = parts.port
    except ValueError:
        return "has a port that is not between 1 and 65535"
    if parts.scheme in ("nats", "tls", "redis", "rediss") and not parts.hostname:
        return "has no host"
    return "has port 0" if port == 0 else ""


@register(Tags.security)
def check_open_to_others(app_configs: Any, **kwargs: Any) -> list[CheckMessage]:
    """Report cluster.E004: HOST exposes the cluster to other machines while a secret is weak."""
    cluster = conf.cluster()
    if addresses.is_loopback(cluster.host):
        return []
    secrets = {
        "LOCALAI_REGISTRATION_TOKEN": [cluster.registration_token],
        "LOCALAI_API_KEY": cluster.api_keys,
        "LOCALAI_METRICS_TOKEN": [cluster.metrics_token],
        "SECRET_KEY": [settings.SECRET_KEY],
    }
    return [
        Error(
            f"{name} is short or easily guessed, and HOST={cluster.host} exposes the cluster.",
            hint="Use a long random value, or let `make run` generate one.",
            id="cluster.E004",
        )
        for name, values in secrets.items()
        if any(value and is_weak_secret(value) for value in values)
    ]


@register(Tags.security)
def check_weak_identity(app_configs: Any, **kwargs: Any) -> list[CheckMessage]:
    """Report cluster.W001: nodes with only the shared token are admitted."""
    if not conf.cluster().allow_shared_token_nodes:
        return []
    return [
        Warning(
            "LOCALAI_ALLOW_SHARED_TOKEN_NODES admits workers without an identity of their own.",
            hint="Use it only while the cluster has stock workers.",
            id="cluster.W001",
        )
    ]


@register(Tags.security)
def check_keyless(app_configs: Any, **kwargs: Any) -> list[CheckMessage]:
    """Report cluster.W005: inference without a key is open to networks."""
    networks = conf.cluster().keyless_networks
    if not networks:
        return []
    return [
        Warning(
            f"CLUSTER_KEYLESS_NETWORKS admits {', '.join(map(str, networks))} to inference without a key.",
            hint="Everybody there can use the models. Name the smallest networks, or give programs keys.",
            id="cluster.W005",
        )
    ]


@register(Tags.security)
def check_bus_credentials(app_configs: Any, **kwargs: Any) -> list[CheckMessage]:
    """Report cluster.E005 and W003: inconsistent bus credentials, settings without effect."""
    cluster = conf.cluster()
    messages: list[CheckMessage] = []
    if not (cluster.require_auth and cluster.nats_require_auth):
        messages.append(
            Warning(
                "LOCALAI_DISTRIBUTED_REQUIRE_AUTH and LOCALAI_NATS_REQUIRE_AUTH cannot be switched off.",
                hint="Remove them: this cluster always needs a registration token and NATS credentials.",
                id="cluster.W003",
            )
        )
    if bool(cluster.nats_service_jwt) != bool(cluster.nats_service_seed):
        messages.append(
            Error(
                "LOCALAI_NATS_SERVICE_JWT and LOCALAI_NATS_SERVICE_SEED must be set together.",
                hint="Set both, or neither: the server processes then mint their own credentials.",
                id="cluster.E005",
            )
        )
    elif cluster.nats_service_jwt:
        try:
            Credentials.of(cluster.nats_service_jwt, cluster.nats_service_seed)
        except ValueError as error:
            messages.append(
                Error(
                    f"LOCALAI_NATS_SERVICE_JWT: {error}.",
                    hint="Use the JWT and the seed of one NATS user.",
                    id="cluster.E005",
                )
            )
    return messages
