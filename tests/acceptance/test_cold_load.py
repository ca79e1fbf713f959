"""The main job and the cold load, through public interfaces, with real processes."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import websockets

from localai_cluster.messaging.messages import process_key
from localai_cluster.rpc.client import BackendClient
from tests.acceptance.conftest import Shared
from tests.conftest import eventually
from tests.support.cluster import ADMIN, ADMIN_KEY, ROOT, Cluster, Process, engines_of

DEMO = json.loads((ROOT / "examples" / "demo.json").read_text())


def write_model(cluster: Cluster, name: str, backend: str = "echo", **options: Any) -> None:
    """A definition beside the seeded ones; `options` go to the engine."""
    lines = [f"name: {name}", f"backend: {backend}", "parameters:", f"  model: {name}", "embeddings: true"]
    if options:
        lines += ["options:", *(f'  - "{key}:{value}"' for key, value in options.items())]
    draft = cluster.models / f"{name}.draft"
    draft.write_text("\n".join(lines) + "\n")
    draft.rename(cluster.models / f"{name}.yaml")
    webs = [process for process in cluster.processes if process.name == "web" and process.alive]
    eventually(lambda: all(name in served(cluster, web) for web in webs), what=f"{name} is served")


def served(cluster: Cluster, web: Process) -> set[str]:
    """The models a web process offers."""
    return {entry["id"] for entry in cluster.get(web, "/v1/models").json()["data"]}


def cosine(one: list[float], other: list[float]) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True))


async def many(web: Process, count: int, model: str) -> list[httpx.Response]:
    limits = httpx.Limits(max_connections=count)
    async with httpx.AsyncClient(base_url=web.url, headers=ADMIN, timeout=120, limits=limits) as client:
        body = {"model": model, "input": "hello there"}
        return await asyncio.gather(*(client.post("/v1/embeddings", json=body) for _ in range(count)))


def engine_calls(cluster: Cluster, model: str) -> int:
    """How often LoadModel was called at the replica, told by the engine itself."""
    ((address, token),) = cluster.rows(
        "SELECT r.address, n.engine_token FROM node_models r JOIN backend_nodes n ON n.id = r.node_id"
        " WHERE r.model_name = %s",
        model,
    )

    async def ask() -> int:
        client = BackendClient(address, token)
        try:
            return int((await client.status(timeout=5)).memory.breakdown["load_calls"])
        finally:
            await client.close()

    return asyncio.run(ask())


def test_fifty_first_requests_load_once(shared: Shared) -> None:
    """One install, one process, one LoadModel, 50 answers; also when they reach two web processes."""
    cluster = shared.cluster
    write_model(cluster, "fifty", load_seconds=1)
    before = set(engines_of(cluster.home / "worker-one"))

    async def fire() -> list[httpx.Response]:
        halves = await asyncio.gather(*(many(web, 25, "fifty") for web in shared.webs))
        return [response for half in halves for response in half]

    answers = asyncio.run(fire())
    assert [answer.status_code for answer in answers] == [200] * 50, answers[0].text
    assert len({json.dumps(answer.json()["data"]) for answer in answers}) == 1
    assert cluster.rows("SELECT count(*) FROM operations WHERE key = 'model:fifty#0'") == [(1,)]
    assert cluster.rows(
        "SELECT count(*) FROM operations WHERE element = 'echo' AND kind = 'backend_install'"
    ) <= [(1,)]
    assert len(set(engines_of(cluster.home / "worker-one")) - before) == 1
    assert engine_calls(cluster, "fifty") == 1
    assert process_key("fifty", 0) == "fifty#0"


@pytest.mark.parametrize("server", ["uvicorn", "daphne"])
def test_the_main_job_gives_the_known_vectors(shared: Shared, server: str) -> None:
    """The real model's known answers to 1e-3, unit vectors, real token counts, by either web server."""
    request, expect = DEMO["request"], DEMO["expect"]
    web = shared.webs[0] if server == "uvicorn" else shared.cluster.web(CLUSTER_SERVER=server)
    answer = shared.cluster.post(web, request["path"], request["body"])
    assert answer.status_code == 200, answer.text
    body = answer.json()
    vectors = dict(zip(request["body"]["input"], (entry["embedding"] for entry in body["data"]), strict=True))
    for vector in vectors.values():
        assert len(vector) == expect["dimensions"]
        assert cosine(vector, vector) == pytest.approx(1, abs=1e-3)
    for pair in expect["cosines"]:
        one, other = pair["of"]
        assert cosine(vectors[one], vectors[other]) == pytest.approx(pair["is"], abs=1e-3)
    for text, components in expect["first_components"].items():
        assert vectors[text][: len(components)] == pytest.approx(components, abs=1e-3)
    assert body["object"] == "list"
    assert body["usage"]["prompt_tokens"] == body["usage"]["total_tokens"] == 13


