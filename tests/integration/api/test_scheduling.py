"""Scheduling rules over REST and from the settings (`contract/http-api.md` §2.12)."""

import io
import json
import re
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psycopg
import pytest
from django.core.management import CommandError, call_command
from django.db import connection
from django.test.utils import CaptureQueriesContext

from localai_cluster.accounts.models import AuditEntry
from localai_cluster.kit import clock, errors
from nodes.models import ModelSchedulingConfig
from nodes.replicas import eviction
from nodes.scheduling import passes, rules, store
from nodes.scheduling.rules import MAX_REPLICAS, MAX_THRESHOLD, Rule
from nodes.scheduling.snapshot import RuleDecision
from operations.changes.events import conninfo
from tests.support import api
from tests.support.fleet import at_once, unexpected

pytestmark = pytest.mark.django_db

RULES = "/api/nodes/scheduling"
ROUTING = {
    "route_policy": "prefix_cache",
    "balance_abs_threshold": 3,
    "balance_rel_threshold": 1.5,
    "min_prefix_match": 0.4,
}


def put(**fields: Any) -> Any:
    """Sets a rule; answers it."""
    answer = api.admin().post(RULES, {"model_name": "m"} | fields)
    assert answer.status_code == 200, answer.content
    return answer.json()


def shown(model: str = "m") -> Any:
    answer = api.admin().get(f"{RULES}/{quote(model)}")
    return answer.json() if answer.status_code == 200 else answer.status_code


def demands(model: str = "m") -> dict[str, Any]:
    """What the rule asks for, without what every rule has."""
    others = {"id", "model_name", "unsatisfiable_ticks", "unsatisfiable_until", "created_at", "updated_at"}
    return {name: value for name, value in shown(model).items() if name not in others}


def comparable(body: Any) -> Any:
    """A recorded or an own answer without what cannot be equal: ids, times, wording."""
    if isinstance(body, list):
        return [comparable(one) for one in body]
    if not isinstance(body, dict):
        return body
    if "error" in body:
        return {"error": {name: body["error"][name] for name in ("code", "type")}}
    own = {"id": "an id", "created_at": "a time", "updated_at": "a time"}
    return {name: own.get(name, value) for name, value in body.items()}


@pytest.mark.rule("http-2.12", "R1.85", "R4.49", "T-REG-45", "T-REG-46", "T-REG-47", "T-REG-48", "T-REG-52")
def test_the_recordings_of_the_reference() -> None:
    """Each request in its order: status, names and values. We reply with the stored row (D-RULE-REPLY)."""
    for recorded in api.examples("scheduling"):
        answer = api.admin().send(recorded["method"], recorded["path"], recorded["request_body"])
        assert answer.status_code == recorded["status"], recorded["name"]
        body = json.loads(answer.content) if answer.content else None
        if body and isinstance(body, dict) and "error" in body and answer.status_code == 400:
            assert body["error"]["field"] in body["error"]["message"], recorded["name"]
        expected = comparable(recorded["body"])
        if recorded["name"] == "min without max":
            # The reference replies with what was sent; the stored row keeps its routing.
            expected |= ROUTING
        assert comparable(body) == expected, recorded["name"]


@pytest.mark.rule("http-2.12", "R1.85")
def test_an_update_answers_the_stored_row_and_keeps_its_flags() -> None:
    """Id, creation and an active cooldown stay; an edit ends no cooldown (R1.88)."""
    made = put(min_replicas=1)
    until = clock.now() + timedelta(minutes=5)
    ModelSchedulingConfig.objects.update(unsatisfiable_until=until, unsatisfiable_ticks=3)
    changed = put(min_replicas=2)
    assert changed == shown()
    assert (changed["id"], changed["created_at"]) == (made["id"], made["created_at"])
    assert changed["updated_at"] > made["updated_at"]
    assert (changed["unsatisfiable_ticks"], "unsatisfiable_until" in changed) == (3, True)


@pytest.mark.rule("http-2.12", "R4.49")
def test_routing_is_kept_when_left_out_and_the_rest_is_replaced() -> None:
    """Null is left out too; an empty policy and zeros go back to what the cluster does."""
    put(min_replicas=1, node_selector={"b": "2", "a": "1"}, **ROUTING)
    assert demands()["node_selector"] == '{"a":"1","b":"2"}'
    put(max_replicas=4, route_policy=None)
    assert demands() == {"min_replicas": 0, "max_replicas": 4} | ROUTING
    put(spread_all=True, route_policy="", balance_abs_threshold=0, balance_rel_threshold=0)
    assert demands() == {"min_replicas": 0, "max_replicas": 0, "spread_all": True, "min_prefix_match": 0.4}


