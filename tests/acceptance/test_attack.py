"""No worker can speak for another: five intruders against real servers (attack.py has what they try)."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from localai_cluster.messaging.servers import Credentials
from tests.acceptance import attack
from tests.acceptance.attack import Intruder, Target, Victim
from tests.conftest import eventually
from tests.support.cluster import ADMIN, TOKEN, Cluster, running_cluster

SECURITY = Path(__file__).resolve().parents[2] / "docs" / "security.md"
BEGIN, END = "<!-- attack table -->", "<!-- end of attack table -->"


class Stage:
    """A cluster with a victim that serves a model."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.web = cluster.web()
        cluster.controller()
        cluster.worker("victim", self.web)
        node = cluster.node(self.web, "victim")
        assert node
        self.approve(node["id"])
        eventually(lambda: cluster.embed(self.web).status_code == 200, seconds=60, what="the victim serves")
        ((engine,),) = cluster.rows("SELECT address FROM node_models WHERE state = 'loaded'")
        self.victim = Victim(node["id"], "victim", engine, node["http_address"])
        self.target = Target(self.web.url, cluster.nats.url)

    def approve(self, node_id: str) -> None:
        answer = httpx.post(f"{self.web.url}/api/nodes/{node_id}/approve", headers=ADMIN, timeout=60)
        assert answer.status_code == 200, answer.text

    def register(self, name: str, secret: str) -> dict[str, Any]:
        """A registration as an intruder sends it."""
        body = {"name": name, "address": "127.0.0.1:2", "token": TOKEN}
        own = {"X-LocalAI-Node-Secret": secret, "X-LocalAI-Node-Instance": "1" * 32} if secret else {}
        headers = {"Authorization": f"Bearer {TOKEN}", **own}
        answer = httpx.post(f"{self.web.url}/api/node/register", headers=headers, json=body, timeout=60)
        assert answer.status_code == 201, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def intruder(self, who: str, name: str, secret: str) -> Intruder:
        """A node that an administrator has approved."""
        self.approve(self.register(name, secret)["id"])
        answer = self.register(name, secret)
        credentials = Credentials(answer["nats_jwt"], answer["nats_user_seed"])
        return Intruder(who, secret, answer["id"], "d" * 64, credentials)

    def serves(self) -> bool:
        """Whether the victim is what it was."""
        node = self.cluster.node(self.web, "victim")
        assert node
        return node["status"] == "healthy" and self.cluster.embed(self.web).status_code == 200


def pending(stage: Stage) -> Intruder:
    secret = "a" * 64
    answer = stage.register("pending", secret)
    assert "nats_jwt" not in answer
    return Intruder("a pending node", secret, answer["id"])


def revoked(stage: Stage) -> Intruder:
    made = stage.intruder("a revoked node", "revoked", "b" * 64)
    url = f"{stage.web.url}/api/nodes/{made.node_id}/identity/revoke"
    assert httpx.post(url, headers=ADMIN, json={"reason": "stolen"}, timeout=60).status_code == 200
    ends = "SELECT count(*) FROM bus_credentials WHERE revoked_at IS NOT NULL"
    eventually(lambda: stage.cluster.rows(ends) == [(1,)], what="its credentials are revoked")
    log = stage.cluster.processes[1]
    eventually(
        lambda: "revoked credentials of the message bus" in log.output(), seconds=10, what="NATS knows"
    )
    return made


INTRUDERS: dict[str, Callable[[Stage], Intruder]] = {
    "stranger": lambda stage: Intruder("a stranger with the registration token"),
    "pending": pending,
    "approved": lambda stage: stage.intruder("an approved, malicious node", "malicious", "c" * 64),
    "revoked": revoked,
    "stock": lambda stage: stage.intruder("a stock node, admitted by the token", "stock", ""),
}


@pytest.fixture(scope="module")
def stage() -> Any:
    with running_cluster(
        LOCALAI_AUTO_APPROVE_NODES="false",
        LOCALAI_ALLOW_SHARED_TOKEN_NODES="true",
        CLUSTER_FAILED_TOKENS="100000",
        LOCALAI_METRICS_TOKEN="scraper-token-of-the-test-cluster",
        LOCALAI_WORKER_METRICS_TOKEN="scraper-token-of-a-test-worker",
    ) as cluster:
        yield Stage(cluster)


@pytest.mark.rule("nats-9", "nats-9.2", "T-JWT-3", "T-JWT-4", "W35")
def test_no_one_speaks_for_another_node(stage: Stage) -> None:
    """Item 20 of the measured failures, and the attack that once came back with a forged vector."""
    played = {}
    for make in INTRUDERS.values():
        intruder = make(stage)
        played[intruder.who] = attack.play(intruder, stage.victim, stage.target)
        assert stage.serves()
    lines = [["tried", *played], ["---"] * (1 + len(played))]
    lines += [[what, *(refused[what] for refused in played.values())] for what in attack.ATTEMPTS]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    written = SECURITY.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0].strip()
    assert written == table, f"docs/security.md does not say what happens; it must be:\n{table}"


def test_a_stranger_s_wrong_secret_gains_nothing_from_a_right_node_id(stage: Stage) -> None:
    """The same with a guessed secret: counted as a wrong one, of any node."""
    guess = Intruder("a guesser", "9" * 64)
    assert attack.self_service(guess, stage.victim, stage.target)
    assert attack.infer(replace(guess, secret="0" * 64), stage.victim, stage.target)