def test_the_openai_client_gets_the_same_vectors(shared: Shared) -> None:
    """The unmodified client asks for base64."""
    texts = DEMO["request"]["body"]["input"]
    model = DEMO["request"]["body"]["model"]
    plain = shared.cluster.embed(shared.webs[1], texts, model=model).json()
    with openai.OpenAI(base_url=f"{shared.webs[0].url}/v1", api_key=ADMIN_KEY) as client:
        answer = client.embeddings.create(model=model, input=texts)
        names = {entry.id for entry in client.models.list()}
    for mine, theirs in zip(plain["data"], answer.data, strict=True):
        assert theirs.embedding == pytest.approx(mine["embedding"], abs=1e-6)
    assert {"minilm", "echo"} <= names


def test_a_second_file_serves_under_its_own_name(shared: Shared) -> None:
    """A new definition is served without a restart."""
    write_model(shared.cluster, "second", dims=8)
    answer = shared.cluster.embed(shared.webs[0], model="second")
    assert len(answer.json()["data"][0]["embedding"]) == 8, answer.text


@pytest.mark.rule("R4.10", "R4.21", "A82")
def test_a_minimum_loads_a_model_that_no_request_has_asked_for(shared: Shared) -> None:
    """From its definition, when the rule is set and not at the next tick; the rule says what came of it."""
    cluster, web = shared.cluster, shared.webs[0]
    write_model(cluster, "wanted")
    answer = cluster.post(web, "/api/nodes/scheduling", {"model_name": "wanted", "min_replicas": 1})
    assert answer.status_code == 200, answer.text
    loaded = "SELECT state FROM node_models WHERE model_name = 'wanted'"
    eventually(lambda: cluster.rows(loaded) == [("loaded",)], what="the minimum is met")
    ended = "SELECT actor FROM operations WHERE element = 'wanted' AND status = 'completed'"
    eventually(lambda: cluster.rows(ended) == [("system",)], what="the load has ended")

    def wanted() -> int | None:
        """Return what the last pass aims at; a pass during the load counts it beside the replica."""
        state = cluster.get(web, "/api/nodes/scheduling/wanted").json().get("state") or {}
        return state.get("wanted")

    eventually(lambda: wanted() == 1, what="a pass has seen the replica")
    assert cluster.embed(web, model="wanted").status_code == 200
    cluster.rows("DELETE FROM model_scheduling_configs RETURNING 1")


@pytest.mark.rule("R2.68")
def test_an_engine_that_exits_at_start_shows_its_stderr(shared: Shared) -> None:
    """The last 20 lines are in the operation and in the request's error; no new attempt for 15 s."""
    write_model(shared.cluster, "never", backend="broken")
    first = shared.cluster.embed(shared.webs[0], model="never")
    assert first.status_code == 503, first.text
    assert int(first.headers["Retry-After"]) >= 1
    message = first.json()["error"]["message"]
    assert "loading" not in first.json()
    again = shared.cluster.embed(shared.webs[1], model="never")
    assert again.json()["error"]["message"] == message
    ((error,),) = shared.cluster.rows("SELECT error FROM operations WHERE key = 'model:never#0'")
    stderr = [line for line in error.splitlines() if line.strip()]
    assert len(stderr) >= 20
    assert error.splitlines()[-1] in message


@pytest.mark.rule("R2.63")
def test_a_load_that_is_refused_says_why(shared: Shared) -> None:
    """R2.63: the backend's own message reaches the client."""
    write_model(shared.cluster, "refused", refuse_load="not today")
    answer = shared.cluster.embed(shared.webs[0], model="refused")
    assert answer.status_code == 503
    assert "not today" in answer.json()["error"]["message"]
    rows = "SELECT count(*) FROM node_models WHERE model_name = 'refused'"
    eventually(lambda: shared.cluster.rows(rows) == [(0,)], what="its engine is gone, and its place is free")


