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

PACKAGE_FOLDER = Path(__file__).parent
PROTO_FILE = PACKAGE_FOLDER / "backend.proto"
STUBS_PACKAGE_PATH = "localai_cluster/rpc/generated"
STAMP_FILE_NAME = ".stamp"


class StubsNotBuilt(ClusterError):
    """The gRPC stubs cannot be generated from backend.proto."""


def build_stubs(target: Path | None = None) -> bool:
    """Generate the stubs in `target` unless they are current. Return True if they were generated."""
    folder = target or PACKAGE_FOLDER / "generated"
    stamp = _hash_inputs(typed=target is None and _find_typed_plugins() is not None)
    if _read_or_empty(folder / STAMP_FILE_NAME) == stamp and (folder / "backend_pb2_grpc.py").exists():
        return False
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".stubs-", dir=folder) as scratch:
        for path in _run_compiler(Path(scratch), packaged=target is None):
            os.replace(path, folder / path.name)
        new_stamp = Path(scratch) / STAMP_FILE_NAME
        new_stamp.write_text(stamp)
        os.replace(new_stamp, folder / STAMP_FILE_NAME)
    return True


def _hash_inputs(*, typed: bool) -> str:
    tools = [metadata.version("grpcio-tools"), metadata.version("protobuf"), f"typed={typed}"]
    inputs = [PROTO_FILE.read_bytes(), Path(__file__).read_bytes(), *(tool.encode() for tool in tools)]
    return hashlib.sha256(b"\0".join(inputs)).hexdigest()


def _read_or_empty(path: Path) -> str:
    try:
        return path.read_text()
    except FileNotFoundError:
        return ""


def _find_typed_plugins() -> str | None:
    """Return the folder with mypy-protobuf's plugins, None if they are not installed."""
    scripts = Path(sys.executable).parent
    if (scripts / "protoc-gen-mypy").exists() and (scripts / "protoc-gen-mypy_grpc").exists():
        return str(scripts)
    return None


def _run_compiler(scratch: Path, *, packaged: bool) -> list[Path]:
    # Imported late: a process that only checks whether the stubs are current need not load the compiler.
    from grpc_tools import protoc  # type: ignore[import-untyped]

    # The virtual path gives the generated modules absolute imports of this package.
    source = f"{STUBS_PACKAGE_PATH}={PACKAGE_FOLDER}" if packaged else str(PACKAGE_FOLDER)
    out = scratch / STUBS_PACKAGE_PATH if packaged else scratch
    arguments = ["protoc", f"-I{source}", f"--python_out={scratch}", f"--grpc_python_out={scratch}"]
    plugins = _find_typed_plugins() if packaged else None
    if plugins:
        for name in ("mypy", "mypy_grpc"):
            arguments += [f"--plugin={plugins}/protoc-gen-{name}", f"--{name}_out=quiet:{scratch}"]
    arguments.append(f"{STUBS_PACKAGE_PATH}/{PROTO_FILE.name}" if packaged else PROTO_FILE.name)
    if protoc.main(arguments) != 0:
        raise StubsNotBuilt(f"protoc refused {PROTO_FILE}; its message is above.")
    if packaged:
        (out / "__init__.py").write_text('"""Generated from backend.proto; do not edit."""\n')
    return sorted(path for path in out.iterdir() if path.is_file())


def main() -> None:
    """Generate the stubs in the package, or in the folder given on the command line."""
    build_stubs(Path(sys.argv[1]) if len(sys.argv) > 1 else None)


if __name__ == "__main__":
    main()
