"""Prometheus metrics that each process counts in its memory.

Each process is a scrape target of its own, and Prometheus adds them up. Only the web processes of one address
share their counters in files, because a scrape reaches any of them (`registries.py`). Metrics of the whole
cluster are not counted here: web processes read them from the rows (`localai_cluster/scraping.py`).

The path of a metric: code calls a function of `web`, `controller`, `passes` or `worker` -> a counter in
memory -> `registries` has the registry of the process -> `localai_cluster/scraping.py`, or the worker's own
HTTP server, renders it. Labels have few values: names of defined models, never ids, paths or texts of
clients.
"""
