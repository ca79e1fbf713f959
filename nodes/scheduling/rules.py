"""Validate scheduling rules (`contract/http-api.md` §2.12, R3.2, R4.47), and parse rules in the settings.

REST, the command line, Django's admin and the settings each build a `Rule` from their input, and `check_rule`
validates all of them. The settings are an inline JSON list and a YAML file with a list (R4.44 to R4.48). Each
error in them becomes a problem of the environment, with the setting, the entry and the remedy; `manage.py
bootstrap` then sets no rule and fails.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import msgspec

from localai_cluster.kit import errors, names, untrusted
from localai_cluster.kit.env import Environment
from nodes.models import RoutePolicy, scheduling

MAX_MODEL_LENGTH = 255
MAX_REPLICAS = 100_000
MAX_THRESHOLD = 1_000_000
ROUTE_POLICIES = ("", *RoutePolicy.values)


@dataclass(frozen=True)
class Rule:
    """The desired state of one model. None in a routing field keeps the stored value (R4.49)."""

    model_name: str
    node_selector: Mapping[str, str] = field(default_factory=dict)
    min_replicas: int = 0
    max_replicas: int = 0
    """Maximum number of replicas; 0 = no limit."""
    spread_all: bool = False
    route_policy: str | None = None
    """Routing policy; empty = the cluster's default. A threshold of 0 also means the default."""
    balance_abs_threshold: int | None = None
    balance_rel_threshold: float | None = None
    min_prefix_match: float | None = None

    @property
    def given(self) -> dict[str, Any]:
        """Return the columns that the rule sets, with their values and without the model's name."""
        values = {
            column.name: getattr(self, column.name) for column in fields(self) if column.name != "model_name"
        }
        return {name: value for name, value in values.items() if value is not None}

    @property
    def counts(self) -> bool:
        """Return True if the rule sets a number of replicas (R1.86)."""
        return self.spread_all or self.min_replicas > 0 or self.max_replicas > 0

    @property
    def summary(self) -> str:
        """Describe the rule in one line, for the audit and the log."""
        assignments = (f"{name}={value}" for name, value in self.given.items() if value)
        return ", ".join(assignments) or "no demands"


def check_rule(rule: Rule) -> None:
    """Raise InvalidInput for the first wrong field, in the order of §2.12."""
    scheduling.check_selector(rule.node_selector)
    _check_name(rule.model_name)
    if rule.spread_all and (rule.min_replicas or rule.max_replicas):
        _raise_invalid("spread_all", "and min_replicas/max_replicas are mutually exclusive")
    _check_range("min_replicas", rule.min_replicas, 0, MAX_REPLICAS)
    _check_range("max_replicas", rule.max_replicas, 0, MAX_REPLICAS)
    if 0 < rule.max_replicas < rule.min_replicas:
        _raise_invalid("min_replicas", "must be <= max_replicas (a max_replicas of 0 means no limit)")
    if (rule.route_policy or "") not in ROUTE_POLICIES:
        _raise_invalid("route_policy", f"must be empty or one of {', '.join(RoutePolicy.values)}")
    _check_range("min_prefix_match", rule.min_prefix_match, 0, 1)
    _check_range("balance_abs_threshold", rule.balance_abs_threshold, 0, MAX_THRESHOLD)
    if rule.balance_rel_threshold != 0:
        _check_range("balance_rel_threshold", rule.balance_rel_threshold, 1, MAX_THRESHOLD, "0 or ")


def _check_name(name: str) -> None:
    if not name.strip():
        raise errors.InvalidInput("model_name is required", field="model_name")
    if name != name.strip():
        _raise_invalid("model_name", "must not begin or end with a blank")
    if len(name) > MAX_MODEL_LENGTH:
        _raise_invalid("model_name", f"exceeds {MAX_MODEL_LENGTH} characters")
    names.check_text(name, "model_name")


def _check_range(name: str, value: float | None, least: int, most: int, alternative: str = "") -> None:
    # NaN compares false with everything.
    if value is not None and not least <= value <= most:
        _raise_invalid(name, f"must be {alternative}from {least} to {most}")


def _raise_invalid(name: str, complaint: str) -> None:
    raise errors.InvalidInput(f"{name} {complaint}", field=name)


