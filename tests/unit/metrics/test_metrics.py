"""What is exposed, against what is written of it: the table in docs/metrics.md and the dashboard."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from django.urls import get_resolver
from prometheus_client.metrics import MetricWrapperBase

from localai_cluster import edge, scraping
from localai_cluster.metrics import controller, kinds, passes, registries, web, worker

ROOT = Path(__file__).resolve().parents[3]
DOCUMENT = ROOT / "docs" / "metrics.md"
BOARDS = sorted((ROOT / "examples" / "grafana").glob("*.json"))
RULES = ROOT / "examples" / "prometheus" / "rules.yml"
BUILD_INFO = registries.BUILD_NAME + "_info"
BEGIN, END = "<!-- metrics -->", "<!-- end of metrics -->"
Line = tuple[str, str, tuple[str, ...], str, str]


def figures() -> Iterator[Line]:
    """Name, type, labels, process and meaning of all figures, one line each."""
    yield BUILD_INFO, "gauge", ("process", "version"), "all", registries.BUILD_MEANING
    for process in registries.FIGURES:
        for figure in registries.FIGURES[process]:
            if process == "tasks" and figure in registries.FIGURES["controller"]:
                continue
            both = process == "controller" and figure in registries.FIGURES["tasks"]
            (family,) = figure.describe()
            name = f"{family.name}_total" if family.type == "counter" else family.name
            where = "controller, tasks" if both else process
            yield name, family.type, figure._labelnames, where, family.documentation
    for row in scraping.CLUSTER_FIGURES:
        yield kinds.PREFIX + row.name, "gauge", row.labels, "web, from the rows", row.meaning
    for row in scraping.NODE_FIGURES[1:]:
        yield kinds.PREFIX + row.name, "gauge", row.labels, "`/metrics/nodes`", row.meaning


def table() -> str:
    lines = ["| name | type | labels | process | meaning |", "|---|---|---|---|---|"]
    for name, kind, labels, where, meaning in figures():
        shown = ", ".join(f"`{label}`" for label in labels) or "none"
        lines.append(f"| `{name}` | {kind} | {shown} | {where} | {meaning} |")
    return "\n".join(lines)


def test_the_document_lists_what_is_exposed() -> None:
    written = DOCUMENT.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0].strip()
    assert written == table(), f"docs/metrics.md must say:\n{table()}"


def test_every_figure_of_boards_and_rules_is_exposed_with_these_labels() -> None:
    known = {name: {"instance", "job", "le", *labels} for name, _, labels, _, _ in figures()}
    shown_queries = [
        target["expr"]
        for board in BOARDS
        for panel in json.loads(board.read_text())["panels"]
        for target in panel.get("targets", [])
    ]
    rules = [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
    recorded = {rule["record"] for rule in rules if "record" in rule}
    assert len(shown_queries) > 60
    assert len(rules) > 10
    for query in shown_queries + [rule["expr"] for rule in rules]:
        for name in recorded:
            query = query.replace(name, "process_")
        names = re.findall(rf"\b({kinds.PREFIX}\w+?)(?:_bucket|_sum|_count)?\b", query)
        assert names or "process_" in query, query
        labels = {label for name in names for label in known.get(name, ())}
        assert set(names) <= set(known), query
        used = re.findall(r"(\w+)\s*[!=]~?\s*\"", query)
        used += [one for group in re.findall(r"by \(([^)]*)\)", query) for one in re.split(r",\s*", group)]
        assert set(used) <= labels, query
    shown = {name for query in shown_queries for name in known if name in query}
    assert set(known) - shown == set(), "on no board"


def test_names_have_the_prefix_and_base_units() -> None:
    for name, kind, labels, where, meaning in figures():
        assert name.startswith(kinds.PREFIX), name
        assert meaning.endswith("."), name
        assert kind != "histogram" or name.endswith("_seconds"), name
        assert not re.search(r"_(ms|millis|minutes|mb|gb|percent)\b", name), name
        # Of these there is one a machine, a person or a request.
        allowed = {"node"} if where == "`/metrics/nodes`" else set()
        assert not {"node", "node_id", "user", "path", "address", "id"} & set(labels) - allowed, name


def test_buckets_reach_from_a_millisecond_to_the_limit_of_a_request() -> None:
    assert (kinds.REQUEST_BUCKETS[0], kinds.REQUEST_BUCKETS[-1]) == (0.001, 600)
    for buckets in (kinds.REQUEST_BUCKETS, kinds.WORK_BUCKETS):
        assert list(buckets) == sorted(set(buckets))


def sample(figure: MetricWrapperBase, suffix: str = "_total", **labels: str) -> float:
    """A figure's value now; 0 if it was never counted."""
    found = [
        one.value
        for family in figure.collect()
        for one in family.samples
        if one.name.endswith(suffix) and one.labels == labels
    ]
    return found[0] if found else 0.0


@pytest.mark.parametrize(
    ("path", "surface"),
    [
        ("/v1/embeddings", "inference"),
        ("/models", "inference"),
        ("/api/node/register", "workers"),
        ("/api/nodes", "api"),
        ("/", "pages"),
        ("/app/nodes/1", "pages"),
        ("/metrics", "probes"),
        ("/wp-login.php", "other"),
        ("/" + "x" * 5000, "other"),
    ],
)
def test_a_path_belongs_to_one_of_few_surfaces(path: str, surface: str) -> None:
    assert web.surface_of_path(path) == surface


def test_every_route_has_a_surface() -> None:
    """What is `other` is no route of ours."""
    paths = [route.path for route in edge.ROUTES]
    paths += ["/" + str(entry.pattern) for entry in get_resolver().url_patterns]
    assert {path for path in paths if web.surface_of_path(path) == "other"} == set()


def test_an_attempt_that_says_nothing_is_unrecorded() -> None:
    before = sample(controller.ATTEMPTS, kind="k", outcome="complete")
    with controller.count_attempt("k") as told:
        told.outcome = "complete"
    lost = sample(controller.ATTEMPTS, kind="k", outcome=controller.UNRECORDED_OUTCOME)
    with pytest.raises(LookupError), controller.count_attempt("k"):
        raise LookupError
    assert sample(controller.ATTEMPTS, kind="k", outcome="complete") == before + 1
    assert sample(controller.ATTEMPTS, kind="k", outcome=controller.UNRECORDED_OUTCOME) == lost + 1


def test_a_pass_and_a_start_that_raise_have_failed() -> None:
    failed = sample(passes.PASSES, name="p", outcome="failed")
    starts = sample(worker.ENGINE_STARTS, outcome="failed")
    with pytest.raises(LookupError), passes.count_pass("p"), worker.count_start():
        raise LookupError
    with passes.count_pass("p"), worker.count_start():
        pass
    assert sample(passes.PASSES, name="p", outcome="failed") == failed + 1
    assert sample(worker.ENGINE_STARTS, outcome="failed") == starts + 1
    assert sample(passes.PASS_SECONDS, "_count", name="p") >= 2


@pytest.mark.parametrize("process", ["web", "controller", "tasks", "worker"])
def test_a_process_tells_what_it_is_and_its_own_figures_only(process: str) -> None:
    text = registries.text(process).decode()
    assert f'{BUILD_INFO}{{process="{process}",version="' in text
    assert "process_resident_memory_bytes" in text
    assert "_created" not in text
    told = set(re.findall(r"^# TYPE (localai_cluster_\w+) ", text, re.M))
    own = {
        name for name, *_, where, _ in figures() if where in ("all", process) or process in where.split(", ")
    }
    rows = {kinds.PREFIX + row.name for row in scraping.CLUSTER_FIGURES}
    assert told == own - rows
