"""The hot path: pick a loaded replica and count its requests, in handwritten SQL on an async pool.

A request flows like this: `picks.Picker.acquire` -> one statement, shared with all requests that wait at that
moment -> a `Replica` with its in-flight count raised -> the call -> `Picker.release` -> one statement, shared
again. `request` is the object that passes through all steps, `process` maintains the row of this web process.
The SQL is in `nodes/replicas/statements.py`; the tests have a pure counterpart of its choice.

Routing by prefix: `chains` hashes a prompt, `affinity` remembers which replica had each prefix last,
`prefixes` advises the pick and learns from its result (its SQL: `nodes/gateway/prefix_statement.py`),
`pressure` counts the requests that were diverted, `prefix_news` sends updates to other web processes, and
`prefix_service` runs all of it.
"""
