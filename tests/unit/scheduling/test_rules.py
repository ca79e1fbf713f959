"""What a scheduling rule may say, and what the settings of boot-time rules mean. No database."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localai_cluster.kit import errors
from localai_cluster.kit.env import Environment
from nodes.scheduling import rules
from nodes.scheduling.rules import MAX_REPLICAS, Rule, check_rule

INLINE, FILE = rules.INLINE_SETTING, rules.FILE_SETTING

RULES = st.builds(
    Rule,
    model_name=st.text(max_size=260) | st.just("m"),
    node_selector=st.dictionaries(st.text(max_size=3), st.text(max_size=3) | st.integers(), max_size=2),
    min_replicas=st.integers(-2, 4) | st.integers(),
    max_replicas=st.integers(-2, 4) | st.integers(),
    spread_all=st.booleans(),
    route_policy=st.none() | st.sampled_from(["", "round_robin", "prefix_cache", "zz"]),
    balance_abs_threshold=st.none() | st.integers(),
    balance_rel_threshold=st.none() | st.floats(),
    min_prefix_match=st.none() | st.floats(),
)


def refused(rule: Rule) -> errors.InvalidInput | None:
    """Why it is not accepted."""
    try:
        check_rule(rule)
    except errors.InvalidInput as refusal:
        return refusal
    return None


@pytest.mark.rule("http-2.12", "R4.47", "R4.49", "R1.69", "R4.20")
@settings(max_examples=60)
@given(rule=RULES)
def test_a_rule_is_refused_naming_a_field_or_means_what_it_says(rule: Rule) -> None:
    """Whatever is sent: what passes is in all bounds, and a refusal names a field that the rule has."""
    if refusal := refused(rule):
        assert refusal.field in Rule.__dataclass_fields__
        assert refusal.message.startswith(refusal.field)
        return
    assert rule.model_name == rule.model_name.strip() != ""
    assert len(rule.model_name) <= 255
    assert all(isinstance(value, str) for value in rule.node_selector.values())
    assert 0 <= rule.min_replicas <= (rule.max_replicas or MAX_REPLICAS) <= MAX_REPLICAS
    assert not rule.spread_all or (rule.min_replicas, rule.max_replicas) == (0, 0)
    assert rule.route_policy in (None, "", "round_robin", "prefix_cache")
    assert (rule.balance_abs_threshold or 0) >= 0
    relative = rule.balance_rel_threshold or 0
    assert relative == 0 or (relative >= 1 and math.isfinite(relative))
    assert 0 <= (rule.min_prefix_match or 0) <= 1


@pytest.mark.rule("http-2.12")
@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"model_name": "", "spread_all": True, "min_replicas": -1}, "model_name"),
        ({"spread_all": True, "min_replicas": -1}, "spread_all"),
        ({"min_replicas": -1, "max_replicas": -1}, "min_replicas"),
        ({"max_replicas": -1, "route_policy": "zz"}, "max_replicas"),
        ({"min_replicas": 3, "max_replicas": 2, "route_policy": "zz"}, "min_replicas"),
        ({"route_policy": "zz", "min_prefix_match": 2.0}, "route_policy"),
        ({"min_prefix_match": -0.1, "balance_abs_threshold": -1}, "min_prefix_match"),
        ({"balance_abs_threshold": -1, "balance_rel_threshold": 0.5}, "balance_abs_threshold"),
        ({"balance_rel_threshold": 0.5}, "balance_rel_threshold"),
        ({"balance_rel_threshold": math.nan}, "balance_rel_threshold"),
    ],
    ids=str,
)
def test_the_first_hit_wins(wrong: dict[str, Any], field: str) -> None:
    """In the order of http-2.12."""
    refusal = refused(Rule(**({"model_name": "m"} | wrong)))
    assert refusal is not None
    assert refusal.field == field


@pytest.mark.parametrize(
    ("given", "field"),
    [
        pytest.param(*case, id=name, marks=[pytest.mark.rule("R3.2"), pytest.mark.rule(name)])
        for name, *case in (
            (
                "T-PFX-3",
                {"route_policy": "prefix_cache", "min_prefix_match": 1, "balance_rel_threshold": 1},
                "",
            ),
            ("T-PFX-4", {"route_policy": "PREFIX_CACHE"}, "route_policy"),
            ("T-PFX-5", {"min_prefix_match": 1.01}, "min_prefix_match"),
            ("T-PFX-6", {"min_prefix_match": -0.01}, "min_prefix_match"),
            ("T-PFX-7", {"balance_abs_threshold": -1}, "balance_abs_threshold"),
            ("T-PFX-8", {"balance_rel_threshold": 0.99}, "balance_rel_threshold"),
        )
    ],
)
def test_how_a_model_is_routed(given: dict[str, Any], field: str) -> None:
    """R3.2: what is stored is in bounds; 0 and the empty policy are the cluster's."""
    refusal = refused(Rule("m", **given))
    assert (refusal.field if refusal else "") == field
    assert not refused(Rule("m", route_policy="", balance_abs_threshold=0, min_prefix_match=0))
    assert not refused(Rule("m", route_policy="round_robin", balance_rel_threshold=0))


