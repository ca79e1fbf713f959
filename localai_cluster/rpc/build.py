"""Generates the gRPC stubs: `python -m localai_cluster.rpc.build [folder]`.

Without a folder the stubs become `localai_cluster.rpc.generated`; with one they are plain top-level modules
in it, as an engine outside the product needs them. Nothing happens while the stamp beside the stubs fits.
Every file is written elsewhere and renamed into place, the stamp last, so builds may run side by side.
"""

import hashlib
import os
import sys
import tempfile
from importlib import metadata
from pathlib import Path

from localai_cluster.errors import ClusterError

HERE = Path(__file__).parent
PROTO = HERE / "backend.proto"
PACKAGE = "localai_cluster/rpc/generated"
STAMP = ".stamp"


class StubsNotBuilt(ClusterError):
    """The gRPC stubs could not be generated from backend.proto."""


def build(target: Path | None = None) -> bool:
    """Brings the stubs in `target` up to date; returns whether anything had to be generated."""
    folder = target or HERE / "generated"
    stamp = _stamp(typed=target is None and _typed_plugin() is not None)
    if _read(folder / STAMP) == stamp and (folder / "backend_pb2_grpc.py").exists():
        return False
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".stubs-", dir=folder) as scratch:
        for path in _generate(Path(scratch), packaged=target is None):
            os.replace(path, folder / path.name)
        fresh = Path(scratch) / STAMP
        fresh.write_text(stamp)
        os.replace(fresh, folder / STAMP)
    return True


def _stamp(*, typed: bool) -> str:
    tools = [metadata.version("grpcio-tools"), metadata.version("protobuf"), f"typed={typed}"]
    inputs = [PROTO.read_bytes(), Path(__file__).read_bytes(), *(tool.encode() for tool in tools)]
    return hashlib.sha256(b"\0".join(inputs)).hexdigest()


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except FileNotFoundError:
        return ""


def _typed_plugin() -> str | None:
    """The folder of mypy-protobuf's plugins, which only a development environment has."""
    here = Path(sys.executable).parent
    if (here / "protoc-gen-mypy").exists() and (here / "protoc-gen-mypy_grpc").exists():
        return str(here)
    return None


def _generate(scratch: Path, *, packaged: bool) -> list[Path]:
    # Imported late: a process that only asks whether the stubs are current need not load the compiler.
    from grpc_tools import protoc  # type: ignore[import-untyped]

    # The virtual path gives the generated modules absolute imports of this package.
    source = f"{PACKAGE}={HERE}" if packaged else str(HERE)
    out = scratch / PACKAGE if packaged else scratch
    arguments = ["protoc", f"-I{source}", f"--python_out={scratch}", f"--grpc_python_out={scratch}"]
    plugins = _typed_plugin() if packaged else None
    if plugins:
        for name in ("mypy", "mypy_grpc"):
            arguments += [f"--plugin={plugins}/protoc-gen-{name}", f"--{name}_out=quiet:{scratch}"]
    arguments.append(f"{PACKAGE}/{PROTO.name}" if packaged else PROTO.name)
    if protoc.main(arguments) != 0:
        raise StubsNotBuilt(f"protoc refused {PROTO}; its message is above.")
    if packaged:
        (out / "__init__.py").write_text('"""Generated from backend.proto; do not edit."""\n')
    return sorted(path for path in out.iterdir() if path.is_file())


def main() -> None:
    """Builds into the package, or into the folder named on the command line."""
    build(Path(sys.argv[1]) if len(sys.argv) > 1 else None)


if __name__ == "__main__":
    main()