INLINE_SETTING = "LOCALAI_MODEL_SCHEDULING"
"""Setting with the rules as a JSON list."""
FILE_SETTING = "LOCALAI_MODEL_SCHEDULING_CONFIG"
"""Setting with the path of a YAML file of rules."""
MAX_NUMBER = 1024 * 1024
_REMEDY_SENTENCE = "Correct it there; docs/configuration.md lists the fields of a rule."


class BootRule(msgspec.Struct, forbid_unknown_fields=True):
    """One entry of the rules in the settings. A null field means the same as an omitted field."""

    model_name: str | None = None
    node_selector: dict[str, str] | None = None
    min_replicas: int | None = None
    max_replicas: int | None = None
    replicas: Any = None
    spread_all: bool | None = None
    route_policy: str | None = None
    balance_abs_threshold: int | None = None
    balance_rel_threshold: float | None = None
    min_prefix_match: float | None = None


def rules_from_settings(environment: Environment) -> list[Rule]:
    """Return the rules of both settings, inline rules first.

    A wrong entry becomes a problem of `environment`.
    """
    text, path = environment.text(INLINE_SETTING), environment.text(FILE_SETTING)
    inline_rules = (
        list(_parse_rules(environment, INLINE_SETTING, lambda: _parse_inline(text))) if text.strip() else []
    )
    return inline_rules + (
        list(_parse_rules(environment, FILE_SETTING, lambda: _parse_file(Path(path)))) if path else []
    )


def _parse_inline(text: str) -> Any:
    if problem := untrusted.json_problem(text.encode()):
        raise ValueError(f"is {problem}")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not valid JSON: {error}") from error


def _parse_file(path: Path) -> Any:
    try:
        content = untrusted.read_file(path, MAX_NUMBER)
        if len(content) > MAX_NUMBER:
            raise ValueError(f"{path} is larger than {MAX_NUMBER} bytes")
        return untrusted.load_yaml(content.decode("utf-8"), untrusted.PlainLoader)
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text") from error
    except untrusted.InvalidYAML as error:
        raise ValueError(f"{path} {error}") from error


def _parse_rules(environment: Environment, setting: str, document: Callable[[], Any]) -> Iterator[Rule]:
    try:
        entries = document()
    except ValueError as error:
        environment.refuse(setting, str(error), "Give a list of rules.")
        return
    if entries is not None and not isinstance(entries, list):
        environment.refuse(setting, "is not a list of rules", 'Give a list such as [{"model_name": …}].')
        return
    for number, entry in enumerate(entries or [], 1):
        try:
            yield parse_rule(entry)
        except errors.InvalidInput as error:
            environment.refuse(
                setting, f"entry {number}{_entry_label(entry)}: {error.message}", _REMEDY_SENTENCE
            )


def _entry_label(entry: Any) -> str:
    name = entry.get("model_name") if isinstance(entry, dict) else None
    return f" ({name[:80]!r})" if isinstance(name, str) and name else ""


def parse_rule(entry: Any) -> Rule:
    """Convert an entry of the settings to a rule that replaces the stored rule entirely (R4.48).

    Raises InvalidInput with the field.
    """
    try:
        boot_rule = msgspec.convert(entry, BootRule)
    except msgspec.ValidationError as error:
        raise errors.InvalidInput(str(error)) from error
    rule = Rule(
        model_name=boot_rule.model_name or "",
        node_selector=boot_rule.node_selector or {},
        min_replicas=boot_rule.min_replicas or 0,
        max_replicas=boot_rule.max_replicas or 0,
        spread_all=bool(boot_rule.spread_all) or _requests_spread(boot_rule.replicas),
        route_policy=boot_rule.route_policy or "",
        balance_abs_threshold=boot_rule.balance_abs_threshold or 0,
        balance_rel_threshold=boot_rule.balance_rel_threshold or 0,
        min_prefix_match=boot_rule.min_prefix_match or 0,
    )
    check_rule(rule)
    return rule


def _requests_spread(replicas: Any) -> bool:
    """Return True if `replicas` requests one replica on every node (R4.46)."""
    if replicas is None or isinstance(replicas, bool):
        return bool(replicas)
    word = replicas.strip().lower() if isinstance(replicas, str) else None
    if word not in ("all", "auto", ""):
        raise errors.InvalidInput(
            'replicas must be "all" or "auto"; for a number use min_replicas and max_replicas',
            field="replicas",
        )
    return word == "all"
