"""Figures over time on PostgreSQL: samples, counts of several processes, packing, retention, reading."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.db import connection, connections
from django.test.utils import CaptureQueriesContext
from psycopg import AsyncConnection

from localai_cluster.kit import clock, conf
from localai_cluster.kit.database_pool import Pool
from localai_cluster.kit.transactions import Lock, try_lock_across
from localai_cluster.metrics import web as metrics
from localai_cluster.metrics.web import ModelCounts
from nodes.figures import partitions, series, store
from nodes.figures.series import DAY, HOUR, MINUTE, SAMPLE_EVERY
from nodes.figures.store import Span
from nodes.models import BackendNode
from nodes.reconcilers import tasks
from tests.support import api, hot

pytestmark = pytest.mark.django_db(transaction=True)

GIB = 2**30
AT = datetime(2026, 8, 22, 10, 0, 0, tzinfo=UTC)
GPU = {"uuid": "", "name": "L4", "total_vram": 24 * GIB, "free_vram": 20 * GIB, "utilization": 50}


@pytest.fixture(autouse=True)
def _no_partitions() -> Iterator[None]:
    yield
    for table in store.TABLES:
        table.drop(before=datetime(2999, 1, 1, tzinfo=UTC))


def sample(at: datetime) -> int:
    """A sample of nodes that were heard just before."""
    BackendNode.objects.update(last_heartbeat=at)
    return store.store_samples(heard_since=at - MINUTE, now=at)


def plant_samples(subject: str, start: datetime, minutes: int, numbers: list[int | None]) -> None:
    """A sample every ten seconds."""
    partitions.create_missing(
        (table, start + n * HOUR) for table in store.TABLES for n in range(minutes // 60 + 2)
    )
    rows = [start + n * SAMPLE_EVERY for n in range(6 * minutes)]
    with connection.cursor() as cursor:
        cursor.executemany(
            "INSERT INTO figure_samples VALUES (%s, %s, %s::int[])", [(subject, at, numbers) for at in rows]
        )


def count_rows(table: str) -> int:
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT count(*) FROM {table}")
        (number,) = cursor.fetchone()
    return int(number)


def read_node(node: BackendNode, start: datetime, step: timedelta, count: int) -> series.Columns:
    subject = f"node/{node.id}"
    return store.read([subject], Span(start, step, count))[subject]


@pytest.mark.rule("UW13", "UI-4.16")
def test_a_sample_has_each_node_that_is_heard_and_the_cluster() -> None:
    """Under a budget what counts is what may be used; what is not reported is not known."""
    plain = hot.node(
        "plain", total_vram=24 * GIB, available_vram=20 * GIB, total_ram=64 * GIB, available_ram=60 * GIB,
        gpus=[
            {**GPU, "index": 2, "temperature": 60}, {**GPU, "index": 0, "free_vram": 0, "utilization": None}
        ],
    )  # fmt: skip
    tight = hot.node("tight", total_vram=24 * GIB, available_vram=5 * GIB, vram_budget_bytes=12 * GIB)
    api.make_node("pending", approved=False, total_vram=GIB)
    gone = hot.node("silent")
    assert sample(AT) == 4
    BackendNode.objects.filter(pk=gone.pk).update(last_heartbeat=AT - HOUR)
    assert store.store_samples(heard_since=AT - MINUTE, now=AT + timedelta(seconds=9)) == 0
    assert store.store_samples(heard_since=AT - MINUTE, now=AT + SAMPLE_EVERY) == 3
    columns = read_node(plain, AT, SAMPLE_EVERY, 2)
    assert columns["vram_used"] == columns["ram_used"] == [4096, 4096]
    assert columns["gpu0.vram_used"] == [24576] * 2
    assert (columns["gpu2.busy"], columns["gpu2.temperature"]) == ([50, 50], [60, 60])
    assert "gpu0.busy" not in columns
    assert "disk_used" not in columns
    assert read_node(tight, AT, SAMPLE_EVERY, 1) == {"vram_used": [7168]}
    assert read_node(gone, AT, SAMPLE_EVERY, 2) == {}
    cluster = store.read(["cluster"], Span(AT, SAMPLE_EVERY, 2))["cluster"]
    assert (cluster["nodes"], cluster["gpus"], cluster["busy"]) == ([3, 2], [2, 2], [50, 50])
    assert (cluster["vram_used"][0], cluster["vram_total"][0]) == (11264, 36864)


def test_a_wrong_sensor_does_not_fail_the_samples_of_all_nodes() -> None:
    most = 2**63 - 1
    hot.node(
        "odd", total_ram=most, total_disk=most, gpus=[{**GPU, "index": 0, "total_vram": most, "free_vram": 0}]
    )
    hot.node("empty")
    assert sample(AT) == 3


def test_figures_above_two_pebibytes_are_the_largest_that_a_sample_has() -> None:
    """They never start again at zero."""
    nodes = [hot.node(f"big{number}", total_disk=3 * 2**50, available_disk=2**50) for number in range(2)]
    assert sample(AT) == 3
    assert read_node(nodes[0], AT, SAMPLE_EVERY, 1)["disk_used"] == [2**31 - 1]
    cluster = store.read(["cluster"], Span(AT, SAMPLE_EVERY, 1))["cluster"]
    assert (cluster["disk_used"], cluster["disk_total"]) == ([2**31 - 1], [2**31 - 1])
    assert "ram_used" not in read_node(nodes[0], AT, SAMPLE_EVERY, 1)


def test_processes_add_up_what_they_have_counted() -> None:
    """Also at once, in any order of the models."""
    partitions.create_missing([(store.SAMPLES_TABLE, AT)])
    counts = {
        "a": ModelCounts(3, 1, 10, 20, 2, 500),
        "b": ModelCounts(requests=2**31),
        "": ModelCounts(requests=1),
    }

    async def report() -> None:
        pool = Pool(hot.database_url())
        await pool.open()
        for _ in range(20):
            await asyncio.gather(
                store.add_counts(pool, counts, now=AT),
                store.add_counts(pool, dict(reversed(counts.items())), now=AT),
            )
        await store.add_counts(pool, {}, now=AT)
        await pool.close()

    asyncio.run(report())
    found = store.read(["model/a", "model/b", "model/"], Span(AT, SAMPLE_EVERY, 1))
    assert found["model/a"] == {
        "requests": [120], "errors": [40], "prompt_tokens": [400], "completion_tokens": [800],
        "first_tokens": [80], "first_token_ms": [20000],
    }  # fmt: skip
    assert found["model/b"]["requests"] == found["model/"]["requests"] == [2**31 - 1]


@pytest.mark.parametrize("ahead", [timedelta(0), 3 * HOUR], ids=["first start", "clock ahead"])
def test_a_report_before_the_first_sample_is_stored(ahead: timedelta) -> None:
    """No sampling task has created the partition, and two web processes report at once."""
    now = clock.now()
    at = now + ahead
    if ahead:
        store.store_samples(heard_since=now, now=now)

    async def report() -> None:
        pool = Pool(hot.database_url())
        await pool.open()
        try:
            reports = (store.add_counts(pool, {"a": ModelCounts(requests=2)}, now=at) for _ in range(2))
            await asyncio.gather(*reports)
        finally:
            await pool.close()

    asyncio.run(report())
    span = Span(series.floor_to_step(at, SAMPLE_EVERY), SAMPLE_EVERY, 1)
    assert store.read(["model/a"], span)["model/a"]["requests"] == [4]


def test_a_report_of_a_web_process_is_lost_and_not_repeated() -> None:
    """Nobody knows whether a statement without a reply was executed; here the table is away."""

    def rename(old: str, new: str) -> None:
        with connection.cursor() as cursor:
            cursor.execute(f"ALTER TABLE {old} RENAME TO {new}")

    metrics.take_model_counts()

    async def report() -> None:
        async with hot.picker() as picker:
            metrics.inference_ended("m", 500, 0.1)
            metrics.inference_ended("m", metrics.CLIENT_LEFT, 0.1)
            await hot.in_thread(rename, "figure_samples", "away")
            try:
                await picker.report_counts()
            finally:
                await hot.in_thread(rename, "away", "figure_samples")
            metrics.inference_ended("m", 200, 0.1)
            metrics.inference_ended("", 200, 0.1)
            metrics.inference_ended("", 503, 0.1)
            metrics.first_token("m", 0.25)
            metrics.tokens_used("m", 5, 7, 1)
            await picker.report_counts()

    asyncio.run(report())
    start = series.floor_to_step(clock.now(), MINUTE) - MINUTE
    (columns,) = store.read(["model/m"], Span(start, HOUR, 1)).values()
    assert columns == {
        "requests": [1], "errors": [0], "prompt_tokens": [5], "completion_tokens": [7], "first_tokens": [1],
        "first_token_ms": [250],
    }  # fmt: skip
    sums = store.read([series.ALL_MODELS_SUBJECT], Span(start, HOUR, 1))[series.ALL_MODELS_SUBJECT]
    assert (sums["requests"], sums["errors"]) == ([2], [1]), "a list of models is no request to a model"


def read_requests(start: datetime) -> int:
    """The requests of model m in the two hours from this time."""
    columns = store.read(["model/m"], Span(series.floor_to_step(start, HOUR), HOUR, 2))["model/m"]
    return sum(filter(None, columns.get("requests", [])))


def test_a_process_that_is_frozen_with_the_lock_stops_no_web_process() -> None:
    """A blocked report is a web process without heartbeats, which counts as dead. Its figures are lost."""
    metrics.take_model_counts()
    started = clock.now()

    async def report() -> bool:
        async with hot.picker() as picker, await AsyncConnection.connect(hot.database_url()) as frozen:
            await frozen.execute("SELECT pg_advisory_xact_lock(1, hashtext('partitions'))")
            metrics.inference_ended("m", 200, 0.1)
            reporting = asyncio.create_task(picker.report_counts())
            done, _ = await asyncio.wait({reporting}, timeout=conf.cluster().web_stale_after)
            await frozen.rollback()
            await reporting
            for _ in range(2):
                metrics.inference_ended("m", 200, 0.1)
            await picker.report_counts()
        return bool(done)

    assert asyncio.run(report())
    assert read_requests(started) == 2


@pytest.mark.parametrize("is_sampled", [True, False])
def test_a_web_clock_that_is_behind_creates_no_partition_of_a_packed_hour(
    monkeypatch: pytest.MonkeyPatch, is_sampled: bool
) -> None:
    """Else each run that packs takes an exclusive lock to drop it, and the figures are lost anyway."""
    metrics.take_model_counts()
    now, behind = clock.now(), clock.now() - 3 * HOUR
    if is_sampled:
        partitions.create_missing([(store.SAMPLES_TABLE, now), (store.SAMPLES_TABLE, now + HOUR)])
    before = store.SAMPLES_TABLE.starts()

    async def report() -> None:
        async with hot.picker() as picker:
            metrics.inference_ended("m", 200, 0.1)
            with monkeypatch.context() as patch:
                patch.setattr(clock, "now", lambda: behind)
                await picker.report_counts()

    asyncio.run(report())
    requests = 0 if is_sampled else 1
    assert len(store.SAMPLES_TABLE.starts()) == len(before) + requests
    assert read_requests(behind) == requests


@pytest.fixture
def past(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Samples of an hour and a bit of five subjects, packed two at a time."""
    monkeypatch.setattr(store, "SUBJECTS_PER_TRANSACTION", 2)
    subjects = ["cluster", *(f"model/{name}" for name in ("", "a", "b")), "node/x"]
    for subject in subjects:
        plant_samples(
            subject,
            AT,
            70,
            [4] * len(series.CLUSTER_FIGURES if subject == "cluster" else series.NODE_FIGURES[:3]),
        )
    return subjects


