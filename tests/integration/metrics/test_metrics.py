"""`/metrics`: who may read it, what it counts, and the figures of the cluster from the rows."""

import asyncio
import dataclasses
import socket
import threading
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from django.contrib.auth.models import User
from django.db import OperationalError
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families
from pytest_django import Settings
from pytest_django.fixtures import DjangoAssertNumQueries

from localai_cluster import broker, scraping
from localai_cluster.accounts import principals
from localai_cluster.asgi import application
from localai_cluster.kit import clock, conf, connections
from localai_cluster.kit.addresses import Address
from localai_cluster.metrics import registries
from localai_cluster.scraping import MetricsApplication, RowReader
from localai_cluster.web.throttle import DEFAULT_LIMIT, WINDOW, Failures
from nodes.models import PendingBackendOp, WebProcess
from operations.executor import controllers
from operations.models import Operation, Status
from tests.conftest import until
from tests.support import hot
from tests.support.environment import API_KEY, REGISTRATION_TOKEN

pytestmark = pytest.mark.django_db(transaction=True)

SCRAPER = "a-token-for-scrapers-of-the-tests"
Samples = dict[tuple[Any, ...], float]


@pytest.fixture(autouse=True)
def _scraper(settings: Settings) -> None:
    settings.CLUSTER = dataclasses.replace(settings.CLUSTER, metrics_token=SCRAPER)


def key_of(name: str, *, staff: bool) -> str:
    user = User.objects.create_user(name, password="x", is_staff=staff)
    return principals.create_api_key(user, "k")[1]


def asked(key: str | None, path: str = "/metrics", method: str = "GET", app: Any = application) -> hot.Reply:
    async def ask() -> hot.Reply | None:
        return await hot.Client(app, key).request(method, path)

    reply = asyncio.run(ask())
    assert reply is not None
    return reply


def samples(families: Sequence[Metric]) -> Samples:
    """The values by name and values of labels."""
    return by_value(
        {
            (one.name.removeprefix("localai_cluster_"), *one.labels.values()): one.value
            for family in families
            for one in family.samples
        }
    )


def by_value(values: Samples) -> Samples:
    """The same whatever the order of the labels is."""
    return {(name, *sorted(labels)): value for (name, *labels), value in values.items()}


def scraped() -> Samples:
    return samples(list(text_string_to_metric_families(asked(SCRAPER).body)))


def test_a_scraper_s_token_and_an_admin_s_key_open_it_and_nothing_else_does() -> None:
    user, admin = key_of("ann", staff=False), key_of("root", staff=True)
    for key in (SCRAPER, API_KEY, admin):
        reply = asked(key)
        assert (reply.status, reply.headers["content-type"]) == (200, registries.CONTENT_TYPE)
        assert reply.headers["cache-control"] == "no-store"
    strangers: list[str | None] = [None, "", "wrong", SCRAPER[:-1], REGISTRATION_TOKEN]
    refused = {**dict.fromkeys(strangers, 401), user: 403}
    for given, status in refused.items():
        reply = asked(given)
        assert reply.status == status, given
        assert status != 401 or reply.headers["www-authenticate"] == "Bearer"
        assert "localai_cluster" not in str(reply.body)
    refusal = asked(SCRAPER, method="POST")
    assert (refusal.status, refusal.headers["allow"]) == (405, "GET")
    assert asked(SCRAPER, "/metrics/").status == 200


def test_the_scraper_s_token_opens_nothing_else() -> None:
    for path in ("/api/nodes", "/v1/models", "/api/system/health", "/version", "/api/schema", "/join"):
        assert asked(SCRAPER, path).status == 401, path


def test_without_a_token_nothing_matches_it(settings: Settings) -> None:
    """Not even an empty bearer."""
    settings.CLUSTER = dataclasses.replace(settings.CLUSTER, metrics_token="")
    assert [asked(key).status for key in (SCRAPER, "", None, API_KEY)] == [401, 401, 401, 200]


