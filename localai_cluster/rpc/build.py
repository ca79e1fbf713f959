"""Generate the gRPC stubs: `python -m localai_cluster.rpc.build [folder]`.

Without a folder the stubs become `localai_cluster.rpc.generated`; with one they are plain top-level modules
in it, for an engine outside the product. A build does nothing while the stamp beside the stubs is current. It
writes every file to a temporary folder and renames it into place, the stamp last, so builds may run
concurrently.
"""

import hashlib
import os
import sys
import tempfile
from importlib import metadata
from pathlib import Path

from localai_cluster.kit.errors import ClusterError

HERE = Path(__file__).parent
PROTO = HERE / "backend.proto"
PACKAGE = "localai_cluster/rpc/generated"
STAMP = ".stamp"


class StubsNotBuilt(ClusterError):
    """The gRPC stubs cannot be generated from backend.proto."""


def build(target: Path | None = None) -> bool:
    """Generate the stubs in `target` unless they are up to date; return True if they were generated."""
    folder = target or HERE / "generated"
    stamp = _stamp(typed=target is None and _typed_plugin() is not None)
    if _read(folder / STAMP) == stamp and (folder / "backend_pb2_grpc.py").exists():
        return False
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".stubs-", dir=folder) as scratch:
        for path in _generate(Path(scratch), packaged=target is None):
            os.replace(path, folder / path.name)
        new_stamp = Path(scratch) / STAMP
        new_stamp.write_text(stamp)
        os.replace(new_stamp, folder / STAMP)
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
    """Return the folder of mypy-protobuf's plugins; None if they are not installed."""
    scripts = Path(sys.executable).parent
    if (scripts / "protoc-gen-mypy").exists() and (scripts / "protoc-gen-mypy_grpc").exists():
        return str(scripts)
    return None


def _generate(scratch: Path, *, packaged: bool) -> list[Path]:
    # Imported late: a process that only checks whether the stubs are current need not load the compiler.
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
    """Generate the stubs in the package, or in the folder given on the command line."""
    build(Path(sys.argv[1]) if len(sys.argv) > 1 else None)


if __name__ == "__main__":
    main()