def test_hours_are_packed_in_pieces_and_read_the_same(past: list[str]) -> None:
    spans = [Span(AT, MINUTE, 70), Span(AT, 10 * MINUTE, 7), Span(AT, HOUR, 2)]
    before = [store.read(past, span) for span in spans]
    assert store.maintain(now=AT + HOUR + MINUTE, limit=60) is True
    assert count_rows("figure_hours") == 0, "the last samples may still arrive"
    now = AT + HOUR + store.LATE_SAMPLES_GRACE
    assert store.maintain(now=now, limit=0) is False
    assert 0 < count_rows("figure_hours") < len(past)
    assert [store.read(past, span) for span in spans] == before, "half packed"
    assert store.maintain(now=now, limit=60) is True
    assert count_rows("figure_hours") == len(past)
    assert store.maintain(now=now, limit=60) is True
    assert count_rows("figure_hours") == len(past)
    assert [store.read(past, span) for span in spans] == before
    assert before[0]["model/a"]["requests"] == [24] * 70
    assert before[0]["node/x"]["ram_used"] == [4] * 70
    assert store.maintain(now=AT + 2 * HOUR, limit=60) is True
    assert count_rows("figure_samples") == 60 * len(past), "ten minutes are not an hour old"


def test_a_kill_between_two_pieces_loses_and_repeats_nothing(past: list[str]) -> None:
    now, level = AT + HOUR + store.LATE_SAMPLES_GRACE, store.ROLL_UPS[0]
    partitions.create_missing([(store.HOURS_TABLE, AT)])
    level.pack_next(AT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(series, "pack", raising(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            level.pack_next(AT)
    assert count_rows("figure_hours") == 2
    assert store.maintain(now=now, limit=60) is True
    (columns,) = store.read(["model/b"], Span(AT, HOUR, 1)).values()
    assert columns["requests"] == [360 * 4]
    assert count_rows("figure_hours") == len(past)


def raising(error: type[BaseException]) -> Any:
    def call(*_: object) -> None:
        raise error

    return call


def test_of_two_processes_one_packs(past: list[str]) -> None:
    def other() -> bool:
        try:
            return store.maintain(now=AT + 2 * HOUR, limit=60)
        finally:
            connections.close_all()

    with try_lock_across(Lock.FIGURES) as locked, ThreadPoolExecutor(1) as pool:
        assert locked
        assert pool.submit(other).result() is False
    assert count_rows("figure_hours") == 0
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda _: other(), range(2)))
    assert count_rows("figure_hours") == len(past)


def test_samples_that_cannot_be_packed_go_after_a_day(
    past: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "_pack_until", lambda *_: False)
        store.maintain(now=AT + 4 * HOUR, limit=1)
        assert count_rows("figure_samples") > 0
        store.maintain(now=AT + DAY + 3 * HOUR, limit=1)
    assert count_rows("figure_samples") == 0


def test_days_are_packed_after_their_hours_and_old_partitions_go() -> None:
    """A year of hours, two days of minutes, an hour of samples."""
    midnight = AT.replace(hour=0)
    plant_samples("node/x", midnight, 60, [1, 2, 3])
    plant_samples("node/x", midnight + 23 * HOUR, 60, [3, 2, 1])
    now = midnight + DAY + store.LATE_SAMPLES_GRACE
    assert store.maintain(now=now, limit=60) is True
    assert (count_rows("figure_hours"), count_rows("figure_days")) == (2, 1)
    span = Span(midnight, HOUR, 24)
    found = store.read(["node/x"], span)["node/x"]
    assert found["vram_used"] == [1, *[None] * 22, 3]
    assert store.maintain(now=now + 2 * DAY, limit=60) is True
    assert [count_rows(table.name) for table in store.TABLES] == [0, 0, 1]
    assert store.read(["node/x"], span)["node/x"] == found
    assert store.read(["node/x"], Span(midnight, MINUTE, 60))["node/x"] == {}
    store.maintain(now=now + 400 * DAY, limit=60)
    assert [table.starts() for table in store.TABLES] == [[], [], []]


def test_a_backup_keeps_a_partition_and_the_next_run_drops_it(past: list[str]) -> None:
    later = AT + 5 * HOUR

    def drop() -> int:
        try:
            return store.SAMPLES_TABLE.drop(before=later)
        finally:
            connections.close_all()

    with ThreadPoolExecutor(1) as pool, connection.cursor() as cursor:
        cursor.execute("BEGIN")
        cursor.execute("SELECT count(*) FROM figure_samples")
        assert pool.submit(drop).result() == 0
        cursor.execute("COMMIT")
        assert pool.submit(drop).result() > 0


def test_two_processes_create_a_partition_once() -> None:
    def create(_: int) -> None:
        try:
            partitions.create_missing((table, AT) for table in store.TABLES)
        finally:
            connections.close_all()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(create, range(4)))
    assert store.SAMPLES_TABLE.starts() == [AT]


