"""Talking to inference engines over gRPC: the only package that imports `grpc`.

`backend.proto` is the contract, `build` turns it into stubs under `generated/` (never committed), `messages`
names the messages others may use, `client` calls engines, `errors` says what went wrong and whether the same
request may go elsewhere. No module of it is imported here, so that `build` runs before any stub exists.
"""

import os

# The library writes its own lines to stderr, past every logging configuration, and is told only by the
# environment to keep to errors. Must stand before the first `import grpc`.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
