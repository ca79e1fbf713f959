"""A scripted gRPC engine. `engine.json` beside it says how it behaves and where it notes what happens to it.

`notes`: the file, one JSON object a line. `exit`: words for stderr before it leaves with 3. `gate`: serves
only once this file exists. `stubborn`: survives SIGTERM. `child`: has a child in its group that survives
SIGTERM. `away`: has a child in a session of its own that takes the port when the engine has ended. `free`:
`hang` (no answer) or `missing` (not offered). `lines`: printed to stdout and stderr in turn.
"""

import json
import os
import signal
import socket
import sys
import threading
import time
from concurrent import futures
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
OK = b"\x0a\x02OK"
"""A `Reply` whose `message` is `OK`."""
DONE = b"\x10\x01"
"""A `Result` whose `success` is true."""


_SERVERS: list[Any] = []


def main() -> None:
    options = json.loads((FOLDER / "engine.json").read_text())
    port = int(sys.argv[2].rpartition(":")[2])

    def note(event: str, **facts: object) -> None:
        line = {"event": event, "port": port, "pid": os.getpid(), "at": time.monotonic(), **facts}
        with open(options["notes"], "a") as file:
            file.write(json.dumps(line) + "\n")

    def survive(event: str) -> None:
        signal.signal(signal.SIGTERM, lambda *_: note(event))

    def end(*_: object) -> None:
        note("sigterm")
        os._exit(0)

    if options.get("stubborn"):
        survive("sigterm")
    else:
        signal.signal(signal.SIGTERM, end)
    if options.get("child") and os.fork() == 0:
        survive("child sigterm")
        rest(note)
    if options.get("away") and os.fork() == 0:
        linger(port, note)
    note("started", argv=sys.argv[1:], cwd=os.getcwd(), env=dict(os.environ))
    speak(options.get("lines", ()))
    if "exit" in options:
        print(options["exit"], file=sys.stderr, flush=True)
        sys.exit(3)
    wait(options.get("gate"))
    serve(port, options, note)
    while True:
        signal.pause()


def wait(gate: str | None) -> None:
    while gate and not Path(gate).exists():
        time.sleep(0.02)


def rest(note: Any) -> None:
    note("child started")
    while True:
        signal.pause()


def linger(port: int, note: Any) -> None:
    """Wait for the end of the engine and keep its port."""
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    engine = os.getppid()
    while os.getppid() == engine:
        time.sleep(0.02)
    with socket.create_server(("0.0.0.0", port)):
        rest(note)


def speak(lines: list[str]) -> None:
    for number, line in enumerate(lines):
        print(line, file=sys.stderr if number % 2 else sys.stdout, flush=True)


def serve(port: int, options: dict[str, Any], note: Any) -> None:
    import grpc

    token = os.environ.get("LOCALAI_GRPC_AUTH_TOKEN", "")

    def checked(context: Any) -> None:
        if token and ("authorization", f"Bearer {token}") not in context.invocation_metadata():
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "token required")

    def health(_: bytes, context: Any) -> bytes:
        checked(context)
        return OK

    def free(_: bytes, context: Any) -> bytes:
        checked(context)
        note("free")
        if options.get("free") == "hang":
            threading.Event().wait()
        return DONE

    methods: dict[str, Any] = {"Health": grpc.unary_unary_rpc_method_handler(health)}
    if options.get("free") != "missing":
        methods["Free"] = grpc.unary_unary_rpc_method_handler(free)
    server = grpc.server(futures.ThreadPoolExecutor(4))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("backend.Backend", methods),))
    server.add_insecure_port(f"0.0.0.0:{port}")
    server.start()
    # Ends with the process: a server that is dropped stops.
    _SERVERS.append(server)


if __name__ == "__main__":
    main()