@pytest.mark.rule("http-2.12", "http-0.1", "T-REG-50", "T-REG-51")
@pytest.mark.parametrize("model", ["org/m", "models", "a b:c@d", "ü#?%41"])
def test_a_model_of_any_name_is_shown_and_deleted(model: str) -> None:
    """The path is decoded once (D-DECODE-ONCE); deleting what is gone is 204 too."""
    put(model_name=model)
    assert shown(model)["model_name"] == model
    for _ in range(2):
        assert api.admin().delete(f"{RULES}/{quote(model)}").status_code == 204
        assert shown(model) == 404
    assert api.admin().get(RULES).json() == []


@pytest.mark.rule("http-2.12")
@pytest.mark.parametrize("model", ["%00", "%ff", "%e2%80%ae"])
def test_a_path_that_is_no_name_names_no_rule(model: str) -> None:
    """404, and 204 for a deletion."""
    assert api.admin().get(f"{RULES}/{model}").status_code == 404
    assert api.admin().delete(f"{RULES}/{model}").status_code == 204


@pytest.mark.rule("http-2.12", "R4.49", "R1.69")
@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("model_name", value) for value in ("", None, " ", " m", 5, ["m"], "x" * 256, "a\x00", "a\u202e")),
        *(("node_selector", value) for value in ("tier=t1", ["a"], {"a": 1}, {"a": None}, {"": "x"})),
        *(("node_selector", value) for value in ({"a" * 129: "x"}, {"a": "x" * 256}, {"a": "\x00"})),
        ("node_selector", {str(number): "" for number in range(65)}),
        *(("min_replicas", value) for value in (-1, 1.5, "1", True, MAX_REPLICAS + 1, 10**400)),
        *(("max_replicas", value) for value in (-1, "1", 2**63)),
        *(("spread_all", value) for value in ("true", 1)),
        *(("route_policy", value) for value in ("zz", "ROUND_ROBIN", 1, "x" * 33)),
        *(("min_prefix_match", value) for value in (-0.1, 1.1, "1", True, 10**400)),
        *(("balance_abs_threshold", value) for value in (-1, 1.5, MAX_THRESHOLD + 1)),
        *(("balance_rel_threshold", value) for value in (-1, 0.5, 0.999, MAX_THRESHOLD + 1, 10**400)),
    ],
    ids=lambda value: ascii(value)[:40],
)
def test_what_cannot_be_is_400_naming_the_field(field: str, value: Any) -> None:
    """And nothing is stored."""
    refused = api.admin().post(RULES, {"model_name": "m", field: value})
    error = refused.json()["error"]
    assert (refused.status_code, error["type"]) == (400, "node_error")
    assert (error["field"], field in error["message"]) == (field, True)
    assert not ModelSchedulingConfig.objects.exists()


@pytest.mark.rule("http-2.12", "R4.47", "R4.49")
@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"spread_all": True, "min_replicas": 1}, "spread_all"),
        ({"spread_all": True, "max_replicas": 1}, "spread_all"),
        ({"min_replicas": 3, "max_replicas": 2}, "min_replicas"),
    ],
    ids=str,
)
def test_fields_that_exclude_each_other_are_400(body: dict[str, Any], field: str) -> None:
    """The stored rule stays."""
    put(min_replicas=1)
    refused = api.admin().post(RULES, {"model_name": "m"} | body)
    assert (refused.status_code, refused.json()["error"]["field"]) == (400, field)
    assert demands() == {"min_replicas": 1, "max_replicas": 0}


@pytest.mark.rule("http-2.12")
@pytest.mark.parametrize("body", [b"{", b"[1]", b"null", b'"x"', b'{"min_prefix_match": 1e999}', b"\xff"])
def test_a_body_that_is_none_is_400(body: bytes) -> None:
    """Never a 500."""
    assert api.admin().post(RULES, body).status_code == 400


@pytest.mark.rule("http-2.12")
def test_a_list_takes_one_query_however_long(django_assert_num_queries: Any) -> None:
    """And is in the order of names."""
    for name in ("c", "a", "b"):
        store.set_rule(Rule(name), clock.now())
    with django_assert_num_queries(1):
        listed = api.admin().get(RULES).json()
    assert [rule["model_name"] for rule in listed] == ["a", "b", "c"]


def test_a_change_is_in_the_audit() -> None:
    """Who set and who deleted it, and what they asked for."""
    put(min_replicas=1, node_selector={"tier": "t1"})
    api.admin().delete(f"{RULES}/m")
    api.admin().delete(f"{RULES}/m")
    entries = list(AuditEntry.objects.order_by("id").values_list("kind", "subject", "actor", "detail"))
    assert entries == [
        (
            "scheduling_rule.set",
            "scheduling rule m",
            "static-key",
            "node_selector={'tier': 't1'}, min_replicas=1",
        ),
        ("scheduling_rule.deleted", "scheduling rule m", "static-key", ""),
    ]


