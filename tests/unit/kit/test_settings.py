"""The environment and the system checks: every wrong setting is named with what to do, none raises."""

from dataclasses import replace
from typing import Any

import pytest
from django.core.checks import run_checks

from localai_cluster.kit import addresses, conf, env, settings_table
from localai_cluster.kit.env import is_weak_secret

STRONG = "f4ac1d9e07b35582aa"

WRONG = {
    "PORT": "abc",
    "LOG_LEVEL": "loud",
    "CLUSTER_OPERATION_LEASE": "0",
    "CLUSTER_EVENT_RETENTION": "99999999h",  # 11,415 years ago: no task could compute with that time
    "LOCALAI_NATS_WORKER_JWT_TTL": f"{'9' * 400}h",
    "CLUSTER_REQUEST_TIMEOUT": "0s",
    "CLUSTER_NODE_STALE_AFTER": "soon",
    "LOCALAI_MASS_SILENCE_HOLD": "-5m",
    "LOCALAI_MODEL_LOAD_WAIT": "-1s",
    "LOCALAI_AUTO_APPROVE_NODES": "perhaps",
    "LOCALAI_VRAM_POLICY": "sometimes",
    "LOCALAI_DISTRIBUTED_DISK_HEADROOM_CHECK": "perhaps",
    "LOCALAI_BACKEND_GALLERIES": "xx",
    "CLUSTER_NODE_HOSTS": '{"gpu-1": ["10.0.0.5:7001"]}',
    "CLUSTER_CONTROLLER_METRICS_ADDRESS": ":9101",
    "CLUSTER_TASKS_METRICS_ADDRESS": "127.0.0.1",
    "CLUSTER_PUBLIC_URL": "cluster.example:8080",
    "CLUSTER_WEB_PROCESSES": "65",
    "SECRET_KEY_FILE": "/nowhere/at/all",
}


@pytest.mark.rule("R5.13")
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_value_becomes_a_problem_that_names_it(name: str) -> None:
    """The setting, what is wrong, what to do; in words, not in the library's."""
    _, found = conf.load({name: WRONG[name]})
    (problem,) = found.problems
    assert problem.setting == name
    assert problem.hint
    assert "invalid literal" not in problem.message
    assert "Expecting" not in problem.message


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("gpu-1=10.0.0.5", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ('["gpu-1"]', "not a JSON object"),
        ('{"gpu-1": "10.0.0.5"}', "not a JSON object"),
        ('{"gpu-1": ["unix:/x"]}', "'gpu-1': 'unix:/x' is neither"),
        ('{"gpu-1": [7]}', "'gpu-1': 7 is neither"),
    ],
)
def test_further_hosts_of_nodes_are_checked(text: str, says: str) -> None:
    """The message names the node and the host."""
    (problem,) = conf.load({"CLUSTER_NODE_HOSTS": text})[1].problems
    assert says in problem.message


def test_further_hosts_of_nodes_are_read_in_one_spelling() -> None:
    found, _ = conf.load({"CLUSTER_NODE_HOSTS": '{"gpu-1": ["GPU-1.lan.", "[0::1]", "10.0.0.5"], "b": []}'})
    assert found.node_hosts == {"gpu-1": {"gpu-1.lan", "::1", "10.0.0.5"}, "b": set()}


def test_other_readers_name_their_setting_too() -> None:
    """LOG_LEVEL and secret files are read by the settings module with the same means."""
    cluster, found = conf.load({name: WRONG[name] for name in ("LOG_LEVEL", "SECRET_KEY_FILE")})
    assert cluster.log_level == "INFO"
    assert cluster.secret_key == ""
    assert [problem.setting for problem in found.problems] == ["LOG_LEVEL", "SECRET_KEY_FILE"]


@pytest.mark.parametrize(
    ("changes", "id", "names"),
    [
        ({"database_url": ""}, "cluster.E002", "DATABASE_URL"),
        ({"redis_url": "http://h"}, "cluster.E003", "REDIS_URL"),
        ({"redis_url": "redis://h:port/0"}, "cluster.E003", "REDIS_URL"),
        ({"nats_url": "nats://"}, "cluster.E003", "LOCALAI_NATS_URL"),
        ({"nats_url": "nats://u:hunter2@h:99999"}, "cluster.E003", "LOCALAI_NATS_URL"),
        ({"database_url": "postgresql://h:abc/x"}, "cluster.E003", "DATABASE_URL"),
        (
            {"host": "0.0.0.0", "api_keys": (STRONG, "changeme" * 3)},
            "cluster.E004",
            "LOCALAI_API_KEY",
        ),
        ({"host": "0.0.0.0", "metrics_token": "short"}, "cluster.E004", "LOCALAI_METRICS_TOKEN"),
        ({"allow_shared_token_nodes": True}, "cluster.W001", "LOCALAI_ALLOW_SHARED_TOKEN_NODES"),
    ],
)
def test_system_checks_name_the_setting(settings: Any, changes: dict[str, Any], id: str, names: str) -> None:
    """`manage.py check` tells each by its id; no secret is repeated."""
    settings.CLUSTER = replace(settings.CLUSTER, **changes)
    found = [message for message in run_checks() if message.id == id]
    assert any(names in message.msg for message in found), found
    assert all("hunter2" not in message.msg for message in found)


