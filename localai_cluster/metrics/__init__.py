"""Figures for Prometheus: what each kind of process counts of itself, in memory.

Each process answers for itself and is a target of its own. No two of our processes share an address, so a
scrape always reaches the same counters, and Prometheus adds them up; nothing is written to a disk for that.
The task cluster forks, but all its results pass one process, which counts and answers for it. What is true of
the whole cluster is not counted here: web processes read it from the rows (`localai_cluster/row_metrics.py`).

A figure moves like this: code calls a function of `web`, `controller`, `passes` or `worker` -> a counter in
memory -> `exposed` has the registry of the process -> `localai_cluster/scraping.py`, or the worker's own HTTP
server, renders it. Labels have few values: models that are defined, never ids, paths or texts of strangers.
"""