def test_the_number_of_statements_does_not_grow_with_the_fleet() -> None:
    """A sample, a run that packs an hour, and the pages' requests at 10 and 40 nodes."""
    counts = []
    for size in (10, 40):
        BackendNode.objects.all().delete()
        at, nodes = (
            AT + size * HOUR,
            [hot.node(f"{size}-{number}", total_ram=2, available_ram=1) for number in range(size)],
        )
        partitions.create_missing((table, moment) for table in store.TABLES for moment in (at, at + HOUR))
        caller = api.admin()
        works = (
            lambda at=at: sample(at),
            lambda at=at: store.maintain(now=at + HOUR + store.LATE_SAMPLES_GRACE, limit=60),
            lambda caller=caller: caller.get("/api/figures?scope=cluster"),
            lambda caller=caller, nodes=nodes: caller.get(f"/api/figures?scope=node&name={nodes[0].id}"),
            lambda caller=caller: caller.get("/api/overview"),
        )
        found = []
        for work in works:
            with CaptureQueriesContext(connection) as queries:
                work()
            found.append(len(queries))
        counts.append(found)
        for table in store.TABLES:
            table.drop(before=datetime(2999, 1, 1, tzinfo=UTC))
    assert counts[0] == counts[1]


def test_the_tasks_keep_what_the_page_of_a_node_shows() -> None:
    node = hot.node("one", total_ram=2 * GIB, available_ram=GIB)
    tasks.sample_figures()
    tasks.pack_figures()
    [ram] = api.admin().get(f"/api/figures?scope=node&name={node.id}").json()["figures"]
    assert (ram["name"], [value for value in ram["values"] if value is not None]) == ("ram_used", [GIB])