def test_wrong_tokens_are_limited_and_right_ones_are_not(failed_keys: Failures) -> None:
    """D-FAILED-TOKENS: together with wrong API keys."""
    now = clock.now()
    for moment in (now, now + timedelta(seconds=WINDOW)):
        for _ in range(DEFAULT_LIMIT):
            failed_keys.note("192.0.2.7", moment)
    assert [asked(key).status for key in ("wrong", SCRAPER, API_KEY)] == [429, 200, 200]


def planted(now: datetime) -> None:
    """Two nodes, three replicas, operations and intents in several states."""
    fast = hot.node("fast", total_vram=100, available_vram=60, reserved_vram=10)
    hot.node("silent", total_vram=1000, offline_at=now)
    hot.replica(fast, in_flight=2)
    hot.replica(fast, index=1, in_flight=3)
    hot.replica(fast, "other", state="loading")
    for number, (status, ended) in enumerate(
        [
            (Status.PENDING, None),
            (Status.WAITING, None),
            (Status.FAILED, now - timedelta(minutes=5)),
            (Status.COMPLETED, now - timedelta(minutes=5)),
            (Status.COMPLETED, now - timedelta(hours=2)),
        ]
    ):
        Operation.objects.create(
            kind="model_load",
            key=f"model:{number}",
            element=str(number),
            status=status,
            created_at=now - timedelta(seconds=90),
            finished_at=ended,
        )
    for number in range(2):
        lease = {"lease_until": now, "lease_owner": "c"} if number else {}
        PendingBackendOp.objects.create(
            node=fast,
            backend=str(number),
            op="install",
            operation_id=fast.id,
            created_at=now - timedelta(seconds=30),
            **lease,
        )
    WebProcess.objects.create(host="here", pid=1, seen_at=now, started_at=now)
    WebProcess.objects.create(host="gone", pid=2, seen_at=now - timedelta(hours=1), started_at=now)
    for owner, silence in (("c", 0.0), ("killed", controllers.SILENCE_LIMIT + 1)):
        heard = now - timedelta(seconds=silence)
        controllers.write_heartbeat(owner, bus_connected=True, now=heard)


def test_the_cluster_in_eight_queries(django_assert_num_queries: DjangoAssertNumQueries) -> None:
    """However much there is."""
    now = clock.now()
    with django_assert_num_queries(8):
        none = samples(scraping.read_metrics(now))
    assert {value for key, value in none.items() if key[0] == "nodes"} == {0.0}
    planted(now)
    for number in range(20):
        hot.replica(hot.node(f"more-{number}", approved_at=None), f"model-{number}")
    with django_assert_num_queries(8):
        found = samples(scraping.read_metrics(now))
    expected: Samples = {
        ("nodes", "healthy", "backend"): 1,
        ("nodes", "offline", "backend"): 1,
        ("nodes", "pending", "backend"): 20,
        ("nodes", "draining", "agent"): 0,
        ("vram_total_bytes",): 100,
        ("vram_available_bytes",): 60,
        ("vram_reserved_bytes",): 10,
        ("replicas", "echo", "loaded"): 2,
        ("replicas", "other", "loading"): 1,
        ("requests_in_flight", "echo"): 5,
        ("requests_in_flight", "other"): 0,
        ("operations", "model_load", "pending"): 1,
        ("operations", "model_load", "waiting_for_nodes"): 1,
        ("operations", "model_load", "failed"): 1,
        ("operation_oldest_age_seconds", "model_load", "pending"): 90,
        ("operations_ended_last_hour", "model_load", "completed"): 1,
        ("operations_ended_last_hour", "model_load", "failed"): 1,
        ("intents", "install", "waiting"): 1,
        ("intents", "install", "running"): 1,
        ("intent_oldest_age_seconds", "install", "running"): 30,
        ("processes", "web"): 1,
        ("processes", "controller"): 1,
        ("tasks_waiting",): 0,
    }
    assert {key: found.get(key) for key in by_value(expected)} == by_value(expected)


