"""What surrounds the seeds: timings (`http-api.md` §0.6), and subjects of the bus that are not used here."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from localai_cluster.kit import env
from localai_cluster.kit.conf import load
from localai_cluster.messaging import servers
from localai_cluster.worker import config, control_plane, lifecycle
from nodes.backends import worker_logs
from nodes.commands import commands

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.rule("http-0.6")
def test_the_timings_that_shape_the_api() -> None:
    """The values of the sheet, by default."""
    cluster, _ = load({})
    assert (cluster.node_stale_after, cluster.install_timeout, cluster.upgrade_timeout) == (60, 900, 900)
    assert (commands.LIST_TIMEOUT, commands.DELETE_TIMEOUT, commands.MODEL_TIMEOUT) == (30, 120, 30)
    assert (control_plane.CALL_TIMEOUT, lifecycle.DEREGISTER_TIMEOUT) == (10, 60)
    assert env.Environment({"LOCALAI_REGISTER_TO": "http://h"}).read(config.Config).heartbeat_interval == 10
    assert (worker_logs.ANSWER_LIMIT, worker_logs.HANDSHAKE_LIMIT) == (15, 10)


AROUND = re.compile(
    r"(gallery|cache\.invalidate|staging|state|responses|agent|jobs|mcp|finetune|files)\.[a-z*>.<-]+\Z"
)
"""Subjects that control planes and agents of the reference use among themselves."""


def texts() -> Iterator[tuple[str, str]]:
    """Every text of our modules that looks like one of these subjects, with its module."""
    for package in ("localai_cluster", "nodes", "operations"):
        for path in sorted((ROOT / package).rglob("*.py")):
            if "generated" in path.parts or "migrations" in path.parts:
                continue
            for node in ast.walk(ast.parse(path.read_text())):
                if (
                    isinstance(node, ast.Constant)
                    and isinstance(node.value, str)
                    and AROUND.match(node.value)
                ):
                    yield path.relative_to(ROOT).as_posix(), node.value


@pytest.mark.rule(
    "nats-2.2", "nats-2.3", "nats-4.12", "nats-7.1", "nats-7.2", "nats-7.3", "nats-7.5", "nats-7.6"
)
def test_no_part_of_ours_publishes_or_reads_them() -> None:
    """D-SHARED-BY-ROWS, D-STAGE-ROWS, D-STATELESS, decision 23: only permissions of agent nodes name them."""
    named = {subject for path, subject in texts() if path == "localai_cluster/messaging/servers.py"}
    assert named == set(servers._AGENT_PUBLISH_SUBJECTS) | set(servers._AGENT_SUBSCRIBE_SUBJECTS)
    elsewhere = [
        (path, subject) for path, subject in texts() if path != "localai_cluster/messaging/servers.py"
    ]
    assert [found for found in elsewhere if found[1].count(".") > 1 or "*" in found[1]] == []
