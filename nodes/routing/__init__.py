"""Picking a loaded replica and counting what runs on it: the hot path, written by hand on an async pool.

A request moves like this: `picks.Picker.acquire` -> one statement, shared with all requests that wait at that
moment -> a `Replica` with its in-flight count raised -> the call -> `Picker.release` -> one statement, shared
again. `request` is the object that travels, `process` keeps the row that stands for this web process. The SQL
is in `nodes/replicas/statements.py`; the tests keep a pure twin of its choice.

By the prefix: `chains` makes hashes of a prompt, `affinity` knows which replica had it last, `prefixes`
advises the pick and learns from it (its SQL: `nodes/replicas/prefix_statement.py`), `pressure` counts what
was kept away, `prefix_news` tells other web processes, and `prefix_service` runs all of it.
"""