@pytest.mark.django_db(transaction=True)
def test_a_change_is_told_when_it_is_committed() -> None:
    """A NOTIFY with the model's name, for processes that keep rules in memory; nothing for a refusal."""
    with psycopg.connect(conninfo(), autocommit=True) as link:
        link.execute(f"LISTEN {store.CHANNEL}")
        put(min_replicas=1)
        api.admin().post(RULES, {"model_name": "m", "min_replicas": -1})
        api.admin().delete(f"{RULES}/m")
        api.admin().delete(f"{RULES}/m")
        put(model_name="the last")
        heard: list[str] = []
        for note in link.notifies(timeout=60, stop_after=3):
            heard.append(note.payload)
    assert heard == ["m", "m", "the last"]


@pytest.mark.rule("http-2.12", "R1.85")
@pytest.mark.django_db(transaction=True)
def test_writers_of_one_rule_at_once_all_succeed() -> None:
    """One row in the end, with the fields of one writer; deletions in between change nothing of that."""
    now = clock.now()
    results = at_once(
        *(lambda n=number: store.set_rule(Rule("m", {"n": str(n)}, n, n), now) for number in range(1, 7)),
        lambda: store.delete_rule("m", now),
        lambda: store.replace_rules([Rule("n"), Rule("m", {"n": "9"}, 9, 9)], now),
    )
    assert unexpected(results) == []
    row = ModelSchedulingConfig.objects.filter(model_name="m").first()
    assert row is None or {row.node_selector["n"]} == {str(row.min_replicas)} == {str(row.max_replicas)}


def test_all_writers_lock_rules_in_the_order_of_the_settings() -> None:
    """`bootstrap` sets rules in Python's order; a pass that locks in another order can deadlock with it."""
    now = clock.now()
    for name in ("B", "a"):
        store.set_rule(Rule(name, min_replicas=1), now)
    ModelSchedulingConfig.objects.update(unsatisfiable_ticks=1)
    state = {rule.model: rule for rule in passes.read_desired_states()}
    decisions = [RuleDecision(name, 1, 0, 0, "full", ()) for name in ("B", "a")]
    with CaptureQueriesContext(connection) as queries:
        passes.write_results(decisions, state, now)
        passes.clear_cooldowns(now)
        eviction.lock_victims("m", [], now=now)
    locks = [
        query["sql"]
        for query in queries
        if re.search("FOR (NO KEY )?UPDATE", query["sql"]) and "model_scheduling_configs" in query["sql"]
    ]
    assert len(locks) >= 2
    assert all('COLLATE "C"' in lock.rpartition("ORDER BY")[2] for lock in locks), locks


# Rules from the settings


def bootstrap(monkeypatch: pytest.MonkeyPatch, *entries: Any, file: str = "") -> str:
    monkeypatch.setenv(rules.INLINE_SETTING, json.dumps(entries))
    monkeypatch.setenv(rules.FILE_SETTING, file)
    said = io.StringIO()
    call_command("bootstrap", stdout=said)
    return said.getvalue()


@pytest.mark.rule("R1.89", "R4.44", "R4.48", "T-REG-54")
def test_the_settings_replace_the_rules_that_they_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Wholly, routing too; a cooldown goes on, others stay, the later of two entries wins."""
    put(model_name="kept", min_replicas=1)
    put(min_replicas=5, node_selector={"a": "b"}, **ROUTING)
    ModelSchedulingConfig.objects.update(unsatisfiable_ticks=2)
    path = tmp_path / "rules.yaml"
    path.write_text("- {model_name: m, max_replicas: 2}\n- {model_name: new, replicas: all}\n")
    said = bootstrap(monkeypatch, {"model_name": "m", "min_replicas": 9}, file=str(path))
    assert said == "scheduling rules set: 2\n"
    assert demands("kept") == {"min_replicas": 1, "max_replicas": 0}
    assert demands("m") == {"min_replicas": 0, "max_replicas": 2}
    assert demands("new") == {"min_replicas": 0, "max_replicas": 0, "spread_all": True}
    assert shown("m")["unsatisfiable_ticks"] == 2
    assert not AuditEntry.objects.filter(subject__endswith="new").exists()


@pytest.mark.rule("R4.44", "R4.47")
def test_one_wrong_entry_ends_the_start_and_sets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names setting, entry, reason and what to do."""
    with pytest.raises(CommandError) as failed:
        bootstrap(monkeypatch, {"model_name": "a"}, {"model_name": "m", "min_replicas": -1})
    assert str(failed.value).startswith(
        f"{rules.INLINE_SETTING}: entry 2 ('m'): min_replicas must be from 0 to"
    )
    assert "docs/configuration.md" in str(failed.value)
    assert not ModelSchedulingConfig.objects.exists()


def test_of_many_rules_all_are_set_or_none() -> None:
    """Also when one is refused at last."""
    with pytest.raises(errors.InvalidInput):
        store.replace_rules([Rule("a"), Rule("b", min_replicas=-1)], clock.now())
    assert not ModelSchedulingConfig.objects.exists()
