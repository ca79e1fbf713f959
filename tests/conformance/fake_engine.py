"""A gRPC engine for worker tests. Its folder tells it how to behave and shows what happened to it.

`engine.json`: `exit` (leaves at once with these words on stderr), `mute` (never listens), `stubborn` (ignores
SIGTERM), `free_seconds`. It writes `started-<port>.json` and `events-<port>`.
"""

import json
import os
import signal
import sys
import threading
from concurrent import futures
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent


def main() -> None:
    options = json.loads((FOLDER / "engine.json").read_text())
    if options.get("stubborn"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if "exit" in options:
        print(options["exit"], file=sys.stderr, flush=True)
        sys.exit(3)
    port = int(sys.argv[2].rpartition(":")[2])
    if options.get("mute"):
        threading.Event().wait()
    serve(port, options)


def serve(port: int, options: dict[str, Any]) -> None:
    # Not the product's package: an engine knows only what it was started with.
    import grpc
    from backend_pb2 import HealthMessage, Reply, Result  # type: ignore[import-not-found]

    token = os.environ.get("LOCALAI_GRPC_AUTH_TOKEN", "")

    def note(event: str) -> None:
        with open(FOLDER / f"events-{port}", "a") as file:
            file.write(event + "\n")

    def checked(context: Any) -> None:
        if token and ("authorization", f"Bearer {token}") not in context.invocation_metadata():
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "token required")

    def health(request: Any, context: Any) -> Any:
        checked(context)
        return Reply(message=b"OK")

    def free(request: Any, context: Any) -> Any:
        checked(context)
        note("free")
        threading.Event().wait(options.get("free_seconds", 0))
        return Result(success=True)

    def method(call: Any) -> Any:
        return grpc.unary_unary_rpc_method_handler(
            call,
            request_deserializer=HealthMessage.FromString,
            response_serializer=lambda m: m.SerializeToString(),
        )

    def terminated(*_: Any) -> None:
        note("sigterm")
        os._exit(0)

    if not options.get("stubborn"):
        signal.signal(signal.SIGTERM, terminated)
    server = grpc.server(futures.ThreadPoolExecutor(4))
    handlers = {"Health": method(health), "Free": method(free)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("backend.Backend", handlers),))
    server.add_insecure_port(f"0.0.0.0:{port}")
    server.start()
    facts = {"argv": sys.argv[1:], "cwd": os.getcwd(), "env": dict(os.environ), "pid": os.getpid()}
    (FOLDER / f"started-{port}.json").write_text(json.dumps(facts))
    threading.Event().wait()


if __name__ == "__main__":
    main()