def test_figures_over_rest() -> None:
    """By name or id, on the grid that is asked for, with what happened to the node."""
    node = hot.node("gpu-a", total_ram=4 * GIB, available_ram=GIB, gpus=[{**GPU, "index": 0}])
    api.mark(node, "unhealthy")
    tasks.sample_figures()
    admin = api.admin()
    by_name, by_id = (
        admin.get(f"/api/figures?scope=node&name={name}").json() for name in ("gpu-a", str(node.id))
    )
    assert by_name["name"] == by_id["name"] == "gpu-a"
    assert by_id["step"] == 10
    found = {(one["name"], one["gpu"]): (one["unit"], one["values"]) for one in by_id["figures"]}
    assert found.keys() == {("ram_used", None), ("vram_used", 0), ("busy", 0)}
    assert max(filter(None, found["ram_used", None][1])) == 3 * GIB
    assert {len(values) for _, values in found.values()} <= {360, 361}
    assert [event["kind"] for event in by_id["events"]] == ["marked_unhealthy"]
    cluster = admin.get("/api/figures?scope=cluster&step=60").json()
    names = [one["name"] for one in cluster["figures"]]
    assert "requests" in names
    assert "first_token" in names
    assert names.count("busy") == 1
    model = admin.get("/api/figures?scope=model&name=org/m").json()
    values = {one["name"]: set(one["values"]) for one in model["figures"]}
    assert values.pop("first_token") == {None}
    assert values.keys() == {"requests", "errors", "prompt_tokens", "completion_tokens"}
    assert set().union(*values.values()) == {0}


