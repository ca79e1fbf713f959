"""gRPC calls to inference engines; the only package that imports `grpc`.

`backend.proto` is the contract, `build` generates its stubs in `generated/` (never committed), `messages`
exports the messages that other packages use, `client` calls engines, with `stream_client` and `http2` for
streams of text, `errors` classifies failures and whether the request may be retried on another replica. This
module imports none of them, so that `build` runs before any stub exists.
"""

import os

# The library writes to stderr and ignores every logging configuration; only this environment variable limits
# it to errors. It must be set before the first `import grpc`.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