@pytest.mark.rule("R1.94")
def test_request_parameters_never_change_what_is_loaded(shared: Shared) -> None:
    """The reference's worst defect: other parameters must neither reload nor refuse."""
    first = shared.cluster.embed(shared.webs[0])
    body = {
        "model": "echo",
        "input": "a cat",
        "user": "u",
        "encoding_format": "float",
        "temperature": 2,
        "seed": 5,
    }
    second = shared.cluster.post(shared.webs[0], "/v1/embeddings", body)
    assert (first.status_code, second.status_code) == (200, 200)
    assert engine_calls(shared.cluster, "echo") == 1


def test_an_install_asked_of_one_web_process_is_live_on_the_other(empty: Cluster) -> None:
    """F3 and two-process rule.

    Rate-capped copy, at least five rising byte values over the other's websocket.
    """
    webs = [empty.web(), empty.web()]
    empty.controller()
    empty.controller()
    size = sum(path.lstat().st_size for path in (empty.gallery / "echo").rglob("*") if path.is_file())
    empty.worker("slow", webs[0], LOCALAI_WORKER_DOWNLOAD_RATE=str(size // 5))
    node = empty.node(webs[0], "slow")
    assert node is not None
    accepted = empty.post(webs[0], f"/api/nodes/{node['id']}/backends/install", {"backend": "echo"})
    assert accepted.status_code == 202, accepted.text
    job = accepted.json()["jobID"]
    seen = asyncio.run(watch(webs[1], job))
    values = [operation["currentBytes"] for _, operation in seen if operation.get("currentBytes")]
    assert values == sorted(values)
    assert len(set(values)) >= 5
    assert [seq for seq, _ in seen] == sorted({seq for seq, _ in seen})
    status = empty.get(webs[1], accepted.json()["statusUrl"]).json()
    assert (status["processed"], status["completed"]) == (True, True)
    assert (empty.home / "worker-slow" / "backends" / "echo" / "run.sh").exists()
    assert asyncio.run(resume(webs[0], seen[0][0])) == job


async def watch(web: Process, job: str) -> list[tuple[int, dict[str, Any]]]:
    """Deltas of one operation until it has ended."""
    url = web.url.replace("http", "ws") + "/ws/operations"
    seen: list[tuple[int, dict[str, Any]]] = []
    async with websockets.connect(url, additional_headers=ADMIN) as socket:
        async with asyncio.timeout(360):
            async for text in socket:
                message = json.loads(text)
                entries = message["operations"] if message["type"] == "snapshot" else [message["operation"]]
                seen += [(message["seq"], entry) for entry in entries if entry["jobID"] == job]
                if seen and seen[-1][1]["status"] in ("completed", "failed"):
                    return seen
    raise AssertionError("the socket ended first")


async def resume(web: Process, since: int) -> str:
    """The first operation told to a client that comes back with a number."""
    url = web.url.replace("http", "ws") + f"/ws/operations?since={since}"
    async with websockets.connect(url, additional_headers=ADMIN) as socket, asyncio.timeout(60):
        message = json.loads(await socket.recv())
        assert message["type"] == "delta"
        return str(message["operation"]["jobID"])


@pytest.mark.parametrize(
    ("prepare", "reason"),
    [("none", "no node is registered"), ("pending", "only pending nodes (1): approve one")],
)
def test_without_a_node_the_answer_says_what_is_missing(tmp_path: Path, prepare: str, reason: str) -> None:
    """503 with Retry-After, the `loading` body and the reason, after LOCALAI_MODEL_LOAD_WAIT."""
    from tests.support.cluster import running_cluster

    with running_cluster(LOCALAI_MODEL_LOAD_WAIT="3s", LOCALAI_AUTO_APPROVE_NODES="false") as cluster:
        web = cluster.web()
        cluster.controller()
        if prepare == "pending":
            cluster.worker("waiting", web)
        answer = cluster.embed(web)
        assert answer.status_code == 503, answer.text
        assert int(answer.headers["Retry-After"]) >= 5
        body = answer.json()
        assert body["error"]["type"] == body["error"]["code"] == "model_loading"
        assert body["loading"]["model"] == "echo"
        assert reason in body["error"]["message"]
        if prepare == "pending":
            node = cluster.node(web, "waiting")
            assert node is not None
            assert node["status"] == "pending"
            assert cluster.post(web, f"/api/nodes/{node['id']}/approve").status_code == 200
            eventually(
                lambda: cluster.embed(web).status_code == 200, seconds=30, what="approval lets the load go on"
            )
