"""How the server processes come onto the message bus, and what they tell workers about it.

The account key mints: credentials of nodes at their registration, and those of our own processes, which keep
them in memory. With the keys of the operator and of the system account, a second connection pushes
revocations (`nodes/reconcilers/revocations.py`).
"""

from dataclasses import replace
from functools import lru_cache

from localai_cluster import clock, conf
from localai_cluster.messaging import nkeys
from localai_cluster.messaging.credentials import Credentials, mint_service
from localai_cluster.messaging.nkeys import KeyPair, Role
from localai_cluster.messaging.servers import Servers, parse_url, url_for_worker


@lru_cache(maxsize=8)
def _key(seed: str, role: Role) -> KeyPair:
    return nkeys.from_seed(seed, role)


def account() -> KeyPair:
    """The cluster's account on the bus; ValueError without a seed (`manage.py check` says so at start)."""
    return _key(conf.cluster().nats_account_seed, "account")


def operator() -> KeyPair | None:
    """The operator of the bus, if it is ours to use."""
    cluster = conf.cluster()
    known = cluster.nats_operator_seed and cluster.nats_system_seed
    return _key(cluster.nats_operator_seed, "operator") if known else None


def service(name: str) -> Servers:
    """Where and as whom a server process dials."""
    cluster = conf.cluster()
    if cluster.nats_service_jwt:
        credentials = Credentials.of(cluster.nats_service_jwt, cluster.nats_service_seed)
    else:
        credentials = mint_service(account(), name, now=clock.now().timestamp())
    return replace(parse_url(cluster.nats_url), credentials=credentials, tls=cluster.nats_tls)


def system(name: str) -> Servers:
    """The same for the system account; needs an operator."""
    cluster = conf.cluster()
    credentials = mint_service(_key(cluster.nats_system_seed, "account"), name, now=clock.now().timestamp())
    return replace(parse_url(cluster.nats_url), credentials=credentials, tls=cluster.nats_tls)


def worker_url(own_host: str) -> str:
    """The URL that a worker dials which has reached this server as `own_host`."""
    cluster = conf.cluster()
    return cluster.worker_nats_url or url_for_worker(cluster.nats_url, own_host)
