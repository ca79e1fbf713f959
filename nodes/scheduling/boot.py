"""Scheduling rules from the settings (R4.44 to R4.48): a JSON list inline, and a list in a YAML file.

Each setting is parsed to entries, and each entry to a checked `Rule`. Every error becomes a problem of the
environment that names the setting, the entry and the remedy; `manage.py bootstrap` then sets nothing and
fails.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from localai_cluster.kit import errors, untrusted
from localai_cluster.kit.env import Environment
from nodes.definitions.files import PlainLoader
from nodes.scheduling.rules import Rule, check

INLINE, FILE = "LOCALAI_MODEL_SCHEDULING", "LOCALAI_MODEL_SCHEDULING_CONFIG"
LARGEST = 1024 * 1024
_FIX = "Correct it there; docs/configuration.md lists the fields of a rule."


class BootRule(msgspec.Struct, forbid_unknown_fields=True):
    """One entry of the list; null means the same as omitting a field."""

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


def read(environment: Environment) -> list[Rule]:
    """Return the rules of both settings, inline ones first; wrong entries become problems."""
    text, path = environment.text(INLINE), environment.text(FILE)
    inline_rules = list(_rules(environment, INLINE, lambda: _inline(text))) if text.strip() else []
    return inline_rules + (list(_rules(environment, FILE, lambda: _file(Path(path)))) if path else [])


def _inline(text: str) -> Any:
    if problem := untrusted.json_problem(text.encode()):
        raise ValueError(f"is {problem}")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not valid JSON: {error}") from error


def _file(path: Path) -> Any:
    try:
        content = untrusted.read_file(path, LARGEST)
        if len(content) > LARGEST:
            raise ValueError(f"{path} is larger than {LARGEST} bytes")
        return untrusted.load_yaml(content.decode("utf-8"), PlainLoader)
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text") from error
    except untrusted.InvalidYAML as error:
        raise ValueError(f"{path} {error}") from error


def _rules(environment: Environment, setting: str, document: Callable[[], Any]) -> Iterator[Rule]:
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
            yield rule_of(entry)
        except errors.InvalidInput as error:
            environment.refuse(setting, f"entry {number}{_entry_label(entry)}: {error.message}", _FIX)


def _entry_label(entry: Any) -> str:
    name = entry.get("model_name") if isinstance(entry, dict) else None
    return f" ({name[:80]!r})" if isinstance(name, str) and name else ""


def rule_of(entry: Any) -> Rule:
    """Convert an entry to a rule with every field, since it replaces the stored rule (R4.48).

    Raises InvalidInput, which names the field.
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
        spread_all=bool(boot_rule.spread_all) or _spreads(boot_rule.replicas),
        route_policy=boot_rule.route_policy or "",
        balance_abs_threshold=boot_rule.balance_abs_threshold or 0,
        balance_rel_threshold=boot_rule.balance_rel_threshold or 0,
        min_prefix_match=boot_rule.min_prefix_match or 0,
    )
    check(rule)
    return rule


def _spreads(replicas: Any) -> bool:
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