def read(**given_settings: str) -> tuple[list[Rule], list[str]]:
    """The rules, and the problems as an operator reads them."""
    environment = Environment(given_settings)
    found = rules.rules_from_settings(environment)
    return found, [f"{one.setting}: {one.message} {one.hint}" for one in environment.problems]


def inline(*entries: Any) -> tuple[list[Rule], list[str]]:
    return read(**{INLINE: json.dumps(entries)})


WHOLE = {
    "route_policy": "",
    "balance_abs_threshold": 0,
    "balance_rel_threshold": 0,
    "min_prefix_match": 0,
}
"""What an entry means that says nothing of routing: as the cluster does."""


@pytest.mark.rule("R4.45", "R4.48", "T-SED-1")
def test_an_entry_has_the_fields_of_a_rule() -> None:
    """What it leaves out is empty, routing too: a rule at boot replaces the whole."""
    routing = {
        "route_policy": "prefix_cache",
        "balance_abs_threshold": 3,
        "balance_rel_threshold": 1.5,
        "min_prefix_match": 0.4,
    }
    rules, problems = inline(
        {"model_name": "a", "min_replicas": 1, "max_replicas": 2, "node_selector": {"tier": "t1"}},
        {"model_name": "b", **routing},
    )
    assert problems == []
    assert rules == [
        Rule("a", {"tier": "t1"}, 1, 2, **WHOLE),  # type: ignore[arg-type]
        Rule("b", **routing),  # type: ignore[arg-type]
    ]


@pytest.mark.rule("R4.46", "T-SED-2", "T-SED-3", "T-SED-4")
@pytest.mark.parametrize(
    ("told", "spread"),
    [
        ({"replicas": "all"}, True),
        ({"replicas": " ALL "}, True),
        ({"replicas": True}, True),
        ({"spread_all": True}, True),
        ({"spread_all": True, "replicas": "auto"}, True),
        ({"replicas": ""}, False),
        ({"replicas": "auto"}, False),
        ({"replicas": False}, False),
        ({"replicas": None}, False),
        ({}, False),
    ],
    ids=str,
)
def test_replicas_says_all_or_not(told: dict[str, Any], spread: bool) -> None:
    """The alias, and the field itself."""
    rules, problems = inline({"model_name": "m"} | told)
    assert ([rule.spread_all for rule in rules], problems) == ([spread], [])


@pytest.mark.rule("R4.46", "T-SED-7")
@pytest.mark.parametrize("replicas", [3, 0, 1.5, "3", "every", ["all"], {}], ids=str)
def test_a_number_of_replicas_is_refused_with_a_hint(replicas: Any) -> None:
    """It names the fields that take a number."""
    rules, (problem,) = inline({"model_name": "m", "replicas": replicas})
    assert rules == []
    assert "replicas must be" in problem
    assert "min_replicas and max_replicas" in problem


