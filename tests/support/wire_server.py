"""The server that `tests/wire` starts: a whole cluster, described on one line of JSON, until SIGTERM."""

import json
import os
import signal
import threading

GIVEN = (
    "LOCALAI_MODELS_PATH",
    "LOCALAI_BACKEND_GALLERIES",
    "LOCALAI_NATS_BACKEND_INSTALL_TIMEOUT",
    "LOCALAI_NATS_MODEL_LOAD_TIMEOUT",
    "LOCALAI_NATS_WORKER_JWT_TTL",
)
"""Settings of the suite that are passed on; the tests' own environment has other values."""
OURS = {
    "LOCALAI_AUTO_APPROVE_NODES": "false",
    # The suite's workers know the registration token only.
    "LOCALAI_ALLOW_SHARED_TOKEN_NODES": "true",
    "CLUSTER_NODE_STALE_AFTER": "60s",
}


def main() -> None:
    """Start everything, print the addresses, and wait."""
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    given = {name: os.environ[name] for name in GIVEN if name in os.environ}
    # Not before: the tests' own settings replace those in the environment.
    from tests.support.cluster import ADMIN_KEY, TOKEN, running_cluster

    with running_cluster(**OURS, **given) as cluster:
        web = cluster.web()
        cluster.controller()
        cluster.tasks()
        told = {"url": web.url, "nats": cluster.nats.url, "token": TOKEN, "key": ADMIN_KEY}
        print(json.dumps(told), flush=True)
        ended.wait()


if __name__ == "__main__":
    main()
