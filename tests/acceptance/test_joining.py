"""Join tokens over two real web processes: racers, and one bad claim among many good ones."""

from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import Any

import httpx
import pytest

from localai_cluster.accounts.principals import hash_secret
from tests.acceptance.conftest import Shared
from tests.conftest import eventually
from tests.support.cluster import ADMIN, TOKEN, Cluster


def made(shared: Shared, **wanted: Any) -> str:
    """A join token."""
    answer = shared.cluster.post(shared.webs[0], "/api/join-tokens", wanted)
    return str(answer.raise_for_status().json()["token"])


def register(url: str, name: str, token: str) -> httpx.Response:
    """An agent's registration: nothing is ever placed on it."""
    return httpx.post(
        f"{url}/api/node/register",
        json={"name": name, "node_type": "agent", "token": token},
        headers={"Authorization": f"Bearer {token}", "X-LocalAI-Node-Secret": hash_secret(name)},
        timeout=120,
    )


@pytest.fixture
def gone_afterwards(shared: Shared) -> Any:
    """Removes the nodes of a test."""
    yield
    for node in shared.cluster.get(shared.webs[0], "/api/nodes").json():
        if node["name"].startswith("join-race"):
            httpx.delete(f"{shared.webs[0].url}/api/nodes/{node['id']}", headers=ADMIN, timeout=120)


def at_once(shared: Shared, *calls: tuple[str, str]) -> list[httpx.Response]:
    """Registers these names with these tokens at once, by turns at both web processes."""
    with ThreadPoolExecutor(len(calls)) as threads:
        waiting = [
            threads.submit(register, shared.webs[number % 2].url, name, token)
            for number, (name, token) in enumerate(calls)
        ]
    return [one.result() for one in waiting]


@pytest.mark.usefixtures("gone_afterwards")
def test_forty_machines_race_for_five_uses(shared: Shared) -> None:
    """Also where they share a transaction: five join, the others are told why, the count is right."""
    token = made(shared, uses=5, note="race")
    answers = at_once(shared, *[(f"join-race-{number}", token) for number in range(40)])
    assert sorted(answer.status_code for answer in answers) == [201] * 5 + [401] * 35
    said = {answer.json()["error"] for answer in answers if answer.status_code == 401}
    assert all("used up" in text for text in said)
    listed = shared.cluster.get(shared.webs[1], "/api/join-tokens").json()
    assert next(one for one in listed if one["note"] == "race")["uses"] == 5
    nodes = shared.cluster.get(shared.webs[1], "/api/nodes").json()
    assert sum(node["name"].startswith("join-race") for node in nodes) == 5


@pytest.mark.usefixtures("gone_afterwards")
def test_a_token_that_does_not_suffice_hurts_no_one_else(shared: Shared) -> None:
    """Registrations that arrive together share a transaction; those with the other token all join."""
    token = made(shared)
    scarce = [(f"join-race-s{number}", token) for number in range(8)]
    plenty = [(f"join-race-p{number}", TOKEN) for number in range(24)]
    groups = zip(plenty[::3], scarce, plenty[1::3], plenty[2::3], strict=True)
    answers = at_once(shared, *chain.from_iterable(groups))
    joined = [answer.json()["name"] for answer in answers if answer.status_code == 201]
    assert sum(name.startswith("join-race-p") for name in joined) == 24
    assert sum(name.startswith("join-race-s") for name in joined) == 1


def test_a_machine_that_joined_serves_and_restarts_after_the_token_is_revoked(empty: Cluster) -> None:
    """Its engines need no registration token, and its environment still holds what it joined with."""
    web = empty.web()
    empty.controller()
    token = empty.post(web, "/api/join-tokens", {}).raise_for_status().json()
    environment = {"LOCALAI_REGISTRATION_TOKEN": token["token"]}
    first = empty.worker("joined", web, **environment)
    node = empty.node(web, "joined")
    assert node is not None
    if node["status"] == "pending":
        empty.post(web, f"/api/nodes/{node['id']}/approve").raise_for_status()
    assert empty.embed(web, "a cat", model="echo").status_code == 200
    gone = httpx.delete(f"{web.url}/api/join-tokens/{token['id']}", headers=ADMIN, timeout=120)
    assert gone.status_code == 200
    first.child.terminate()
    first.child.wait(60)
    empty.worker("joined", web, **environment)
    eventually(
        lambda: (empty.node(web, "joined") or {})["status"] == "healthy", seconds=60, what="it is back"
    )
    assert (empty.node(web, "joined") or {})["id"] == node["id"]