def test_good_settings_pass(settings: Any) -> None:
    """No check cries wolf."""
    settings.CLUSTER = replace(settings.CLUSTER, nats_url="nats://u:p@one:4222,nats://u:p@two:4222")
    assert [message for message in run_checks() if str(message.id).startswith("cluster.")] == []


@pytest.mark.parametrize(
    ("value", "weak"),
    [("short", True), ("a" * 64, True), ("changeme" * 4, True), ("0f" * 3 + "9a8b7c6d5e4f3a2b1c0d", False)],
)
def test_what_a_weak_secret_is(value: str, weak: bool) -> None:
    """Short, repeated or well known."""
    assert is_weak_secret(value) is weak


@pytest.mark.parametrize(
    "text",
    [
        "",
        "h:1",
        "ftp://h",
        "http://",
        "http://u:p@h",
        "http://h?q=1",
        "http://h#f",
        "http://h:99999",
        "http://h:0",
        "http://h\n",
        "http://h x",
        "http://[::1",
        "http://" + "h" * 512,
        "http://h\u00e4",
    ],
)
def test_what_is_no_base_url(text: str) -> None:
    with pytest.raises(ValueError, match="not a base URL"):
        addresses.parse_base_url(text)


@pytest.mark.parametrize("text", ["http://h", "https://h:1/", "http://[::1]:8080", "https://h/under/"])
def test_a_base_url_has_no_slash_at_its_end(text: str) -> None:
    assert addresses.parse_base_url(text) == text.rstrip("/")


@pytest.mark.rule("R3.2", "C41", "C42", "C43", "C44", "T-PFX-1")
def test_daphne_serves_with_one_process() -> None:
    (problem,) = conf.load({"CLUSTER_WEB_PROCESSES": "2", "CLUSTER_SERVER": "daphne"})[1].problems
    assert (problem.setting, problem.message) == ("CLUSTER_WEB_PROCESSES", "daphne serves with one process")
    assert conf.load({})[0].web_processes == 1


def test_routing_by_prefix_is_on_and_has_the_references_bounds() -> None:
    """All but the threshold of pressure, which is 20 instead of 1 (review R18)."""
    cluster, environment = conf.load({})
    assert not environment.problems
    found = (cluster.prefix_cache, cluster.prefix_match, cluster.prefix_ttl, cluster.prefix_pressure)
    assert found == (True, 0.3, 300.0, 20)
    assert (cluster.prefix_balance_abs, cluster.prefix_balance_rel) == (2, 1.5)


@pytest.mark.rule("R3.2", "T-PFX-2")
@pytest.mark.parametrize(
    ("name", "wrong", "right"),
    [
        ("LOCALAI_DISTRIBUTED_PREFIX_CACHE", ["maybe"], "false"),
        ("LOCALAI_DISTRIBUTED_PREFIX_CACHE_TTL", ["0", "-5m", "5"], "1s"),
        ("CLUSTER_PREFIX_MATCH", ["-0.1", "1.1", "nan", "x"], "1"),
        ("CLUSTER_PREFIX_BALANCE_ABS", ["-1", "1.5", "inf", "1e999"], "0"),
        ("CLUSTER_PREFIX_BALANCE_REL", ["0.99", "nan", "inf"], "1"),
        ("CLUSTER_PREFIX_PRESSURE", ["-1", "101", "2.5"], "0"),
    ],
)
def test_the_bounds_of_routing_by_prefix(name: str, wrong: list[str], right: str) -> None:
    """R3.2: what is wrong keeps the process from starting, with the setting's name and what to do."""
    for text in wrong:
        (problem,) = conf.load({name: text})[1].problems
        assert problem.setting == name
        assert problem.hint.startswith("Use ")
    assert not conf.load({name: right})[1].problems


def test_several_keys_of_the_administrator() -> None:
    """Commas separate them; blanks around them and empty ones do not count."""
    found = conf.load({"LOCALAI_API_KEY": " one-key , two-key,,"})[0]
    assert found.api_keys == ("one-key", "two-key")
    assert conf.load({"LOCALAI_API_KEY": ","})[0].api_keys == ()
    assert "one-key" not in repr(found)


def test_all_problems_are_reported_together_and_no_secret_is_quoted() -> None:
    """A wrong value never raises, and a safe default takes its place."""
    names = ("LOCALAI_NATS_ACCOUNT_SEED", "LOCALAI_NATS_SERVICE_SEED", "LOCALAI_REGISTRIES")
    secrets = dict.fromkeys(names, "hunter2")
    cluster, found = conf.load({**WRONG, **secrets})
    assert {problem.setting for problem in found.problems} == {*WRONG, *secrets}
    assert "hunter2" not in str(found.problems)
    assert (cluster.port, cluster.vram_policy, cluster.node_hosts) == (8080, "fit", {})
    assert cluster.nats_account_seed == ""


def test_a_secret_never_shows_in_the_repr_of_its_table() -> None:
    entries = env.declared_settings(settings_table.ClusterSettings)
    secrets = [entry for entry in entries if entry.format.secret and entry.format.parse is str]
    cluster, _ = conf.load({entry.names[0]: "hunter2" for entry in secrets})
    assert {getattr(cluster, entry.key) for entry in secrets} == {"hunter2"}
    assert "hunter2" not in repr(cluster)
