"""The rows of replicas and their only writer: reserve, publish, count, retire.

`slots.py` takes a place for a load and turns it into a replica, `engine_ends.py` removes rows and announces each
removal to `hooks.py`, `statements.py` and `prefix_statement.py` hold the SQL that counts requests in and out
(run by `nodes/gateway`), `fleet_queries.py` reads. Who removes a replica, and why, is decided elsewhere.
"""