@pytest.mark.rule("R4.44", "R4.47", "T-SED-5", "T-SED-6")
@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"min_replicas": 1}, "model_name is required"),
        ({"model_name": "m", "replicas": "all", "min_replicas": 1}, "mutually exclusive"),
        ({"model_name": "m", "spread_all": True, "max_replicas": 1}, "mutually exclusive"),
        ({"model_name": "m", "min_replicas": -1}, "min_replicas must be"),
        ({"model_name": "m", "min_replicas": 3, "max_replicas": 2}, "min_replicas must be <= max"),
        ({"model_name": "m", "balance_rel_threshold": 0.5}, "balance_rel_threshold must be"),
        ({"model_name": "m", "min_replicas": "1"}, "min_replicas"),
        ({"model_name": "m", "min_replicas": True}, "min_replicas"),
        ({"model_name": "m", "node_selector": {"tier": 1}}, "node_selector"),
        ({"model_name": "m", "min_replica": 1}, "min_replica"),
        ({"model_name": "m", "min_replicas": 10**400}, "min_replicas"),
        ("m", "object"),
        (None, "object"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_a_wrong_entry_is_named_with_its_setting_and_what_to_do(entry: Any, words: str) -> None:
    """Setting, number of the entry, reason, fix; the good entry beside it is read all the same."""
    rules, (problem,) = inline({"model_name": "good"}, entry)
    assert [rule.model_name for rule in rules] == ["good"]
    assert problem.startswith(f"{INLINE}: entry 2")
    assert words in problem
    assert "docs/configuration.md" in problem


@pytest.mark.rule("R4.44", "T-SED-8")
@pytest.mark.parametrize("text", ["", " ", "[]", "null"])
def test_nothing_is_no_rule(text: str, tmp_path: Path) -> None:
    """Neither inline nor in a file."""
    path = tmp_path / "rules.yaml"
    path.write_text(text)
    assert read(**{INLINE: text}) == read(**{FILE: str(path)}) == ([], [])


@pytest.mark.rule("R4.44", "T-SED-9")
def test_a_file_follows_what_is_inline(tmp_path: Path) -> None:
    """YAML, with selector and `all`; JSON is YAML too."""
    path = tmp_path / "rules.yaml"
    path.write_text("- model_name: org/m\n  replicas: all\n  node_selector: {tier: fast}\n")
    rules, problems = read(**{INLINE: '[{"model_name": "first"}]', FILE: str(path)})
    assert problems == []
    assert [(rule.model_name, rule.spread_all, dict(rule.node_selector)) for rule in rules] == [
        ("first", False, {}),
        ("org/m", True, {"tier": "fast"}),
    ]
    path.write_text('[{"model_name": "m"}]')
    assert [rule.model_name for rule in read(**{FILE: str(path)})[0]] == ["m"]


@pytest.mark.rule("R4.44")
@pytest.mark.parametrize(
    "content",
    [
        b"[",
        b"a: b",
        b"\xff",
        b"- &a {model_name: m}\n- *a",
        b"[" * 600,
        b"- {model_name: m, min_replicas: " + b"9" * 5000 + b"}",
        b"- {1: 2}",
        b"- !!bool maybe",
        b"- !!int ''",
        b"- {? [a] : b}",
        b"- {model_name: m, min_prefix_match: .nan}",
        b"#" * (rules.MAX_NUMBER + 1),
    ],
    ids=lambda content: repr(content[:30]),
)
def test_a_file_that_cannot_be_read_is_one_problem(content: bytes, tmp_path: Path) -> None:
    """Never a traceback."""
    path = tmp_path / "rules.yaml"
    path.write_bytes(content)
    rules, (problem,) = read(**{FILE: str(path)})
    assert (rules, problem.startswith(FILE)) == ([], True)


@pytest.mark.rule("R4.44")
def test_so_is_one_that_is_not_there_and_text_that_is_no_json(tmp_path: Path) -> None:
    """The path is named."""
    missing = tmp_path / "none.yaml"
    _, problems = read(**{INLINE: "model: m", FILE: str(missing)})
    assert "is not valid JSON" in problems[0]
    assert f"cannot read {missing}" in problems[1]
    assert read(**{INLINE: "{}"})[1][0].startswith(f"{INLINE}: is not a list")
    assert read(**{INLINE: "[" * 5000})[1][0].startswith(INLINE)
    assert read(**{FILE: str(tmp_path)})[1][0].startswith(f"{FILE}: cannot read")
