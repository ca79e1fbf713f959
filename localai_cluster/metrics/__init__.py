"""Prometheus metrics that each process counts in its memory.

Each process is a scrape target of its own. No two of our processes share an address, so a scrape always
reaches the same counters, and Prometheus adds them up; no multiprocess files are needed. Metrics of
the whole cluster are not counted here: web processes read them from the rows (`localai_cluster/scraping.py`).

The path of a metric: code calls a function of `web`, `controller`, `passes` or `worker` -> a counter in
memory -> `registries` has the registry of the process -> `localai_cluster/scraping.py`, or the worker's own
HTTP server, renders it. Labels have few values: names of defined models, never ids, paths or texts of
clients.
"""
