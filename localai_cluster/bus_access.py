"""Access of the server processes to the message bus, and the bus URL for workers.

The account key mints credentials of nodes at their registration, and those of our own processes, which keep
them in memory. With the keys of the operator and of the system account, a second connection pushes
revocations (`nodes/registry/bus_credentials.py`).
"""

from dataclasses import replace
from functools import lru_cache

from localai_cluster.kit import clock, conf, nkeys
from localai_cluster.kit.nkeys import KeyPair, Role
from localai_cluster.messaging.servers import Credentials, Servers, mint_service, parse_url, url_for_worker


@lru_cache(maxsize=8)
def _key_pair(seed: str, role: Role) -> KeyPair:
    return nkeys.from_seed(seed, role)


def account_key() -> KeyPair:
    """Return the cluster account's key pair on the bus. Raise ValueError if no seed is set.

    `manage.py check` reports a missing seed.
    """
    return _key_pair(conf.cluster().nats_account_seed, "account")


def operator_key() -> KeyPair | None:
    """Return the key pair of the bus operator; None unless its seed and the system account's seed are set."""
    cluster = conf.cluster()
    has_keys = cluster.nats_operator_seed and cluster.nats_system_seed
    return _key_pair(cluster.nats_operator_seed, "operator") if has_keys else None


def service_servers(name: str) -> Servers:
    """Return the servers, with the credentials that a server process connects with."""
    cluster = conf.cluster()
    if cluster.nats_service_jwt:
        credentials = Credentials.of(cluster.nats_service_jwt, cluster.nats_service_seed)
    else:
        credentials = mint_service(account_key(), name, now=clock.now().timestamp())
    return replace(parse_url(cluster.nats_url), credentials=credentials, tls=cluster.nats_tls)


def system_account_servers(name: str) -> Servers:
    """Return the servers, with credentials of the system account. The system account's seed must be set."""
    cluster = conf.cluster()
    credentials = mint_service(
        _key_pair(cluster.nats_system_seed, "account"), name, now=clock.now().timestamp()
    )
    return replace(parse_url(cluster.nats_url), credentials=credentials, tls=cluster.nats_tls)


def worker_url(own_host: str) -> str:
    """Return the URL of the bus for a worker that has reached this server under the host `own_host`."""
    cluster = conf.cluster()
    return cluster.worker_nats_url or url_for_worker(cluster.nats_url, own_host)
