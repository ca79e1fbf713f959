"""Validate scheduling rules (`contract/http-api.md` §2.12, R3.2, R4.47); pure.

REST, the command line, Django's admin and the settings each build a `Rule` from their input, and `check`
validates it in one place for all of them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from localai_cluster.kit import errors, names
from nodes.models import RoutePolicy, selectors

LONGEST_MODEL = 255
MOST_REPLICAS = 100_000
LARGEST_THRESHOLD = 1_000_000
POLICIES = ("", *RoutePolicy.values)


@dataclass(frozen=True)
class Rule:
    """The desired state of one model; None in one of the last four fields keeps the stored value (R4.49)."""

    model_name: str
    node_selector: Mapping[str, str] = field(default_factory=dict)
    min_replicas: int = 0
    max_replicas: int = 0
    """0 = no limit."""
    spread_all: bool = False
    route_policy: str | None = None
    """Empty = the cluster's default; thresholds of 0 likewise."""
    balance_abs_threshold: int | None = None
    balance_rel_threshold: float | None = None
    min_prefix_match: float | None = None

    @property
    def given(self) -> dict[str, Any]:
        """Return the columns that the rule sets, without the model's name."""
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


def check(rule: Rule) -> None:
    """Raise InvalidInput that names the first wrong field, in the order of http-2.12."""
    selectors.check(rule.node_selector)
    _check_name(rule.model_name)
    if rule.spread_all and (rule.min_replicas or rule.max_replicas):
        _refuse("spread_all", "and min_replicas/max_replicas are mutually exclusive")
    _check_range("min_replicas", rule.min_replicas, 0, MOST_REPLICAS)
    _check_range("max_replicas", rule.max_replicas, 0, MOST_REPLICAS)
    if 0 < rule.max_replicas < rule.min_replicas:
        _refuse("min_replicas", "must be <= max_replicas (a max_replicas of 0 means no limit)")
    if (rule.route_policy or "") not in POLICIES:
        _refuse("route_policy", f"must be empty or one of {', '.join(RoutePolicy.values)}")
    _check_range("min_prefix_match", rule.min_prefix_match, 0, 1)
    _check_range("balance_abs_threshold", rule.balance_abs_threshold, 0, LARGEST_THRESHOLD)
    if rule.balance_rel_threshold != 0:
        _check_range("balance_rel_threshold", rule.balance_rel_threshold, 1, LARGEST_THRESHOLD, "0 or ")


def _check_name(name: str) -> None:
    if not name.strip():
        raise errors.InvalidInput("model_name is required", field="model_name")
    if name != name.strip():
        _refuse("model_name", "must not begin or end with a blank")
    if len(name) > LONGEST_MODEL:
        _refuse("model_name", f"exceeds {LONGEST_MODEL} characters")
    names.check_text(name, "model_name")


def _check_range(name: str, value: float | None, least: int, most: int, alternative: str = "") -> None:
    # NaN compares false with everything.
    if value is not None and not least <= value <= most:
        _refuse(name, f"must be {alternative}from {least} to {most}")


def _refuse(name: str, complaint: str) -> None:
    raise errors.InvalidInput(f"{name} {complaint}", field=name)
