"""The list of many definitions and its search over HTTP (goal of the 95th percentile: 100 ms).

`python -m tests.benchmarks.bench_definitions [--stored 1000] [--files 1000] [--requests 100]` starts a
cluster with one web process, stores definitions as rows, writes others as files, and prints the times of a
page, of a search and of one definition, and the cost of a poll of the rows.
"""

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from uuid import uuid4

import httpx

from localai_cluster.kit import clock
from tests.benchmarks import planted
from tests.conftest import eventually
from tests.support.cluster import ADMIN, Cluster, running_cluster

TEXT = """\
# imported
name: {name}
backend: llama-cpp
parameters:
  model: {name}.gguf
  temperature: 0.7
context_size: 8192
options: [use_jinja:true]
"""


def store(count: int) -> None:
    """Insert `count` rows with one revision each."""
    from nodes.models import DefinitionRevision, ModelDefinition

    rows = [
        ModelDefinition(id=uuid4(), name=name, text=TEXT.format(name=name), origin="import")
        for name in (f"org/stored-{number:05}" for number in range(count))
    ]
    ModelDefinition.objects.bulk_create(rows)
    DefinitionRevision.objects.bulk_create(
        DefinitionRevision(definition=row, number=1, text=row.text, origin="import", actor="ann")
        for row in rows
    )


def times(run: Callable[[], object], count: int) -> list[float]:
    """Return the milliseconds of each run, after a first run that is not counted."""
    run()
    found = []
    for _ in range(count):
        begin = clock.monotonic()
        run()
        found.append((clock.monotonic() - begin) * 1000)
    return found


def show(what: str, found: list[float]) -> None:
    percentile = statistics.quantiles(found, n=20)[-1]
    print(f"{what:<28}{statistics.median(found):>10.1f}{percentile:>10.1f}")


def measure(cluster: Cluster, requests: int) -> None:
    """Print the table."""
    from nodes.definitions import rows

    web = cluster.web()
    with httpx.Client(base_url=web.url, headers=ADMIN, timeout=60) as client:

        def get(path: str) -> None:
            answer = client.get(f"/api/definitions{path}")
            assert answer.status_code == 200, answer.text

        # The first scan parses all files, and is answered with 503 until it has ended.
        eventually(lambda: client.get("/api/definitions").status_code == 200, seconds=60)
        print(f"{'milliseconds':<28}{'median':>10}{'p95':>10}")
        for what, path in (
            ("first page", ""),
            ("last page", "?items=100&page=20"),
            ("search", "?term=stored-0001"),
            ("all on one page", "?items=1000"),
            ("one definition", "/org/stored-00001"),
        ):
            show(what, times(partial(get, path), requests))
    known = rows.read_rows({})
    show("poll of unchanged rows", times(lambda: rows.read_rows(known), requests))
    show("first poll of the rows", times(lambda: rows.read_rows({}), 5))


def main() -> None:
    """Start the cluster and run the benchmark."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--stored", type=int, default=1000)
    parser.add_argument("--files", type=int, default=1000)
    parser.add_argument("--requests", type=int, default=100)
    options = parser.parse_args()
    with running_cluster() as cluster:
        planted.set_up(cluster)
        store(options.stored)
        models = cluster.home / "models"
        models.mkdir(exist_ok=True)
        for number in range(options.files):
            (models / f"file-{number:05}.yaml").write_text(TEXT.format(name=f"file-{number:05}"))
        measure(cluster, options.requests)


if __name__ == "__main__":
    main()
