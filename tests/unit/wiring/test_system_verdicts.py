"""How the parts of the system are: which facts make which state, and what the operator is told."""

import dataclasses
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from localai_cluster.kit.disk import DiskUsage
from localai_cluster.system_verdicts import Facts, Process, Schedule, State, Verdict, Work, verdicts, worst
from nodes.registry.mass_silence import CurrentHold

NOW = datetime(2026, 8, 22, 10, tzinfo=UTC)
GIB = 2**30


def ago(seconds: float) -> datetime:
    return NOW - timedelta(seconds=seconds)


def process(kind: str, **more: Any) -> Process:
    values: dict[str, Any] = {"version": "1", "started_at": ago(100), "seen_at": ago(1)} | more
    return Process(kind, f"{kind}:1", **values)


SCHEDULE = Schedule(1, "liveness", "* * * * * */5", False, ago(1), ago(3), True)
WELL = Facts(
    version="1",
    database="PostgreSQL 16.2",
    database_since=ago(500),
    probes={"nats": ("ok", ago(50)), "redis": ("ok", ago(50))},
    processes=[process("web"), process("controller")],
    schedules=[SCHEDULE],
    tasks_ended_at=ago(3),
    workers={"healthy": 2, "draining": 1},
    disk=DiskUsage("/data", "/mnt", 50 * GIB, 100 * GIB),
    data_dir="/data",
)


def disk(free: int) -> DiskUsage:
    return DiskUsage("/data", "/mnt", free * GIB, 100 * GIB)


def of(part: str, **changed: Any) -> Verdict:
    (found,) = [one for one in verdicts(dataclasses.replace(WELL, **changed), NOW) if one.id == part]
    return found


def test_all_is_well_and_nothing_asks_for_anything() -> None:
    found = verdicts(WELL, NOW)
    assert worst(found) is State.OK
    assert [one.id for one in found if one.state is not State.OK or one.hint] == []
    assert len({one.id for one in found}) == len(found)


@pytest.mark.parametrize(
    ("part", "changed", "state", "text", "since"),
    [
        ("nats", {"probes": {"nats": ("not reachable", ago(9))}}, "error", "not reachable", ago(9)),
        ("redis", {"probes": {}}, "error", "not asked", None),
        ("controllers", {"processes": []}, "error", "none is running", None),
        (
            "controllers",
            {"processes": [process("controller", seen_at=ago(20))]},
            "error",
            "none is running",
            ago(20),
        ),
        (
            "controllers",
            {"processes": [process("controller", bus_connected=False)]},
            "warning",
            "1 controller; without NATS: controller:1",
            ago(100),
        ),
        (
            "workers",
            {"held": CurrentHold(ago(20), NOW + timedelta(minutes=5), 6, 9), "workers": {"healthy": 9}},
            "error",
            "9 healthy; 6 of 9 nodes fell silent at once; kept until 10:05 UTC",
            ago(20),
        ),
        ("tasks", {"tasks_wait_since": ago(31)}, "error", "no process runs them", ago(31)),
        ("tasks", {"tasks_wait_since": ago(5)}, "ok", "Running", ago(3)),
        ("tasks", {"tasks_ended_at": None}, "ok", "none has run yet", None),
        (
            "schedules",
            {"schedules": [dataclasses.replace(SCHEDULE, next_run=ago(40))]},
            "error",
            "overdue: liveness",
            ago(40),
        ),
        (
            "schedules",
            {"schedules": [dataclasses.replace(SCHEDULE, next_run=ago(40), paused=True)]},
            "warning",
            "paused: liveness",
            None,
        ),
        (
            "schedules",
            {"schedules": [dataclasses.replace(SCHEDULE, last_ok=False)]},
            "warning",
            "failed: liveness",
            ago(3),
        ),
        ("schedules", {"schedules": []}, "error", "there are none", None),
        ("workers", {"workers": {"offline": 1, "healthy": 3}}, "warning", "3 healthy, 1 offline", None),
        ("workers", {"workers": {}}, "ok", "no worker has registered", None),
        (
            "operations",
            {"operations": Work(2, 1, ago(70)), "intents": Work(4, 3, ago(60))},
            "ok",
            "1 operation running, 2 waiting; on nodes 3 running, 4 waiting",
            ago(70),
        ),
        (
            "operations",
            {"failures": 2, "oldest_failure": ago(90)},
            "warning",
            "0 operations running, 0 waiting; on nodes 0 running, 0 waiting; 2 failures in the inbox",
            ago(90),
        ),
        ("versions", {"other_versions": 2}, "warning", "1; 2 workers of another version", None),
        (
            "versions",
            {"processes": [process("web", version="0"), process("controller", version="")]},
            "warning",
            "1; server processes also run 0",
            None,
        ),
        (
            "versions",
            {"processes": [process("controller", version="0", seen_at=ago(20)), process("web")]},
            "ok",
            "1",
            None,
        ),
        (
            "web",
            {"processes": [process("web", seen_at=ago(20))], "web_silent_after": 60},
            "ok",
            "1 process",
            ago(100),
        ),
        ("models", {}, "ok", "every file can be used", None),
        (
            "models",
            {"broken_definitions": {"a.yaml": "is not valid YAML: x"}},
            "warning",
            "1 file cannot be used: a.yaml is not valid YAML: x",
            None,
        ),
        (
            "models",
            {"broken_definitions": dict.fromkeys("abcde", "is odd")},
            "warning",
            "5 files cannot be used: a is odd; b is odd; c is odd; and 2 more",
            None,
        ),
        ("models", {"models_folder": "does not answer"}, "error", "the models folder does not answer", None),
        ("disk", {"disk": disk(9)}, "warning", "9.0 of 100.0 GiB free on /mnt (folder /data)", None),
        ("disk", {"disk": disk(2)}, "error", "2.0 of 100.0 GiB free on /mnt (folder /data)", None),
        ("disk", {"disk": None}, "error", "/data does not answer", None),
    ],
)
def test_each_part(part: str, changed: dict[str, Any], state: str, text: str, since: datetime | None) -> None:
    """What is not well says what to do."""
    found = of(part, **changed)
    assert (found.state, found.text, found.since) == (state, text, since)
    assert bool(found.hint) == (state != "ok")


def test_without_the_database_the_rest_is_told() -> None:
    """Review X4: and the disk that is full is named with its folder."""
    away = dataclasses.replace(
        WELL,
        is_database_away=True,
        probes={**WELL.probes, "database": ("not reachable", ago(9))},
        disk=disk(0),
    )
    found = {one.id: one for one in verdicts(away, NOW)}
    assert list(found) == ["database", "nats", "redis", "disk"]
    assert (found["database"].state, found["database"].since) == ("error", ago(9))
    assert "0.0 of 100.0 GiB free on /mnt (folder /data)" in found["database"].text
    assert found["database"].hint.startswith("Free space on /mnt.")
    assert found["nats"].state == "ok"
