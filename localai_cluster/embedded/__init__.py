"""Real servers from wheels and the supervisor of `make run`.

PostgreSQL, NATS and Valkey run as ordinary child processes on one machine; each URL in the environment
replaces one of them by the operator's own, with the same code path behind it.
"""
