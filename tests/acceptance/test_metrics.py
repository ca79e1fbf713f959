"""`/metrics` of all four kinds of processes, as a scraper reads them."""

from functools import partial

import httpx

from tests.acceptance.conftest import Shared
from tests.conftest import eventually
from tests.support.cluster import ADMIN_KEY, SCRAPER, TOKEN


def scraped(url: str, token: str = SCRAPER) -> httpx.Response:
    return httpx.get(f"{url}/metrics", headers={"Authorization": f"Bearer {token}"}, timeout=60)


def counts(url: str, what: str) -> bool:
    """Whether a process answers and has counted this."""
    try:
        lines = scraped(url).text.splitlines()
    except httpx.TransportError:
        return False
    return any(line.startswith(f"localai_cluster_{what}") and not line.endswith(" 0.0") for line in lines)


def test_every_process_tells_what_it_has_done(shared: Shared) -> None:
    """A heartbeat, a scheduled pass, a command at its worker; nothing without the token."""
    node = shared.cluster.node(shared.webs[0], "one")
    assert node
    targets = {**shared.metrics, "worker": f"http://{node['http_address']}"}
    expected = {
        "web": ("http_requests_total{", 'heartbeats_total{status="200"}', 'nodes{node_type="backend",'),
        # Which of the two controllers asks a worker is not known.
        "controller": ("passes_total{", "bus_connected 1.0"),
        "tasks": ('passes_total{name="liveness",outcome="ok"}',),
        "worker": ('worker_heartbeats_total{outcome="ok"}', 'worker_commands_total{command="backend.list"'),
    }
    for process, url in targets.items():
        for what in (f'build_info{{process="{process}"', *expected[process]):
            eventually(partial(counts, url, what), seconds=60, what=f"{process} counts {what}")
        assert scraped(url, TOKEN).status_code == 401, process
        assert scraped(url, ADMIN_KEY).status_code == (401 if process == "worker" else 200), process