def test_single_nodes_and_gpus_in_one_query(
    django_assert_num_queries: DjangoAssertNumQueries, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By name up to the limit; of a node that has left, the last readings and its age are left out."""
    heard = clock.now()
    gpu = {"index": 3, "total_vram": 24, "free_vram": 20, "utilization": 25, "temperature": 60, "power": None}
    hot.node('a"b', total_vram=24, available_vram=20, total_disk=9, gpus=[gpu], last_heartbeat=heard)
    hot.node("b", total_vram=24, gpus=[gpu], offline_at=heard, last_heartbeat=heard)
    hot.node("pending", approved_at=None)
    hot.node("z")
    monkeypatch.setattr(scraping, "MAX_NODES", 2)
    with django_assert_num_queries(1):
        scraping.read_node_metrics(heard)
    reply = asked(SCRAPER, "/metrics/nodes")
    assert "process_" not in reply.body
    found = samples(list(text_string_to_metric_families(reply.body)))
    assert found["nodes_left_out",] == 1
    assert found["rows_readable",] == 1
    assert [found["node_up", name] for name in ('a"b', "b")] == [1, 0]
    assert found["node_disk_total_bytes", 'a"b'] == 9
    assert found["node_last_heartbeat_timestamp_seconds", 'a"b'] == pytest.approx(heard.timestamp())
    assert ("node_last_heartbeat_timestamp_seconds", "b") not in found, "it has left: nobody waits for it"
    gpus = {key: value for key, value in found.items() if key[0].startswith("gpu_")}
    assert gpus == by_value(
        {
            ("gpu_vram_total_bytes", 'a"b', "3"): 24,
            ("gpu_vram_free_bytes", 'a"b', "3"): 20,
            ("gpu_busy_ratio", 'a"b', "3"): 0.25,
            ("gpu_temperature_celsius", 'a"b', "3"): 60,
        }
    )
    assert asked("wrong", "/metrics/nodes").status == 401
    assert asked(SCRAPER, "/metrics/nodes", method="POST").status == 405


def reads(*reader: Callable[[datetime], Sequence[Metric]]) -> list[Samples]:
    """Two scrapes at the same moment."""

    async def both() -> list[Samples]:
        one = RowReader(*reader)
        return [samples(list(found)) for found in await asyncio.gather(one.families(), one.families())]

    return asyncio.run(both())


def test_scrapes_at_the_same_moment_share_the_queries() -> None:
    calls: list[datetime] = []

    def read(now: datetime) -> Sequence[Metric]:
        calls.append(now)
        return scraping.read_metrics(now)

    first, second = reads(read)
    assert len(calls) == 1
    assert first == second
    assert first["rows_readable",] == 1


@pytest.mark.parametrize("trouble", ["away", "hangs"])
def test_without_the_database_the_process_tells_its_own(
    trouble: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hang costs one thread, however many scrapes come."""
    release, calls = threading.Event(), []
    monkeypatch.setattr(scraping, "SCRAPE_TIMEOUT", 0.2 if trouble == "hangs" else 60)

    def read(now: datetime) -> Sequence[Metric]:
        calls.append(now)
        if trouble == "hangs":
            release.wait(60)
        raise OperationalError("the server is away")

    async def scrapes() -> list[str]:
        client = hot.Client(MetricsApplication("web", RowReader(read)), SCRAPER)
        found = await asyncio.gather(*(client.request("GET", "/metrics") for _ in range(3)))
        release.set()
        return [reply.body for reply in found if reply]

    bodies = asyncio.run(scrapes())
    assert len(bodies) == 3
    assert len(calls) == 1
    for body in bodies:
        told = samples(list(text_string_to_metric_families(body)))
        assert told["rows_readable",] == 0
        assert not any(key[0] == "nodes" for key in told)
        assert ("pick_duration_seconds_count",) in told


def test_what_a_web_process_counts(tmp_path: Path, settings: Settings) -> None:
    """A request for a model that is not defined counts under no model, whatever its name."""
    (tmp_path / "echo.yaml").write_text("name: echo\nbackend: echo\nparameters: {model: echo}\n")
    settings.CLUSTER = dataclasses.replace(settings.CLUSTER, models_path=tmp_path, model_load_wait=0.3)
    before = scraped()

    async def requests() -> None:
        async with hot.serving():
            client = hot.Client(application)
            for model in ("nope-1", "nope-2", "echo"):
                await client.post("/v1/embeddings", {"model": model, "input": "x"})
            await hot.Client(application, None).post("/v1/embeddings", {})
            await client.request("GET", "/v1/models")
            await client.post(f"/api/node/{REGISTRATION_TOKEN}/heartbeat", {})

    asyncio.run(requests())
    after = scraped()
    grown = {key: after[key] - before.get(key, 0) for key in after if key[0] in COUNTED}
    expected: Samples = {
        ("inference_requests_total", "", "404"): 2,
        ("inference_requests_total", "", "401"): 1,
        ("inference_requests_total", "", "200"): 1,
        ("inference_requests_total", "echo", "503"): 1,
        ("http_requests_total", "inference", "404"): 2,
        ("http_requests_total", "inference", "401"): 1,
        ("http_requests_total", "inference", "200"): 1,
        ("http_requests_total", "inference", "503"): 1,
        ("http_requests_total", "workers", "403"): 1,
        ("http_requests_total", "probes", "200"): 1,
        ("heartbeats_total", "403"): 1,
    }
    picks = grown.pop(("picks_total", "none"))
    assert picks >= 1
    assert {key: value for key, value in grown.items() if value} == by_value(expected)
    assert after["inference_requests_in_flight",] == 0
    assert after["inference_requests_waiting",] == 0


COUNTED = {"inference_requests_total", "http_requests_total", "heartbeats_total", "picks_total"}


def test_a_process_without_routes_of_its_own_serves_its_figures(caplog: pytest.LogCaptureFixture) -> None:
    """On the address that it is given, tried again while another program has it."""

    async def scrape() -> tuple[int, int, int, str]:
        taken = socket.create_server(("127.0.0.1", 0))
        address = Address(*taken.getsockname())
        task = asyncio.create_task(connections.serve(address, MetricsApplication("controller"), again=0.01))
        await until(lambda: "cannot listen" in caplog.text)
        taken.close()
        await until(lambda: _answers(address))
        async with httpx.AsyncClient(base_url=f"http://{address}") as client:
            opened = {"Authorization": f"Bearer {SCRAPER}"}
            right = await client.get("/metrics", headers=opened)
            wrong = await client.get("/metrics", headers={"Authorization": "Bearer no"})
            elsewhere = await client.get("/api/nodes", headers=opened)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return right.status_code, wrong.status_code, elsewhere.status_code, right.text

    caplog.set_level("INFO")
    right, wrong, elsewhere, text = asyncio.run(scrape())
    assert (right, wrong, elsewhere) == (200, 401, 404)
    assert 'build_info{process="controller"' in text


async def _answers(address: Address) -> bool:
    try:
        (await asyncio.open_connection(address.host, address.port))[1].close()
    except OSError:
        return False
    return True


def test_each_result_of_a_task_is_counted() -> None:
    """What django-q2 tells of a task, as a name or as the function itself."""
    at = clock.now()
    result = {"started": at, "stopped": at + timedelta(seconds=2), "success": True}
    text = registries.text("tasks").decode()
    broker._record_pass("django_q", {**result, "func": "nodes.reconcilers.tasks.liveness"})
    broker._record_pass("django_q", {**result, "func": conf.cluster, "success": False})
    found = samples(list(text_string_to_metric_families(registries.text("tasks").decode())))
    before = samples(list(text_string_to_metric_families(text)))
    assert found["passes_total", "liveness", "ok"] == before.get(("passes_total", "liveness", "ok"), 0) + 1
    assert found["passes_total", "cluster", "failed"] == 1
    assert found["pass_duration_seconds_sum", "liveness"] >= 2