@pytest.mark.parametrize(
    ("ago", "step"),
    [(HOUR, 10), (DAY, 300), (2 * DAY, 600), (7 * DAY, 3600), (30 * DAY, 7200), (365 * DAY, 86400)],
)
def test_the_usual_step_is_the_least_that_is_kept(ago: timedelta, step: int) -> None:
    since = (clock.now() - ago).isoformat().replace("+00:00", "Z")
    body = api.admin().get(f"/api/figures?scope=model&name=m&from={since}").json()
    assert body["step"] == step
    assert all(len(one["values"]) <= 401 for one in body["figures"])


def test_what_is_no_longer_kept_is_not_zero() -> None:
    since = (clock.now() - 3 * DAY).isoformat().replace("+00:00", "Z")
    body = api.admin().get(f"/api/figures?scope=model&name=m&step=300&from={since}").json()
    values = next(one["values"] for one in body["figures"] if one["name"] == "requests")
    assert values[0] is None
    assert values[-1] == 0


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("", "scope"),
        ("scope=fleet", "scope"),
        ("scope=node", "name"),
        ("scope=cluster&name=x", "name"),
        ("scope=cluster&from=yesterday", "from"),
        ("scope=cluster&from=2026-01-01T00:00:00", "from"),
        ("scope=cluster&from=0001-01-01T00:00:00Z", "from"),
        ("scope=cluster&from=2999-01-01T00:00:00Z", "from"),
        ("scope=cluster&to=0001-01-01T00:00:00Z", "to"),
        ("scope=cluster&to=1980-01-01T00:00:00Z", "from"),
        ("scope=cluster&step=7", "step"),
        ("scope=cluster&step=30", "step"),
        ("scope=cluster&year=1", "year"),
    ],
)
def test_wrong_parameters_are_named(query: str, field: str) -> None:
    answer = api.admin().get(f"/api/figures?{query}")
    assert (answer.status_code, answer.json()["error"]["field"]) == (400, field)


def test_too_many_steps_and_unknown_nodes_are_refused() -> None:
    since = (clock.now() - DAY).isoformat().replace("+00:00", "Z")
    assert api.admin().get(f"/api/figures?scope=cluster&step=10&from={since}").status_code == 400
    assert api.admin().get("/api/figures?scope=node&name=nobody").status_code == 404
